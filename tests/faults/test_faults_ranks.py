"""If one of two ranks fails, the other one ends as without us, and its files are complete.

| rank | x how it fails in batch 4 | x which callbacks of ours | cases |
|---|---|---|---|
| 0, 1 | raises, exits, os._exit, SIGKILL | profilers alone | 8 |
| 1 | raises, os._exit | with SpeedMonitor, which gathers from all ranks | 2 |

SIGTERM to one rank alone is left out: Lightning itself then waits forever, with and without us.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import (
    Child,
    Ended,
    ForkServer,
    Setting,
    await_files,
    files,
    fit,
    hidden,
    raises,
    whole,
)
from helpers.small import Small
from lightning.pytorch import Callback

from lightning_perf import Fixed, Memray, PyTorch, SpeedMonitor, VizTracer

pytestmark = pytest.mark.slow

RANKS: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2}
#: Each rank has eight batches. These windows end before batch 4, during which Memray's is open.
EARLY = set().union(
    *(files("PyTorch", 1, rank=rank) | files("VizTracer", 3, rank=rank) for rank in (0, 1)),
)
LATE = files("Memray", 4, rank=0) | files("Memray", 4, rank=1)
FAULTS: dict[str, Callable[[], object]] = {
    "raises": raises,
    "exits": partial(sys.exit, 3),
    "os._exit": partial(os._exit, 5),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class OneFails(Callback):
    """One rank fails after both have written the files of their early windows."""

    def __init__(self, rank: int, fault: str, folder: Path, ours: bool) -> None:
        self.rank, self.fault, self.folder, self.ours = rank, fault, folder, ours

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            if self.ours:
                await_files(self.folder, EARLY)
            if trainer.global_rank == self.rank:
                FAULTS[self.fault]()


def one_fails(rank: int, fault: str, folder: Path, ours: bool) -> Setting:
    return Setting(Small(), before=[OneFails(rank, fault, folder, ours)], options=RANKS)


def ours(monitor: bool) -> list[Any]:
    recorders = [
        PyTorch(schedule=Fixed(0, 1)),
        VizTracer(schedule=Fixed(2, 1)),
        Memray(schedule=Fixed(3, 5)),
    ]
    return [*recorders, SpeedMonitor(window_size=2)] if monitor else recorders


def start(fork_server: ForkServer, folder: Path, rank: int, fault: str, mine: list[Any]) -> Child:
    out = folder / "out"
    return fork_server.start(folder, fit, out, one_fails, rank, fault, out, bool(mine), ours=mine)


def _same(ended: Ended) -> tuple[int, str]:
    """Whether torch reports the failing or the waiting rank is a race."""
    assert ended.outcome is not None
    error, _ = ended.outcome["error"]
    return ended.code, "torch" if error.startswith("Process") else error


@pytest.mark.parametrize(
    ("rank", "fault", "monitor"),
    [
        *((rank, fault, False) for fault in FAULTS for rank in (0, 1)),
        *((1, fault, True) for fault in ("raises", "os._exit")),
    ],
)
def test_a_failing_rank_loses_no_file_of_any_rank(
    fork_server: ForkServer, tmp_path: Path, rank: int, fault: str, monitor: bool
) -> None:
    """Finished windows of both ranks are complete, and the run ends as without us."""
    children = [
        start(fork_server, tmp_path / "ours", rank, fault, ours(monitor)),
        start(fork_server, tmp_path / "without", rank, fault, []),
    ]
    ended, without = (child.wait() for child in children)
    assert _same(ended) == _same(without), ended.stderr + without.stderr
    out = tmp_path / "ours" / "out"
    assert EARLY <= whole(out) <= EARLY | LATE
    # torch ends the other rank by SIGTERM, possibly before a file has its final name.
    left = [path.name for path in hidden(out)]
    assert all(name.startswith(".spool-") or name.endswith(".partial") for name in left), left
