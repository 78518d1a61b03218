"""Says why training is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf import charts
from lightning_perf.checks import flag
from lightning_perf.core.window import Window
from lightning_perf.diagnosis import Findings, Rule, Verdict, checked_rules, diagnose, reachable
from lightning_perf.diagnosis.report import headline
from lightning_perf.diagnosis.signals import WARM_UP
from lightning_perf.errors import ConfigError, describe
from lightning_perf.profilers.base import OpenRecording
from lightning_perf.profilers.pytorch import PyTorch
from lightning_perf.run.collector import Collector
from lightning_perf.run.termination import hurried
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.schedule import OnVerdict, Schedule, as_schedule
from lightning_perf.tracking.notify import Notifier

if TYPE_CHECKING:
    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.run.run import Run
    from lightning_perf.timing.totals import Action, Cost

#: Where the capture is: apart from the traces of a profiler of the user's own.
_FOLDER = "{run_name}/diagnosis/capture"
#: The minimum batches per window: shorter windows take time and show nothing more.
_FEWEST_BATCHES = 10


class Diagnosis(WindowCallback):
    """Says why training is slow: causes by name, what each costs, and what to do.

    While training runs and at its end, rules examine times by category, step times, garbage
    collections, compilations, memory and the machine. ``verdicts`` lists what they found, the most
    costly first; a run without a problem is ``healthy``. The end of the run shows a panel in the
    terminal. They are in ``summary.json``, and on the page ``report.html`` beside it, both in the
    run's folder and among MLflow's artifacts. ``diagnosis/CODE`` is logged as a metric: the share
    of the run's wall time that the cause takes, if there is one.

    Windows are those of ``Trainer(log_every_n_steps)``, of 10 batches at least; the first two
    batches, with what runs before them, are the warm-up. The analysis runs on a background thread
    of rank 0 and takes at most 0.2 % of the time: with very short steps it is less frequent than
    the schedule says.

    Args:
        schedule: When to analyse during training. The end is always diagnosed.
        rules: Rules to apply; by default those of the package.
        terminal: Whether to print the summary of the run at its end, verdicts first.
        capture: Whether the first critical verdict starts a trace of five batches, which the report
            summarizes. A `PyTorch` profiler records the batches that its schedule selects instead.
        notify: A function that is called with each new critical verdict, a dictionary, on a thread
            of its own; or the URL of a webhook, to which it is posted as JSON.

    Raises:
        ConfigError: If an argument is not valid.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Diagnosis
        >>> trainer = L.Trainer(callbacks=[Diagnosis(schedule="every 500ba")], logger=False)
    """

    keeps_windows = True
    columns = (
        "timings/*", "progress/batches", "batch/count", "batch/samples", "batch/tokens",
        "memory/*", "system/*",
    )  # fmt: skip

    def __init__(
        self,
        schedule: Schedule | str | None = "every 200ba",
        rules: Sequence[Rule] | None = None,
        terminal: bool = True,
        capture: PyTorch | bool | None = None,
        notify: Callable[[dict[str, Any]], object] | str | None = None,
    ) -> None:
        super().__init__()
        self.schedule = None if schedule is None else as_schedule(schedule)
        self.rules = None if rules is None else checked_rules(rules)
        self.reaches = reachable(self.rules)
        self.terminal = self.show_summary = flag("terminal", terminal)
        if isinstance(capture, bool):
            options: dict[str, Any] = {
                "folder": _FOLDER,
                "remote_file_name": f"{_FOLDER}/rank{{rank}}.{{batch}}.pt.trace.json",
                "with_stack": True,
                "profile_memory": False,
            }
            capture = PyTorch(OnVerdict("critical"), **options) if capture else None
        if not isinstance(capture, PyTorch | None):
            problem = "is neither a bool nor a PyTorch profiler"
            raise ConfigError("capture", capture, problem, "True")
        self._capture = capture
        # Not `notify`, which would be logged with the other settings: the URL is a secret.
        self._notifier = None if notify is None else Notifier(notify)
        self._run_name = ""
        self._reset()

    def _reset(self) -> None:
        #: The verdicts so far, the most costly first.
        self.verdicts: list[Verdict] = []
        self._findings = Findings()
        # The critical verdicts that were passed on.
        self._notified: set[tuple[object, ...]] = set()
        # Further sections of the summary at the end of the run.
        self._sections: dict[str, object] = {}
        # Collects the measurements of this run; and those of the latest diagnosis.
        self._collector: Collector | None = None
        self._diagnosed: Signals | None = None
        # The batch at which the warm-up ends, and the one from which on a window may end.
        self._warm = self._next = 0

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_collector": None}

    @property
    @override
    def parts(self) -> list[PyTorch]:
        return [] if self._capture is None else [self._capture]

    # -- the run ------------------------------------------------------------------------------

    @override
    def prepare(self, context: Run) -> None:
        self._reset()
        self._run_name = context.run_name
        several = context.ranks.world_size > 1
        self.columns = (*type(self).columns, *(("waits/*",) if several else ()))
        super().prepare(context)
        self._collector = Collector(
            context,
            self.schedule,
            self._analyse,
            lambda: (OpenRecording.opened, OpenRecording.current is not None),
        )
        if context.trainer.state.fn == "fit" and context.ranks.global_rank == 0:
            charts.template()  # for the report: here it delays no batch, and the end waits for less

    @override
    def on_start(self, context: Run) -> None:
        super().on_start(context)
        assert self._collector is not None
        if self._collector.enter(self):
            self._warm = context.counters.batch + WARM_UP
            self._next = context.counters.batch + _FEWEST_BATCHES

    @override
    def window_due(self, context: Run, at_end: bool) -> bool:
        due, batch = super().window_due(context, at_end), context.counters.batch
        if at_end:  # it may be that of a validation with its own batches
            return due
        if context.stage == "train" and batch <= self._warm:
            self.trigger.quiet_until = self._warm
            return batch == self._warm  # the warm-up has a window of its own
        if not due or batch < self._next:
            return False
        self._next = batch + _FEWEST_BATCHES
        return True

    @override
    def costs(self) -> Mapping[Action, Cost]:
        return {} if self._collector is None else self._collector.costs()

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        if self._collector is not None:
            self._collector.receive(window)
        return None

    def _analyse(self, signals: Signals) -> Findings:
        """Diagnose; on a worker thread while training runs."""
        findings = diagnose(signals, self.rules)
        if self._diagnosed is not None and signals.reached < self._diagnosed.reached:
            return Findings()  # the run has ended and was diagnosed meanwhile
        self._diagnosed = signals
        self._findings, self.verdicts = findings, list(findings.verdicts)
        self.metrics = findings.metrics
        if self._notifier is not None:
            for verdict in findings.verdicts:
                self._notify(verdict, self._notifier)
        return findings

    def _notify(self, verdict: Verdict, notifier: Notifier) -> None:
        """Pass a critical verdict on, once."""
        identity = (verdict.code, verdict.culprit, verdict.rank)
        if verdict.severity != "critical" or identity in self._notified:
            return
        self._notified.add(identity)
        text = f"{self._run_name}: {headline(verdict)}. {verdict.advice}".strip()
        notifier({"event": "verdict", "run": self._run_name, "text": text, **verdict.as_dict()})

    # -- the end ------------------------------------------------------------------------------

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        collector, self._collector = self._collector, None
        if collector is None:
            return
        self._sections = collector.close(reason)
        if self._sections and self._capture is not None:
            self._sections["capture"] = cache(self._captured)
        if self._notifier is not None:
            self._notifier.close(until=hurried)

    def _captured(self) -> Mapping[str, object]:
        """The summary of the captured trace, or why there is none."""
        assert self._capture is not None
        try:
            found = self._capture.trace_summary().as_dict()
        except Exception as error:
            why = str(error) if isinstance(error, LookupError) else describe(error)
            return {"missing": why}
        return {name: value for name, value in found.items() if value is not None}

    @override
    def summary_sections(self) -> Mapping[str, object]:
        return {
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
            "abstained": dict(self._findings.abstained),
            **self._sections,
        }
