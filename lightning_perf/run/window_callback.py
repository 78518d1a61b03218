"""The base class of callbacks that turn windows into metrics, and when they report."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.errors import let_through
from lightning_perf.run.callback import PerfCallback
from lightning_perf.schedule import Never, Schedule, as_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.core.window import Window
    from lightning_perf.run.run import Run
    from lightning_perf.timing.totals import Action, Cost


#: The schedule of Lightning's logging, as users write it.
LOGGING = "log_every_n_steps"


class ReportTrigger:
    """Decides after each batch whether a callback reports.

    Ranks may disagree about a schedule that depends on clocks or on the rank. With such a schedule
    all ranks meet when Lightning logs, and each remembers whether it wanted to report. Without a
    schedule, reports are at every ``Trainer(log_every_n_steps)``.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        # Without a schedule, reports follow Lightning's logging alone.
        self._scheduled = schedule is not None
        self._schedule = Never() if schedule is None else schedule
        self._shared = self._wanted = False
        #: Whether the schedule selected the first batch after an epoch that ended early.
        self._late = False
        #: Batches before this one need no check, except where Lightning logs.
        self.quiet_until: float = 0

    def setup(self, context: Run) -> None:
        """Prepare for a run; ConfigError if the schedule cannot work in it."""
        self._wanted, self._late, self.quiet_until = False, False, 0
        self._schedule.setup(context.schedule_context)
        # What a schedule depends on is known after its set-up.
        alike = self._schedule.shared or context.ranks.world_size == 1
        self._shared = self._scheduled and alike

    def start(self, context: Run) -> None:
        """A stage starts."""
        self.quiet_until = 0
        self._schedule.observe(context.moment)

    def begin_epoch(self, context: Run) -> None:
        """An epoch starts: it or the last one may have another length than was predicted."""
        self.quiet_until = 0
        if context.counters.cut_short:
            moment = context.moment
            self._schedule.observe(moment)
            # A report now would be a second one after the same batch: it comes with the next.
            self._late = self._schedule(moment)

    def due(self, context: Run) -> bool:
        """Whether the ranks meet now, the same on all of them; called at most once per batch."""
        schedule, now = self._schedule, False
        if context.counters.batch >= self.quiet_until:
            moment = context.moment
            schedule.observe(moment)
            now = schedule(moment) or self._late
            self._late = False
            if not (now or schedule.watches):
                # A user's schedule that returns no number fails here, not in a report of others.
                self.quiet_until = max(schedule.quiet_until(moment), 0)
        if self._shared:
            self._wanted = now
            return now
        self._wanted |= now
        return context.logs_now

    def request(self) -> None:
        """Request a report now, in addition to the schedule."""
        self._wanted = True

    def consume_request(self) -> bool:
        """Whether this rank wanted a report since the last call."""
        wanted, self._wanted = self._wanted, False
        return wanted or not self._scheduled

    def close(self) -> None:
        """Stop following the run; may be called more than once."""
        self._schedule.close()


#: What loggers get of validation inside of fit from a callback that leaves keys out.
_NESTED = (
    "/mfu", "/throughput/batches_per_sec", "/throughput/samples_per_sec",
    "/throughput/tokens_per_sec", "/timings/dataloader_next", "/timings/forward",
)  # fmt: skip


class WindowCallback(PerfCallback):
    """Receives windows of named columns, of all ranks, and logs metrics computed from them.

    Subclass it, name the columns and write ``on_window``. Metrics of other stages than training
    carry the stage's name in front. ``docs/windows.md`` lists the columns with their units. A
    subclass with a constructor of its own calls ``super().__init__(schedule)``.

    Args:
        schedule: When to report; by default every ``Trainer(log_every_n_steps)``. It is asked after
            each batch about the next one: a schedule that selects batch n gives a report before
            batch n. The end of a stage is always reported, and validation inside of fit only then.

    Raises:
        ConfigError: The schedule is not valid.

    Example:
        >>> import lightning_perf as lp
        >>> class ForwardShare(lp.WindowCallback):
        ...     columns = ("timings/forward", "progress/seconds")
        ...
        ...     def on_window(self, window):
        ...         seconds = window.total("progress/seconds") or 1.0
        ...         return {"forward_share": window.total("timings/forward") / seconds}
        >>> callback = ForwardShare(schedule="every 50ba")
    """

    #: A tuple or list of names of columns, or of patterns such as ``"timings/*"``.
    columns: Sequence[str] = ()
    #: Whether callbacks of Lightning can monitor its metrics, which ``compat`` lists.
    monitored = False
    #: Whether metrics of other stages than training carry the stage's name in front.
    prefixes_stage = True
    #: Whether its windows are kept for the end of the run.
    keeps_windows = False
    #: Endings of keys that loggers do not get, nor most of validation inside of fit: a Suite with
    #: ``keys="short"`` sets them.
    left_out: tuple[str, ...] = ()

    def __init__(self, schedule: Schedule | str | None = None) -> None:
        super().__init__()
        self.schedule = None if schedule in (None, LOGGING) else as_schedule(schedule)
        self.trigger = ReportTrigger(self.schedule)
        #: The last reported value of each metric since the last ``fit`` began.
        self.metrics: dict[str, float] = {}
        # Keys of this run so far.
        self._keys: set[str] = set()

    def on_window(self, window: Window) -> Mapping[str, float] | None:
        """The metrics of a window.

        It is called in every stage: a metric of training alone checks ``window.stage``. It may be
        called some batches after the window's end, with several ranks on every rank; what rank 0
        returns is logged at the window's step.

        Args:
            window: The values of all ranks since this callback's last window of the stage.

        Returns:
            Numbers by key; those that are not finite are left out. The attribute ``metrics`` has
            the last value of each.
        """
        raise NotImplementedError("write on_window(self, window)")

    @override
    def prepare(self, context: Run) -> None:
        if context.trainer.state.fn == "fit":
            self.metrics = {}
        self._keys = set()
        self.trigger.setup(context)
        context.subscribe(self, self.columns)

    @override
    def on_start(self, context: Run) -> None:
        if not context.nested:
            self.trigger.start(context)

    @override
    def on_epoch(self, context: Run) -> None:
        self.trigger.begin_epoch(context)

    @override
    def close(self, context: Run, reason: str) -> None:
        self.trigger.close()

    def window_due(self, context: Run, at_end: bool) -> bool:
        """Whether a window ends now: the same on every rank, even if this callback failed there."""
        if at_end or context.nested:
            return at_end
        return self.trigger.due(context)

    def is_due(self, context: Run, at_end: bool) -> bool:
        """As ``window_due``; a schedule that raises switches this callback off."""
        try:
            return self.window_due(context, at_end)
        except Exception as error:
            let_through(error)
            if not self.disabled:
                self.disable("schedule", error)
            self.trigger.quiet_until = inf  # not evaluated again
            return at_end

    def costs(self) -> Mapping[Action, Cost]:
        """Further named costs of this rank until now, the end of a window: ``Window.costs``."""
        return {}

    def receive(self, window: Window) -> Mapping[str, float]:
        """Turn a window into metrics under their full keys."""
        prefix = f"{window.stage}/" if self.prefixes_stage and window.stage != "train" else ""
        returned = self.on_window(window) or {}
        metrics = {prefix + key: float(value) for key, value in returned.items()}
        if self.monitored and self._context is not None:
            for key in ("mfu", "throughput/device/mfu"):
                self._context.check_mfu(metrics.get(prefix + key, 0.0))
        self.metrics = self.metrics | metrics
        if self.left_out and self._context is not None and not metrics.keys() <= self._keys:
            self._keys |= metrics.keys()
            nested = self._context.trainer.state.fn == "fit" and window.stage != "train"
            self._context.leave_out(
                key
                for key in metrics
                if f"/{key}".endswith(self.left_out) or (nested and not key.endswith(_NESTED))
            )
        return metrics
