"""Sending placed files to the server, again and again, and a list of what did not arrive."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.errors import describe, warn, without_credentials
from lightning_perf.trace.pending import FILE_NAME, PendingUpload, append_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lightning_perf.trace.ledger import Ledger, Trace
    from lightning_perf.trace.worker import Worker


class Delivery:
    """The uploading end of a writer's pipe.

    Args:
        worker: Waits before a further attempt.
        ledger: Knows what is yet to be sent.
        root: Where the list of pending uploads lies.
        run_name: The run's name, for the list.
        send: Sends a file by a remote name, and raises if it cannot; None if nothing is sent.
        target: What a later upload needs to know, for the list.
        backoff: Seconds to wait before each further attempt.
    """

    def __init__(
        self,
        worker: Worker,
        ledger: Ledger,
        root: Path,
        run_name: str,
        send: Callable[[Path, str], None] | None,
        target: Mapping[str, str],
        backoff: Sequence[float],
    ) -> None:
        self._worker, self._ledger, self._root, self._run_name = worker, ledger, root, run_name
        self._send, self._backoff = send, tuple(backoff)
        self._target = {key: without_credentials(value) for key, value in target.items()}

    def upload(self, trace: Trace, again: Callable[[Trace], object]) -> Trace | None:
        """Try once to send a trace.

        Args:
            trace: The trace; nothing is done if it is not to be sent.
            again: What to do with the trace at the next attempt, if this one fails.

        Returns:
            The trace if it needs nothing further, else None.
        """
        if trace.remote is None or self._send is None:
            return trace
        try:
            self._send(trace.path, trace.remote)
        except Exception as error:
            failed = replace(trace, failures=trace.failures + 1)
            delays = self._backoff[trace.failures :]
            label = f"uploading {trace.path.name}"
            if not delays or not self._worker.submit(partial(again, failed), label, delays[0]):
                self.park([trace], describe(error))
            return None
        self._ledger.settle(trace)
        return trace

    def park(self, traces: Sequence[Trace], why: str) -> None:
        """List files for `lightning-perf upload`, and keep them on the disk until then.

        Args:
            traces: The traces; those that were sent, listed, or never to be sent are passed over.
            why: What kept them from the server.
        """
        parked = [trace for trace in traces if self._ledger.settle(trace)]
        advice = f"`lightning-perf upload` sends what {self._root / FILE_NAME} lists"
        for trace in parked:
            self._ledger.stay(trace)
            path = str(trace.path.absolute())
            entry = PendingUpload(path, trace.remote or "", self._run_name, why, self._target)
            try:
                append_pending(self._root, entry)
            except OSError as error:
                advice = f"they could not be listed for later, either ({describe(error)})"
        if parked:
            names = ", ".join(str(trace.path) for trace in parked)
            warn(f"not uploaded ({why}): {names}; {advice}.")
