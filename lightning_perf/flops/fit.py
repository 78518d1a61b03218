"""FLOPs of batches of new shapes, predicted from those of shapes that were counted.

What layers cost grows with three things only: the samples ``B``, the elements ``n`` of the input,
and ``n`` times the elements of one sample (attention). Work that follows no such law, or shapes
that vary in a way that was not seen, are refused instead of guessed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from lightning_perf.flops.counter import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_perf.flops.signature import Signature

# A dimension of some tensor: the tensor's place in the signature, and the dimension's in it.
Place = tuple[int, int]

_FEWEST, _EVERY = 8, 4
_TOLERANCE = 1e-3
_EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class FlopModel:
    """A law that gives the FLOPs of a signature.

    Make it with `fit`.
    """

    _shapes: _Shapes
    _axis: int
    #: Samples, elements, elements times elements of a sample: their scales, and the span of those
    #: that were counted, outside of which nothing is known.
    _scales: Tensor
    _span: Tensor
    _coefficients: Tensor
    _buckets: Sequence[tuple[str, str]]
    _tracked_operations: int

    def predict(self, signature: Signature) -> Counts | None:
        """The FLOPs of a batch.

        Args:
            signature: Of a batch that need not have been seen.

        Returns:
            Model and hardware FLOPs; operations are those of a batch that was counted. None if the
            shapes differ from the known ones in more than what the law is about.
        """
        if not self._shapes.explain(signature):
            return None
        row = _features([self._shapes.lead(signature)], self._axis) / self._scales
        if (row - row @ self._span).norm() > _EXACT * row.norm():
            return None
        values = (row @ self._coefficients).squeeze(0).round().tolist()
        found: dict[str, dict[str, int]] = {"model": {}, "hardware": {}}
        for (kind, dtype), value in zip(self._buckets, values, strict=True):
            found[kind][dtype] = int(value)
        return Counts(**found, tracked_operations=self._tracked_operations)


def fit(known: Mapping[Signature, Counts]) -> FlopModel | None:
    """Find the law that known counts follow, if there is one.

    Every fourth of them is held out, and has to be predicted within 0.1 % from the others.

    Args:
        known: Counts by signature, at least eight that differ in sizes alone.

    Returns:
        The model, or None where no law holds.

    Example:
        >>> from lightning_perf.flops import signature
        >>> def cost(b, t):
        ...     return Counts(*2 * [{"float32": 6 * b * t + 2 * b * t**2}])
        >>> shapes = [(b, t) for b in (2, 3) for t in (4, 5, 7, 8)]
        >>> model = fit({signature(torch.empty(b, t)): cost(b, t) for b, t in shapes})
        >>> model.predict(signature(torch.empty(16, 100))).model
        {'float32': 329600}
    """
    if not known:
        return None
    template = Counter(map(_template, known)).most_common(1)[0][0]
    chosen = {one: counts for one, counts in known.items() if _template(one) == template}
    shapes = _Shapes.of(list(chosen))
    complete = not any(counts.untracked_names for counts in chosen.values())
    if len(chosen) < _FEWEST or shapes is None or not complete:
        return None
    # Samples come first, or second where time does.
    models = (_checked(shapes, axis, chosen) for axis in (0, 1))
    return next((model for model in models if model is not None), None)


def _checked(shapes: _Shapes, axis: int, known: Mapping[Signature, Counts]) -> FlopModel | None:
    held_out = set(list(known)[_EVERY - 1 :: _EVERY])
    rest = {one: counts for one, counts in known.items() if one not in held_out}
    model = _fitted(shapes, axis, rest)
    if all(_agree(model.predict(one), known[one]) for one in held_out):
        return _fitted(shapes, axis, known)
    return None


def _agree(predicted: Counts | None, counted: Counts) -> bool:
    if predicted is None:
        return False
    pairs = [(predicted.model, counted.model), (predicted.hardware, counted.hardware)]
    return all(
        abs(ours.get(dtype, 0) - theirs.get(dtype, 0)) <= _TOLERANCE * theirs.get(dtype, 0)
        for ours, theirs in pairs
        for dtype in ours.keys() | theirs.keys()
    )


def _fitted(shapes: _Shapes, axis: int, known: Mapping[Signature, Counts]) -> FlopModel:
    rows = _features([shapes.lead(one) for one in known], axis)
    scales = rows.amax(0)
    inverse = torch.linalg.pinv(rows / scales, rtol=_EXACT)
    names = {(kind, dtype) for c in known.values() for kind in _KINDS for dtype in _KINDS[kind](c)}
    buckets = sorted(names)
    values = [[_KINDS[kind](c).get(dtype, 0) for kind, dtype in buckets] for c in known.values()]
    targets = torch.tensor(values, dtype=torch.float64, device="cpu")
    span = inverse @ (rows / scales)
    operations = next(iter(known.values())).tracked_operations
    return FlopModel(shapes, axis, scales, span, inverse @ targets, buckets, operations)


_KINDS: dict[str, Callable[[Counts], Mapping[str, int]]] = {
    "model": lambda counts: counts.model,
    "hardware": lambda counts: counts.hardware,
}


def _features(sizes: Sequence[Size], axis: int) -> Tensor:
    rows = [(s[axis], s.numel(), s.numel() ** 2 // max(s[axis], 1)) for s in sizes]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _template(signature: Signature) -> Signature:
    """All of a signature but the sizes."""
    return tuple((Size, len(part)) if isinstance(part, Size) else part for part in signature)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """How the sizes of a batch hang together: what is not of the leading tensor follows from it."""

    template: Signature
    #: Where the first tensor with two or more dimensions is.
    leader: int
    #: For each other dimension, the sizes that it may have: a fixed one, under None, or one that
    #: is by so much larger than a dimension of the leading tensor.
    rules: Mapping[Place, Sequence[tuple[int | None, int]]]

    @classmethod
    def of(cls, signatures: Sequence[Signature]) -> _Shapes | None:
        """What all signatures of one template have in common; None if their sizes are free."""
        first = signatures[0]
        sizes = {place: part for place, part in enumerate(first) if isinstance(part, Size)}
        leader = next((place for place, size in sizes.items() if len(size) > 1), None)
        if leader is None:
            return None
        rules = {
            (place, i): cls._rules(leader, (place, i), signatures)
            for place, size in sizes.items()
            if place != leader
            for i in range(len(size))
        }
        return cls(_template(first), leader, rules) if all(rules.values()) else None

    @staticmethod
    def _rules(
        leader: int, place: Place, signatures: Sequence[Signature]
    ) -> list[tuple[int | None, int]]:
        size, *_ = signatures
        found: list[tuple[int | None, int]] = [(None, size[place[0]][place[1]])]
        found += [(i, size[place[0]][place[1]] - length) for i, length in enumerate(size[leader])]
        return [rule for rule in found if all(_holds(rule, place, leader, s) for s in signatures)]

    def explain(self, signature: Signature) -> bool:
        """Whether the sizes of a signature hang together in the same way."""
        return _template(signature) == self.template and all(
            any(_holds(rule, place, self.leader, signature) for rule in rules)
            for place, rules in self.rules.items()
        )

    def lead(self, signature: Signature) -> Size:
        """The shape of the leading tensor."""
        size: Size = signature[self.leader]
        return size


def _holds(rule: tuple[int | None, int], place: Place, leader: int, signature: Signature) -> bool:
    dimension, value = rule
    base = 0 if dimension is None else signature[leader][dimension]
    return bool(signature[place[0]][place[1]] == base + value)
