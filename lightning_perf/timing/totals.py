"""Time totals by stage, category and name."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

#: The categories of which a training batch consists, in this order.
PHASES = (
    "dataloader_next",
    "to_device",
    "forward",
    "backward",
    "optimizer_step",
    "step_lr_schedulers",
)
#: Every second of a run belongs to one category, so they add up to the wall time.
CATEGORIES = (
    *PHASES,
    "from_device",
    "reduce_metrics",
    "callbacks",
    "logging",
    "checkpoint",
    "validation",
    "other",
)
#: Categories whose actions are listed by name in tables of costs.
TABLED = ("callbacks", "logging", "checkpoint", "other", "reduce_metrics")


class Action(NamedTuple):
    """Key of a timing: stage, category, name."""

    #: The stage; empty before the first one and after the last.
    stage: str
    #: One of ``CATEGORIES``.
    category: str
    #: ``Class.hook``, ``Class.method`` or another name.
    name: str

    def category_in(self, stage: str) -> str:
        """The category of this action in the view of a stage.

        In the view of training, validation inside of it is one category, except its checkpoints.
        """
        within = stage == "train" and self.stage == "validate"
        return "validation" if within and self.category != "checkpoint" else self.category


class Cost(NamedTuple):
    """Seconds and calls of an action."""

    seconds: float
    calls: int


class Share(NamedTuple):
    """One row of the table of costs."""

    #: ``Class.hook`` or ``Class.method``.
    name: str
    seconds: float
    calls: int
    #: Fraction of the wall time.
    share: float


_SECONDS = itemgetter(0)


@lru_cache(maxsize=16)  # the actions of a run are the same at each report
def _positions(actions: tuple[Action, ...], stage: str, own: bool) -> NDArray[np.intp]:
    """The position in ``CATEGORIES`` of each action's, and after them of those left out."""
    at = {category: position for position, category in enumerate(CATEGORIES)}
    left_out = len(CATEGORIES)
    found = [
        left_out if own and action.stage != stage else at[action.category_in(stage)]
        for action in actions
    ]
    return np.array(found, np.intp)


@dataclass(frozen=True, slots=True)
class Totals:
    """Cost of every action so far; the difference of two totals is that of the time between.

    Example:
        >>> step, wait = Action("train", "forward", "step"), Action("train", "other", "loop")
        >>> before = Totals({step: Cost(1.0, 1)})
        >>> after = Totals({step: Cost(4.0, 3), wait: Cost(0.5, 0)})
        >>> (after - before).costs[step]
        Cost(seconds=3.0, calls=2)
        >>> (after - before).seconds
        3.5
    """

    #: Exclusive seconds: none is counted twice.
    costs: Mapping[Action, Cost]
    #: Inclusive seconds of Lightning's ``run_training_batch``.
    train_batch: float = 0.0
    #: Seconds on the device, between CUDA events; ``calls`` is the number of batches.
    device: Mapping[Action, Cost] = field(default_factory=dict)
    #: Costs that are part of other actions, such as garbage collections.
    further: Mapping[Action, Cost] = field(default_factory=dict)

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(
            _difference(self.costs, earlier.costs),
            self.train_batch - earlier.train_batch,
            _difference(self.device, earlier.device),
            _difference(self.further, earlier.further),
        )

    @property
    def named(self) -> dict[Action, Cost]:
        """All costs, those that are part of others included."""
        return {**self.costs, **self.further}

    @property
    def seconds(self) -> float:
        """The wall time: the sum of all costs."""
        return sum(cost.seconds for cost in self.costs.values())

    def by_category(self, stage: str, *, own: bool = False) -> dict[str, float]:
        """Seconds of each of ``CATEGORIES``, which add up to ``seconds``.

        Args:
            stage: Whose view, as for `Action.category_in`.
            own: Leave out the time of other stages.
        """
        positions = _positions(tuple(self.costs), stage, own)
        seconds = [*map(_SECONDS, self.costs.values())]
        sums = np.bincount(positions, seconds, len(CATEGORIES) + 1).tolist()
        return dict(zip(CATEGORIES, sums, strict=False))

    def table(self, categories: Iterable[str]) -> list[Share]:
        """Costs of classes' methods and of checkpoints in some categories, the highest first."""
        wanted, wall = set(categories), self.seconds or 1.0
        found: dict[str, Cost] = {}
        for action, cost in self.costs.items():
            named = "." in action.name or action.category == "checkpoint"
            if named and action.category in wanted and cost.calls:
                seconds, calls = found.get(action.name, Cost(0.0, 0))
                found[action.name] = Cost(seconds + cost.seconds, calls + cost.calls)
        rows = [Share(name, *cost, cost.seconds / wall) for name, cost in found.items()]
        return sorted(rows, key=lambda row: row.seconds, reverse=True)


class Floor:
    """Sums a series of values, each replaced by the 20 % quantile of its block.

    This excludes time that only some values contain, such as waiting for a rank that is late.

    Example:
        >>> waits = Floor()
        >>> for seconds in (1.0, 9.0) * 8:
        ...     waits.add(seconds)
        >>> waits.total()
        16.0
    """

    #: Values of a block at most, and at least if its sum is needed.
    _MOST, _LEAST = 16, 8

    def __init__(self) -> None:
        self._whole, self._block = 0.0, list[float]()

    def add(self, value: float) -> None:
        """Add the next value."""
        self._block.append(value)
        if len(self._block) == self._MOST:
            self._end_block()

    def total(self) -> float:
        """The sum so far, without values of an incomplete block."""
        if len(self._block) >= self._LEAST:
            self._end_block()
        return self._whole

    def _end_block(self) -> None:
        values = sorted(self._block)
        self._block.clear()
        if values:  # another thread may add values
            self._whole += len(values) * values[len(values) // 5]


def _difference(later: Mapping[Action, Cost], earlier: Mapping[Action, Cost]) -> dict[Action, Cost]:
    increase = {}
    for action, (seconds, calls) in later.items():
        before_seconds, before_calls = earlier.get(action, (0.0, 0))
        increase[action] = Cost(seconds - before_seconds, calls - before_calls)
    return increase


#: Rows below this share of the wall time are merged.
_NEGLIGIBLE = 0.001


def folded(table: Sequence[Share]) -> list[Share]:
    """Merge the rows of a table with negligible costs into one last row.

    Example:
        >>> costs = [("A.log", 0.2), ("B.log", 0.0004), ("C.log", 0.0002)]
        >>> [row.name for row in folded([Share(name, share, 5, share) for name, share in costs])]
        ['A.log', '2 others']
    """
    small = [row for row in table if row.share < _NEGLIGIBLE]
    if len(small) < 2:
        return list(table)
    _, seconds, calls, shares = zip(*small, strict=True)
    others = Share(f"{len(small)} others", sum(seconds), sum(calls), sum(shares))
    return [*(row for row in table if row.share >= _NEGLIGIBLE), others]
