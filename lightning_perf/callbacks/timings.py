"""Times by category: where every second of a run goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.charts.stacked import heatmap_html, stacked_html
from lightning_perf.core.window import PerRank, Window
from lightning_perf.diagnosis.rules.ranks import PHASES, Straggler, Work, straggler_of, work_of
from lightning_perf.errors import describe, warn
from lightning_perf.run.history import TIMES, History, Point, table_totals
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.schedule import Schedule
from lightning_perf.timing.totals import (
    TABLED,
    Share,
    folded,
)

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

_FOLDER = "{run_name}/timings"
#: The number of windows in which a straggler is searched.
_RECENT = 10
#: Maximum reports in the chart.
_MOST_ROWS = 500
#: Maximum reports in the picture of all ranks; beyond it, adjacent ones are merged.
_MOST_REPORTS = 400
#: The columns that Determined tracks in training.
_DETERMINED = (
    "timings/dataloader_next", "timings/to_device", "timings/train_batch",
    "timings/step_lr_schedulers", "timings/from_device", "timings/reduce_metrics",
)  # fmt: skip
#: The inclusive time, of training alone, and what counts the batches of the device.
_INCLUSIVE, _DEVICE_BATCHES = "timings/train_batch", "timings/device/batches"


class Timings(WindowCallback):
    """Logs where every second goes, in seconds per batch, with the keys of Determined's timings.

    ``timings/{dataloader_next,to_device,forward,backward,optimizer_step,step_lr_schedulers,
    from_device,reduce_metrics,callbacks,logging,checkpoint,validation,other}`` are exclusive times:
    they add up to the wall time of a batch. ``timings/train_batch`` is the inclusive time of
    forward, backward and optimizer step. Each is the mean over the batches since the last report.
    A category that has taken no time since the run began is left out; Determined's are always
    there in training.
    Time after the last report of a run is in its files, not in a second point of the same step.
    Stages other than training put their name in front (``validate/timings/forward``).

    With several ranks the values are means over ranks, with ``timings/NAME/{min,median,max}`` and
    ``timings/NAME/slowest_rank`` beside them, and ``straggler/{rank,node,phase,share}`` name the
    rank or node that the others wait for, -1 for none. On a GPU, ``timings/device/...`` is the
    device's own time from CUDA events, and ``timings/exposed_input`` is how long the device waited
    for the next batch. The device is never synchronized for that.

    At the end of a run, ``table`` lists callbacks, loggers and checkpoints by cost. It is in
    ``summary.json``, and with a chart of the time per step in ``{run_name}/timings/timings.html``
    (with several ranks ``ranks.html`` shows how late each rank was). Both are uploaded to MLflow.

    Args:
        schedule: When to report; by default every ``Trainer(log_every_n_steps)``.

    Raises:
        ConfigError: The schedule is not valid.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Timings
        >>> trainer = L.Trainer(callbacks=[Timings(schedule="every 100ba")], logger=False)
    """

    columns: Sequence[str] = ("timings/*", "progress/batches")
    units: Mapping[str, str] = {"timings/*": "s per batch"}

    def __init__(self, schedule: Schedule | str | None = None) -> None:
        super().__init__(schedule)
        #: The costs of callbacks, loggers and checkpoints; complete at the end of the run.
        self.table: list[Share] = []
        self._history = History()
        #: The rank or node that the others wait for, in the last windows.
        self.straggler: Straggler | None = None
        self._work: deque[Work] = deque(maxlen=_RECENT)
        # Steps, and the lateness of each rank: seconds per batch above the median rank.
        self._lateness: list[tuple[int, PerRank]] = []
        # Seconds per batch, and batches, in the last report of the run's main stage.
        self._last: dict[str, float] = {}
        self._last_batches = 0
        self._stage = ""
        self._active = False

    @property
    def rows(self) -> Sequence[tuple[int, Mapping[str, float]]]:
        """Step and seconds per batch by category of each report, for charts.

        They are of the main stage of the run; adjacent rows are merged if there are too many.
        """
        rows = []
        for early, late in pairwise(self._history.points):
            batches = late.batch - early.batch
            totals = late.totals.items()
            each = {TIMES[k]: (v - early.totals[k]) / batches for k, v in totals}
            rows.append((late.step, each))
        return rows

    @override
    def prepare(self, context: Run) -> None:
        self._history, self.table, self._stage = History(), [], ""
        self.straggler, self._last = None, {}
        self._work.clear()
        self._lateness.clear()
        if context.ranks.world_size > 1:
            self.columns = (*Timings.columns, "waits/*")
            self.units = {
                "timings/*/slowest_rank": "rank",
                "straggler/rank": "rank",
                "straggler/node": "node",
                "straggler/phase": "index",
                "straggler/share": "fraction",
                **Timings.units,
            }
        super().prepare(context)
        self._active = True

    @override
    def on_start(self, context: Run) -> None:
        super().on_start(context)
        if not self._stage:
            self._stage = context.stage
            begun = dict.fromkeys(TIMES, 0.0)
            step, batch = context.step - 1, context.counters.batch
            start = Point(step, batch, begun, context.times())
            self._history = History(start, most=_MOST_ROWS)

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        if window.stage == self._stage:
            self._keep(window)
        if not window.batches:
            return None
        found = seconds_per_batch(window)
        if window.stage == self._stage:
            self._last, self._last_batches = found, window.batches
        if window.stage == "train" and window.world_size > 1:
            return found | self._find_straggler(window)
        return found

    def _find_straggler(self, window: Window) -> dict[str, float]:
        # The first batch of a run is slow for other reasons.
        if window.first.batch > self._history.points[0].batch:
            work = work_of(window)
            self._work.append(work)
            if window.rank == 0:
                self._lateness.append((window.step, work.lateness))
                if len(self._lateness) > _MOST_REPORTS:
                    pairs = zip(self._lateness[::2], self._lateness[1::2], strict=False)
                    self._lateness = [(step, (a + b) / 2) for (_, a), (step, b) in pairs]
        found = self.straggler = straggler_of(self._work)
        none = -1.0
        return {
            "straggler/rank": none if found is None or found.rank is None else found.rank,
            "straggler/node": none if found is None else found.node,
            "straggler/phase": none if found is None else list(PHASES).index(found.phase),
            "straggler/share": 0.0 if found is None else found.share,
        }

    def _keep(self, window: Window) -> None:
        """Keep the times for the chart; those after the last batch belong to the last report."""
        history, totals = self._history, table_totals(window.columns, window.totals)
        point = Point(window.step, window.last.batch, totals)
        if history.due(point.batch, window.at_end):
            history.add(point)
        elif window.at_end and self._last:
            history.points[-1] = point
        if not window.batches and self._last:
            for column in TIMES:
                seconds = window.mean(column) / self._last_batches
                if each := self._last.get(column, 0.0) + seconds:
                    self._last[column] = each
            prefix = "" if window.stage == "train" else f"{window.stage}/"
            self.metrics |= {prefix + column: value for column, value in self._last.items()}

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        if not self._active or not self._stage or reason == "failure":
            return
        self._active = False
        start = self._history.points[0]
        self.table = (context.times() - start.costs).table(TABLED)
        batches = context.progress.timestamp(self._stage).batch - start.batch
        if batches and context.ranks.global_rank == 0:
            self._leave_files(context)

    def _leave_files(self, context: Run) -> None:
        rows, first = self.rows, self._history.points[0].step + 1
        files: dict[str, Callable[[Path], None]] = {}
        if rows:
            table = folded(self.table)
            files["timings.html"] = partial(stacked_html, rows=rows, table=table, first=first)
        if self._lateness:
            steps, lateness = zip(*self._lateness, strict=True)
            files["ranks.html"] = partial(heatmap_html, steps=steps, lateness=lateness)
        try:
            context.write_files(_FOLDER, files, self._stage)
        except OSError as error:
            warn(f"timings were not written ({describe(error)}): see Timings.table and .rows.")

    @override
    def summary_sections(self) -> Mapping[str, object]:
        return {"culprits": [row._asdict() for row in self.table]} if self.table else {}


def seconds_per_batch(window: Window) -> dict[str, float]:
    """Mean seconds per batch by category, and with several ranks how these differ.

    Args:
        window: Holds the columns ``timings/...`` and ``progress/batches``.

    Returns:
        ``timings/NAME`` and, with several ranks, ``timings/NAME/min``, ``/median``, ``/max`` and
        ``/slowest_rank``; without what some rank does not know, and what never took any time.
    """
    found: dict[str, float] = {}
    active = several = window.world_size
    if window.least("progress/batches") <= 0:  # some ranks have no more batches
        active = int((window["progress/batches"] > 0).sum())
    train = window.stage == "train"
    for column in window.columns:
        if not column.startswith("timings/") or column == _DEVICE_BATCHES:
            continue
        if not (train and column in _DETERMINED) and (
            column == _INCLUSIVE or not window.ever(column)
        ):
            continue
        per, ranks = "progress/batches", active
        if column.startswith("timings/device/") or column == "timings/exposed_input":
            per, ranks = _DEVICE_BATCHES, several
            measured = column == "timings/device/other" or window.least(column) > 0
            if window.least(per) <= 0 or not measured:
                continue
        found[column] = window.rate(column, per) / ranks
        if several > 1:
            found |= window.spread(column, per).metrics(column)
    return found
