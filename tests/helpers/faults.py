"""Trainings with faults in real processes, checks of the files that they leave, and a failing
server.

A new interpreter per training would spend nine seconds on imports. Instead, one process imports
everything and forks a child per training; each child that fails exits like any interpreter.
"""

from __future__ import annotations

import base64
import gc
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import memray
import mlflow  # noqa: F401  (imported once for all children)
import torch
import viztracer  # noqa: F401
from lightning.pytorch import Callback

from helpers import leaving
from helpers.servers import free_port
from helpers.small import Records, Small, trainer
from lightning_perf import Fixed, Memray, PyTorch, Schedule, Stages, VizTracer
from lightning_perf.profilers.base import Profiler

#: Every training here takes a few seconds; one that hangs is killed, which fails the test.
PATIENCE = 120.0
#: The batch of the fault, when each profiler has recorded a window and one has a window open.
BATCH = 10
#: Files of a window that was closed after a batch.
_FILES = {
    "PyTorch": ("torch_traces/rank{}.{}.pt.trace.json.gz",),
    "VizTracer": ("viztracer/rank{}.{}.json.gz",),
    "Memray": ("memray/rank{}.{}.bin", "memray/rank{}.{}.txt"),
}
PROFILERS = tuple(_FILES)


def files(profiler: str, *batches: int, rank: int = 0) -> set[str]:
    """Files of a profiler for windows that were closed after these batches."""
    return {name.format(rank, batch) for name in _FILES[profiler] for batch in batches}


#: The files at that time, of one window of each.
EACH = {name: files(name, batch) for name, batch in zip(_FILES, (2, 4, 6), strict=True)}
DONE = set().union(*EACH.values())


# -- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, and what it wrote."""

    code: int
    stderr: str
    outcome: dict[str, Any] | None

    @property
    def ended(self) -> tuple[int, Any]:
        """The part that must be the same with and without us."""
        return self.code, self.outcome

    @property
    def said(self) -> list[str]:
        """Our lines, except the notice of a wait, which depends on the load of the machine."""
        ours = [line for line in self.stderr.splitlines() if "lightning_perf:" in line]
        return [line for line in ours if "lightning_perf: finishing files:" not in line]


@dataclass(frozen=True)
class Child:
    """A process that is running."""

    fork_server: ForkServer
    pid: int
    folder: Path

    def wait(self) -> Ended:
        code = self.fork_server.ask("wait", self.pid)
        stderr = (self.folder / "stderr").read_text()
        assert code is not None, f"it hung\n{stderr}"
        outcome = self.folder / "outcome.json"
        return Ended(code, stderr, json.loads(outcome.read_text()) if outcome.exists() else None)


_SERVER = "import helpers.leaving; from helpers.faults import serve; serve()()"


class ForkServer:
    """Starts processes by forking one that has all imports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment() | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def start(self, folder: Path, job: Callable[..., None], /, *args: Any, **kwargs: Any) -> Child:
        """Call a function of a module in a new process, whose own files go to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        return Child(self, self.ask("start", str(folder), job, args, kwargs), folder)

    def run(self, folder: Path, job: Callable[..., None], /, *args: Any, **kwargs: Any) -> Ended:
        """Start a process and wait for its end."""
        return self.start(folder, job, *args, **kwargs).wait()

    def ranks(
        self, folder: Path, number: int, job: Callable[..., None], /, *args: Any, nodes: int = 1
    ) -> None:
        """Call a function on some ranks, numbered as by torchrun, and wait for their ends."""
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number // nodes),
            "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        children = []
        for rank in range(number):
            node, local = divmod(rank, number // nodes)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
            process = folder / f"process{rank}"
            children.append(self.start(process, _on_rank, shared | own, job, args))
        for ended in [child.wait() for child in children]:
            assert ended.code == 0, ended.stderr[-3000:]

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(base64.b64encode(pickle.dumps(question)) + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)


def _environment() -> dict[str, str]:
    """The environment without the port set by Lightning, because children run in parallel."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}


def serve() -> Callable[[], None]:
    """The server's loop. Returns in each child with its job, and at the end."""
    gc.freeze()  # otherwise the exit of each child takes a second to collect all imported objects
    children = set()
    for line in iter(sys.stdin.buffer.readline, b""):
        command, *rest = pickle.loads(base64.b64decode(line))
        if command == "wait":
            answer = _wait(*rest)
            children.discard(*rest)
        elif (answer := os.fork()) == 0:
            return _born(*rest)
        else:
            children.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in children:
        _end(pid)
    return lambda: None


def _born(
    folder: str, job: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], None]:
    os.setsid()  # so that it can be killed together with its children
    # Shells ignore SIGINT for commands in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)

    def run() -> None:
        job(*args, **kwargs)
        leaving.done = True

    return run


def _on_rank(environment: dict[str, str], job: Callable[..., None], args: Any) -> None:
    os.environ.update(environment)
    job(*args)


def _wait(pid: int) -> int | None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    _end(pid)
    return None


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# -- trainings ------------------------------------------------------------------------------------


@dataclass
class Setting:
    """A training without our callbacks: callbacks before ours and after ours, and other options."""

    model: L.LightningModule = field(default_factory=Small)
    before: list[Callback] = field(default_factory=list)
    after: list[Callback] = field(default_factory=list)
    logger: Any = field(default_factory=Records)
    options: dict[str, Any] = field(default_factory=dict)


class Planted(Callback):
    """Performs an action in one hook after a number of steps."""

    def __init__(self, hook: str, act: Callable[[], object], at: int = BATCH) -> None:
        self.act, self.at = act, at
        setattr(self, hook, self.strike)

    def strike(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.at:
            self.act()


class Acting(Small):
    """Performs an action within `training_step`."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == BATCH:
            self.act()
        return super().training_step(batch, batch_idx)


def raises() -> None:
    raise RuntimeError("planted")


def profilers(open_one: str, alone: bool = False) -> list[Profiler]:
    """Three profilers record a window each in turn; one also records batches 8 to 11, and 13.

    Args:
        open_one: That one.
        alone: Without the other two.
    """
    windows: dict[Any, Schedule] = {
        PyTorch: Fixed(1, 1),
        VizTracer: Fixed(3, 1),
        Memray: Fixed(5, 1),
    }
    for kind in windows:
        if kind.__name__ == open_one:
            windows[kind] |= Fixed(8, 4) | Fixed(13, 1)
    return [
        kind(schedule=when & Stages("train"))
        for kind, when in windows.items()
        if kind.__name__ == open_one or not alone
    ]


def fit(
    folder: Path, make: Callable[..., Setting], /, *args: Any, ours: list[Profiler], **more: Any
) -> None:
    """Train in this process and write the outcome to ``outcome.json``."""
    torch.manual_seed(0)
    with outcome_written(setting := make(*args, **more)):
        run = trainer(
            folder,
            *setting.before,
            *ours,
            *setting.after,
            logger=setting.logger,
            **setting.options,
        )
        run.fit(setting.model)


@contextmanager
def outcome_written(setting: Setting) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _write_outcome({"error": [type(error).__name__, str(error)]})
        raise
    weights = [p.detach().double().sum().item().hex() for p in setting.model.parameters()]
    _write_outcome({"weights": weights})


def _write_outcome(outcome: dict[str, Any]) -> None:
    Path("outcome.json").write_text(json.dumps(outcome))


def await_files(folder: Path, names: set[str]) -> None:
    """Wait until files have appeared below a folder."""
    until = time.monotonic() + PATIENCE / 2
    while time.monotonic() < until:
        if names <= {"/".join(path.parts[-2:]) for path in folder.rglob("*")}:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{names} did not appear")


# -- what they leave ------------------------------------------------------------------------------


def whole(folder: Path) -> set[str]:
    """Open every file with a final name in its own reader, and return the names."""
    found = {path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}
    found = {path for path in found if path.parent.name != "attempts"}
    for path in found:
        read(path)
    names = {"/".join(path.relative_to(folder).parts[1:]) or path.name for path in found}
    return names - {"summary.json"}  # of which each run writes one


def hidden(folder: Path) -> list[Path]:
    """The unfinished files."""
    marks = {".run"}
    found = (path for path in folder.rglob(".*") if path.is_file())
    return sorted(path for path in found if path.name not in marks)


def read(path: Path) -> None:
    """Raise if a file is empty or cannot be opened by its reader."""
    if path.suffix == ".gz":
        assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"], path
    elif path.suffix == ".bin":
        assert next(memray.FileReader(path).get_allocation_records()), path
    elif path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>"), path
    elif path.suffix == ".txt":
        text = path.read_text()
        assert text.startswith("peak memory "), path
        assert "\nAllocated in total, freed or not\n" in text, path
    elif path.name == "summary.json":
        assert json.loads(path.read_text())["version"], path
    elif path.suffix == ".json":  # a trace for which the disk had no space to be compressed
        assert json.loads(path.read_bytes())["traceEvents"], path
    elif ".jsonl" in path.name:
        assert [json.loads(line) for line in path.read_text().splitlines()], path
    else:
        raise AssertionError(f"{path} is of no kind that we write")
