"""The recording end of a writer's pipe: from the recorder's raw file to one under its name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.errors import describe
from lightning_perf.trace.compress import compress, place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trace.complaints import Complaints
    from lightning_perf.trace.layout import Layout
    from lightning_perf.trace.ledger import Ledger, Trace
    from lightning_perf.trace.targets import Target

    Sends = tuple[tuple[Target, str], ...]

# Bytes that are left on a disk which is full: less than the least that it gives out.
_FULL = 1 << 16


class Placing:
    """Names traces, and brings them there.

    Args:
        layout: What they may be called.
        ledger: Which names are taken.
        complaints: Where trouble is told.
        packs: Whether they are compressed.
        overwrite: Whether names that are taken are taken all the same.
        sends: Where a file goes, by its path and its remote name.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        complaints: Complaints,
        packs: bool,
        overwrite: bool,
        sends: Callable[[Path, str | None], Sends],
    ) -> None:
        self._layout, self._ledger, self._complaints = layout, ledger, complaints
        self._packs, self._overwrite, self._sends = packs, overwrite, sends

    def names(self, timestamp: Timestamp, stage: str, raw: bool = False) -> tuple[Path, str | None]:
        """Where a new trace goes, as `Layout.names`."""
        names = partial(self._layout.names, timestamp, stage, raw=raw)
        number = 1 if self._overwrite else self._ledger.take(lambda n: names(number=n)[0])
        return names(number=number)

    def prepare(self, trace: Trace) -> Trace:
        """Complete the raw file."""
        if trace.prepare is not None:
            # The folder may have been removed since the recorder began.
            trace.spooled.parent.mkdir(parents=True, exist_ok=True)
            trace.prepare()
        return replace(trace, prepare=None)  # which may hold the recorder and its memory

    def inspect(self, trace: Trace) -> Trace | None:
        """Pass over a file that holds nothing; on a full disk, doubt it."""
        if not (trace.spooled.exists() and trace.spooled.stat().st_size):
            trace.spooled.unlink(missing_ok=True)
            message = (
                f"the recorder left nothing for {trace.path}: is the disk full, or was the folder "
                "removed?"
            )
            self._complaints.tell("recordings were empty", message)
            return None
        folder = trace.spooled.parent
        usage = shutil.disk_usage(folder)
        # Some recorders do not notice; and some network disks tell no sizes at all.
        if usage.total and usage.free < _FULL:
            message = f"the disk of {folder} is full: {trace.path.name} may be cut short."
            self._complaints.tell("traces may be cut short: the disk is full", message)
        return trace

    def place(self, trace: Trace) -> Trace:
        """Move the file to its name, compressed or as it is."""
        try:
            (compress if self._packs else place)(trace.spooled, trace.path)
        except OSError as error:
            if not self._packs:
                raise
            return self._place_raw(trace, error)
        self._ledger.place(trace)
        return trace

    def _place_raw(self, trace: Trace, error: OSError) -> Trace:
        """What cannot be compressed, as on a disk that is full, need not be: a rename is free."""
        path, remote = self.names(trace.timestamp, trace.stage, raw=True)
        raw = replace(trace, path=path, sends=self._sends(path, remote))
        place(raw.spooled, raw.path)
        self._ledger.place(raw)
        message = f"{raw.path} was not compressed ({describe(error)}), and stays as it is."
        self._complaints.tell("traces were not compressed", message)
        return raw
