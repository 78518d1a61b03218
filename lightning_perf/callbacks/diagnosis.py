"""Says why a training is slow."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_perf import charts
from lightning_perf.cgroup import usable_cpus
from lightning_perf.checks import flag, is_list
from lightning_perf.core.progress import Moment
from lightning_perf.core.window import Window
from lightning_perf.diagnosis import RULES, SEVERITIES, Findings, Rule, Verdict, diagnose
from lightning_perf.diagnosis.report import document, report_page
from lightning_perf.diagnosis.signals import COMPILE, RECORDING, Loader, Record, Setup, Step
from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.flops import is_compiled
from lightning_perf.profilers.pytorch import PyTorch
from lightning_perf.profilers.recording import OpenRecording
from lightning_perf.run import compat, destination
from lightning_perf.run.batches import TIMED
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.hardware import sample_ranks
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.schedule import OnVerdict, Schedule, as_schedule
from lightning_perf.timing.clock import GcTimer, run_queue
from lightning_perf.timing.totals import Action, Cost
from lightning_perf.traces.events import TraceError
from lightning_perf.traces.names import folder_format

if TYPE_CHECKING:
    from lightning_perf.diagnosis.signals import Costs, Signals
    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.context import RunContext
    from lightning_perf.traces.summary import TraceSummary

_FOLDER = "{run_name}/diagnosis"
#: The minimum batches per window: shorter windows take time and show nothing more.
_FEWEST_BATCHES = 10
#: torch's name for the time of one compilation.
_COMPILED = "_compile.compile_inner"
#: The maximum share of the time for analyses during training, because they compete for the GIL, and
#: additional seconds for the first ones.
_MOST_TIME, _FIRST_SECONDS = 0.002, 0.01


class Diagnosis(WindowCallback):
    """Says why a training is slow: causes by name, what each costs, and what to do.

    While training runs and at its end, rules examine times by category, step times, garbage
    collections, compilations, memory and the machine. ``verdicts`` lists what they found, the most
    costly first; a run without a problem is ``healthy``. The end of the run shows a panel in the
    terminal and leaves ``diagnosis.json`` and ``report.html`` in ``folder`` and among MLflow's
    artifacts. ``diagnosis/CODE`` is logged as a metric: the share of the run's wall time that the
    cause takes, if there is one.

    Windows are those of ``Trainer(log_every_n_steps)``, of 10 batches at least. The analysis runs
    on a background thread of rank 0 and takes at most 0.2 % of the time: with very short steps it
    is less frequent than the schedule says.

    Args:
        folder: Format string of the folder.
        schedule: When to analyse during training. The end is always diagnosed.
        rules: Rules to apply; by default those of the package.
        terminal: Whether to print the summary of the run at its end, verdicts first.
        capture: Whether the first critical verdict starts a trace of five batches, which the report
            summarizes. A `PyTorch` profiler records the batches that its schedule selects instead.

    Raises:
        ConfigError: If an argument is not valid.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Diagnosis
        >>> trainer = L.Trainer(callbacks=[Diagnosis(schedule="every 500ba")], logger=False)
    """

    columns = (
        "timings/*", "progress/batches", "batch/count", "batch/samples", "batch/tokens",
        "memory/*", "system/*",
    )  # fmt: skip
    units: Mapping[str, str] = {"diagnosis/*": "fraction"}

    def __init__(
        self,
        folder: str = _FOLDER,
        schedule: Schedule | str | None = "every 200ba",
        rules: Sequence[Rule] | None = None,
        terminal: bool = True,
        capture: PyTorch | bool | None = None,
    ) -> None:
        super().__init__()
        folder_format(folder)
        self.folder = folder
        self.schedule = None if schedule is None else as_schedule(schedule)
        example = "[*lightning_perf.diagnosis.RULES]"
        if rules is not None and not is_list(rules):
            raise ConfigError("rules", rules, "is not a list", example)
        self.rules = None if rules is None else list(rules)
        for rule in self.rules or ():
            if not callable(rule) or not isinstance(getattr(rule, "code", None), str):
                problem = "is not a rule: rules are callable and have a code"
                raise ConfigError("rules", rule, problem, example)
        codes = (rule.code for rule in (RULES if self.rules is None else self.rules))
        self.reaches = {*codes, "healthy", *SEVERITIES}
        self.terminal = self.show_summary = flag("terminal", terminal)
        if isinstance(capture, bool):
            # Apart from the traces of a profiler of the user's own.
            place = f"{folder}/capture"
            options: dict[str, Any] = {
                "folder": place,
                "remote_file_name": f"{place}/rank{{rank}}.{{batch}}.pt.trace.json",
                "with_stack": True,
                "profile_memory": False,
            }
            capture = PyTorch(OnVerdict("critical"), **options) if capture else None
        if not isinstance(capture, PyTorch | None):
            problem = "is neither a bool nor a PyTorch profiler"
            raise ConfigError("capture", capture, problem, "True")
        self._capture = capture
        self._reset()

    def _reset(self) -> None:
        #: The verdicts so far, the most costly first.
        self.verdicts: list[Verdict] = []
        self._findings = Findings()
        self._record = Record()
        self._setup = Setup()
        self._gc: GcTimer | None = None
        # torch's list of compilations, how many of them are counted, and their cost so far by
        # category of training.
        self._compiled: Sequence[float] = ()
        self._counted, self._compilations = 0, dict[str, Cost]()
        # The named costs up to each report in flight.
        self._costs: deque[Costs] = deque()
        self._next = self._diagnosed = 0
        self._analysing = False
        # When training began, and CPU seconds of analyses since.
        self._start: float | None = None
        self._spent = 0.0
        # Windows in which a profiler recorded, and recordings of this process.
        self._recordings = self._opened = 0
        self._active = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_gc": None}

    @property
    @override
    def parts(self) -> list[PerfCallback]:
        # A trace is written before the report about it.
        return [self] if self._capture is None else [self._capture, self]

    # -- the run ------------------------------------------------------------------------------

    @override
    def prepare(self, context: RunContext) -> None:
        self._reset()
        several = context.ranks.world_size > 1
        self.columns = (*type(self).columns, *(("waits/*",) if several else ()))
        super().prepare(context)
        if self.schedule is not None:
            self.schedule.setup(context.schedule_context)
        context.batches.listeners.append(self._add_steps)
        self._gc = GcTimer(context.spans.require().clock)
        self._gc.open()
        if context.trainer.state.fn == "fit" and context.ranks.global_rank == 0:
            charts.template()  # for the report: here it delays no batch, and the end waits for less
        self._active = True

    @override
    def on_start(self, context: RunContext) -> None:
        super().on_start(context)
        self._add_compilations("forward")
        if context.stage == "train" and self._start is None:
            self._start = time.monotonic()
            self._opened = OpenRecording.opened
            self._record.origin = {**context.spans.totals.costs, **self._other_costs()}
            self._setup = _setup(context)
            self._next = context.counters.batch + _FEWEST_BATCHES

    @override
    def window_due(self, context: RunContext, at_end: bool) -> bool:
        due = super().window_due(context, at_end)
        if at_end or not due:  # the end may be that of a validation with its own batches
            return due
        batch = context.counters.batch
        if batch < self._next:
            return False
        self._next = batch + _FEWEST_BATCHES
        return True

    @override
    def window_ended(self, context: RunContext) -> None:
        self._add_compilations("validation" if context.stages.nested else "forward")
        if context.stage == "train" and context.ranks.global_rank == 0:
            opened, self._opened = self._opened, OpenRecording.opened
            self._recordings += opened != self._opened or OpenRecording.current is not None
            self._costs.append({**context.spans.latest.costs, **self._other_costs()})

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        context = self._context
        if window.stage != "train" or context is None:
            return None
        sample_ranks(context.sampler, window)
        if window.rank != 0:
            return None
        # Without the totals since the run began, since many windows are kept.
        kept = replace(window, totals=())
        self._record.add(kept, self._costs.popleft())
        if not window.at_end and not self._analysing and self._wanted(window, context):
            self._analysing = True
            job = partial(self._analyse, self._signals(context), context, window.step)
            if not context.file_worker.submit(job, "the diagnosis"):
                self._analysing = False
        context.reporting.deliver()
        return None

    def _wanted(self, window: Window, context: RunContext) -> bool:
        if self.schedule is None or self._start is None:
            return False
        moment = Moment(
            window.stage, window.last, window.first, context.limits, context.ranks, context.run_name
        )
        self.schedule.observe(moment)
        allowed = _FIRST_SECONDS + _MOST_TIME * (time.monotonic() - self._start)
        return self.schedule(moment) and self._spent <= allowed

    def _add_steps(self, stage: str, records: Sequence[BatchRecord]) -> None:
        if stage == "train":
            first = next((record.seconds for record in records if record.first), None)
            steps = [
                Step(
                    nan if record.slowed else record.seconds,
                    nan if record.cost is None else record.cost.total,
                    record.begins_epoch,
                )
                for record in records
            ]
            self._record.add_steps(steps, first)

    def _other_costs(self) -> Costs:
        """The costs of compilations, waits for a CPU, recordings and collections so far."""
        collections = self._gc.costs if self._gc is not None else {}
        recordings = {RECORDING: Cost(0.0, self._recordings)}
        compilations = {
            Action(COMPILE, category, "torch.compile"): cost
            for category, cost in self._compilations.items()
            if cost.calls
        }
        return {**compilations, **run_queue(), **recordings, **collections}

    def _add_compilations(self, category: str) -> None:
        """Add the compilations since the last call."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        compiled = getattr(utils, "compilation_time_metrics", {}).get(_COMPILED, ())
        # torch.compiler.reset() begins another list.
        new = compiled[self._counted if compiled is self._compiled else 0 :]
        self._compiled, self._counted = compiled, len(compiled)
        seconds, calls = self._compilations.get(category, (0.0, 0))
        self._compilations[category] = Cost(seconds + sum(new), calls + len(new))

    def _signals(self, context: RunContext) -> Signals:
        mfu = None
        if context.meter.wanted:
            totals = dict(zip(TIMED, context.batches.totals("train"), strict=False))
            seconds, ideal = totals["flops/seconds"], totals["flops/ideal_seconds"]
            mfu = ideal / seconds if ideal and seconds else None
        # Lightning creates this loader with the first validation.
        loader = _loader(compat.validation_loader(context.trainer))
        return self._record.signals(replace(self._setup, validation_loader=loader), mfu)

    def _analyse(self, signals: Signals, context: RunContext, step: int) -> None:
        """Diagnose; on a worker thread while training runs."""
        began = time.thread_time()
        try:
            findings = diagnose(signals, RULES if self.rules is None else self.rules)
        finally:
            self._spent += time.thread_time() - began
            self._analysing = False
        if signals.batches < self._diagnosed:
            return  # the run has ended and was diagnosed meanwhile
        self._diagnosed = signals.batches
        self._findings, self.verdicts = findings, list(findings.verdicts)
        reached = context.reporting.reached
        found = [name for each in self.verdicts for name in (each.code, each.severity)]
        reached += [name for name in dict.fromkeys(found) if name not in reached]
        shares: dict[str, float] = {}
        for verdict in filter(lambda each: each.share, self.verdicts):
            key = f"diagnosis/{verdict.code}"
            shares[key] = max(verdict.share, shares.get(key, 0.0))
        self.metrics = shares
        context.reporting.log_from_worker(shares, step)

    # -- the end ------------------------------------------------------------------------------

    @override
    def close(self, context: RunContext, reason: str) -> None:
        super().close(context, reason)
        if self.schedule is not None:
            self.schedule.close()
        if self._gc is not None:
            self._gc.close()
        listeners = context.batches.listeners
        if self._add_steps in listeners:
            listeners.remove(self._add_steps)
        if not self._active:
            return
        self._active = False
        if reason == "failure" or self._start is None or context.ranks.global_rank != 0:
            return
        context.finish_reports(reason)
        context.batches.fold("train")
        signals = self._signals(context)
        self._analyse(signals, context, context.step)
        context.reporting.deliver()
        self._leave_files(context, signals)

    def _leave_files(self, context: RunContext, signals: Signals) -> None:
        findings, captured = self._findings, cache(self._captured)
        texts: dict[str, Callable[[], str]] = {
            "diagnosis.json": lambda: json.dumps(document(signals, findings, captured()), indent=1),
            "report.html": lambda: report_page(signals, findings, captured()),
        }
        files = {name: destination.text_file(text) for name, text in texts.items()}
        try:
            context.write_files(self.folder, files, "train")
        except OSError as error:
            warn(f"the diagnosis was not written ({describe(error)}): see Diagnosis.verdicts.")

    def _captured(self) -> TraceSummary | str | None:
        """The captured trace, or why there is none; None if no capture was requested."""
        if self._capture is None:
            return None
        try:
            return self._capture.trace_summary()
        except Exception as error:
            return str(error) if isinstance(error, LookupError | TraceError) else describe(error)

    @override
    def summary_sections(self) -> Mapping[str, object]:
        verdicts = [verdict.as_dict() for verdict in self.verdicts]
        return {"verdicts": verdicts, "abstained": dict(self._findings.abstained)}


def _setup(context: RunContext) -> Setup:
    """The settings of a training that begins."""
    trainer, limits = context.trainer, context.limits
    return Setup(
        device=trainer.strategy.root_device.type,
        world_size=context.ranks.world_size,
        cpus=usable_cpus(),
        threads=torch.get_num_threads(),
        precision=str(trainer.precision),
        compiled=is_compiled(context.module),
        log_every_n_steps=compat.log_every_n_steps(trainer),
        batches_per_epoch=limits.batches_per_epoch,
        automatic_optimization=context.module.automatic_optimization,
        reloads=getattr(trainer, "reload_dataloaders_every_n_epochs", 0) == 1,
        loader=_loader(compat.training_loader(trainer)),
        ours=frozenset(
            type(each).__name__ for member in context.members for each in member.with_parts
        ),
    )


def _loader(loader: Any) -> Loader | None:
    pipeline = getattr(loader, "pipeline", None)
    if isinstance(pipeline, list) and pipeline:  # webdataset's WebLoader begins with a DataLoader
        loader = pipeline[0]
    if not hasattr(loader, "num_workers"):
        return None
    owners = loader, getattr(loader, "batch_sampler", None)
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return Loader(
        num_workers=int(loader.num_workers),
        batch_size=next((size for size in sizes if isinstance(size, int)), None),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        iterable=isinstance(getattr(loader, "dataset", None), IterableDataset),
    )
