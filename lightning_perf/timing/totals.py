"""Where the time of a run went: totals by what was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    #: A step, the batches up to it since the last one, and the seconds of them all.
    _Row = tuple[int, float, dict[str, float]]

#: Every second of a run belongs to one of these, so that they add up to the wall time.
CATEGORIES = (
    "dataloader_next",
    "to_device",
    "forward",
    "backward",
    "optimizer_step",
    "step_lr_schedulers",
    "from_device",
    "reduce_metrics",
    "callbacks",
    "logging",
    "checkpoint",
    "validation",
    "other",
)


class Action(NamedTuple):
    """One kind of work, as far as it is told apart."""

    #: The stage that it was done in; empty before the first one and after the last.
    stage: str
    #: One of ``CATEGORIES``.
    category: str
    #: ``Class.hook``, ``Class.method``, or what else it is called.
    name: str


class Cost(NamedTuple):
    """What an action took."""

    seconds: float
    calls: int


class Share(NamedTuple):
    """One row of the table of what took time."""

    #: ``Class.hook`` or ``Class.method``.
    name: str
    seconds: float
    calls: int
    #: Of the wall time, as a fraction.
    share: float


@dataclass(frozen=True, slots=True)
class Totals:
    """What every action took up to a moment, or, as a difference, between two.

    Example:
        >>> step, wait = Action("train", "forward", "step"), Action("train", "other", "loop")
        >>> before = Totals({step: Cost(1.0, 1)})
        >>> after = Totals({step: Cost(4.0, 3), wait: Cost(0.5, 0)})
        >>> (after - before).costs[step]
        Cost(seconds=3.0, calls=2)
        >>> (after - before).seconds
        3.5
    """

    #: Exclusive: no second is in two of them.
    costs: Mapping[Action, Cost]
    #: Seconds of Lightning's ``run_training_batch`` with all that is within.
    train_batch: float = 0.0
    #: Seconds between the events of the device's own clock; the batches are the calls.
    device: Mapping[Action, Cost] = field(default_factory=dict)

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(
            _difference(self.costs, earlier.costs),
            self.train_batch - earlier.train_batch,
            _difference(self.device, earlier.device),
        )

    @property
    def seconds(self) -> float:
        """The wall time: all costs together."""
        return sum(cost.seconds for cost in self.costs.values())

    def by_category(self, stage: str, *, own: bool = False) -> dict[str, float]:
        """Seconds of each of ``CATEGORIES``, which add up to ``seconds``.

        Args:
            stage: Whose view. In training's, validation inside of it is one category, apart from
                its checkpoints.
            own: Leave out what belongs to other stages.
        """
        found = dict.fromkeys(CATEGORIES, 0.0)
        for action, cost in self.costs.items():
            if own and action.stage != stage:
                continue
            within = stage == "train" and action.stage == "validate"
            validation = within and action.category != "checkpoint"
            found["validation" if validation else action.category] += cost.seconds
        return found

    def table(self, categories: Iterable[str]) -> list[Share]:
        """What has a class and a method, and the writing of checkpoints; the most costly first.

        Args:
            categories: Those that are looked at.
        """
        wanted, wall = set(categories), self.seconds or 1.0
        found: dict[str, Cost] = {}
        for action, cost in self.costs.items():
            named = "." in action.name or action.category == "checkpoint"
            if named and action.category in wanted and cost.calls:
                seconds, calls = found.get(action.name, Cost(0.0, 0))
                found[action.name] = Cost(seconds + cost.seconds, calls + cost.calls)
        rows = [Share(name, *cost, cost.seconds / wall) for name, cost in found.items()]
        return sorted(rows, key=lambda row: row.seconds, reverse=True)


def _difference(later: Mapping[Action, Cost], earlier: Mapping[Action, Cost]) -> dict[Action, Cost]:
    nothing = Cost(0.0, 0)
    found = {}
    for action, (seconds, calls) in later.items():
        before = earlier.get(action, nothing)
        found[action] = Cost(seconds - before.seconds, calls - before.calls)
    return found


class Window(NamedTuple):
    """Where the time of some batches went."""

    #: The first and the last step.
    first: int
    last: int
    batches: float
    #: Of all batches together, by category.
    seconds: dict[str, float]


class History:
    """Seconds a batch by category, report by report, within a bound.

    Args:
        most: Rows that are kept; of more, neighbours are merged.

    Example:
        >>> history = History(most=2)
        >>> for step, seconds in enumerate([1.0, 2.0, 6.0]):
        ...     history.add(step, 1, {"forward": seconds})
        >>> history.rows
        [(1, {'forward': 1.5}), (2, {'forward': 6.0})]
        >>> history.whole
        Window(first=0, last=2, batches=3, seconds={'forward': 9.0})
    """

    def __init__(self, most: int = 500) -> None:
        self._most = most
        self._rows: list[_Row] = []
        #: The last report, without what came after it.
        self.last: Window | None = None

    @property
    def rows(self) -> list[tuple[int, Mapping[str, float]]]:
        """Steps, and the seconds a batch up to each since the one before."""
        return [
            (step, {key: value / batches for key, value in seconds.items()})
            for step, batches, seconds in self._rows
        ]

    @property
    def first(self) -> int:
        """The step of the first batch that the first row is about."""
        if not self._rows:
            return 0
        step, batches, _ = self._rows[0]
        # Gradient accumulation has fewer steps than batches.
        return max(step - int(batches) + 1, 0)

    @property
    def whole(self) -> Window | None:
        """All that was reported, to the end of the run."""
        if not self._rows:
            return None
        step, batches, seconds = _merge(self._rows)
        return Window(self.first, step, batches, seconds)

    def add(self, step: int, batches: float, seconds: Mapping[str, float]) -> None:
        """Keep a report.

        Args:
            step: The loggers'.
            batches: How many it is about.
            seconds: A batch, by category.
        """
        whole = {key: value * batches for key, value in seconds.items()}
        first = self._rows[-1][0] + 1 if self._rows else max(step - int(batches) + 1, 0)
        self.last = Window(min(first, step), step, batches, whole)
        self._rows.append((step, batches, whole))
        if len(self._rows) > self._most:
            self._rows = [_merge(self._rows[i : i + 2]) for i in range(0, len(self._rows), 2)]

    def extend(self, seconds: Mapping[str, float]) -> None:
        """The last report again, with what came after its last batch.

        Args:
            seconds: A batch of the same batches, by category.
        """
        if self.last is None:
            return
        step, batches, before = self._rows[-1]
        known, count = self.last.seconds, self.last.batches
        later = {key: value * count - known[key] for key, value in seconds.items()}
        self._rows[-1] = step, batches, {key: before[key] + later[key] for key in before}


def _merge(rows: Sequence[_Row]) -> _Row:
    seconds = {key: sum(row[2][key] for row in rows) for key in rows[0][2]}
    return rows[-1][0], sum(row[1] for row in rows), seconds


def windows_of(points: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, dict[str, object]]:
    """The whole run and its last report, of a run that was cut off before it could tell them.

    A report counts for as many batches as steps have passed since the one before, and the first
    one for as many as the second.

    Args:
        points: Of each key, which ends in a category, the steps and the seconds a batch.

    Example:
        >>> points = {"timings/forward": [(9, 1.0), (19, 2.0), (24, 6.0)]}
        >>> {name: window["seconds"] for name, window in windows_of(points).items()}
        {'whole_run': {'forward': 60.0}, 'last_window': {'forward': 30.0}}
    """
    history = History(most=sum(map(len, points.values())) + 1)
    reports: dict[int, dict[str, float]] = {}
    for key, values in points.items():
        for step, value in values:
            reports.setdefault(step, {})[key.rpartition("/")[2]] = value
    names = sorted({name for report in reports.values() for name in report})
    steps = sorted(reports)
    passed = [later - step for step, later in pairwise(steps)]
    first = passed[:1] or [step + 1 for step in steps]
    for step, batches in zip(steps, [*first, *passed], strict=True):
        history.add(step, batches, {name: reports[step].get(name, 0.0) for name in names})
    windows = {"whole_run": history.whole, "last_window": history.last}
    return {name: window._asdict() for name, window in windows.items() if window}


#: A table tells nothing of callbacks that cost less than this share of the wall time.
_NEGLIGIBLE = 0.001


def folded(table: Sequence[Share]) -> list[Share]:
    """A table with one last row for all that hardly cost anything, as a page shows it.

    Args:
        table: Its rows.

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


def as_markdown(table: Sequence[Share], batches: int) -> str:
    """A table as a page.

    Args:
        table: Its rows.
        batches: Over which seconds a batch are averaged.
    """
    lines = ["| what | seconds | ms a batch | calls | share |", "|---|---:|---:|---:|---:|"]
    for row in table:
        each = 1e3 * row.seconds / max(batches, 1)
        lines.append(
            f"| {row.name} | {row.seconds:.3f} | {each:.3f} | {row.calls} | {row.share:.1%} |"
        )
    return "\n".join(lines) + "\n"
