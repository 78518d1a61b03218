"""Runs one trial: the user's command in a process of its own, with a limit of time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lightning_perf.errors import DAMAGE, printable
from lightning_perf.files import read_json, write_text
from lightning_perf.tracking.summary import text_of
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: The environment variable with the file of a trial's settings, and the file of its result.
VARIABLE, RESULT = "LIGHTNING_PERF_TRIAL", "result.json"
#: Seconds between looks at a process, and for a launcher to end after its ranks.
_PAUSE, _LAUNCHER = 0.5, 5.0
#: Bytes of the output that are searched for the last line, and characters of it.
_LAST, _LINE = 4000, 300


class Outcome(NamedTuple):
    """What a trial gave."""

    #: As written by `Trial`; empty if it failed.
    result: Mapping[str, Any]
    #: Why it failed.
    error: str | None
    wall_seconds: float
    #: The most memory that its processes had, in bytes.
    host_memory: int

    @property
    def per_batch(self) -> float:
        """Seconds per batch."""
        return float(self.result["seconds"] / self.result["timed"])

    @property
    def per_sample(self) -> float:
        """Seconds per sample, or per batch if the samples are unknown."""
        return self.per_batch / (self.result.get("batch_size") or 1)

    @property
    def memory(self) -> int:
        """The most memory in bytes, of the device if it has its own."""
        return self.result.get("memory") or self.host_memory


def run_trial(
    command: Sequence[str], shared: Path, folder: Path, spec: Mapping[str, Any], limit: float
) -> Outcome:
    """Run one trial.

    Args:
        command: The program and its arguments.
        shared: The temporary folder of all trials.
        folder: One for this trial alone, which is deleted.
        spec: The fields of `Spec` but the folders.
        limit: Seconds after which it is ended.
    """
    folder.mkdir()
    settings = {"folder": str(folder), "shared": str(shared), **spec}
    write_text(folder / "spec.json", text_of(settings))
    output, began = folder / "output.txt", monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603  no shell
            command,
            env=_environment(shared, folder / "spec.json"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time, memory = _wait(process, folder / RESULT, limit)
        finally:
            stop(process)
    wall = monotonic() - began
    try:
        result = read_json(folder / RESULT)
        error = result.get("error")
        if error is None and not result["timed"]:
            error = "the training ended before the batches that are timed"
    except FileNotFoundError:
        result, error = {}, _without_result(process, output, wall, in_time)
    except (OSError, *DAMAGE) as why:
        result, error = {}, f"its result is not readable: {why}"
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome({} if error else result, error, wall, memory)


def _environment(shared: Path, spec: Path) -> dict[str, str]:
    """Without the variables that let scripts send something by themselves."""
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(shared / "tmp"))
    return os.environ | temporary | {
        VARIABLE: str(spec), "LIGHTNING_PERF": "0", "WANDB_MODE": "disabled",
        "NEPTUNE_MODE": "debug", "MLFLOW_TRACKING_URI": f"sqlite:///{shared}/mlflow.db",
        "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], result: Path, limit: float) -> tuple[bool, int]:
    """Wait for a process; returns whether it ended in time, and the most memory it had."""
    end, memory = monotonic() + limit, 0
    while process.poll() is None:
        memory = max(memory, _memory(process.pid))
        if monotonic() > end:
            return False, memory
        if result.exists():  # a launcher may wait for other ranks
            end = min(end, monotonic() + _LAUNCHER)
        time.sleep(_PAUSE)
    return True, memory


def _without_result(
    process: subprocess.Popen[bytes], output: Path, wall: float, in_time: bool
) -> str:
    """Why there is no result."""
    if not in_time:
        return f"stopped after {duration(wall)} without a result"
    text = output.read_bytes()[-_LAST:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = printable(lines[-1])[:_LINE] if lines else "it printed nothing"
    if process.returncode:
        return last
    return (
        "the command ended without Trainer.fit, or its Trainer is in a process that does not have "
        f"the environment (the last line: {last})"
    )


def _memory(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, those that outlive it included."""
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    for each in below:
        with suppress(psutil.Error):
            each.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    if sys.platform != "win32":
        with suppress(OSError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)
