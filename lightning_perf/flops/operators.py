"""FLOP formulas of operators, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


Args = Sequence[Any]


def product(args: Args, out: Tensor) -> int:
    """A product that contracts the last dimension of its first argument.

    Args:
        args: ``a, ...`` with ``a`` of shape ``[..., k]``.
        out: The product.

    Example:
        >>> import torch
        >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
        >>> product((a, b), a @ b)
        60
    """
    return 2 * out.numel() * _contracted(args[0])


def _contracted(a: Tensor) -> int:
    # A 4-bit dtype such as float4_e2m1fn_x2 has two values per element.
    return int(a.size(-1)) * (2 if str(a.dtype).endswith("_x2") else 1)


def added_product(args: Args, out: Tensor) -> int:
    """A product that is added to the first argument."""
    return product(args[1:], out)


def summed_product(args: Args, out: Tensor) -> int:
    """A batch of products, summed and added to the first argument."""
    return int(args[1].size(0)) * product(args[1:], out)


def listed_products(args: Args, out: Sequence[Tensor]) -> int:
    """One product per pair of two lists."""
    return sum(product([a], one) for a, one in zip(args[0], out, strict=True))


def grouped_product(args: Args, out: Tensor) -> int:
    """One product per expert."""
    a, b = args[:2]
    if a.dim() == b.dim() == 2:
        # The groups split the contracted dimension; the output has one matrix per group.
        return 2 * int(a.size(0) * b.size(1)) * _contracted(a)
    return product(args, out)


def linear_backward(args: Args, _: object) -> int:
    """One product for each requested gradient of input and weight."""
    x, grad, _weight, mask = args
    return int(sum(mask[:2])) * product([x], grad)


def matmul_backward(args: Args, _: object) -> int:
    """One product per requested gradient."""
    grad, a, _b, mask = args
    return int(sum(mask)) * product([a], grad)


def plain_convolution(args: Args, out: Tensor) -> int:
    """One filter over the channels of a group per output element."""
    weight = args[1]
    return int(2 * out.numel() * (weight.numel() // weight.size(0)))


def transposed_convolution(args: Args, _: object) -> int:
    """One filter per input element."""
    return plain_convolution(args, args[0])


def convolution(args: Args, out: Tensor) -> int:
    """A convolution of any dimensions and groups, transposed or not."""
    transposed = args[6]
    return transposed_convolution(args, out) if transposed else plain_convolution(args, out)


def convolution_backward(args: Args, _: object) -> int:
    """The cost of the forward for each requested gradient of input and weight."""
    grad, *forward, mask = args
    return int(sum(mask[:2])) * convolution(forward, grad)


def convolution_backward_overrideable(args: Args, out: object) -> int:
    """Like `convolution_backward`, but called without the sizes of the bias."""
    return convolution_backward([*args[:3], None, *args[3:]], out)


def recurrent(args: Args, _: object) -> int:
    """Every weight matrix of every layer and direction, once per step of every sequence.

    Args:
        args: Input ``[time, batch, features]`` or packed ``[total, features]``, then the list of
            weights, of which the biases have one dimension.
    """
    x, weights = args[:2]
    steps = x.numel() // x.size(-1)
    return int(2 * steps * sum(w.numel() for w in weights if w.dim() == 2))


def recurrent_backward(args: Args, out: object) -> int:
    """The gradients of the data, which are always computed, and of the weights if requested."""
    mask = args[-1]
    forward = recurrent(args, out)
    return 2 * forward if mask[3] else forward


def recurrent_mps(args: Args, out: object) -> int:
    """Like `recurrent`, but called with the state before the weights."""
    x, _state, weights = args[:3]
    return recurrent([x, weights], out)


def recurrent_layer(args: Args, out: object) -> int:
    """One layer in one direction, with separate weights of input and state."""
    return recurrent([args[0], args[1:3]], out)


def recurrent_layer_backward(args: Args, out: object) -> int:
    """The gradients of the data and the weights, which are always computed."""
    return 2 * recurrent_layer(args, out)


def attention(args: Args, _: object) -> int:
    """Scaled dot-product attention.

    Args:
        args: Query ``[batch, heads, queries, features]``, key ``[batch, key heads, keys,
            features]``, value ``[batch, key heads, keys, value features]``.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 4, 8, 16)
        >>> attention((x, x, x), None) == 2 * (2 * 4 * 8 * 8 * 16)
        True
    """
    query, key, value = args[:3]
    scores = query.numel() // query.size(-1) * key.size(-2)
    return int(2 * scores * (query.size(-1) + value.size(-1)))


def attention_backward(args: Args, out: object) -> int:
    """The gradients of query, key, value and scores; the first argument is the output gradient."""
    return 2 * attention(args[1:], out)


def flex_attention_backward(args: Args, out: object) -> int:
    """Like `attention_backward`, but the first argument is the query."""
    return 2 * attention(args, out)


def _packed(query: Tensor, key: Tensor, value: Tensor, ends: Args) -> int:
    query_ends, key_ends = ends
    if query_ends is None:
        pairs = query.size(0) * query.size(1) * key.size(1)
    else:
        lengths = zip(_lengths(query_ends), _lengths(key_ends), strict=True)
        pairs = sum(queries * keys for queries, keys in lengths)
    return 2 * query.size(-2) * pairs * (query.size(-1) + value.size(-1))


def _lengths(ends: Tensor) -> list[int]:
    return [end - start for start, end in pairwise(ends.tolist())]


def flash_attention(args: Args, _: object) -> int:
    """Attention over a padded batch or over packed sequences.

    Args:
        args: Query, key and value ``[batch, length, heads, features]`` or packed ``[total, heads,
            features]``, then the cumulative lengths of the packed queries and keys (starting at 0),
            or None twice.
    """
    query, key, value, *ends = args[:5]
    return _packed(query, key, value, ends)


def flash_attention_backward(args: Args, _: object) -> int:
    """Backward of `flash_attention`: gradient, query, key, value, output, log-sum-exp, ends."""
    return 2 * _packed(args[1], args[2], args[3], args[6:8])


def efficient_attention(args: Args, _: object) -> int:
    """Like `flash_attention`, with a bias before the cumulative lengths."""
    return _packed(args[0], args[1], args[2], args[4:6])


def efficient_attention_backward(args: Args, _: object) -> int:
    """Backward of `efficient_attention`: gradient, query, key, value, bias, output, ends."""
    return 2 * _packed(args[1], args[2], args[3], args[6:8])


def _sequences(x: Tensor) -> list[int]:
    # The fast path of nn.TransformerEncoder converts a padded batch to a nested tensor.
    if x.is_nested:
        return [int(length) for length in x._nested_tensor_size()[:, 0]]
    return [x.size(1)] * x.size(0)


def multi_head_attention(args: Args, _: object) -> int:
    """Projections and attention in one operator, for inference.

    Args:
        args: Query, key and value ``[batch, length, width]`` or nested, then the width.
    """
    query, key, _value, width = args[:4]
    lengths = zip(_sequences(query), _sequences(key), strict=True)
    return sum(4 * width * ((q + k) * width + q * k) for q, k in lengths)


def transformer_encoder_layer(args: Args, out: object) -> int:
    """Self-attention and the two linear layers after it in one operator, for inference."""
    x, width, first, second = args[0], args[1], args[14], args[16]
    feed_forward = 2 * sum(_sequences(x)) * (first.numel() + second.numel())
    return int(multi_head_attention([x, x, x, width], out) + feed_forward)
