"""FLOPs by the shapes of batches: counted for each signature, and predicted for new ones.

Batches with equal signatures cost the same FLOPs, unless the model chooses its layers at random or
trains another network with each batch: some batches are counted again, and if these differ, the
mean of more of them is used, to which later ones are added if there is no cycle. For other shapes,
the sizes that vary independently (samples, lengths, nodes, edges, pixels) are the variables of a
polynomial, fitted by least squares. It is accepted only if it predicts all counts within 0.1 %,
held-out ones too. Shapes that vary in a way that was not counted are not predicted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import product
from math import isclose
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Size, Tensor
from torch._C import DisableTorchFunctionSubclass

from lightning_perf.flops.batch import (
    MOST_OBJECTS,
    attributes,
    container,
    entries,
    has_hidden_state,
    shape_of,
)
from lightning_perf.flops.counter import Counts, mean

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from lightning_perf.flops.peaks import BatchCost

Signature = tuple[Any, ...]

#: Types without tensors, whose values do not affect the cost.
_LEAVES = (
    type(None), int, float, str, bytes, range, slice, type, ModuleType, Enum, date, time, timedelta,
    Decimal, PurePath, UUID, np.generic, torch.dtype, torch.device, torch.layout, weakref.ref,
    Number, FunctionType, BuiltinFunctionType, MethodType,
)  # fmt: skip
#: Keys that count by their values, because their types do not define equality in Python.
_KEYS = (type(None), bool, int, float, str, bytes)
#: Packages whose arrays, such as an index of pandas, run no code of the user.
_ARRAYS = ("pandas", "jaxlib", "cupy")
#: Methods by which a class gives something else than its attributes.
_ACCESS = ("__getitem__", "__getattr__")


def signature(value: object) -> Signature:
    """Return a hashable description of the shapes and dtypes of all tensors in a value.

    Walks lists, tuples, dicts, arrays and attributes of objects, without running the user's code.
    Numbers, strings and similar values count by type only: batches that differ in a number have the
    same signature. Objects that cannot be inspected (iterators, objects without attributes) make
    the signature unique.
    """
    if (plain := _plain_signature(value)) is not None:
        return plain
    description: list[Any] = []
    _describe(value, description, set())
    return tuple(description)


def _plain_signature(value: Any) -> Signature | None:
    """The signature of a tensor, or of a list, tuple or dict of tensors; None for other values.

    In one function, since it is called at every batch.
    """
    kind = type(value)
    description: list[Any] = [kind]
    if kind is tuple or kind is list:
        description.append(len(value))
    elif kind is dict:
        description += map(_describable, value)
        value = value.values()
    elif kind is Tensor:
        description, value = [], (value,)
    else:
        return None
    for item in value:
        if type(item) is not Tensor or item.is_nested:
            return None
        description += (item.dtype, item.shape)
    return tuple(description)


def _describe(value: Any, description: list[Any], seen: set[int]) -> None:
    kind: Any = type(value)
    description.append(kind)
    if issubclass(kind, Tensor):
        description += _dtype_and_size(value)
    elif container(kind) is not None:
        items = entries(value)
        description.append(len(items))
        for key, item in items.items():
            description.append(_describable(key))
            _describe(item, description, seen)
        if kind not in (list, tuple, dict):
            for name, attribute in attributes(value).items():
                if issubclass(type(attribute), Tensor):
                    description.append(name)
                    _describe(attribute, description, seen)
    elif issubclass(kind, np.ndarray) or _is_array(value, kind):
        _describe_array(value, description, seen)
    elif not issubclass(kind, _LEAVES):
        _describe_object(value, description, seen)


def _describable(key: Any) -> object:
    """Return a key, or its type if comparing keys may run the user's code."""
    parts = key if type(key) is tuple else (key,)
    return key if all(type(part) in _KEYS for part in parts) else type(key)


def _dtype_and_size(value: Any) -> tuple[Any, ...]:
    kind: Any = Tensor
    with DisableTorchFunctionSubclass():
        # A nested tensor has no shape; its cost depends on the number of elements.
        nested = kind.is_nested.__get__(value)
        return kind.dtype.__get__(value), Size([kind.numel(value)]) if nested else shape_of(value)


def _is_array(value: Any, kind: type) -> bool:
    """Whether an object converts to one NumPy array, as an index of pandas does."""
    return (
        str(kind.__module__).startswith(_ARRAYS)
        and hasattr(kind, "__array__")
        and isinstance(getattr(value, "shape", None), tuple)
        and getattr(value, "dtype", None) is not None
    )


def _describe_array(value: Any, description: list[Any], seen: set[int]) -> None:
    array: Any = value
    if issubclass(type(value), np.ndarray):
        array = np.ndarray.view(value, np.ndarray)
    description += (array.dtype, Size(array.shape))
    if not getattr(array.dtype, "hasobject", False):
        return
    # Strings in most cases, but any of them may be a tensor.
    if array.dtype != object or array.size > MOST_OBJECTS or id(value) in seen:
        description.append(object())
        return
    seen.add(id(value))
    for item in np.asarray(array).flat:
        _describe(item, description, seen)


def _describe_object(value: Any, description: list[Any], seen: set[int]) -> None:
    """Describe an object by its attributes, in ``__dict__`` and slots."""
    if id(value) in seen:  # already described, or a cycle
        return
    seen.add(id(value))
    kind: Any = type(value)
    before = len(description)
    if issubclass(kind, Iterator) or has_hidden_state(kind) or len(seen) > MOST_OBJECTS:
        description.append(object())
        return
    parts = attributes(value)
    description += parts
    for part in parts.values():
        _describe(part, description, seen)
    known = any(type(each) is Size for each in description[before:])
    if not known and any(hasattr(kind, name) for name in _ACCESS):
        description.append(object())


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
        if all(guess is not None and _agree(guess, counts) for guess, counts in predictions):
            return model
    return None


def _agree(one: Counts, other: Counts) -> bool:
    """Whether two counts differ by the tolerance at most, in each dtype."""
    return all(
        isclose(mine.get(dtype, 0), others.get(dtype, 0), rel_tol=_TOLERANCE)
        for mine, others in zip(one.flops, other.flops, strict=True)
        for dtype in {*mine, *others}
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


#: Shapes that are counted before others are predicted, and at most.
_MIN_COUNTED, MOST_COUNTED = 16, 64
#: Sizes up to this share beyond the counted ones are predicted. Farther ones are counted, because
#: models may treat them differently: they truncate them, or attend to a part only.
_BEYOND = 0.125
#: Predictions of which one is verified by counting.
_VERIFIED = 200
#: Costs that are cached at most.
_MOST_COSTS = 4096
#: Batches that are counted again to see whether those of one signature differ, and if they do. The
#: first one shows whether the very first batch did more, such as logging images. Ten more contain
#: one of each tenth, as a GAN may train its generator; 30 is a multiple of most such numbers.
_RECOUNTS, _MORE_RECOUNTS = 11, 31
#: Known batches between the first one that is counted again and the others, as short runs have two
#: counts only. With manual optimization one batch often trains another network than the next one.
_PAUSE = {True: 0, False: 16}
#: Batches before one is counted to see whether costs have changed: at first and after a change, and
#: at most, by manual optimization. They double after each one that shows no change. 61 batches from
#: one to the next have no common divisor with the numbers of batches that cycles usually have.
_CHECKED_AFTER, _CHECKED_EVERY = 40, {True: 60, False: 200}
#: Batches before one is checked whose costs differ at random: from one to the next there are 47, a
#: prime. The counts that are kept at most, and those that must repeat in a cycle seen only once.
_RANDOM_EVERY, _MOST_SAMPLES, _REPEATED = 46, 200, 10
#: Counting starts anew if the mean of so many checks differs from that of the counts before by more
#: than this share and so many standard errors.
_CHECKS, _MOVED, _ERRORS = (8, 16, 32), 0.05, 4
#: Batches between two of a kind that was never counted, beyond which their share is too small.
_FARTHEST = 200
#: The last part of the signature of the first batch of an epoch, which often does more than others,
#: such as logging images, and how many of them are counted: at first and after a change.
_FIRST, _FIRSTS = "first", 16
#: At most one batch in 20 is counted, after the first 30 counted ones, or one in 40 after more.
_PER_COUNT, _FREE = 20, 30 * 20


@dataclass(slots=True)
class FlopCache:
    """FLOPs and costs by batch signature, for one stage and set of trainable parameters."""

    #: Batches without FLOPs that are still counted before counting is given up.
    tries: int
    #: Whether the module optimizes manually.
    manual: bool = False
    #: Skipped batches since the last one whose FLOPs were counted.
    skips: int = 0
    counts: dict[Signature, Counts] = field(default_factory=dict)
    costs: dict[Signature, BatchCost] = field(default_factory=dict)
    predictor: FlopModel | None = None
    #: Size of ``counts`` at the last fit.
    fitted_at: int = 0
    # The counts of each signature and of each of its kinds, in the order of the batches, and those
    # that have the very first batch.
    _samples: dict[Signature, list[Counts]] = field(default_factory=dict)
    _oldest: tuple[Signature, ...] = ()
    # Checks that are among the counts, by signature or kind: those of costs that differ at random.
    _checks: Counter[Signature] = field(default_factory=Counter)
    # Batches of kinds that were never counted: the number of the last one.
    _missed: dict[Signature, int] = field(default_factory=dict)
    _recounts: int = 0
    _differ: bool = False
    # Changes of the cost in a row, and whether the first batch of an epoch showed the last one.
    _changes: int = 0
    _at_epoch: bool = False
    _gap: int = _CHECKED_AFTER
    # Batches so far, and those that were counted.
    _batches: int = 0
    _counted: int = 0
    # Batches before this epoch or validation.
    _before_epoch: int = 0
    # First batches of epochs that were counted since the last change.
    _firsts: int = 0
    # The batch after which one of a counted signature is counted again, and the one that was due
    # before `check` asked for another.
    _due: int = 0
    _due_later: int = 0
    #: Predictions since the last one that was verified.
    _unverified: int = 0

    def cost(self, signature: Signature) -> BatchCost | None:
        """Return the cost of a signature, or None if it is new or must be counted again."""
        self._batches += 1
        due = self._batches > self._due and signature[-1:] != (_FIRST,)
        if due and signature in self._samples:
            return None
        return self.costs.get(signature)

    def known(self, signature: Signature) -> BatchCost | None:
        """Return the cost that is known of a signature, or of others than the first of an epoch."""
        return self.costs.get(signature) or self.costs.get(signature[:-1])

    def count(self, signature: Signature, counts: Counts, kind: Hashable = None) -> Counts:
        """Add the counts of a batch; return what other batches of its signature cost on average.

        Batches of different kinds may differ, as a GAN's that step different optimizers: `mean_of`
        has the cost of each kind.
        """
        self._counted += 1
        self.skips = 0
        if signature[-1:] == (_FIRST,):
            return self._count_first(signature, counts)
        own = of_kind(signature, kind)
        known = self._samples.get(own)
        if known and not self._recounting and not self._expected(own, counts):
            self._forget()
        if not self._samples:
            self._oldest = signature, own
        kept = True
        if signature in self._samples:
            kept = self._count_again(signature, own, counts)
        elif self.predictor is not None:
            self._verify(self.predictor.predict(signature), counts)
        if kept:
            for key in {own, signature}:
                samples = self._samples.setdefault(key, [])
                samples.append(counts)
                del samples[:-_MOST_SAMPLES]
            self.counts[signature] = self.mean_of(signature)
        return self.counts[signature]

    def _count_again(self, signature: Signature, own: Signature, counts: Counts) -> bool:
        """Say when to count again after a known signature; return whether its counts are kept."""
        samples = self._samples.get(own, [])
        if self._recounting:
            self._recounts += 1
            self._differ = self._differ or any(counts.flops != one.flops for one in samples[:1])
            if not self._recounting:
                self._wait(self._gap)
            elif self._recounts == 1 and not self._differ:
                self._wait(_PAUSE[self.manual])
            return True
        if self._due_later:
            self._due, self._due_later = self._due_later, 0
        else:
            self._wait(self._gap)
        if 2 * len(samples) <= self._recounts:
            return True
        length = self._cycle(own)
        if length > 1 or (length == 1 and counts.flops == self._used(own)[0].flops):
            return False
        self._checks.update({own, signature})
        return True

    def mean_of(self, key: Signature) -> Counts:
        """Return the mean of the counts of a signature, or of a kind of it.

        Of costs that repeat, whole cycles are averaged.
        """
        used, length = self._used(key), self._cycle(key)
        return mean(used[: len(used) // length * length] if length else used)

    def _cycle(self, key: Signature) -> int:
        """Return the length of the cycle of a key's costs, 1 if they are equal, 0 if at random."""
        length = _cycle(self._used(key))
        return 0 if length > 1 and self._checks[key] else length

    def _used(self, key: Signature) -> Sequence[Counts]:
        """Return the counts of a signature, or of a kind of it, without the least typical ones.

        The very first batch is left out if others were counted, and the next one, which does not
        precede the others.
        """
        samples = self._samples[key]
        left_out = min(len(samples) - 1, 2) if key in self._oldest else 0
        return _latest(samples[left_out:])

    @property
    def error(self) -> float:
        """The relative standard error of the mean that most batches have; 0 if it is exact."""
        # With manual optimization, a batch has the mean of its kind.
        keys = [key for key in self._samples if not (self.manual and key in self.counts)]
        key = max(keys, key=lambda one: len(self._samples[one]), default=None)
        costs = [] if key is None or self._cycle(key) else [*map(_size, self._used(key))]
        if len(costs) < _CHECKS[0] or _one_way(costs):
            return 0.0
        return float(np.std(costs, ddof=1) / np.mean(costs) / len(costs) ** 0.5)

    def missed(self, signature: Signature, kind: Hashable) -> None:
        """A batch of a kind that was never counted was not counted: count the next one.

        It is as far away as the last one.
        """
        own, batch = of_kind(signature, kind), self._batches
        last = self._missed.get(own, batch - 1)
        self._missed[own] = batch
        if signature in self._samples and not self._recounting and batch - last <= _FARTHEST:
            self._due_later = self._due_later or max(self._due, batch + 1)
            self._wait(batch - last - 1)

    def _verify(self, predicted: Counts | None, counts: Counts) -> None:
        """Forget the predictions if one is wrong."""
        self._unverified = 0
        if predicted is not None and not _agree(predicted, counts):
            self.predictor = None
            self.costs = {one: self.costs[one] for one in self.costs.keys() & self._samples}

    def first(self, signature: Signature) -> Signature:
        """Return the signature of an epoch's first batch: its own if other batches cost the same.

        Its cost is dropped if it must be counted. Where epochs have one batch, it is as any other.
        """
        single = self._batches - self._before_epoch == 1
        self._before_epoch = self._batches
        samples = [] if self.full or single else self._samples.get(signature, [])
        if not samples or any(one.flops != samples[-1].flops for one in samples[1:]):
            return signature
        signature = (*signature, _FIRST)
        allowed = _PER_COUNT * self._counted - _FREE <= self._batches < self._due
        if allowed and self._firsts < _FIRSTS:
            self.costs.pop(signature, None)
        return signature

    def _count_first(self, signature: Signature, counts: Counts) -> Counts:
        """Return the mean of the first batches; if this one is new, the next one is checked."""
        self._firsts += 1
        samples = self._samples.setdefault(signature, [])
        others = self._samples[signature[:-1]]
        self._at_epoch = all(one.flops != counts.flops for one in (others[-1], *samples))
        if self._at_epoch:
            self._wait(0)
        samples.append(counts)
        self.counts[signature] = mean(samples)
        return self.counts[signature]

    @property
    def full(self) -> bool:
        """Whether no new signature is counted any more. Some verify the predictions."""
        return len(self.counts) >= MOST_COUNTED * (1 if self.predictor is None else 2)

    def skip(self) -> None:
        """A batch was skipped, at an unknown cost: some of the next may be, too."""
        self.skips += 1
        self._differ = True
        self._wait(0)

    def check(self) -> None:
        """Count one of the next batches, besides those that are due: costs may have changed."""
        if not self._recounting:
            self._due_later = max(self._due, self._batches + 1)
            self._wait(0)

    @property
    def _recounting(self) -> bool:
        """Whether more batches are counted again; of work that changes all the time, one is."""
        most = 1 if self._changes > 1 else _MORE_RECOUNTS if self._differ else _RECOUNTS
        return self._recounts < most

    def _expected(self, own: Signature, counts: Counts) -> bool:
        """Whether the cost of a checked batch has not changed: the next check may be later."""
        samples, used = self._samples[own], self._used(own)
        costs, cost = [*map(_size, used)], _size(counts)
        new = all(counts.flops != sample.flops for sample in samples)
        random = not self._cycle(own)
        if random and not _one_way(costs):
            # Where other costs came once only, so may this one, unless it is far away.
            least, most = min(costs), max(costs)
            near = 2 * least - most <= cost <= 2 * most - least
            new = new and not (near and 1 in Counter(costs).values())
            new = new or _moved([*costs, cost], self._checks[own] + 1)
        if new and not (self._differ and 2 * len(samples) <= self._recounts):
            return False
        if not self._due_later:
            self._changes *= self._at_epoch
            most = _CHECKED_EVERY[self.manual]
            self._gap = _RANDOM_EVERY if random else min(2 * self._gap, most)
        return True

    def _wait(self, batches: int) -> None:
        """Count again after some batches, or after more if too many were counted.

        What changes all the time must not go unnoticed: not after more than until the first check.
        """
        late = min(_PER_COUNT * self._counted - _FREE, self._batches + _CHECKED_AFTER)
        self._due = max(self._batches + batches, late)

    def _forget(self) -> None:
        """Start anew with what has changed."""
        for known in (self.counts, self.costs, self._samples, self._missed, self._checks):
            known.clear()
        self.predictor, self.fitted_at = None, 0
        self._due = self._due_later = self._recounts = self._firsts = 0
        self._differ = False
        self._changes, self._gap = self._changes + 1, _CHECKED_AFTER

    def predict(self, signature: Signature) -> Counts | None:
        """Return the predicted FLOPs of a new signature, or None if it must be counted."""
        if len(self.counts) < _MIN_COUNTED or signature in self.counts:
            return None
        # Signatures that the predictor does not cover are counted, and extend the next fit.
        if len(self.counts) >= 2 * self.fitted_at:
            self.fitted_at = len(self.counts)
            self.predictor = fit(self.counts)
        self._unverified += 1
        verifies = self._unverified > _VERIFIED and not self.full
        if self.predictor is None or verifies or not _within(signature, self.counts):
            return None
        return self.predictor.predict(signature)

    def store(self, signature: Signature, cost: BatchCost) -> None:
        """Cache the cost of a signature."""
        if len(self.costs) >= _MOST_COSTS:
            self.costs.clear()
        self.costs[signature] = cost


def of_kind(signature: Signature, kind: Hashable) -> Signature:
    """Return the key of the batches of a kind. The first ones of epochs have no kinds."""
    return signature if kind is None or signature[-1:] == (_FIRST,) else (*signature, kind)


def _latest(samples: Sequence[Counts]) -> Sequence[Counts]:
    """Counts without those of a first phase, such as a warm-up, that has ended.

    It is equal counts that do not come again in twice as many.
    """
    kinds = [counts.flops for counts in samples]
    length = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    ended = kinds[0] not in kinds[length:] and len(kinds) >= 3 * length > 3
    return samples[length:] if ended else samples


def _cycle(samples: Sequence[Counts]) -> int:
    """The length of the cycle in which costs repeat, 1 if they are equal; 0 if they do not."""
    kinds = [counts.flops for counts in samples]
    length = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    again = kinds[length:]
    # Costs at random may begin and end with the same few ones.
    repeats = len(again) >= _REPEATED and any(kind != again[0] for kind in again)
    return length if length == 1 or repeats or len(again) >= length else 0


def _size(counts: Counts) -> int:
    """The size of a batch's cost, for comparison with others."""
    return counts.model_flops + counts.hardware_flops


def _one_way(costs: Sequence[int]) -> bool:
    """Whether costs only grow or only fall."""
    return list(costs) in (sorted(costs), sorted(costs, reverse=True))


def _moved(costs: Sequence[int], checks: int) -> bool:
    """Whether the mean of the latest costs, all of them checks, differs from that before."""
    values = np.array(costs, float)
    for count in _CHECKS:
        if count > min(checks, len(values) // 2):
            return False
        before, latest = values[:-count], values[-count:]
        moved = abs(latest.mean() - before.mean())
        squares = before.var() * len(before) + latest.var() * count
        error = (squares / (len(values) - 2) * (1 / len(before) + 1 / count)) ** 0.5
        if moved > max(_MOVED * before.mean(), _ERRORS * error):
            return True
    return False


def _within(signature: Signature, known: Iterable[Signature]) -> bool:
    """Whether all sizes are near those of known signatures, which differ in sizes only."""
    template = _template(signature)
    counted = zip(*(_sizes(one) for one in known if _template(one) == template), strict=True)
    return all(
        min(column) * (1 - _BEYOND) <= size <= max(column) * (1 + _BEYOND)
        for size, column in zip(_sizes(signature), counted, strict=False)
    )
