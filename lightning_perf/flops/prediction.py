"""FLOPs of new shapes: predicted by a polynomial in the sizes of the counted ones.

The sizes that vary independently (samples, lengths, nodes, edges, pixels) are the variables of a
polynomial, fitted by least squares. It is accepted only if it predicts all counts within 0.1 %,
held-out ones too. Shapes that vary in a way that was not counted are not predicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import isclose
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Size

from lightning_perf.flops.counter import Counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lightning_perf.flops.signature import Signature

# The exponents of the variables.
Monomial = tuple[int, ...]
Values = NDArray[np.float64]

#: Each fourth count is held out.
_HELD_OUT = 4
#: The largest relative error of a prediction.
_TOLERANCE = 1e-3
# Counts required beyond the number of coefficients.
_SURPLUS = 2
_MOST_VARIABLES = 4
#: Relative size below which a combination of monomials did not vary, and the largest part of a
#: batch's monomials that did not.
_RANK, _ALIKE = 1e-9, 1e-6
_KINDS = ("model", "hardware", "hidden")
#: Sizes up to this share beyond the counted ones are predicted. Farther ones are counted, because
#: models may treat them differently: they truncate them, or attend to a part only.
_BEYOND = 0.125


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Predicts FLOPs from sizes. Created by `fit`."""

    _template: Signature
    #: The sizes of a counted batch.
    _origin: Sequence[int]
    #: By size, the first one that always differed from it by the same number.
    _like: Sequence[int]
    #: What the polynomials are for: ``model`` or ``hardware``, and the dtype.
    _buckets: Sequence[tuple[str, str]]
    _tracked_operations: int
    _basis: Sequence[Monomial]
    #: The largest counted value of each monomial, by which they are divided.
    _scale: Values
    #: By monomial: of the FLOPs of each bucket, then of all monomials, which are reproduced only
    #: for a combination of the counted batches.
    _coefficients: Values

    def predict(self, signature: Signature) -> Counts | None:
        """Return the FLOPs of a batch, with the operation count of a counted one.

        None if the shapes differ from the counted ones in other dimensions than the fitted ones.
        """
        if _template(signature) != self._template:
            return None
        sizes = _sizes(signature)
        moved = [size - first for size, first in zip(sizes, self._origin, strict=True)]
        if any(moved[i] != moved[like] for i, like in enumerate(self._like)):
            return None
        monomials = _monomials([_variables(sizes, self._like)], self._basis)[0] / self._scale
        flops, alike = np.split(monomials @ self._coefficients, [len(self._buckets)])
        flops = flops.round()
        if any(flops < 0) or not np.allclose(alike, monomials, 0, _ALIKE * monomials.max()):
            return None
        kinds: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
        for (kind, dtype), value in zip(self._buckets, flops, strict=True):
            kinds[kind][dtype] = int(value)
        return Counts(**kinds, tracked_operations=self._tracked_operations)


def fit(known: Mapping[Signature, Counts]) -> FlopModel | None:
    """Fit a polynomial in the sizes to counted FLOPs; None if no polynomial fits.

    Signatures must differ in sizes only. Every fourth count is held out of the least squares. All
    counts must be predicted within 0.1 %.
    """
    template = Counter(map(_template, known)).most_common(1)[0][0]
    chosen = {one: counts for one, counts in known.items() if _template(one) == template}
    if any(counts.untracked_names for counts in chosen.values()):
        return None
    sizes = [_sizes(one) for one in chosen]
    moves = [tuple(size - column[0] for size in column) for column in zip(*sizes, strict=True)]
    like = [moves.index(move) for move in moves]
    buckets = sorted({
        (kind, dtype) for one in chosen.values() for kind in _KINDS for dtype in getattr(one, kind)
    })  # fmt: skip
    variables = [_variables(one, like) for one in sizes]
    counted = [
        [float(getattr(counts, kind).get(dtype, 0)) for kind, dtype in buckets]
        for counts in chosen.values()
    ]
    fitted = np.arange(1, len(chosen) + 1) % _HELD_OUT != 0
    operations = next(iter(chosen.values())).tracked_operations
    for basis in _bases(len(variables[0])):
        monomials = _monomials(variables, basis)
        scale = np.maximum(monomials.max(axis=0), 1.0)
        monomials = monomials / scale
        targets = np.hstack([counted, monomials])
        coefficients, _, rank, _ = np.linalg.lstsq(monomials[fitted], targets[fitted], _RANK)
        if rank + _SURPLUS > fitted.sum():
            continue
        model = FlopModel(template, sizes[0], like, buckets, operations, basis, scale, coefficients)
        predictions = ((model.predict(one), counts) for one, counts in chosen.items())
        if all(guess is not None and agree(guess, counts) for guess, counts in predictions):
            return model
    return None


def agree(one: Counts, other: Counts) -> bool:
    """Whether two counts differ by the tolerance at most, in each dtype."""
    return all(
        isclose(mine.get(dtype, 0), others.get(dtype, 0), rel_tol=_TOLERANCE)
        for mine, others in zip(one.flops, other.flops, strict=True)
        for dtype in {*mine, *others}
    )


def within(signature: Signature, known: Iterable[Signature]) -> bool:
    """Whether all sizes are near those of known signatures, which differ in sizes only."""
    template = _template(signature)
    counted = zip(*(_sizes(one) for one in known if _template(one) == template), strict=True)
    return all(
        min(column) * (1 - _BEYOND) <= size <= max(column) * (1 + _BEYOND)
        for size, column in zip(_sizes(signature), counted, strict=False)
    )


def _template(signature: Signature) -> Signature:
    """A signature without its sizes."""
    return tuple((Size, len(part)) if isinstance(part, Size) else part for part in signature)


def _sizes(signature: Signature) -> list[int]:
    """Return all sizes of a signature after a 0, which stands for those that never vary."""
    return [0, *(size for part in signature if isinstance(part, Size) for size in part)]


def _variables(sizes: Sequence[int], like: Sequence[int]) -> list[int]:
    """Return the sizes that vary independently."""
    return [sizes[i] for i in sorted({*like} - {0})]


def _bases(variables: int) -> list[list[Monomial]]:
    """Return the sets of monomials to try."""
    if not 0 < variables <= _MOST_VARIABLES:
        return []
    powers = list(product((0, 1, 2), repeat=variables))
    if variables <= 2:
        return [powers]
    # A cost per element, as of the nodes and edges of graphs.
    bases = [[one for one in powers if sum(one) <= 1]]
    # A cost per sample, as of images, and of encoders and decoders with different lengths.
    bases += [[one for one in powers if one[i] == 1] for i in range(variables)]
    # Attention between all nodes of a graph.
    return [*bases, [one for one in powers if sum(one) <= 2]]


def _monomials(variables: Sequence[Sequence[int]], basis: Sequence[Monomial]) -> Values:
    """Return the value of each monomial of the basis, by point."""
    powers = np.array(variables, float)[:, None] ** np.array(basis)
    values: Values = powers.prod(axis=2)
    return values
