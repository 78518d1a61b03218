"""Where every second of a run goes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_perf.schedule import Schedule, as_schedule
from lightning_perf.timings import CATEGORIES, Share, Totals
from lightning_perf.trainer import documents
from lightning_perf.trainer.cadence import Cadence
from lightning_perf.trainer.collective import Rows
from lightning_perf.trainer.hooks import PerfCallback
from lightning_perf.trainer.roles import Report

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

_FOLDER = "{run_name}/timings"
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
#: Rows that are kept; of more, neighbours are merged.
_MOST_ROWS = 500


@dataclass(slots=True)
class _Window:
    """What has come since a report."""

    since: Totals
    batch: int
    #: Where the report before began, for what comes after the last batch.
    before: _Window | None = None


@dataclass(slots=True)
class _Row:
    """What one report told, in the mean over ranks."""

    step: int
    batches: float
    seconds: dict[str, float]

    def merge(self, later: _Row) -> _Row:
        """Both as one."""
        seconds = {key: value + later.seconds[key] for key, value in self.seconds.items()}
        return _Row(later.step, self.batches + later.batches, seconds)


class Timings(PerfCallback):
    """Logs where every second goes, in seconds a batch, with the keys of Determined's timings.

    ``timings/{dataloader_next,to_device,forward,backward,optimizer_step,step_lr_schedulers,
    from_device,reduce_metrics,callbacks,logging,checkpoint,validation,other}`` are exclusive: they
    add up to the wall time of a batch. ``timings/train_batch`` stands beside them: forward,
    backward and optimizer step together with what lies within. Each is the mean over the batches
    since the last report; what comes after the last batch of a run counts with the batches of the
    last report. Other stages than training have theirs under the stage's name
    (``validate/timings/forward``).

    With several ranks they are means over ranks, and ``timings/NAME/{min,median,max}`` and
    ``timings/NAME/slowest_rank`` stand beside them. On a GPU, ``timings/device/...`` is the
    device's own time from CUDA events, and ``timings/exposed_input`` how long the device had
    nothing to do because the next batch was not there; nothing is synchronised for that.

    At the end of a run, ``table`` names callbacks, loggers and checkpoints by what they cost. It is
    written to ``{run_name}/timings/table.md`` and ``.json``, and uploaded to MLflow.

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
        self._cadence = None if self.schedule is None else Cadence(self.schedule)
        #: What was reported last, by key.
        self.metrics: dict[str, float] = {}
        #: What callbacks, loggers and checkpoints cost, once the run is over.
        self.table: list[Share] = []
        self._listens = False
        self._windows: dict[str, _Window] = {}
        self._rows: list[_Row] = []
        self._stage = ""
        self._began = Totals({})

    @property
    def rows(self) -> Sequence[tuple[int, Mapping[str, float]]]:
        """Of each report its step and the seconds a batch by category, for charts.

        Of the stage that the run is about; neighbours are merged where there are many.
        """
        return [
            (row.step, {key: value / row.batches for key, value in row.seconds.items()})
            for row in self._rows
        ]

    @override
    def prepare(self, driver: Driver) -> None:
        self._windows, self._rows, self.table, self._stage = {}, [], [], ""
        if self._cadence is not None:
            self._cadence.setup(driver)
        driver.spans.require()
        self._listens = True

    @override
    def on_start(self, driver: Driver) -> None:
        totals = driver.spans.totals
        if not self._stage:
            self._stage, self._began = driver.stage, totals
        self._windows[driver.stage] = _Window(totals, driver.counters.batch)
        if self._cadence is not None and not driver.nested:
            self._cadence.start(driver)

    @override
    def due(self, driver: Driver, at_end: bool) -> bool:
        if at_end or driver.nested:
            return at_end
        return driver.report_due if self._cadence is None else self._cadence.due(driver)

    @override
    def collect(self, driver: Driver, at_end: bool) -> Report:
        now, stage = driver.spans.totals, driver.stage
        window, batch = self._windows[stage], driver.counters.batch
        again = batch == window.batch and window.before is not None
        if again and window.before is not None:
            window = window.before
        self._windows[stage] = _Window(now, batch, _Window(window.since, window.batch))
        batches = batch - window.batch
        wanted = at_end or self._cadence is None or self._cadence.take()
        values = _per_batch(now - window.since, stage, batches) if batches else ()
        return Report(values, stage, driver.step, at_end, {"wanted": wanted, "again": again})

    @override
    def publish(self, driver: Driver, report: Report, rows: Rows) -> None:
        found = _over_ranks(rows)
        if report.stage == self._stage:
            self._keep(report, found, rows[driver.ranks.global_rank][-1])
        if report.own["wanted"]:
            prefix = "timings/" if report.stage == "train" else f"{report.stage}/timings/"
            self.metrics = {prefix + key: value for key, value in found.items()}
            driver.log(self.metrics, report.step)

    @override
    def close(self, driver: Driver, reason: str) -> None:
        if self._cadence is not None:
            self._cadence.close()
        if not self._listens:
            return
        self._listens = False
        run = driver.spans.totals - self._began
        driver.spans.release()
        if not self._stage or reason == "failure":
            return
        self.table = run.table(_TABLED)
        if driver.ranks.global_rank == 0:
            batches = driver.progress.timestamp(self._stage).batch
            texts = {
                "table.md": as_markdown(self.table, batches),
                "table.json": json.dumps([row._asdict() for row in self.table], indent=1),
            }
            documents.leave(driver, _FOLDER, texts, self._stage)

    def _keep(self, report: Report, found: Mapping[str, float], batches: float) -> None:
        seconds = {key: found[key] * batches for key in CATEGORIES}
        if report.own["again"]:
            del self._rows[-1:]
        self._rows.append(_Row(report.step, batches, seconds))
        if len(self._rows) > _MOST_ROWS:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=False)
            odd = self._rows[-1:] if len(self._rows) % 2 else []
            self._rows = [one.merge(other) for one, other in pairs] + odd


def as_markdown(table: Sequence[Share], batches: int) -> str:
    """The table as a page.

    Args:
        table: The rows.
        batches: Over which seconds a batch are averaged.
    """
    lines = ["| what | seconds | ms a batch | calls | share |", "|---|---:|---:|---:|---:|"]
    for row in table:
        each = 1e3 * row.seconds / max(batches, 1)
        lines.append(
            f"| {row.name} | {row.seconds:.3f} | {each:.3f} | {row.calls} | {row.share:.1%} |"
        )
    return "\n".join(lines) + "\n"


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


def _over_ranks(rows: Rows) -> dict[str, float]:
    """All keys from what each rank sent; what no rank knows is left out."""
    if len(rows) == 1:
        return _by_key(rows[0])
    sent = torch.tensor(rows, dtype=torch.float64)[:, : len(_SENT)]
    most, slowest = sent.max(0)
    found = _by_key(sent.mean(0).tolist())
    of_ranks = {
        "min": sent.amin(0),
        "median": sent.quantile(0.5, 0),
        "max": most,
        # Not a number where no rank knows: the index would name one.
        "slowest_rank": slowest.where(most.isfinite(), math.nan),
    }
    for word, values in of_ranks.items():
        found |= {f"{key}/{word}": value for key, value in _by_key(values.tolist()).items()}
    return found


def _by_key(values: Sequence[float]) -> dict[str, float]:
    named = zip(_SENT, values, strict=False)
    return {key: value for key, value in named if not math.isnan(value)}
