"""Predicts the FLOPs of batches with new shapes from counted ones.

The sizes that vary independently (samples, lengths, nodes, edges, pixels) are the variables of a
polynomial with exact coefficients. A polynomial is accepted only if it predicts held-out counts
exactly. Shapes that vary in a way that was not counted are not predicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from torch import Size

from lightning_perf.flops.counter import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_perf.flops.signature import Signature

# A dimension of a tensor: index of the shape in the signature, index of the dimension.
Place = tuple[int, int]
# The exponents of the variables.
Monomial = tuple[int, ...]
Row = list[Fraction]

_FEWEST, _EVERY = 8, 4
# Counts required beyond the number of coefficients.
_SURPLUS = 2
_MOST_VARIABLES = 4


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Predicts FLOPs from sizes. Created by `fit`."""

    _shapes: _Shapes
    _polynomial: _Polynomial
    _buckets: Sequence[tuple[str, str]]
    _tracked_operations: int

    def predict(self, signature: Signature) -> Counts | None:
        """Return the FLOPs of a batch, with the operation count of a counted one.

        None if the shapes differ from the counted ones in other dimensions than the fitted ones.
        """
        values = self._shapes.variables(signature)
        found = None if values is None else self._polynomial.at(values)
        if found is None:
            return None
        kinds: dict[str, dict[str, int]] = {"model": {}, "hardware": {}}
        for (kind, dtype), value in zip(self._buckets, found, strict=True):
            kinds[kind][dtype] = value
        return Counts(**kinds, tracked_operations=self._tracked_operations)


def fit(known: Mapping[Signature, Counts]) -> FlopModel | None:
    """Fit a polynomial in the sizes to counted FLOPs; None if no polynomial fits.

    At least eight signatures must differ in sizes only. Every fourth count is held out and must be
    predicted exactly from the others.

    Example:
        >>> from torch import empty
        >>> from lightning_perf.flops.signature import signature
        >>> def cost(b, t):
        ...     return Counts(*2 * [{"float32": 6 * b * t + 2 * b * t**2}])
        >>> shapes = [(b, t) for b in (2, 3) for t in (4, 5, 7, 8)]
        >>> model = fit({signature(empty(b, t)): cost(b, t) for b, t in shapes})
        >>> model.predict(signature(empty(16, 100))).model
        {'float32': 329600}
    """
    if not known:
        return None
    template = Counter(map(_template, known)).most_common(1)[0][0]
    chosen = {one: counts for one, counts in known.items() if _template(one) == template}
    complete = not any(counts.untracked_names for counts in chosen.values())
    if len(chosen) < _FEWEST or not complete:
        return None
    shapes = _Shapes.of(template, list(chosen))
    kinds = ("model", "hardware")
    names = {(kind, dtype) for c in chosen.values() for kind in kinds for dtype in getattr(c, kind)}
    buckets = sorted(names)
    targets = [[getattr(c, kind).get(dtype, 0) for kind, dtype in buckets] for c in chosen.values()]
    sizes = [[one[place][i] for place, i in shapes.free] for one in chosen]
    points = list(zip(sizes, targets, strict=True))
    if shapes.free and len(shapes.free) <= _MOST_VARIABLES:
        for basis in _bases(len(shapes.free)):
            polynomial = _checked(basis, points)
            if polynomial is not None:
                operations = next(iter(chosen.values())).tracked_operations
                return FlopModel(shapes, polynomial, buckets, operations)
    return None


def _bases(variables: int) -> Iterator[list[Monomial]]:
    """Yield the sets of monomials to try, from the simplest."""
    zero = (0,) * variables
    units = [tuple(int(i == j) for i in range(variables)) for j in range(variables)]
    # Graphs: a cost per node and a cost per edge.
    yield [zero, *units]
    # Layers: samples, elements, and elements times those of one sample (attention).
    for samples in (*units, zero):
        yield [tuple(s + (1 - s) * power for s in samples) for power in (0, 1, 2)]
    # Convolutions without padding.
    yield list(product((0, 1), repeat=variables))
    # Attention between all nodes of a graph.
    yield [one for one in product((0, 1, 2), repeat=variables) if sum(one) <= 2]
    # Encoders and decoders with different lengths.
    for samples in units:
        yield [
            one
            for one in product((0, 1, 2), repeat=variables)
            if all(power == 1 for s, power in zip(samples, one, strict=True) if s)
        ]
    yield list(product((0, 1, 2), repeat=variables))


_Point = tuple["Sequence[int]", "Sequence[int]"]


def _checked(basis: Sequence[Monomial], points: Sequence[_Point]) -> _Polynomial | None:
    held_out = points[_EVERY - 1 :: _EVERY]
    rest = [point for i, point in enumerate(points) if (i + 1) % _EVERY]
    if len(basis) > len(rest):
        return None
    polynomial = _Polynomial.through(basis, rest)
    if polynomial is None or len(polynomial.terms) + _SURPLUS > len(rest):
        return None
    if all(polynomial.at(values) == list(target) for values, target in held_out):
        return polynomial
    return None


@dataclass(frozen=True, slots=True)
class _Polynomial:
    """Several polynomials in the same variables."""

    #: Linearly independent monomials, with their coefficient in each polynomial.
    terms: Sequence[tuple[Monomial, Sequence[Fraction | int]]]
    #: The other monomials as sums of these, which limits where the polynomials are valid.
    ties: Sequence[tuple[Monomial, Sequence[tuple[Monomial, Fraction | int]]]]

    @classmethod
    def through(cls, basis: Sequence[Monomial], points: Sequence[_Point]) -> _Polynomial | None:
        """Return the polynomials through all points, or None."""
        pivots: dict[int, Row] = {}
        for values, target in points:
            row = [Fraction(_power(values, one)) for one in basis] + [Fraction(t) for t in target]
            for at, pivot in pivots.items():
                _subtract(row, pivot, at)
            at = next((i for i, value in enumerate(row) if value), len(row))
            if at == len(row):
                continue
            if at >= len(basis):
                return None
            row = [value / row[at] for value in row]
            for pivot in pivots.values():
                _subtract(pivot, row, at)
            pivots[at] = row
        found = sorted(pivots)
        width = len(basis)
        return cls(
            [(basis[at], [_plain(value) for value in pivots[at][width:]]) for at in found],
            [
                (basis[i], [(basis[at], _plain(pivots[at][i])) for at in found if pivots[at][i]])
                for i in range(width)
                if i not in pivots
            ],
        )

    def at(self, values: Sequence[int]) -> list[int] | None:
        """Return the values at a point, or None if the polynomials are not valid there."""
        powers = {one: _power(values, one) for one, _ in self.terms}
        for one, parts in self.ties:
            if _power(values, one) != sum(factor * powers[part] for part, factor in parts):
                return None
        rows = [[powers[one] * factor for factor in factors] for one, factors in self.terms]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        whole = all(one.denominator == 1 and one >= 0 for one in sums)
        return [int(one) for one in sums] if whole else None


def _plain(value: Fraction) -> Fraction | int:
    """Return an int if possible, which is ten times as fast."""
    return int(value) if value.denominator == 1 else value


def _subtract(row: Row, pivot: Row, at: int) -> None:
    if factor := row[at]:
        for i, value in enumerate(pivot):
            if value:
                row[i] -= factor * value


def _power(values: Sequence[int], exponents: Monomial) -> int:
    return prod(value**power for value, power in zip(values, exponents, strict=True) if power)


def _template(signature: Signature) -> Signature:
    """Return a signature without its sizes."""
    return tuple((Size, len(part)) if isinstance(part, Size) else part for part in signature)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """How the sizes of a batch depend on each other."""

    template: Signature
    #: The dimensions that vary independently.
    free: Sequence[Place]
    #: Each other dimension, with its difference to a free one (or to 0).
    tied: Sequence[tuple[Place, Place | None, int]]

    @classmethod
    def of(cls, template: Signature, signatures: Sequence[Signature]) -> _Shapes:
        """Analyze the sizes of signatures with the same template."""
        first = signatures[0]
        free: dict[Place, list[int]] = {}
        tied: list[tuple[Place, Place | None, int]] = []
        for index, part in enumerate(first):
            for i, size in enumerate(part if isinstance(part, Size) else ()):
                place = index, i
                sizes = [one[index][i] for one in signatures]
                if len(set(sizes)) == 1:
                    tied.append((place, None, size))
                    continue
                for other, others in free.items():
                    if len({a - b for a, b in zip(sizes, others, strict=True)}) == 1:
                        tied.append((place, other, size - others[0]))
                        break
                else:
                    free[place] = sizes
        return cls(template, list(free), tied)

    def variables(self, signature: Signature) -> list[int] | None:
        """Return the independent sizes; None if the others depend on them differently."""
        if _template(signature) != self.template:
            return None
        for (place, i), base, more in self.tied:
            if signature[place][i] != more + (signature[base[0]][base[1]] if base else 0):
                return None
        return [signature[place][i] for place, i in self.free]
