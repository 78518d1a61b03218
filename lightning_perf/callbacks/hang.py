"""Reports a training that hangs: which rank, where, since when, and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf import checks
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.termination import hurried
from lightning_perf.run.watchdog import Watchdog
from lightning_perf.tracking.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_perf.run.run import Run


class Hang(PerfCallback):
    """Reports a training that makes no progress, while it hangs: who, where, and since when.

    A thread of each rank watches the batches and spans of the run. Once nothing has ended for
    ``after``, or for 30 times the median batch if that is longer, each rank leaves the stacks of
    all its threads and of its data loader workers in ``{run_name}/hang``. Rank 0 says which rank
    the others wait for in ``hang/report.md``, ``report.html``, ``summary.json`` and one warning.
    The set-up, the first batch of a stage, compilation and checkpoints may take five times as
    long; any phase may take three times as long as it took before. There is one report per hang.

    Args:
        after: The time without progress, in seconds, minutes or hours.
        action: ``"report"`` lets the training wait; ``"abort"`` ends each process with exit code
            75 after the report, for schedulers that start the job again.
        notify: A function that is called with each hang, a dictionary, on a thread of its own; or
            the URL of a webhook, to which it is posted as JSON. As that of `Diagnosis`.

    Raises:
        ConfigError: The time is malformed, not positive or in another unit, or the action unknown.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Hang
        >>> trainer = L.Trainer(callbacks=[Hang(after="5m")], logger=False)
    """

    has_hooks = False

    def __init__(
        self,
        after: Time | str = "120s",
        action: str = "report",
        notify: Callable[[dict[str, Any]], object] | str | None = None,
    ) -> None:
        super().__init__()
        self.after = after
        self._seconds = float(checks.times("after", after, "120s", units={TimeUnit.SECOND}).value)
        if action not in ("report", "abort"):
            problem = "is neither 'report' nor 'abort'"
            raise ConfigError("action", action, problem, "'abort'")
        self.action = action
        #: The hangs of the run so far, as `summary.json` has them.
        self.hangs: list[dict[str, Any]] = []
        self._watchdog: Watchdog | None = None
        # Not `notify`, which would be logged with the other settings: the URL is a secret.
        self._notifier = None if notify is None else Notifier(notify)
        self._run_name = ""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_watchdog": None}

    @override
    def prepare(self, context: Run) -> None:
        self.hangs = []
        if not context.reporting.root(None).discards:  # a trial run
            abort = self.action == "abort"
            self._run_name = context.run_name
            self._watchdog = Watchdog(context, self._seconds, abort, self._found)

    def _found(self, hang: dict[str, Any]) -> None:
        self.hangs.append(hang)
        if self._notifier is not None and "ended" not in hang:  # else another rank has sent it
            text = f"{self._run_name} hangs: {hang['text']}"
            self._notifier({"event": "hang", "run": self._run_name, **hang, "text": text})
            if self.action == "abort":  # the process ends soon
                self._notifier.close()

    @override
    def close(self, context: Run, reason: str) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close(context.trainer, reason)
        if self._notifier is not None:
            self._notifier.close(until=hurried)

    @override
    def summary_sections(self) -> Mapping[str, Any]:
        return {"hangs": self.hangs} if self.hangs else {}
