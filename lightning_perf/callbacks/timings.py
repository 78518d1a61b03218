"""Where every second of a run goes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.charts import stacked_html, stacked_png
from lightning_perf.core.reduce import Rows, over_ranks
from lightning_perf.errors import describe, warn
from lightning_perf.run import artifacts
from lightning_perf.run.callback import PerfCallback, Report
from lightning_perf.run.windows import ReportTrigger
from lightning_perf.schedule import Schedule, as_schedule
from lightning_perf.timing.totals import CATEGORIES, History, Share, Totals, as_markdown, folded

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext

_RUN_FOLDER = "{run_name}"
_FOLDER = f"{_RUN_FOLDER}/timings"
_TABLED = ("callbacks", "logging", "checkpoint", "other", "reduce_metrics")
#: What the device's own clock tells apart; it has no waiting for data but for the last.
_DEVICE = {
    "to_device": "device/to_device",
    "forward": "device/forward",
    "backward": "device/backward",
    "optimizer_step": "device/optimizer_step",
    "other": "device/other",
    "dataloader_next": "exposed_input",
}
#: What a rank sends, in this order, in seconds a batch; then the number of batches.
_SENT = (*CATEGORIES, "train_batch", *_DEVICE.values())


@dataclass(slots=True)
class _Window:
    """What has come since a report."""

    since: Totals
    batch: int
    #: Where the report before began, for what comes after the last batch.
    before: _Window | None = None
    #: Whether what has come since was logged already.
    logged: bool = False


class Timings(PerfCallback):
    """Logs where every second goes, in seconds a batch, with the keys of Determined's timings.

    ``timings/{dataloader_next,to_device,forward,backward,optimizer_step,step_lr_schedulers,
    from_device,reduce_metrics,callbacks,logging,checkpoint,validation,other}`` are exclusive: they
    add up to the wall time of a batch. ``timings/train_batch`` stands beside them: forward,
    backward and optimizer step together with what lies within. Each is the mean over the batches
    since the last report; what comes after the last report of a run is in its files, not in a
    second point of the same step. Other stages than training have theirs under the stage's name
    (``validate/timings/forward``).

    With several ranks they are means over ranks, and ``timings/NAME/{min,median,max}`` and
    ``timings/NAME/slowest_rank`` stand beside them. On a GPU, ``timings/device/...`` is the
    device's own time from CUDA events, and ``timings/exposed_input`` how long the device had
    nothing to do because the next batch was not there; nothing is synchronised for that.

    At the end of a run, ``table`` names callbacks, loggers and checkpoints by what they cost. It is
    written to ``{run_name}/timings`` as ``table.md`` and ``table.json``, beside a chart of where
    the time went over the steps as ``timings.png`` and ``timings.html``, and uploaded to MLflow.
    ``{run_name}/summary.json`` has the seconds of the whole run and of the last report, each with
    the steps that it covers, for ``lightning-perf report``.

    Args:
        schedule: When to report; by default every ``Trainer(log_every_n_steps)``.

    Raises:
        ConfigError: A schedule that is none.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Timings
        >>> trainer = L.Trainer(callbacks=[Timings(schedule="every 100ba")], logger=False)
    """

    reports = True

    def __init__(self, schedule: Schedule | str | None = None) -> None:
        super().__init__()
        self.schedule = None if schedule is None else as_schedule(schedule)
        self._trigger = None if self.schedule is None else ReportTrigger(self.schedule)
        #: What was reported last, by key; at the end of a run with what came after it.
        self.metrics: dict[str, float] = {}
        #: What callbacks, loggers and checkpoints cost, once the run is over.
        self.table: list[Share] = []
        self._listens = False
        self._windows: dict[str, _Window] = {}
        self._history = History()
        self._stage = ""
        self._began = _Window(Totals({}), 0)

    @property
    def rows(self) -> Sequence[tuple[int, Mapping[str, float]]]:
        """Of each report its step and the seconds a batch by category, for charts.

        Of the stage that the run is about; neighbours are merged where there are many.
        """
        return self._history.rows

    @property
    @override
    def quiet_until(self) -> float:
        return math.inf if self._trigger is None else self._trigger.quiet_until

    @override
    def prepare(self, context: RunContext) -> None:
        self._windows, self._history, self.table, self._stage = {}, History(), [], ""
        if self._trigger is not None:
            self._trigger.setup(context)
        context.spans.require()
        self._listens = True

    @override
    def on_start(self, context: RunContext) -> None:
        totals = context.spans.totals
        if not self._stage:
            self._stage, self._began = context.stage, _Window(totals, context.counters.batch)
        self._windows[context.stage] = _Window(totals, context.counters.batch)
        if self._trigger is not None and not context.nested:
            self._trigger.start(context)

    @override
    def due(self, context: RunContext, at_end: bool) -> bool:
        if at_end or context.nested:
            return at_end
        return context.report_due if self._trigger is None else self._trigger.due(context)

    @override
    def collect(self, context: RunContext, at_end: bool) -> Report:
        now, stage = context.spans.totals, context.stage
        window, batch = self._windows[stage], context.counters.batch
        again = batch == window.batch and window.before is not None
        if again and window.before is not None:
            window = window.before
        batches = batch - window.batch
        wanted = at_end or self._trigger is None or self._trigger.consume_request()
        own = {"wanted": wanted, "again": again, "logged": again and window.logged}
        values = _per_batch(now - window.since, stage, batches) if batches else ()
        before = _Window(window.since, window.batch, logged=wanted or window.logged)
        self._windows[stage] = _Window(now, batch, before)
        return Report(values, stage, context.step, at_end, own)

    @override
    def publish(self, context: RunContext, report: Report, rows: Rows) -> None:
        found = over_ranks(_SENT, rows)
        if report.stage == self._stage:
            seconds = {key: found[key] for key in CATEGORIES}
            if report.own["again"]:
                self._history.extend(seconds)
            else:
                batches = float(rows[context.ranks.global_rank, len(_SENT)])
                self._history.add(report.step, batches, seconds)
        wanted, logged = report.own["wanted"], report.own["logged"]
        if wanted:
            prefix = "timings/" if report.stage == "train" else f"{report.stage}/timings/"
            self.metrics = {prefix + key: value for key, value in found.items()}
            # What came after a report does not replace its point: the step would show it twice.
            if not logged:
                context.log(self.metrics, report.step)

    @override
    def close(self, context: RunContext, reason: str) -> None:
        if self._trigger is not None:
            self._trigger.close()
        if not self._listens:
            return
        self._listens = False
        run = context.spans.totals - self._began.since
        context.spans.release()
        if not self._stage or reason == "failure":
            return
        self.table = run.table(_TABLED)
        batches = context.progress.timestamp(self._stage).batch - self._began.batch
        if batches and context.ranks.global_rank == 0:
            if reason != "exception":
                context.exchange.finish()  # the last report is to be in the files
            self._leave_files(context, batches)

    def _leave_files(self, context: RunContext, batches: int) -> None:
        rows, first, table = self.rows, self._history.first, folded(self.table)
        texts = {
            "table.md": as_markdown(table, batches),
            "table.json": json.dumps([row._asdict() for row in self.table], indent=1),
        }
        files: dict[str, Callable[[Path], None]] = {
            name: partial(_write, text) for name, text in texts.items()
        }
        if rows:
            files["timings.html"] = partial(stacked_html, rows=rows, table=table, first=first)
            files["timings.png"] = partial(stacked_png, rows=rows, first=first)
        summary = json.dumps(self._summary(), indent=1)
        try:
            artifacts.leave(context, _FOLDER, files, self._stage)
            whole_run = {"summary.json": partial(_write, summary)}
            artifacts.leave(context, _RUN_FOLDER, whole_run, self._stage)
        except OSError as error:
            warn(f"timings were not written ({describe(error)}): see Timings.table and .rows.")

    def _summary(self) -> dict[str, object]:
        """What the run was, for those who read it back."""
        windows = {"whole_run": self._history.whole, "last_window": self._history.last}
        return {
            "version": 1,
            "stage": self._stage,
            "timings": {name: each._asdict() for name, each in windows.items() if each},
            "culprits": [row._asdict() for row in self.table],
        }


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _per_batch(spent: Totals, stage: str, batches: int) -> list[float]:
    """What one rank sends."""
    values = [seconds / batches for seconds in spent.by_category(stage).values()]
    values.append(spent.train_batch / batches if stage == "train" else math.nan)
    device = {a.category: cost for a, cost in spent.device.items() if a.stage == stage}
    ended = device["other"].calls if "other" in device else 0
    for name in _DEVICE:
        known = ended and name in device
        values.append(device[name].seconds / ended if known else math.nan)
    return [*values, float(batches)]
