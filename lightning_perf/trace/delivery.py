"""Sending placed files away, again and again, and a list of what did not arrive."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.errors import describe
from lightning_perf.trace.pending import FILE_NAME, PendingUpload, append_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lightning_perf.trace.complaints import Complaints
    from lightning_perf.trace.ledger import Ledger, Trace
    from lightning_perf.trace.targets import Target
    from lightning_perf.trace.worker import Worker

#: Files that one warning names at most; the list has them all.
_MOST_NAMED = 10


class Delivery:
    """The uploading end of a writer's pipe.

    Args:
        worker: Waits before a further attempt.
        ledger: Knows what is yet to be sent.
        complaints: Where what did not arrive is told.
        root: Where the list of pending uploads lies.
        run_name: The run's name, for the list.
        backoff: Seconds to wait before each further attempt.
    """

    def __init__(
        self,
        worker: Worker,
        ledger: Ledger,
        complaints: Complaints,
        root: Path,
        run_name: str,
        backoff: Sequence[float],
    ) -> None:
        self._worker, self._ledger, self._complaints = worker, ledger, complaints
        self._root, self._run_name, self._backoff = root, run_name, tuple(backoff)

    def upload(self, trace: Trace, again: Callable[[Trace], object]) -> Trace | None:
        """Try once to send a trace to all targets that have not got it.

        Args:
            trace: The trace; nothing is done if it is not to be sent.
            again: What to do with the trace at the next attempt, if this one fails.

        Returns:
            The trace if it needs nothing further, else None.
        """
        if not trace.sends:
            return trace
        left, why = _send(trace)
        if not left:
            self._ledger.settle(trace)
            return trace
        failed = replace(trace, failures=trace.failures + 1, sends=left)
        self._ledger.wait(failed)
        delays = self._backoff[trace.failures :]
        label = f"uploading {trace.path.name}"
        if not delays or not self._worker.submit(partial(again, failed), label, delays[0]):
            self.park([failed], why)
        return None

    def park(self, traces: Sequence[Trace], why: str) -> None:
        """List files for `lightning-perf upload`, and keep them on the disk until then.

        Args:
            traces: The traces; those that were sent, listed, or never to be sent are passed over.
            why: What kept them here.
        """
        parked = [trace for trace in traces if self._ledger.give_up(trace)]
        if not parked:
            return
        listed = advice = f"`lightning-perf upload` sends what {self._root / FILE_NAME} lists"
        for trace in parked:
            try:
                self._list(trace, why)
            except OSError as error:
                advice = f"they could not be listed for later, either ({describe(error)})"
        names = ", ".join(str(trace.path) for trace in parked[:_MOST_NAMED])
        more = f" and {len(parked) - _MOST_NAMED} more" if len(parked) > _MOST_NAMED else ""
        self._complaints.tell(
            f"files were not uploaded; {listed}",
            f"not uploaded ({why}): {names}{more}; {advice}.",
            len(parked),
        )

    def _list(self, trace: Trace, why: str) -> None:
        path = str(trace.path.absolute())
        for target, remote in trace.sends:
            entry = PendingUpload(path, remote, self._run_name, why, dict(target.address))
            append_pending(self._root, entry)


def _send(trace: Trace) -> tuple[tuple[tuple[Target, str], ...], str]:
    """Send to every target: those that did not take it, and what the last of them said."""
    left, why = [], ""
    for target, remote in trace.sends:
        try:
            target.send(trace.path, remote)
        except Exception as error:
            left.append((target, remote))
            why = describe(error)
    return tuple(left), why
