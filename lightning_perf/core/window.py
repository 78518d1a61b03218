"""The measurements of all ranks between two reports, in named columns, and rates from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_perf.core.progress import Timestamp

#: One row per rank, one number per column.
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]
#: The same; a single row is a plain list, because numpy would take longer than the rest of a
#: report.
Rows = Sequence[Sequence[float]] | Table
#: One number per rank.
PerRank = np.ndarray[tuple[int], np.dtype[np.float64]]
#: The share of batches with known FLOPs below which they give no MFU.
LEAST_KNOWN = 0.1


class Columns(dict[str, int]):
    """The position of each column by its name."""

    def __missing__(self, name: str) -> int:
        hint = did_you_mean(name, self)
        raise KeyError(f"the window has no column {name!r}. {hint}".rstrip())


class Increase:
    """The increase of a table of many ranks since an earlier one, computed where it is read.

    Reports are wide, and most columns are read of few ranks or by no callback. Gauges have their
    last value.
    """

    def __init__(self, now: Table, before: Table, gauges: Sequence[int]) -> None:
        self._now, self._before, self._gauges = now, before, gauges

    def __len__(self) -> int:
        return len(self._now)

    def __getitem__(self, ranks: Any) -> Any:
        """The rows of some ranks."""
        now = self._now[ranks]
        found = now - self._before[ranks]
        found[..., self._gauges] = now[..., self._gauges]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self[:]

    def column(self, number: int) -> PerRank:
        """One value per rank."""
        now = self._now[:, number]
        return now if number in self._gauges else now - self._before[:, number]


class Spread(NamedTuple):
    """How a column differs between ranks."""

    min: float
    median: float
    max: float
    #: The rank of the largest value.
    worst_rank: int

    def metrics(self, key: str) -> dict[str, float]:
        """The spread of a time as ``KEY/min``, ``/median``, ``/max`` and ``/slowest_rank``."""
        names = ("min", "median", "max", "slowest_rank")
        return {f"{key}/{name}": float(value) for name, value in zip(names, self, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The values of all ranks over a stretch of one stage.

    A column is the difference of two running totals, or a gauge: its value at the window's end.

    Example:
        >>> from lightning_perf.core.progress import Timestamp
        >>> window = Window(
        ...     "train", 9, Timestamp(batch=5), Timestamp(batch=10), False, 0,
        ...     {"batch/seconds": 0, "batch/samples": 1}, [[2.0, 64.0], [1.0, 96.0]],
        ...     [[4.0, 128.0], [3.0, 192.0]],
        ... )
        >>> window.batches, window.total("batch/samples"), window.mean("batch/seconds")
        (5, 160.0, 1.5)
        >>> window.rate("batch/samples")
        128.0
        >>> window.spread("batch/seconds")
        Spread(min=1.0, median=1.5, max=2.0, worst_rank=0)
    """

    #: Lightning's name: ``train``, ``validate``, ``test`` or ``predict``.
    stage: str
    #: The step at which loggers log the metrics.
    step: int
    #: The progress of the stage on this rank at the start and at the end of the window.
    first: Timestamp
    last: Timestamp
    #: Whether the stage ended with this window.
    at_end: bool
    #: This process's rank.
    rank: int
    #: The position of each column by its name; rows may have further ones.
    columns: Mapping[str, int]
    #: One row per rank.
    rows: Rows | Increase
    #: The same since the run began.
    totals: Rows
    #: This rank's `Totals` of named actions at the start and at the end, if known.
    spent: tuple[Any, Any] | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def batches(self) -> int:
        """Batches of this rank, including those that are excluded from rates.

        0 if the stage ended right after a report. Other ranks may have another number.
        """
        return self.last.batch - self.first.batch

    def __getitem__(self, name: str) -> PerRank:
        """One value per rank.

        Raises:
            KeyError: The window has no such column; the message names the nearest.
        """
        index = self.columns[name]
        if isinstance(self.rows, Increase):
            return self.rows.column(index)
        if isinstance(self.rows, np.ndarray):
            return self.rows[:, index]
        return np.array([row[index] for row in self.rows], dtype=np.float64)

    def rows_of(self, ranks: Any) -> Table:
        """All columns of some ranks, one row for each."""
        rows = self.rows if isinstance(self.rows, Increase) else np.asarray(self.rows)
        found: Table = rows[ranks]
        return found

    def own(self, name: str) -> float:
        """This rank's value."""
        return float(self.rows[self.rank if len(self.rows) > 1 else 0][self.columns[name]])

    @property
    def whole_run(self) -> Window:
        """This window with the values of the stage since the run began."""
        # Not `dataclasses.replace`, which takes longer than all that callbacks read of it.
        stamps = self.first, self.last
        head = self.stage, self.step, *stamps, self.at_end, self.rank, self.columns
        return Window(*head, self.totals, self.totals)

    @property
    def costs(self) -> Mapping[Any, Any]:
        """On this rank, the `Cost` of each `Action`: its seconds and calls."""
        return {} if self.spent is None else (self.spent[1] - self.spent[0]).named

    def since_start(self, name: str) -> float:
        """This rank's total since the run began."""
        return float(self.totals[self.rank if len(self.rows) > 1 else 0][self.columns[name]])

    def ever(self, name: str) -> bool:
        """Whether any rank's total since the run began is other than 0."""
        index = self.columns[name]
        return any(row[index] for row in self.totals)

    def total(self, name: str) -> float:
        """The sum over ranks."""
        return self.own(name) if len(self.rows) == 1 else float(self[name].sum())

    def mean(self, name: str) -> float:
        """The mean over ranks."""
        return self.total(name) / len(self.rows)

    def least(self, name: str) -> float:
        """The smallest value of any rank."""
        return self.own(name) if len(self.rows) == 1 else float(self[name].min())

    def rate(self, name: str, per: str = "batch/seconds") -> float:
        """Each rank's value divided by its value of ``per``, summed over ranks.

        Ranks end their windows at slightly different times, so each is divided by its own.

        Args:
            name: The column.
            per: What it is divided by; a rank where that is not above 0 adds nothing.
        """
        if len(self.rows) == 1:
            divisor = self.rows[0][self.columns[per]]
            return float(self.rows[0][self.columns[name]] / divisor) if divisor > 0 else 0.0
        values, divisors = self[name], self[per]
        found = np.zeros(len(values))
        np.divide(values, divisors, out=found, where=divisors > 0)
        return float(found.sum())

    def spread(self, name: str, per: str | None = None) -> Spread:
        """How the ranks differ.

        Args:
            name: The column.
            per: A column that it is divided by, such as the number of batches. Ranks where that is
                not above 0 are left out; it must be on one.
        """
        ranks: Any = range(self.world_size)
        values = self[name]
        if per is not None:
            divisors = self[per]
            ranks = np.flatnonzero(divisors > 0)
            values = values[ranks] / divisors[ranks]
        worst = int(ranks[values.argmax()])
        ordered = np.sort(values)
        middle = len(ordered) // 2
        median = (ordered[middle] + ordered[-1 - middle]) / 2
        return Spread(float(ordered[0]), float(median), float(ordered[-1]), worst)

    def worst_rank(self, name: str) -> int:
        """The rank of the largest value."""
        return int(self[name].argmax())


def throughput(window: Window, prefix: str = "") -> dict[str, float]:
    """Rates of all ranks together, and in training those of one device on average.

    All are per second, except MFU, which is a fraction of the peak. What some rank does not know is
    left out; MFU is that of the batches with known FLOPs. The columns ``batch/...`` and
    ``flops/...`` of timed batches begin with the prefix.
    """
    ranks, per = window.world_size, f"{prefix}batch/seconds"
    # Every rank takes part in every batch, so batches are averaged where samples are summed.
    rates = {"batches_per_sec": window.rate(f"{prefix}batch/count", per) / ranks}
    for name, column, uncounted in (
        ("samples", "batch/samples", "batch/uncounted_samples"),
        ("tokens", "batch/tokens", "batch/uncounted_tokens"),
        ("flops", "flops/model", "flops/uncounted_batches"),
    ):
        # One batch that could not be counted would make the rate too low.
        if not window.total(prefix + uncounted):
            rate = window.rate(prefix + column, per)
            if rate > 0:
                rates[f"{name}_per_sec"] = rate
    found = {f"throughput/{key}": value for key, value in rates.items()}
    if window.stage == "train":  # Composer's keys are those of training
        found |= {f"throughput/device/{key}": value / ranks for key, value in rates.items()}
    ideal, per = f"{prefix}flops/ideal_seconds", f"{prefix}flops/seconds"
    # Of the batches with known FLOPs, as that of ``Flops``.
    if window.least(ideal) > 0 and _enough_known(window, prefix):
        found["throughput/device/mfu"] = window.rate(ideal, per) / ranks
    return found


def _enough_known(window: Window, prefix: str = "") -> bool:
    """Whether the batches with known FLOPs stand for all: a few are often the first, slow ones."""
    known = window.total(f"{prefix}flops/batches")
    return known >= LEAST_KNOWN * (known + window.total(f"{prefix}flops/uncounted_batches"))


def utilization(window: Window) -> dict[str, float]:
    """The metrics of ``Flops`` from ``flops/...`` and ``formula/...``, without what is unknown.

    FLOPs per batch and the peak are means of all batches with known FLOPs, the first of a stage
    included.
    """
    flops = window.rate("flops/known", "flops/known_batches")
    found = {
        "batch_flops": flops,
        "tracked_operations": window.total("flops/tracked_operations"),
        "untracked_operations": window.total("flops/untracked_operations"),
    }
    if window.least("flops/known_ideal_seconds") > 0:
        # Rounded, because a sum of equal quotients is not exact.
        peak = float(f"{window.rate('flops/known', 'flops/known_ideal_seconds'):.12g}")
        found |= {"total_flops": peak, "max_batches_per_sec": peak / flops}
    if window.least("flops/seconds") > 0 and _enough_known(window):
        rates = {
            "actual_batches_per_sec": ("flops/batches", 1.0),
            "tflops_per_device": ("flops/model", 1e12),
            "mfu": ("flops/ideal_seconds", 1.0),
            "hfu": ("flops/hardware_ideal_seconds", 1.0),
        }
        causal = window.total("flops/causal_ideal_seconds")
        if causal < window.total("flops/ideal_seconds"):  # a causal mask hides some of the work
            rates["mfu_causal"] = ("flops/causal_ideal_seconds", 1.0)
        for key, (column, unit) in rates.items():
            rate = window.rate(column, "flops/seconds") / window.world_size / unit
            if rate > 0:
                found[key] = rate
    if "formula/batch" in window.columns and (flops := window.total("formula/batch")):
        found["batch_flops_from_formula"] = flops
        rate = window.rate("formula/ideal_seconds", "flops/seconds") / window.world_size
        if rate > 0:
            found["mfu_from_formula"] = rate
    return found
