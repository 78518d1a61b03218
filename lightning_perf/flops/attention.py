"""FLOPs of attention: in full, within windows, of block masks, and of packed sequences.

A query counts the keys that its window or block mask leaves. A causal mask alone leaves the whole
square, as in PaLM's convention; the FLOPs of the pairs that it hides are given besides. Libraries
name the arguments of their operators alike, so that one formula reads them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


class Work(NamedTuple):
    """FLOPs of one call of an operator."""

    flops: int
    #: The part of them that is of pairs that a causal mask hides.
    hidden: int = 0


class Visible(NamedTuple):
    """The keys that a query of a square of queries and keys sees."""

    causal: bool = False
    #: Keys before and after the query's own position; None is all.
    left: int | None = None
    right: int | None = None
    #: Whether the last query has the position of the last key, and not the first that of the first.
    from_the_end: bool = False

    def pairs(self, queries: int, keys: int) -> tuple[int, int]:
        """The pairs that count, and those of them that a causal mask hides."""
        right = 0 if self.causal else self.right
        bounded = self.left is not None and right is not None
        width = min(self.left + 1 + right, keys) if bounded else keys  # type: ignore[operator]
        if not self.causal:
            return queries * width, 0
        offset = keys - queries if self.from_the_end else 0
        seen = _seen(queries, keys, offset + 1)
        if self.left is not None:
            seen -= _seen(queries, keys, offset - self.left)
        return queries * width, max(queries * width - seen, 0)


def _seen(queries: int, keys: int, first: int) -> int:
    """The sum over queries of the keys up to a position, which is ``first`` for the first query."""
    return int(np.clip(np.arange(queries, dtype=np.int64) + first, 0, keys).sum())


def visible(call: Mapping[str, Any], heads_first: bool) -> Visible:
    """The mask of a call, by the names of its arguments in torch, flash-attn and xformers."""
    # In torch's memory-efficient attention: 1 is causal from the top left, 2 from the bottom right.
    kind = call.get("custom_mask_type") or 0
    causal = bool(call.get("is_causal") or call.get("causal") or kind)
    sizes = call.get("window_size")
    if isinstance(sizes, int):  # keys that a causal query sees, itself included
        left, right = (sizes - 1 if sizes > 0 else None), None
    else:
        left, right = sizes or (
            call.get("window_size_left", call.get("window_left")),
            call.get("window_size_right", call.get("window_right")),
        )
    left, right = (None if size is None or size < 0 else int(size) for size in (left, right))
    if left is None and right == 0:  # flash-attn's own form of a causal mask
        causal = True
    return Visible(causal, left, right, not heads_first if kind == 0 else kind == 2)


@dataclass(frozen=True)
class Attention:
    """The formula of an operator, forward or backward.

    ``heads_first`` tensors are ``[batch, heads, length, features]``; others ``[batch, length,
    heads, features]``, or packed ``[total, heads, features]`` with cumulative lengths from 0 on.
    """

    heads_first: bool = False
    #: A backward computes the gradients of query, key, value and scores.
    backward: bool = False

    def __call__(self, call: Mapping[str, Any]) -> Work | Callable[[], Work]:
        """The FLOPs of a call with named arguments, or a function that reads lengths later."""
        query, key, value = (_first(call, name, name[0]) for name in ("query", "key", "value"))
        per_pair = (4 if self.backward else 2) * (query.size(-1) + value.size(-1))
        mask = visible(call, self.heads_first)
        ends = _first(call, *(f"{name}_q" for name in _ENDS))
        if ends is not None and not self.heads_first:
            keys = _first(call, *(f"{name}_k" for name in _ENDS))
            per_pair *= query.size(-2)
            return when_read(
                [ends, ends if keys is None else keys],
                lambda *ends: _sum(per_pair, [mask.pairs(*each) for each in _lengths(*ends)]),
            )
        length = -2 if self.heads_first else -3
        queries, keys = query.size(length), key.size(length)
        squares = query.numel() // (query.size(-1) * queries) if queries else 0
        blocks = call.get("block_mask")
        if blocks is not None and not _is_trivial(blocks):
            return _of_blocks(blocks, squares, queries, keys, per_pair)
        return _sum(per_pair * squares, [mask.pairs(queries, keys)])


#: The beginnings of the names of cumulative lengths.
_ENDS = ("cum_seq", "cu_seqlens", "cu_seq")


def _first(call: Mapping[str, Any], *names: str) -> Any:
    return next((call[name] for name in names if call.get(name) is not None), None)


def _lengths(queries: Sequence[int], keys: Sequence[int]) -> list[tuple[int, int]]:
    pairs = zip(pairwise(queries), pairwise(keys), strict=True)
    return [(b - a, d - c) for (a, b), (c, d) in pairs]


def _sum(per_pair: int, squares: Sequence[tuple[int, int]]) -> Work:
    counted, hidden = (sum(column) for column in zip(*squares, strict=True))
    return Work(per_pair * counted, per_pair * hidden)


def _is_trivial(mask: Sequence[Any]) -> bool:
    """Whether a ``BlockMask`` on a shadow, which has no values, is the one that hides nothing."""
    partial, indices = mask[2:4]
    if not hasattr(partial, "fake_mode"):
        return False
    if partial.numel() != 1 or indices.numel() != 1:
        raise NotImplementedError
    return True


def _of_blocks(
    mask: Sequence[Any], squares: int, queries: int, keys: int, per_pair: int
) -> Work | Callable[[], Work]:
    """The FLOPs of the blocks that a ``BlockMask`` of FlexAttention leaves, as a tuple.

    Border blocks count what exists of them.
    """
    partial, (rows, columns) = mask[2], mask[-3:-1]
    _waits([partial])
    first_rows = rows * torch.arange(partial.size(-1), device=partial.device)
    heights = (queries - first_rows).clamp(0, rows)
    pairs = heights.new_zeros(())
    for numbers, indices in (mask[2:4], mask[4:6]):  # of partial and of full blocks
        if numbers is not None:
            listed = torch.arange(indices.size(-1), device=indices.device) < numbers.unsqueeze(-1)
            widths = (keys - columns * indices.long()).clamp(0, columns) * listed
            pairs = pairs + (heights * widths.sum(-1)).sum()
    # One mask may serve all batches and heads.
    repeats = squares // max(partial.numel() // partial.size(-1), 1)
    return when_read([pairs], lambda pairs: Work(per_pair * repeats * pairs))


def when_read(tensors: Sequence[Tensor], then: Callable[..., Work]) -> Work | Callable[[], Work]:
    """Apply a function to the values of tensors: on a GPU later, because reading waits for it."""
    if not _waits(tensors):
        return then(*(tensor.tolist() for tensor in tensors))
    copies = [tensor.clone() for tensor in tensors]
    return lambda: then(*(copy.tolist() for copy in copies))


def _waits(tensors: Sequence[Tensor]) -> bool:
    """Whether reading values waits for a GPU; raises if it captures a CUDA graph now."""
    waits = any(tensor.is_cuda and not hasattr(tensor, "fake_mode") for tensor in tensors)
    if waits and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("reading values would end the capture of a CUDA graph")
    return waits
