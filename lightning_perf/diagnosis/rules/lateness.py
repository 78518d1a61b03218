"""Which ranks the others wait for: the own work and the waits of each rank in windows."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.diagnosis.rules import LEAST
from lightning_perf.diagnosis.signals import EXCHANGES, shared_waits
from lightning_perf.units import listed, rounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis.stats import Numbers

#: A rank's own work by phase: the columns to add, and the waits to subtract from them. With
#: `_WAITS` these are all columns of the wall time.
PHASES = {
    "input": (("dataloader_next", "to_device"), ()),
    "forward": (("forward",), ("waits/forward",)),
    "backward": (("backward",), ("waits/backward",)),
    "optimizer": (("optimizer_step", "step_lr_schedulers"), ()),
    "callback": (("callbacks", "logging", "checkpoint", "from_device", "other"), ("waits/start",)),
    "validation": (("validation",), ("waits/validation",)),
}
#: The same by the GPU's clock: a GPU that has work queued does not wait for its host.
_DEVICE_PHASES = {
    "input": (("exposed_input", "device/to_device"), ()),
    "forward": (("device/forward",), ()),
    "backward": (("device/backward",), ("waits/device/backward",)),
    "optimizer": (("device/optimizer_step",), ()),
    "callback": (("device/other",), ("waits/device/start",)),
}
#: Collectives of metrics: all of this is waiting.
_WAITS = "timings/reduce_metrics"

#: The number of windows in which a run searches for a straggler.
_RECENT = 10
#: Rows in the table of ranks at most; more ranks share a row, which has the latest of them.
_MOST_RANKS = 512
#: Ranks count as late together from this part of the latest one's excess on.
_AS_LATE = 0.5
#: The share of the wall time from which on a rank's excess in a single phase counts where it has
#: less in others: smaller ones are chance.
_PART = 0.05


@dataclass(frozen=True, slots=True)
class Lateness:
    """When a rank is named as a straggler."""

    #: A chronic one is the same rank in at least this share of the windows, and the fewest windows.
    chronic: float
    fewest: int
    #: The share of the wall time that the others wait for it; of a rank that is late occasionally.
    share: float
    once: float
    #: The share of the others' wait that its own excess explains.
    explained: float

    def enough(self, wall: float) -> float:
        """The minimum lateness, in seconds per batch."""
        return max(self.share * wall, LEAST)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for, or several that are about as late."""

    #: The latest of them.
    rank: int
    node: int
    #: One of ``PHASES``.
    phase: str
    #: Share of the wall time that the others wait for it.
    share: float
    #: Seconds per batch that they wait.
    seconds: float
    #: Whether it is the same in most windows; otherwise it was slow once or occasionally.
    chronic: bool
    #: All of them, in ascending order.
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The rank or ranks in words."""
        return listed("rank", self.ranks)


@dataclass(frozen=True, eq=False)
class Work:
    """Each rank's own work and wait in a window, in seconds."""

    #: One row per rank, one column per phase, by the GPU's clock if there is one.
    own: Numbers
    #: One row per rank, one column per point at which ranks wait for one another, without the
    #: exchange itself.
    waits: Numbers
    nodes: Numbers
    #: Mean over ranks.
    wall: float
    batches: float

    @property
    def lateness(self) -> Numbers:
        """Per rank, seconds per batch of own work above the median rank."""
        totals: Numbers = self.own.sum(axis=1)
        late: Numbers = (totals - np.median(totals)) / self.batches
        return late

    @cached_property
    def late(self) -> Sequence[int]:
        """The ranks with the most own work: at least half as late as the latest.

        At most half of all ranks are, because the others set what is usual.
        """
        totals = self.own.sum(axis=1)
        excess = totals - np.sort(totals)[(len(totals) - 1) // 2]
        late: list[int] = np.flatnonzero(excess > _AS_LATE * excess.max()).tolist()
        return late

    @cached_property
    def latest(self) -> _Latest:
        """These, compared with the others."""
        return self.beside_others(self.late)

    def beside_others(self, ranks: Sequence[int]) -> _Latest:
        """Ranks compared with the others: of several, the one with the most own work.

        What is gained without them is at most what each other rank waits: one that waits less than
        the others is late as well. At which point of the batch each one waits may differ.
        """
        own, waits = self.own / self.batches, self.waits / self.batches
        totals, waited = own.sum(axis=1), waits.sum(axis=1)
        rank = max(ranks, key=totals.__getitem__)
        others: Numbers = np.delete(waits, ranks, axis=0)
        waiting = np.delete(waited, ranks)
        mean = np.maximum(others.mean(axis=0) - shared_waits(len(others) + 1) * waits[rank], 0.0)
        return _Latest(
            own[rank] - np.median(np.delete(own, ranks, axis=0), axis=0),
            float(totals[rank] - np.median(np.delete(totals, ranks))),
            mean * min(waiting.min() / max(mean.sum(), 1e-12), 1.0),
            float(min(np.median(waiting) - waited[rank], waiting.min())),
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.own + other.own, self.waits + other.waits, self.nodes, self.wall + other.wall,
            self.batches + other.batches,
        )  # fmt: skip


class _Latest(NamedTuple):
    """The latest rank, in seconds per batch."""

    #: Own excess over the median of the others in each phase, and in all.
    phases: Numbers
    excess: float
    #: How long the others wait for it at each point, and how much longer than it they wait in all.
    waits: Numbers
    waiting: float


def lost_seconds(late: _Latest, wall: float) -> float:
    """The seconds per batch that the others wait for a rank.

    Where it has less work than they have, another rank may be late for the next point at which
    ranks wait, or in other batches: that does not make up for what this one is late.
    """
    least = max(_PART * wall, LEAST)
    parts = (float(each[each >= least].sum()) for each in (late.phases, late.waits))
    return max(min(late.excess, late.waiting), min(parts))


def straggler_of(works: Sequence[Work], least: Lateness) -> Straggler | None:
    """The rank that makes the others wait, if it is always or mostly the same.

    ``works`` are of windows of training with several ranks, without the warm-up.
    """
    if len(works) < least.fewest:
        return None
    # If no rank is late in most windows, the sum shows one that is occasionally very late.
    for windows, chronic, share in (
        (works, True, least.share),
        ([reduce(add, works)], False, least.once),
    ):
        straggler = _common(windows, chronic, share, least)
        if straggler is not None:
            return straggler
    return None


class RecentWork:
    """The work of a run's last windows, and the straggler in them."""

    def __init__(self, least: Lateness) -> None:
        self._least, self._started = least, False
        self._works: deque[Work] = deque(maxlen=_RECENT)

    def add(self, window: Window) -> tuple[Straggler | None, dict[str, float]]:
        """Add a window; return the straggler and its metrics, -1 for none."""
        # The first batch of a run is slow for other reasons.
        if self._started:
            self._works.append(work_of(window))
        self._started = True
        late = straggler_of(self._works, self._least)
        return late, {
            "straggler/rank": -1.0 if late is None else late.rank,
            "straggler/node": -1.0 if late is None else late.node,
            "straggler/phase": -1.0 if late is None else list(PHASES).index(late.phase),
            "straggler/share": 0.0 if late is None else late.share,
        }


def lateness_table(windows: Sequence[Window]) -> dict[str, Any]:
    """How late each rank was: the last step of each window, and seconds per batch by rank.

    With many ranks, several share a list, which has the latest of them.
    """
    lateness = np.stack([work_of(window).lateness for window in windows], axis=1)
    shared = -(-len(lateness) // _MOST_RANKS)
    lateness = np.maximum.reduceat(lateness, np.arange(0, len(lateness), shared), axis=0)
    return {
        "last": [window.step for window in windows],
        "lateness": [rounded(row, 3) for row in lateness.clip(min=0.0)],
    }


def _common(
    works: Sequence[Work], chronic: bool, share: float, least: Lateness
) -> Straggler | None:
    """The ranks that are the late ones in most windows, if the others typically wait for them."""
    late = [
        work
        for work in works
        if work.late and work.latest.excess >= least.enough(work.wall / work.batches)
    ]
    counts = Counter(rank for work in late for rank in work.late)
    ranks = sorted(rank for rank, count in counts.items() if count >= least.chronic * len(works))
    if not ranks:
        return None
    late = [work for work in late if not {*ranks}.isdisjoint(work.late)]
    wall = float(np.median([work.wall / work.batches for work in late]))
    each = (work.latest if work.late == ranks else work.beside_others(ranks) for work in late)
    medians = (np.median(values, axis=0) for values in zip(*each, strict=True))
    usual = _Latest._make(medians)
    # Whether it is named depends on its whole batch: single parts vary more by chance.
    windows, waited = len(late) / len(works), min(usual.excess, usual.waiting)
    seconds = lost_seconds(usual, wall)
    if waited < least.enough(wall) or windows * seconds < share * wall:
        return None
    if usual.excess < least.explained * usual.waiting:
        return None
    totals = np.median([work.own.sum(axis=1) / work.batches for work in late], axis=0)
    rank = max(ranks, key=totals.__getitem__)
    return Straggler(
        rank,
        int(late[0].nodes[rank]),
        list(PHASES)[int(usual.phases.argmax())],
        float(windows * seconds / wall),
        float(windows * seconds),
        chronic,
        tuple(ranks),
    )


def waiting_points(phases: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """The columns of waiting, in the order of the points in a batch."""
    return [_WAITS, *(name for _, waiting in phases.values() for name in waiting)]


def work_of(window: Window) -> Work:
    """Own work and wait of each rank, from a window of ``timings/*`` and ``waits/*``."""
    phases = PHASES
    names = (name for columns, _ in phases.values() for name in columns)
    wall = sum(window.mean(f"timings/{name}") for name in names) + window.mean(_WAITS)
    if "waits/device/backward" in window.columns and window.least("timings/device/batches") > 0:
        phases = _DEVICE_PHASES
    none = np.zeros(window.world_size)
    own = [
        sum((window[f"timings/{name}"] for name in columns), none)
        - sum((window[name] for name in waiting), none)
        for columns, waiting in phases.values()
    ]
    points = waiting_points(phases)
    waits = [window[name] - window.least(EXCHANGES[name]) for name in points]
    return Work(
        np.maximum(np.stack(own, axis=1), 0.0), np.maximum(np.stack(waits, axis=1), 0.0),
        window["waits/node_rank"], wall, window.mean("progress/batches"),
    )  # fmt: skip
