"""The base class of callbacks that log what they make of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.windows import ReportTrigger
from lightning_perf.schedule import Schedule, as_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.core.window import Window
    from lightning_perf.run.context import RunContext


class WindowCallback(PerfCallback):
    """Receives windows of named columns, of all ranks, and logs the metrics it makes of them.

    Subclass it, name the columns and write ``on_window``. Metrics of other stages than training
    carry the stage's name in front. ``docs/windows.md`` lists the columns with their units.

    Args:
        schedule: When to report; by default every ``Trainer(log_every_n_steps)``. The end of a
            stage is always reported, and validation inside of fit only then.

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

    #: Names of columns, or patterns such as ``"timings/*"``.
    columns: Sequence[str] = ()
    #: Whether metrics of other stages than training carry the stage's name in front.
    prefixes_stage = True

    def __init__(self, schedule: Schedule | str | None = None) -> None:
        super().__init__()
        self.schedule = None if schedule is None else as_schedule(schedule)
        self.trigger = ReportTrigger(self.schedule)
        #: What was reported last, by key.
        self.metrics: dict[str, float] = {}

    def on_window(self, window: Window) -> Mapping[str, float] | None:
        """The metrics of a window.

        With several ranks it is called some batches after the window's end, on every rank; what
        rank 0 returns is logged.

        Args:
            window: The values of all ranks since this callback's last window of the stage.

        Returns:
            Numbers by key; those that are not finite are left out.
        """
        raise NotImplementedError

    @override
    def prepare(self, context: RunContext) -> None:
        self.trigger.setup(context)
        context.windows.subscribe(self, self.columns)

    @override
    def on_start(self, context: RunContext) -> None:
        if not context.nested:
            self.trigger.start(context)

    @override
    def close(self, context: RunContext, reason: str) -> None:
        self.trigger.close()

    def window_due(self, context: RunContext, at_end: bool) -> bool:
        """Whether a window ends now: the same on every rank, also where this callback failed."""
        if at_end or context.nested:
            return at_end
        return self.trigger.due(context)

    def receive(self, window: Window) -> Mapping[str, float]:
        """Turn a window into metrics under their full keys."""
        found = self.on_window(window)
        if not found:
            return {}
        prefix = f"{window.stage}/" if self.prefixes_stage and window.stage != "train" else ""
        self.metrics = {prefix + key: value for key, value in found.items()}
        return self.metrics
