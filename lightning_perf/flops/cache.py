"""FLOPs of batches by their signatures, and which batches are counted.

Batches with equal signatures, and of one kind, cost the same FLOPs, unless the model works at
random where no gradients are computed: some batches are counted again, and if these differ, the
mean of more of them is used, to which later ones are added if there is no cycle.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lightning_perf.flops.counter import Counts, mean
from lightning_perf.flops.prediction import FlopModel, agree, fit, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_perf.flops.peaks import BatchCost
    from lightning_perf.flops.signature import Signature

#: Shapes that are counted before others are predicted, by whether a count is costly, and at most.
#: One size that varies needs 6: three coefficients, two counts more, and one that is held out.
MIN_COUNTED, MOST_COUNTED = {True: 6, False: 16}, 64
#: Predictions of which one is verified by counting.
_VERIFIED = 200
#: Costs that are cached at most.
_MOST_COSTS = 4096
#: Batches that are counted again to see whether those of one signature differ, and if they do. The
#: first one shows whether the very first batch did more, such as logging images. Ten more contain
#: one of each tenth, as a GAN may train its generator; 30 is a multiple of most such numbers.
_RECOUNTS, MORE_RECOUNTS = 11, 31
#: Known batches between the first one that is counted again and the others, as short runs have two
#: counts only. With manual optimization one batch often trains another network than the next one.
_PAUSE = {True: 0, False: 16}
#: Batches before one is counted to see whether costs have changed: at first and after a change, and
#: at most, by manual optimization. They double after each one that shows no change, up to a part of
#: all batches: so many may have another cost unnoticed. 61 batches from one to the next have no
#: common divisor with the numbers of batches that cycles usually have.
_CHECKED_AFTER, _CHECKED_EVERY, _UNCHECKED = 40, {True: 60, False: 200}, 0.25
#: Batches before one is checked whose costs differ at random: from one to the next there are 47, a
#: prime. The counts that are kept at most, and those that must repeat in a cycle seen only once.
_RANDOM_EVERY, _MOST_SAMPLES, _REPEATED = 46, 200, 10
#: Counting starts anew if the mean of one of these numbers of checks differs from the mean of the
#: counts before them by more than this share, and by more than this number of standard errors.
_CHECKS, _MOVED, _ERRORS = (8, 16, 32), 0.05, 4
#: Batches between two of a kind that was never counted, beyond which their share is too small. Each
#: batch may be of a kind of its own: those that ask for a count, and kinds that are told apart.
_FARTHEST, _MOST_MISSED, _MOST_KINDS = 200, 64, 500
#: Shapes whose batches have kinds by their numbers of nodes, at most: the last batch may be small.
_FEW_SHAPES = 2
#: Least and most batches from a refused count to the next try, or from a count of costs that differ
#: to the next one. They are drawn at random, because a fixed number may have a common divisor with
#: a cycle. It is not the next batch: more waits end in long batches than in short ones, and the one
#: after these would be counted. The mean is above `_PER_COUNT`.
_RETRY = 13, 33
#: The last part of the signature of the first batch of an epoch, which often does more than others,
#: such as logging images, and how many of them are counted: at first and after a change.
_FIRST, _FIRSTS = "first", 16
#: At most one batch in 20 is counted, after the first 30 counted ones, or one in 40 after more.
_PER_COUNT, _FREE = 20, 30 * 20


#: A kind of batches: with manual optimization the optimizers that stepped, and the number of nodes
#: that the step adds to autograd's graph.
Kind: TypeAlias = tuple[int, ...]


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
    # The numbers of nodes of the kinds that were counted, in order, by the rest of their keys.
    _nodes: dict[Signature, list[int]] = field(default_factory=dict)
    # Batches of kinds that were never counted: the number of the last one, and how many asked for
    # a count.
    _missed: dict[Signature, int] = field(default_factory=dict)
    _asked: int = 0
    _recounts: int = 0
    _differ: bool = False
    # Changes of the cost in a row, and whether the first batch of an epoch showed the last one.
    _changes: int = 0
    _at_epoch: bool = False
    _gap: int = _CHECKED_AFTER
    #: Batches so far.
    batches: int = 0
    #: Those that were counted.
    counted: int = 0
    #: Whether counts were refused that would have found a cycle or a mean: each one then holds
    #: until the next.
    sparse: bool = False
    #: The kind of all counted batches; None if there are several.
    kind: Kind | None = None
    #: Whether there are so many shapes that graphs of different size are not told apart: the
    #: formulas for other shapes have no number of nodes.
    many_shapes: bool = False
    # The last batch that was counted, the size of the cost of those after it, and of all before it.
    _last: int = 0
    _level: int = 0
    _before: int = 0
    # The change that the last count showed. Each batch since the count before it had the old cost
    # or the new one: the sum of the changes times these batches, and the sum of its squares.
    _change: int = 0
    _late: int = 0
    _squares: int = 0
    _random: Random = field(default_factory=partial(Random, 0))
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
        self.batches += 1
        due = self.batches > self._due and signature[-1:] != (_FIRST,)
        if due and signature in self._samples:
            return None
        return self.costs.get(signature)

    def known(self, signature: Signature) -> BatchCost | None:
        """Return the cost that is known of a signature, or of others than the first of an epoch."""
        return self.costs.get(signature) or self.costs.get(signature[:-1])

    def limit_kinds(self, signature: Signature) -> None:
        """Stop telling graphs of different size apart if this signature is one shape too many."""
        shapes = [one for one in self.counts.keys() | {signature} if one[-1:] != (_FIRST,)]
        if self.many_shapes or len(shapes) <= _FEW_SHAPES:
            return
        self._samples = {one: self._samples[one] for one in self._samples.keys() & self.counts}
        if any(one.flops != each[-1].flops for each in self._samples.values() for one in each):
            self._forget()  # the means are of several kinds
            self._changes = 0
        self.many_shapes, self.kind = True, None

    def cost_of(self, signature: Signature, kind: Kind) -> BatchCost | None:
        """Return the cost of a kind of batches that was counted, or of the most similar one.

        That has the nearest number of nodes. None if there is no similar one.
        """
        cost = self.costs.get(of_kind(signature, kind))
        if cost is None:
            self._ask(signature, kind)
            *rest, nodes = kind
            known = self._nodes.get((*signature, *rest), [])
            place = bisect(known, nodes)
            beside = known[max(place - 1, 0) : place + 1]
            nearest = min(beside, key=lambda number: abs(number - nodes), default=nodes)
            cost = self.costs.get(of_kind(signature, (*rest, nearest)))
        return cost

    def count(self, signature: Signature, counts: Counts, kind: Kind | None = None) -> Counts:
        """Add the counts of a batch; return what other batches of its signature cost on average.

        Batches of different kinds may differ, as a GAN's that step different optimizers: `mean_of`
        has the cost of each kind.
        """
        self.counted += 1
        self.skips = 0
        if signature[-1:] == (_FIRST,):
            return self._count_first(signature, counts)
        own = self._own(signature, kind)
        known = self._samples.get(own)
        since = self.batches - self._last - 1
        self._before += self._level * since + _size(counts)
        if known:
            self._change = 0
            if (self.sparse or not self._recounting) and not self._expected(own, counts):
                change = _size(counts) - _size(self.mean_of(own))
                self._late += change * since
                self._squares += (change * since) ** 2
                self._change = change if self.counted > 2 else 0  # the very first often differs
                self._forget()
        self._last = self.batches
        if not self._samples:
            self._oldest, self.kind = (signature, own), kind
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
        if self.sparse and self._squares:  # whatever this count showed, or costs had other shares
            self._wait(self._random.randint(*_RETRY) - 1)
        self._level = _size(self.counts[signature])
        return self.counts[signature]

    def _own(self, signature: Signature, kind: Kind | None) -> Signature:
        """Note the kind of a counted batch and return its key; with too many, its signature."""
        if self._samples and kind != self.kind:
            self.kind = None
        own = of_kind(signature, kind)
        if own in self._samples or kind is None:
            return own
        if len(self._samples) >= _MOST_KINDS:
            return signature
        insort(self._nodes.setdefault((*signature, *kind[:-1]), []), kind[-1])
        return own

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
        """The relative error of the sum of all costs; 0 if it is exact.

        It is the standard error of the mean that most batches have, or what changes left unknown:
        of work that grows, half of the changes between two counts, since each is found late; of
        work at random, the standard error by the squares of the changes.
        """
        # A batch has the mean of its kind, if there are kinds.
        keys = [key for key in self._samples if key not in self.counts] or self._samples
        key = max(keys, key=lambda one: len(self._samples[one]), default=None)
        if key is None:
            return 0.0
        costs = [] if self._cycle(key) else [*map(_size, self._used(key))]
        if len(costs) < _CHECKS[0] or _one_way(costs):
            since = self.batches - self._last
            late = self._change * since
            unknown = max(abs(self._late + late) / 2, math.sqrt((self._squares + late**2) / 2))
            return unknown / max(self._before + self._level * since, 1)
        return float(np.std(costs, ddof=1) / np.mean(costs) / len(costs) ** 0.5)

    def _ask(self, signature: Signature, kind: Kind) -> None:
        """Count the next batch of a new kind, which is expected at the distance of the last two."""
        own, batch = of_kind(signature, kind), self.batches
        if signature not in self._samples or self._asked > _MOST_MISSED:
            return
        last = self._missed.get(own, batch - 1)
        self._missed[own] = batch
        if not self._recounting and batch - last <= _FARTHEST:
            self._asked += 1
            self._due_later = self._due_later or max(self._due, batch + 1)
            self._wait(batch - last - 1)

    def _verify(self, predicted: Counts | None, counts: Counts) -> None:
        """Forget the predictions if one is wrong."""
        self._unverified = 0
        if predicted is not None and not agree(predicted, counts):
            self.predictor = None
            self.costs = {one: self.costs[one] for one in self.costs.keys() & self._samples}

    def first(self, signature: Signature) -> Signature:
        """Return the signature of an epoch's first batch: its own if other batches cost the same.

        Its cost is dropped if it must be counted. Where epochs have one batch, it is as any other.
        """
        single = self.batches - self._before_epoch == 1
        self._before_epoch = self.batches
        samples = [] if self.full or single else self._samples.get(signature, [])
        if not samples or any(one.flops != samples[-1].flops for one in samples[1:]):
            return signature
        signature = (*signature, _FIRST)
        allowed = _PER_COUNT * self.counted - _FREE <= self.batches < self._due
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

    def refuse(self, signature: Signature) -> None:
        """There was no time to count a batch of a known signature: try again later."""
        if signature[-1:] != (_FIRST,):
            self.sparse = self.sparse or self._recounting
            self._due = self.batches + self._random.randint(*_RETRY) - 1

    def check(self) -> None:
        """Count one of the next batches, besides those that are due: costs may have changed."""
        if not self._recounting:
            self._due_later = max(self._due, self.batches + 1)
            self._wait(0)

    @property
    def _recounting(self) -> bool:
        """Whether more batches are counted again; of work that changes all the time, one is."""
        most = 1 if self._changes > 1 else MORE_RECOUNTS if self._differ else _RECOUNTS
        return self._recounts < most

    def _expected(self, own: Signature, counts: Counts) -> bool:
        """Whether the cost of a checked batch has not changed: the next check may be later."""
        if self.sparse and counts.flops != self.mean_of(own).flops:
            return False
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
            most = max(int(_UNCHECKED * self.batches), _CHECKED_AFTER)
            most = min(2 * self._gap, most, _CHECKED_EVERY[self.manual])
            self._gap = _RANDOM_EVERY if random else most
        return True

    def _wait(self, batches: int) -> None:
        """Count again after some batches, or after more if too many were counted.

        What changes all the time must not go unnoticed: not after more than until the first check.
        """
        late = min(_PER_COUNT * self.counted - _FREE, self.batches + _CHECKED_AFTER)
        self._due = max(self.batches + batches, late)

    def _forget(self) -> None:
        """Start anew with what has changed."""
        for known in (
            self.counts, self.costs, self._samples, self._nodes, self._missed, self._checks
        ):  # fmt: skip
            known.clear()
        self.predictor, self.fitted_at = None, 0
        self._due = self._due_later = self._recounts = self._firsts = 0
        self._differ = False
        self._changes, self._gap = self._changes + 1, _CHECKED_AFTER

    def predict(
        self, signature: Signature, costly: bool = False, spent: bool = False
    ) -> Counts | None:
        """Return the predicted FLOPs of a new signature, or None if it must be counted.

        ``costly`` is whether a count takes long, so that a fit is worth a try after each one. Once
        the time for counts is ``spent``, predictions are not verified, and reach any size.
        """
        known = len(self.counts)
        if known < MIN_COUNTED[costly] or signature in self.counts:
            return None
        # Signatures that the predictor does not cover are counted, and extend the next fit.
        if known > self.fitted_at if costly else known >= 2 * self.fitted_at:
            self.fitted_at = known
            self.predictor = fit(self.counts)
        self._unverified += 1
        if self.predictor is None:
            return None
        verifies = self._unverified > _VERIFIED and not self.full
        if not spent and (verifies or not within(signature, self.counts)):
            return None
        return self.predictor.predict(signature)

    def store(self, signature: Signature, cost: BatchCost) -> None:
        """Cache the cost of a signature."""
        if len(self.costs) >= _MOST_COSTS:
            self.costs.clear()
        self.costs[signature] = cost


def of_kind(signature: Signature, kind: Kind | None) -> Signature:
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
