"""Counts the calls of torch's functions, without knowing the operators that they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from families import grouped_product
from torch import Tensor
from torch.overrides import TorchFunctionMode

Args = Sequence[Any]
Named = Mapping[str, Any]
#: FLOPs of a forward and of its backward.
Both = tuple[int, int]
#: Nodes that only change the layout of a result.
LAYOUT = (
    "View",
    "UnsafeView",
    "Permute",
    "Transpose",
    "TBackward",
    "Squeeze",
    "Unsqueeze",
    "Alias",
)


class ByHand(TorchFunctionMode):
    """Counts 2 FLOPs per multiply-add of each call, and as many for each gradient.

    A call costs its forward, and, once the gradient of its result is computed, the same for each
    operand that requires a gradient. Outer products are elementwise and count nothing. What runs
    inside of a backward is not seen: recomputation, and derivatives of a backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        rule = RULES.get(getattr(func, "__name__", ""))
        if rule is not None:
            forward, backward = rule(args, named, out)
            self.flops += int(forward)
            self._when_differentiated(out, int(backward))
        return out

    def _when_differentiated(self, out: Any, flops: int) -> None:
        tensors = out if isinstance(out, tuple | list) else (out,)
        result = next((one for one in tensors if isinstance(one, Tensor) and one.grad_fn), None)

        def add(_: Any) -> None:
            self.flops += flops

        if result is not None and flops:
            # An operator in place replaces the hooks of a tensor, and the node of a view.
            node = result.grad_fn
            while node.name().startswith(LAYOUT):
                node = node.next_functions[0][0]
            node.register_prehook(add)


def requires(value: object) -> bool:
    """Whether an operand gets a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def product(flops: int, *operands: Any) -> Both:
    """The FLOPs of a product, and those of the gradients of its operands."""
    flops *= 4 if operands[0].is_complex() else 1
    return flops, flops * sum(map(requires, operands))


def linear(args: Args, named: Named, out: Tensor) -> Both:
    """``linear``."""
    x, weight = (*args, *named.values())[:2]
    return product(2 * out.numel() * x.size(-1), x, weight)


def matmul(args: Args, named: Named, out: Tensor) -> Both:
    """``matmul`` and its special cases."""
    a, b = (*args, *named.values())[:2]
    flops = 2 * out.numel() * a.size(-1)
    # The gradient of a matrix by which a vector was multiplied is an outer product.
    if a.dim() == b.dim() == 1:
        return product(flops, a)[0], 0
    if b.dim() == 1:
        return product(flops, b)
    return product(flops, b)[0], product(flops, a, b)[1] if a.dim() > 1 else product(flops, a)[1]


def convolution(args: Args, named: Named, out: Tensor) -> Both:
    """Each output element: a filter over the channels of its group."""
    x, weight = (*args, *named.values())[:2]
    return product(2 * out.numel() * (weight.numel() // weight.size(0)), x, weight)


def transposed(args: Args, named: Named, _: Tensor) -> Both:
    """Each input element: a filter over the channels of its group."""
    x, weight = (*args, *named.values())[:2]
    return product(2 * x.numel() * (weight.numel() // weight.size(0)), x, weight)


def attention(args: Args, named: Named, _: Tensor) -> Both:
    """The scores and their product with the values."""
    names = ("query", "key", "value")
    q, k, v = (args[i] if i < len(args) else named[name] for i, name in enumerate(names))
    pairs = 2 * (q.numel() // q.size(-1)) * k.size(-2)
    scores, mixed = pairs * q.size(-1), pairs * v.size(-1)
    below = requires(q) or requires(k)  # the scores have a gradient, too
    return scores + mixed, scores * (requires(q) + requires(k)) + mixed * (requires(v) + below)


def einsum(args: Args, _: Named, out: Tensor) -> Both:
    """Two operands: the product of the sizes of all letters, if one of them is summed."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if len(operands) != 2:
        return 0, 0
    inputs, _, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        head, dots, tail = letters.partition("...")
        hidden = operand.dim() - len(head) - len(tail) if dots else 0
        names = [*head, *(f".{hidden - i}" for i in range(hidden)), *tail]
        for name, size in zip(names, operand.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    summed = [name for name in sizes if name[0] != "." and name not in result]
    if all(sizes[name] == 1 for name in summed):  # an outer product
        return 0, 0
    return product(2 * math.prod(sizes.values()), *operands)


def heads(args: Args, named: Named, _: Any) -> Both:
    """``multi_head_attention_forward``: three projections, attention and the output."""
    operands, width, last = args[:3], args[3], args[11]
    weight = named["q_proj_weight"] if named.get("use_separate_proj_weight") else args[5]
    rows = [2 * each.numel() for each in operands]
    below = [requires(weight) or requires(each) for each in operands]
    forward = width * sum(rows)
    backward = width * sum(
        count * (requires(each) + requires(weight))
        for count, each in zip(rows, operands, strict=True)
    )
    pairs = rows[0] * args[1].size(0)
    forward += 2 * pairs + width * rows[0]
    backward += pairs * (below[0] + below[1] + below[2] + (below[0] or below[1]))
    backward += width * rows[0] * (any(below) + requires(last))
    return forward, backward


def recurrent(args: Args, _: Named, out: Any) -> Both:
    """Fused layers compute all gradients; others none of a constant input and first state."""
    x, second = args[:2]
    packed = isinstance(second, Tensor) and second.dtype == torch.int64
    weights = [each for each in args[3 if packed else 2] if each.dim() == 2]
    steps = 2 * (x.numel() // x.size(-1))
    lstm = len(out) == 3
    projected = lstm and out[1].size(-1) != out[2].size(-1)
    forward = steps * sum(each.numel() for each in weights)
    if lstm and not packed and not projected and x.dtype != torch.float64:  # oneDNN's
        return forward, 2 * forward
    batch = 2 * (int(second[0]) if packed else out[1].size(1))
    size = 3 if projected else 2
    directions = 2 if args[-1 if packed else -2] else 1
    backward = 0
    for index in range(0, len(weights), size):
        of_input, of_state, *of_output = weights[index : index + size]
        has_gradient = index >= directions * size or requires(x)
        backward += steps * of_input.numel() * (1 + has_gradient)
        backward += (2 * steps - batch) * of_state.numel()
        backward += 2 * steps * sum(each.numel() for each in of_output)
    return forward, backward


def cell(args: Args, _: Named, __: Any) -> Both:
    """One step of a recurrent layer."""
    x, state, of_input, of_state = args[:4]
    hidden = state[0] if isinstance(state, list | tuple) else state
    rows = 2 * (x.numel() // x.size(-1))
    first = product(rows * of_input.numel(), x, of_input)
    second = product(rows * of_state.numel(), hidden, of_state)
    return first[0] + second[0], first[1] + second[1]


def grouped(args: Args, _: Named, out: Tensor) -> Both:
    """One product per group of rows."""
    return product(grouped_product(args, out), *args[:2])


def affine(args: Args, _: Named, out: Tensor) -> Both:
    """Each coordinate: a row of the matrix."""
    return product(2 * out.numel() * args[0].size(-1), args[0])


RULES: dict[str, Callable[[Args, Named, Any], Both]] = {
    "linear": linear,
    **dict.fromkeys(
        ["matmul", "__matmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "_int_mm"], matmul
    ),
    "__rmatmul__": lambda args, named, out: matmul(args[::-1], named, out),
    **dict.fromkeys(
        ["addmm", "baddbmm", "addmv"], lambda args, named, out: matmul(args[1:], named, out)
    ),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], transposed),
    "scaled_dot_product_attention": attention,
    "einsum": einsum,
    "multi_head_attention_forward": heads,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], recurrent),
    **dict.fromkeys(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"], cell),
    **dict.fromkeys(["_grouped_mm", "grouped_mm"], grouped),
    "affine_grid": affine,
}
