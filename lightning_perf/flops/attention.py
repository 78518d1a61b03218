"""FLOPs of attention: two products forward, four backward, in full even if causal.

This is the convention of model FLOPs: what a flash kernel computes again in its backward is not
counted, nor is it taken off what a mask saves. Query heads count, so that grouped queries come out
right.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_perf.flops.operators import Args


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
    """The gradients of query, key, value and scores, called with the output's gradient in front."""
    return 2 * attention(args[1:], out)


def flex_attention_backward(args: Args, out: object) -> int:
    """The same, called with the query in front."""
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
    """Attention over a padded batch or over packed sequences of their own lengths.

    Args:
        args: Query, key and value ``[batch, length, heads, features]`` or packed ``[total, heads,
            features]``, then where queries and keys of each packed sequence end (with a zero in
            front), or None twice.
    """
    query, key, value, *ends = args[:5]
    return _packed(query, key, value, ends)


def flash_attention_backward(args: Args, _: object) -> int:
    """Its backward: gradient, query, key, value, output, log-sum-exp, ends."""
    return 2 * _packed(args[1], args[2], args[3], args[6:8])


def efficient_attention(args: Args, _: object) -> int:
    """The same with a bias before the ends."""
    return _packed(args[0], args[1], args[2], args[4:6])


def efficient_attention_backward(args: Args, _: object) -> int:
    """Its backward: gradient, query, key, value, bias, output, ends."""
    return 2 * _packed(args[1], args[2], args[3], args[6:8])


def _sequences(x: Tensor) -> list[int]:
    # The fast paths of nn.TransformerEncoder turn a padded batch into a nested tensor.
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
