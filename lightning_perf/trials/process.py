"""Runs one trial: the user's command in a process of its own, with a limit of time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lightning_perf.errors import DAMAGE, printable
from lightning_perf.files import read_json, write_text
from lightning_perf.tracking.summary import text_of
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The environment variable with the file of a trial's settings, the file of its result, and one
#: that says that there was a Trainer, and that it fits.
VARIABLE, RESULT, TRAINER = "LIGHTNING_PERF_TRIAL", "result.json", "trainer"
#: Seconds between looks at a process.
_PAUSE = 0.2
#: In the commands of processes that free shared memory, and end, when its users have ended.
_CLEANERS = re.compile("resource_tracker import main|torch_shm_manager")
#: Bytes of the output that are searched for the last line, and characters of it.
_LAST, _LINE = 20_000, 300
#: An exception's line, which launchers write more lines after.
_EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?([\w.]*(?:Error|Exception): .+)")
#: A frame of a traceback; where those are that are not the user's; and ours.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INSTALLED = re.compile(r"(site|dist)-packages|[/\\]lib[/\\]python\d|^<")
_OURS = str(Path(__file__).parents[1])


class Outcome(NamedTuple):
    """What a trial gave."""

    #: As written by `Trial`; empty if it failed.
    result: Mapping[str, Any]
    #: Why it failed.
    error: str | None
    wall_seconds: float
    #: The most memory that its processes had, in bytes.
    host_memory: int
    #: Whether it was ended at its limit of time, or before it because no result would come.
    late: bool = False

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
        started: set[psutil.Process] = set()
        try:
            in_time, memory = _wait(process, folder / RESULT, limit, started)
        finally:
            stop(process, started)
    wall = monotonic() - began
    try:
        result = read_json(folder / RESULT)
        error = result.get("error")
    except FileNotFoundError:
        result, error = {}, _without_result(process, output, wall, in_time)
    except (OSError, *DAMAGE) as why:
        result, error = {}, f"its result is not readable: {why}"
    shutil.rmtree(folder, ignore_errors=True)
    late = result.get("late", not (in_time or result))
    return Outcome({} if error else result, error, wall, memory, late)


def _environment(shared: Path, spec: Path) -> dict[str, str]:
    """Without the variables that let scripts send something by themselves."""
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(shared / "tmp"))
    return os.environ | temporary | {
        VARIABLE: str(spec), "LIGHTNING_PERF": "0", "WANDB_MODE": "disabled",
        "NEPTUNE_MODE": "debug", "MLFLOW_TRACKING_URI": f"sqlite:///{shared}/mlflow.db",
        "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }  # fmt: skip


def _wait(
    process: subprocess.Popen[bytes], result: Path, limit: float, started: set[psutil.Process]
) -> tuple[bool, int]:
    """Wait for a process; returns whether it ended in time, and the most memory it had.

    Processes that it starts are added to ``started``: those of a launcher may outlive it.
    """
    end, memory = monotonic() + limit, 0
    while process.poll() is None:
        family = _family(process.pid)
        started.update(family)
        memory = max(memory, _memory(family))
        if monotonic() > end:
            return False, memory
        if result.exists():
            break
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
    code, mark = process.returncode, output.parent / TRAINER
    errors = [found[1] for line in lines if (found := _EXCEPTION.fullmatch(line))] if code else []
    lines = errors or lines
    last = printable(lines[-1])[:_LINE] if lines else f"exit code {code}"
    last += printable(place_of(text)) if errors else ""
    seen = mark.read_text() if mark.exists() else None
    # Errors in fit are results.
    if code < 0 or seen or (code and seen is not None and not errors):
        how = f"signal {-code}, 9 where memory runs out" if code < 0 else f"exit code {code}"
        return f"the process ended {seen or 'before Trainer.fit'} ({how}; the last line: {last})"
    if code:
        hint = ": trials have no standard input, so give it as an argument or a file"
        return last + hint if last.startswith("EOFError") else last
    if seen is not None:
        return "there is nothing to try: a Trainer was constructed, but Trainer.fit is not called"
    return (
        "no Trainer was seen. If another program starts the training, with another environment "
        "(ssh, sudo, docker, sbatch), put lightning-perf try into the command that it runs. "
        f"The training's Python needs lightning_perf, too (the last line: {last})"
    )


def place_of(traceback: str) -> str:
    r"""The innermost frame in the user's code, in parentheses; empty if the error is ours.

    Example:
        >>> place_of('File "train.py", line 3, in f\nFile "/lib/python3.12/json.py", line 9, in g')
        ' (train.py, line 3)'
    """
    frames = _FRAME.findall(traceback)
    theirs = [each for each in frames if not _INSTALLED.search(each[0]) and _OURS not in each[0]]
    if not theirs or _OURS in frames[-1][0]:
        return ""
    file, line, here = Path(theirs[-1][0]), theirs[-1][1], Path.cwd()
    return f" ({file.relative_to(here) if file.is_relative_to(here) else file}, line {line})"


def _family(pid: int) -> list[psutil.Process]:
    """A process, and all that it has started."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _began(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return process.create_time()
    return 0.0


def _memory(processes: Sequence[psutil.Process]) -> int:
    total = 0
    for each in processes:
        with suppress(psutil.Error):
            total += each.memory_info().rss
    return total


def stop(process: subprocess.Popen[bytes], started: set[psutil.Process]) -> None:
    """End a process and all that it has started, those that outlive it included."""
    family = started.union(_family(process.pid))
    if process.poll() is None:
        process.kill()
    _kill(family)
    process.wait()
    _kill({each for each in psutil.process_iter() if _group(each) == process.pid})


def _cleans(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(_CLEANERS.search(" ".join(process.cmdline())))
    return False


def _group(process: psutil.Process) -> int | None:
    if sys.platform != "win32":
        with suppress(OSError):  # it has ended
            return os.getpgid(process.pid)
    return None


def _kill(processes: set[psutil.Process]) -> None:
    """Parents first: a script must not go on after the training."""
    for each in sorted(processes, key=_began):
        with suppress(psutil.Error):
            if not _cleans(each):
                each.kill()  # not another process that has its number now
