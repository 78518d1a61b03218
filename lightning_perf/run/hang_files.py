"""The states that ranks exchange while a training hangs: in files, and by messages."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from lightning_perf.diagnosis.hang import RankState
from lightning_perf.errors import DAMAGE, describe
from lightning_perf.files import finite, read_json, write_text
from lightning_perf.system.frames import main_thread, users_frame
from lightning_perf.system.stacks import dump_of
from lightning_perf.traces.names import numbered
from lightning_perf.traces.writer import MARKER, mark, owner_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from lightning_perf.run.run import Run

#: The folder below that of the run; the file whose time requests all states; and the report.
FOLDER, _ASKED, REPORT = "hang", ".asked", "report.md"
#: Data loader workers in a message to other ranks.
_MOST_SENT = 5
#: The description of a rank that has not answered, by the state of its process.
_LOST = {
    "stopped": "is stopped (SIGSTOP)", "gone": "has ended", "zombie": "has ended",
}  # fmt: skip


def stacks_file(rank: int) -> str:
    """The name of the file with the stacks of a rank."""
    return f"rank{rank}.stacks.txt"


class HangFiles:
    """The files of a run's hangs, in a folder of this run alone, and what other ranks have sent.

    Runs of one name have one folder: the first one writes to ``hang`` in it, the next one that
    hangs to ``hang-2``.

    Args:
        grace: Seconds that other ranks have to answer.
        part: The part of the run, if that has a folder of its own.
    """

    def __init__(self, grace: float, part: str = "") -> None:
        self.grace, self._part = grace, part
        self._claimed: Path | None = None
        self._written: set[Path] = set()
        # When a rank last requested the states of all ranks, by the clock of the disk.
        self._asked = 0
        # The states in messages, and when they came; when a message last requested the states of
        # all ranks, and when one last said that the hang is reported.
        self._sent: dict[int, tuple[float, RankState]] = {}
        self._requested = self._reported = -inf
        # The ranks whose training has ended.
        self._left: dict[int, RankState] = {}

    # -- all ranks --------------------------------------------------------------------------------

    def ask(self, run: Run, state: RankState) -> None:
        """Request the states of all ranks, unless another rank has just done so."""
        now = time.monotonic()
        asks = self._requested < now - self.grace
        self._requested = now if asks else self._requested
        self.answer(run, state, asks=asks)
        written = self.time_of(run, _answer_of(state.rank))
        if self.time_of(run, _ASKED) < written - self.grace * 1e9:
            self.write(run, _ASKED, "")
        self._asked = self.time_of(run, _ASKED)

    def answer(self, run: Run, state: RankState, **sent: bool) -> None:
        """Send a state to the other ranks; ``sent`` says whether it requests theirs, or reports."""
        self.write(run, _answer_of(state.rank), json.dumps(finite(asdict(state))))
        if run.mail is not None:
            short = asdict(replace(state, workers=state.workers[:_MOST_SENT]))
            run.mail.send({"state": short, "asks": False, "reported": False, **sent})

    def leave(self, run: Run, how: str) -> None:
        """Report to the other ranks that the training of this one has ended."""
        if run.mail is not None:
            state = RankState(run.ranks.global_rank, how, host=platform.node(), pid=os.getpid())
            run.mail.send({"state": asdict(state)})

    def is_asked(self, run: Run) -> bool:
        """Whether a rank has requested the states of all ranks since the last call."""
        requested = self.receive(run)
        before, self._asked = self._asked, self.time_of(run, _ASKED)
        return requested or before != self._asked

    def receive(self, run: Run) -> bool:
        """Read messages of other ranks; returns whether one requests the states of all ranks."""
        now, requested = time.monotonic(), False
        for rank, content in run.mail.receive() if run.mail else ():
            with suppress(*DAMAGE):
                state = replace(RankState.of(content["state"]), rank=rank)
                if state.missing:
                    self._left[rank] = state
                    continue
                self._sent[rank] = now, state
                requested |= content["asks"] is True
                self._reported = now if content["reported"] is True else self._reported
        if requested:
            self._requested = now
        return requested

    def is_reported(self, run: Run) -> bool:
        """Whether another rank has reported the hang for which the states were requested."""
        return self.time_of(run, REPORT) >= self._asked > 0 or self._reported >= self._requested

    def is_reported_since(self, run: Run, written: float, received: float) -> bool:
        """Whether another rank has reported a hang since ``written`` or ``received``.

        The first is a time of the disk's clock, the second one of this process's clock.
        """
        return self.time_of(run, REPORT) >= written or self._reported >= received

    def state_of(self, run: Run, rank: int) -> RankState | None:
        """What a rank has answered; None if it has not."""
        if self.time_of(run, _answer_of(rank)) >= max(self._asked, 1):
            with suppress(OSError, *DAMAGE):
                return RankState.of(read_json(self._folder(run) / _answer_of(rank)))
        at, state = self._sent.get(rank, (-inf, None))
        return state if at >= self._requested else None

    def silent(self, run: Run, among: Collection[int]) -> Iterator[int]:
        """Those of these processes that are ranks in training and have not answered."""
        for rank, pid in run.processes.items():
            if pid in among and rank not in self._left and self.state_of(run, rank) is None:
                dump = dump_of(pid)
                # One whose training has ended writes no stacks, if its message was lost.
                if dump.text or dump.state == "stopped":
                    yield pid

    def missing(self, run: Run, rank: int) -> RankState:
        """The state of a rank that has not answered; it may make progress if nothing is known."""
        if rank in self._left:
            return self._left[rank]
        pid = run.processes.get(rank)
        if pid is None:
            return RankState(rank, "is on another node and has not answered", moves=True)
        dump = dump_of(pid)
        found: dict[str, Any] = {"host": platform.node(), "pid": pid}
        if dump.state in _LOST:
            return RankState(rank, _LOST[dump.state], **found)
        self.save(run, stacks_file(rank), dump.text)
        frame = users_frame(main_thread(dump.text))
        where = "" if frame is None else f", in {frame.place}"
        # Only files in a folder of this machine are seen by all of its processes.
        apart = run.reporting.root(None).mirror is not None
        return RankState(rank, f"runs no Python: C code holds the GIL{where}", moves=apart, **found)

    # -- files ------------------------------------------------------------------------------------

    def _folder(self, run: Run, claims: bool = False) -> Path:
        """The folder: the first one that no other run has."""
        if self._claimed is not None:
            return self._claimed
        of_run = run.reporting.run_folder()
        above, find = (of_run.claim(), mark) if claims else (of_run.folder, owner_of)
        names = filter(_may_be_ours, (above / numbered(FOLDER, number) for number in count(1)))
        owner = f"{run.serial} {self._part}".rstrip()
        found = next(each for each in names if find(each, owner) == owner)
        if claims:
            self._claimed = found
            self._written.add(found / MARKER)
        return found

    def time_of(self, run: Run, name: str) -> int:
        """When a file was written, by the clock of its disk; 0 without one."""
        with suppress(OSError):
            return (self._folder(run) / name).stat().st_mtime_ns
        return 0

    def write(self, run: Run, name: str, text: str) -> Path | None:
        """Write a file of the run at once; None if the run leaves none."""
        if run.reporting.root(None).discards:
            return None
        try:
            path = self._folder(run, claims=True) / name
            write_text(path, text)
        except OSError as error:
            run.reporting.warnings_digest.once(
                "files of a hang were not written", f"{name} was not written ({describe(error)})."
            )
            return None
        self._written.add(path)
        return path

    def save(self, run: Run, name: str, text: str) -> Path | None:
        """Write a file of the run as `write`, and upload it."""
        path = self.write(run, name, text)
        if path is not None:
            run.reporting.write_files(
                f"{{run_name}}/{path.parent.name}", {name: partial(write_text, text=text)},
                "train", run.progress.timestamp("train"), overwrite=True,
            )  # fmt: skip
        return path

    def remove(self, run: Run) -> None:
        """Remove what this rank has written, unless one has reported a hang."""
        if self._claimed is None or self.time_of(run, REPORT):
            return
        marker = self._claimed / MARKER
        for path in self._written - {marker}:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            if [*self._claimed.iterdir()] == [marker]:  # no other rank has files there
                marker.unlink()
                self._claimed.rmdir()


def _may_be_ours(folder: Path) -> bool:
    """Not a link, which may point anywhere, nor a file, nor a report that no run has marked."""
    if not os.path.lexists(folder):
        return True
    unmarked = (folder / REPORT).exists() and not (folder / MARKER).exists()
    return folder.is_dir() and not folder.is_symlink() and not unmarked


def _answer_of(rank: int) -> str:
    return f".rank{rank}.json"
