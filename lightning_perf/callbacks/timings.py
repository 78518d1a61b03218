"""Times by category: where every second of a run goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.core.window import Window
from lightning_perf.diagnosis import LATENESS
from lightning_perf.diagnosis.rules.lateness import RecentWork, Straggler, lateness_table
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.run.window_log import TIMES, WindowLog
from lightning_perf.schedule import Schedule
from lightning_perf.timing.totals import Share

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

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
    rank that the others wait for, -1 for none. On a GPU, ``timings/device/...`` is the
    device's own time from CUDA events, and ``timings/exposed_input`` is how long the device waited
    for the next batch. The device is never synchronized for that.

    At the end of a run, ``table`` lists callbacks, loggers and checkpoints by cost. It is in
    ``summary.json``, and with a chart of the time per step on the page ``report.html`` beside it
    (with several ranks it also shows how late each rank was). Both are uploaded to MLflow.

    Args:
        schedule: When to report; by default every ``Trainer(log_every_n_steps)``.

    Raises:
        ConfigError: The schedule is not valid.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Timings
        >>> trainer = L.Trainer(callbacks=[Timings(schedule="every 100ba")], logger=False)
    """

    keeps_windows = True
    columns: Sequence[str] = ("timings/*", "progress/batches")

    def __init__(self, schedule: Schedule | str | None = None) -> None:
        super().__init__(schedule)
        #: The costs of callbacks, loggers and checkpoints; complete at the end of the run.
        self.table: list[Share] = []
        # The windows of the run's main stage.
        self._log: WindowLog | None = None
        #: The rank that the others wait for, in the last windows.
        self.straggler: Straggler | None = None
        self._work = RecentWork(LATENESS)
        # Seconds per batch, and batches, in the last report of the run's main stage.
        self._last: dict[str, float] = {}
        self._last_batches = 0

    @override
    def prepare(self, context: Run) -> None:
        self._log = self.straggler = None
        self.table, self._last, self._work = [], {}, RecentWork(LATENESS)
        if context.ranks.world_size > 1:
            self.columns = (*Timings.columns, "waits/*")
        super().prepare(context)

    @override
    def on_start(self, context: Run) -> None:
        super().on_start(context)
        if self._log is None:
            self._log = context.log_of(self, context.stage)

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        main = self._log is not None and window.stage == self._log.stage
        if not window.batches:
            if main and self._last:
                self._complete(window)
            return None
        metrics = seconds_per_batch(window)
        if main:
            self._last, self._last_batches = metrics, window.batches
        if window.stage == "train" and window.world_size > 1:
            self.straggler, late = self._work.add(window)
            return metrics | late
        return metrics

    def _complete(self, window: Window) -> None:
        """The time after the last batch belongs to the last report."""
        for column in TIMES:
            seconds = window.mean(column) / self._last_batches
            if each := self._last.get(column, 0.0) + seconds:
                self._last[column] = each
        prefix = "" if window.stage == "train" else f"{window.stage}/"
        self.metrics |= {prefix + column: value for column, value in self._last.items()}

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        if self._log is not None and reason != "failure":
            self.table = self._log.table(context.times())

    @override
    def summary_sections(self) -> Mapping[str, object]:
        if self._log is None:
            return {}
        sections: dict[str, object] = {"culprits": [row._asdict() for row in self.table]}
        windows = [each for each in self._log.windows()[1:] if each.batches]  # without the warm-up
        if windows and windows[0].stage == "train" and windows[0].world_size > 1:
            sections["ranks"] = lateness_table(windows)
        return sections


def seconds_per_batch(window: Window) -> dict[str, float]:
    """Mean seconds per batch by category, and with several ranks how these differ.

    Args:
        window: Holds the columns ``timings/...`` and ``progress/batches``.

    Returns:
        ``timings/NAME`` and, with several ranks, ``timings/NAME/min``, ``/median``, ``/max`` and
        ``/slowest_rank``; without what some rank does not know, and what never took any time.
    """
    metrics: dict[str, float] = {}
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
        metrics[column] = window.rate(column, per) / ranks
        if several > 1:
            metrics |= window.spread(column, per).metrics(column)
    return metrics
