"""Trains with random faults in all interfaces that we use, and compares with the run without us.

    python benchmarks/chaos.py [--runs 200] [--seed 0]     # many runs from a seed
    python benchmarks/chaos.py --runs 1 --seed 17 --show   # one of them again

Each run is a process with the always-on callbacks and every profiler. Its seed decides which of
``FAULTS`` occur, and when, and whether the user's own code ends it (``ENDS``). It must end as the
same training ends without us: same weights, losses and random state, or the same error. Afterwards
no thread, process, file handle, signal handler or Trainer may be left, and every file must be
complete. The table counts, for each fault, the runs that it met.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import errno
import gc
import importlib
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.fake_nvml import FakeGpu, FakeNvml
from helpers.faults import ForkServer
from helpers.outcome import Random
from helpers.small import Records, trainer
from rich.console import Console
from rich.table import Table

from lightning_perf import (
    MemorySnapshot,
    Memray,
    OnSignal,
    PyTorch,
    SystemMetrics,
    VizTracer,
    always_on,
)
from lightning_perf.profilers.base import Profiler
from lightning_perf.run import context as contexts
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.tracking import installed as trackers

#: Batches of a training.
BATCHES = 48
#: Seconds that may pass until all resources are released.
PATIENCE = 20.0


class Chance:
    """A run's random decisions, independent of all generators that the training uses."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.likely = self.random.choice([0.02, 0.2, 1.0])

    def strikes(self) -> bool:
        """Whether a call fails."""
        return self.random.random() < self.likely


# -- faults: each is entered before the training and left after it -------------------------------

Fault = Callable[[Chance, Path], Any]


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _failing(owner: Any, name: str, error: Callable[[], Exception] | None) -> Fault:
    """Calls of a function fail at random, or take long if there is no error."""

    def fault(chance: Chance, _: Path) -> Any:
        def make(original: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if chance.strikes():
                    if error is not None:
                        raise error()
                    time.sleep(0.3)
                return original(*args, **options)

            return call

        return _patched(owner, name, make)

    return fault


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device (planted)")


@contextmanager
def disk_errors(chance: Chance, folder: Path) -> Iterator[None]:
    """Opening a file below the run's folder fails."""

    def make(original: Any) -> Any:
        def opening(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            below = isinstance(file, str | Path) and str(file).startswith(str(folder))
            if below and set(mode) & set("wxa+") and chance.strikes():
                raise _full()
            return original(file, mode, *args, **options)

        return opening

    with _patched(io, "open", make), _patched(builtins, "open", make):
        yield


@contextmanager
def quota(chance: Chance, _: Path) -> Iterator[None]:
    """No file may grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (chance.random.choice([0, 5_000, 50_000]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def few_handles(chance: Chance, _: Path) -> Iterator[None]:
    """Few more files may be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(
        int(each.name) for each in Path("/proc/self/fd").iterdir()
    ) + chance.random.randrange(2, 12)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def few_keys(chance: Chance, _: Path) -> Iterator[None]:
    """Few of the process's 1,024 thread keys are available."""
    # A real MLFlowLogger has imported it: pyarrow, which it imports, crashes without a key.
    importlib.import_module("mlflow")
    libc, keys = ctypes.CDLL(None), list[int]()
    key = ctypes.c_uint()
    while libc.pthread_key_create(ctypes.byref(key), None) == 0:
        keys.append(key.value)
    for each in keys[: chance.random.randrange(3, 20)]:
        libc.pthread_key_delete(ctypes.c_uint(each))
    yield


@contextmanager
def jumping_clock(chance: Chance, _: Path) -> Iterator[None]:
    """The wall clock jumps by hours, back and forth."""

    def make(original: Any) -> Any:
        return lambda: original() + chance.random.choice([0, 1e4, -1e4])

    with _patched(time, "time", make):
        yield


class _Event(L.Callback):
    """Performs an action before one batch."""

    def __init__(self, batch: int, act: Callable[[], object]) -> None:
        self.batch, self.act = batch, act

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop._batches_that_stepped == self.batch:
            self.act()


#: Actions within the training, as a callback.
_EVENTS: list[L.Callback] = []


def _at_a_batch(act: Callable[[Chance, Path], object]) -> Fault:
    @contextmanager
    def fault(chance: Chance, folder: Path) -> Iterator[None]:
        def acting() -> None:
            with suppress(
                OSError
            ):  # another fault may break this one, which is not the training's error
                act(chance, folder)

        _EVENTS.append(_Event(chance.random.randrange(BATCHES), acting))
        yield

    return fault


def _remove(_: Chance, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _occupy(_: Chance, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("not a folder")


def _lock(_: Chance, folder: Path) -> None:
    for place in [folder, *folder.rglob("*")]:
        if place.is_dir():
            place.chmod(0o500)


def _fork(chance: Chance, _: Path) -> None:
    if (pid := os.fork()) == 0:
        if chance.random.random() < 0.5:
            os._exit(0)
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)


def _spawn(chance: Chance, _: Path) -> None:
    how = multiprocessing.get_context("fork")
    process = how.Process(target=gc.collect)
    process.start()
    process.join()


def _signal(_: Chance, __: Path) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def _close_output(_: Chance, __: Path) -> None:
    sys.stdout.close()


def _collect(_: Chance, __: Path) -> None:
    gc.collect()


@contextmanager
def own_profile(_: Chance, __: Path) -> Iterator[None]:
    """The user has a profile function."""

    def called(*_: Any) -> None:
        pass

    sys.setprofile(called)
    yield
    if sys.getprofile() is called:  # otherwise it is reported as left
        sys.setprofile(None)


@contextmanager
def strict_warnings(_: Chance, __: Path) -> Iterator[None]:
    """Our warnings are errors."""
    from lightning_perf.errors import PerfWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", PerfWarning)
        yield


@contextmanager
def bad_nvml(chance: Chance, _: Path) -> Iterator[None]:
    """An NVIDIA driver whose calls fail."""
    nvml = FakeNvml(FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    for name in [name for name in dir(nvml) if name.startswith("nvmlDevice")]:
        original = getattr(nvml, name)

        def call(*args: Any, original: Any = original) -> Any:
            if chance.strikes():
                raise chance.random.choice(
                    [nvml.NVMLError_GpuIsLost("lost"), nvml.NVMLError_Unknown("?"), OSError("x")]
                )
            return original(*args)

        setattr(nvml, name, call)
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]
    yield


class _Tracked(trackers.Tracker):
    """A tracker that loses, refuses and delays uploads."""

    chance: Chance

    @classmethod
    def of(cls, logger: Any) -> Any:
        return cls()

    @classmethod
    def at(cls, address: Any) -> Any:
        return None

    @property
    def address(self) -> dict[str, str]:
        return {"nowhere": "1"}

    def upload(self, path: Path, remote: str) -> None:
        path.read_bytes()
        choice = self.chance.random.random()
        if choice < 0.3:
            raise OSError("the network is down (planted)")
        if choice < 0.5:
            time.sleep(1.0)
        if choice < 0.55:
            time.sleep(8)


@contextmanager
def bad_network(chance: Chance, _: Path) -> Iterator[None]:
    """Uploads fail, take long, or hang."""
    _Tracked.chance = chance
    with _patched(trackers, "installed", lambda _: lambda: (_Tracked,)):
        yield


class MLFlowLogger(Records):
    """Lightning's class name, with an unreachable server."""

    run_id, _tracking_uri = "0" * 32, "http://127.0.0.1:9"


@contextmanager
def no_server(_: Chance, __: Path) -> Iterator[None]:
    """MLflow's server is unreachable."""
    global _LOGGER
    _LOGGER = MLFlowLogger
    yield


_LOGGER: type[Records] = Records


@contextmanager
def dying_recorders(chance: Chance, _: Path) -> Iterator[None]:
    """Recorders raise when they start, at a batch, or when they stop."""
    kinds = (PyTorch, VizTracer, Memray)

    def make(original: Any) -> Any:
        def record(self: Profiler, *args: Any) -> Any:
            when = chance.random.choice(["start", "stop", "never"]) if chance.strikes() else ""
            if when == "start":
                raise RuntimeError("the recorder died at its start (planted)")
            recorded = yield from original(self, *args)
            if when == "stop":
                raise MemoryError("the recorder died at its end (planted)")
            return recorded

        return record

    from contextlib import ExitStack

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_patched(kind, "record", make))
        yield


def _broken() -> Exception:
    return random.choice([MemoryError, ValueError, KeyError, RuntimeError])("planted")


def _seams() -> dict[str, Fault]:
    """Every interface, by name."""
    from lightning_perf import files
    from lightning_perf.flops import counter
    from lightning_perf.run import signals, summary, windows

    def no_thread() -> Exception:
        return RuntimeError("can't start new thread (planted)")

    return {
        "disk errors": disk_errors,
        "disk errors in rename": _failing(Path, "replace", _full),
        "disk errors in mkdir": _failing(Path, "mkdir", _full),
        "disk errors in fsync": _failing(files, "_sync", _full),
        "disk errors in unlink": _failing(Path, "unlink", _full),
        "slow disk": _failing(files, "_sync", None),
        "quota": quota,
        "folder removed": _at_a_batch(_remove),
        "folder occupied": _at_a_batch(_occupy),
        "folder locked": _at_a_batch(_lock),
        "few handles": few_handles,
        "few thread keys": few_keys,
        "no new threads": _failing(threading.Thread, "start", no_thread),
        "jumping clock": jumping_clock,
        "network": bad_network,
        "MLflow is gone": no_server,
        "NVML": bad_nvml,
        "sensors raise": _failing(psutil, "cpu_times", lambda: psutil.AccessDenied()),
        "sensors raise (process)": _failing(psutil.Process, "memory_info", lambda: OSError("x")),
        "slow sensors": _failing(psutil, "virtual_memory", None),
        "recorders die": dying_recorders,
        "callback raises": _failing(WindowCallback, "receive", _broken),
        "snapshot raises": _failing(windows.Windows, "report", _broken),
        "memory signal raises": _failing(signals.MemorySignal, "totals", _broken),
        "counting raises": _failing(counter.FlopCounter, "_count", _broken),
        "summary raises": _failing(summary, "end_summary", _broken),
        "json raises": _failing(json, "dumps", _broken),
        "fork": _at_a_batch(_fork),
        "child process": _at_a_batch(_spawn),
        "signal": _at_a_batch(_signal),
        "output closed": _at_a_batch(_close_output),
        "collection": _at_a_batch(_collect),
        "user's profile function": own_profile,
        "warnings are errors": strict_warnings,
    }


# -- how the user's code ends the training --------------------------------------------------------


def _raise(error: type[BaseException]) -> None:
    raise error("the user's own")


ENDS: dict[str, Callable[[], object] | None] = {
    "well": None,
    "error": lambda: _raise(ZeroDivisionError),
    "exit": lambda: sys.exit(3),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
}


def plan(seed: int) -> tuple[str, int, list[str]]:
    """How a run ends, in which batch, and its faults."""
    chance = random.Random(seed)
    end = chance.choice(["well"] * 3 + list(ENDS))
    names = list(_seams())
    return end, 20, sorted(chance.sample(names, chance.choice([1, 1, 2, 3, 5])))


def _profilers(chance: random.Random) -> list[L.Callback]:
    def when() -> str:
        first, lasting = chance.randrange(3, 9), chance.randrange(1, 4)
        return chance.choice([f"every {first}ba for {lasting}ba", "at 0.5dur for 3ba", "always"])

    made: list[L.Callback] = [
        PyTorch(schedule=when(), batches_per_trace=6),
        VizTracer(schedule=when(), batches_per_trace=6),
        Memray(schedule=when(), batches_per_trace=6, compress=chance.random() < 0.5),
        MemorySnapshot(schedule=when()),
        PyTorch(schedule=OnSignal(lasting="2ba"), folder="{run_name}/on_signal"),
    ]
    return chance.sample(made, chance.randrange(1, 5))


# -- one run ------------------------------------------------------------------------------------


def play(folder: Path, seed: int, end: str, at: int, faults: list[str], ours: bool) -> None:
    """Train in this process, and write the result to ``result.json``."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_perf").addHandler(logging.NullHandler())
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    contexts.UPLOAD_TIMEOUT |= {"teardown": 1.0, "exception": 1.0}
    signal.signal(signal.SIGUSR2, lambda *_: None)
    chance, root = Chance(seed), folder / "root"
    root.mkdir()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGURG)}
    found: dict[str, Any] = {}
    try:
        found["outcome"] = _trained(chance, root, end, at, faults, ours)
        found["left"] = _left(handlers)
    except BaseException:
        found["left"] = [traceback.format_exc()[-1500:]]
    Path(folder, "result.json").write_text(json.dumps(found))


def _trained(
    chance: Chance, root: Path, end: str, at: int, faults: list[str], ours: bool
) -> dict[str, Any]:
    from contextlib import ExitStack

    L.seed_everything(3, verbose=False)
    model, seams, error = Random(), _seams(), ""
    added: list[L.Callback] = []
    if ours:
        draws = random.Random(chance.random.random())
        added = [always_on(show_summary=draws.random() < 0.5), *_profilers(draws)]
        for part in added[0].parts:  # type: ignore[attr-defined]
            if isinstance(part, SystemMetrics):
                part._seconds = 0.02
    stack = ExitStack()
    for name in faults:
        stack.enter_context(seams[name](chance, root))
    events = list(_EVENTS) if ours else []
    act = ENDS[end]
    if act is not None:
        events.append(_Event(at, act))
    run = trainer(root, *events, *added, logger=_LOGGER(), max_epochs=3, limit_val_batches=2)
    watched = weakref.ref(run)
    try:
        run.fit(model)
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        failure.__traceback__ = None
    stack.close()
    steps = run.global_step
    _EVENTS.clear()
    events.clear()
    del run
    gc.collect()
    weights = [each.detach().double().sum().item().hex() for each in model.parameters()]
    state = torch.get_rng_state().sum().item()
    model._trainer = None  # the module's own reference
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    del model
    gc.collect()
    # On a busy machine, a thread of ours that is ending may still reference it.
    until = time.monotonic() + PATIENCE
    while ours and watched() is not None and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    kept = watched() is not None and ours
    return {"error": error, "weights": weights, "state": state, "steps": steps, "kept": kept}


def _left(handlers: dict[Any, Any]) -> list[str]:
    """Resources that should have been released."""
    until = time.monotonic() + PATIENCE

    def left() -> list[str]:
        threads = [f"thread {t.name}" for t in threading.enumerate() if "lightning_perf" in t.name]
        children = [f"process {child.name()}" for child in psutil.Process().children()
                    if child.status() != psutil.STATUS_ZOMBIE]  # fmt: skip
        # Lightning reinstalls our handler after its release; then it only calls the earlier one.
        used = {number: signal.getsignal(number) for number in handlers}
        changed = [f"handler of {n.name}: {h!r}" for n, h in used.items()
                   if h != handlers[n] and not getattr(h, "released", False)]  # fmt: skip
        if sys.getprofile() is not None:
            changed.append("a profile function")
        if not gc.isenabled():
            changed.append("collection is off")
        if contexts._CONTEXTS:
            changed.append("a context")
        return threads + children + changed

    while (found := left()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    return found


# -- many runs ----------------------------------------------------------------------------------


def verdict(folder: Path, code: int, expected: dict[str, Any]) -> tuple[str, str]:
    """The outcome of a run in one word, and the details."""
    try:
        found = json.loads((folder / "result.json").read_text())
    except OSError:
        return "DIED", f"exit code {code}"
    if "outcome" not in found:
        return "DIED", str(found["left"])
    outcome = found["outcome"]
    kept = outcome.pop("kept")
    if outcome != expected:
        return "DIFFERS", f"{outcome} instead of {expected}"
    if found["left"]:
        return "LEFT", ", ".join(found["left"])
    if kept:
        return "KEPT", "the Trainer is alive"
    try:
        with suppress(NotADirectoryError):
            _check_files(folder / "root")
    except Exception as error:
        return "BAD FILE", f"{type(error).__name__}: {error}"
    return "same", ""


def _check_files(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".gz") and not path.name.startswith("."):
            text = path.read_bytes()
            if path.suffix == ".gz":
                import gzip

                text = gzip.decompress(text)
            if path.name.endswith((".json", ".json.gz")):
                json.loads(text)


def main() -> int:
    """Run; return the number of runs that did not end as expected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no run after these.")
    parser.add_argument("--only", default="", help="Runs with a fault of this name alone.")
    parser.add_argument("--show", action="store_true", help="Show what each run wrote.")
    given = parser.parse_args()
    from chaos import play as job  # as the forked process imports it

    counts: Counter[tuple[str, str]] = Counter()
    bad, done, fork_server, expected = 0, 0, ForkServer(), dict[str, Any]()
    until = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        for seed in range(given.seed, given.seed + given.runs):
            if time.monotonic() > until:
                break
            done += 1
            end, at, faults = plan(seed)
            if given.only:
                faults = [given.only]
            folder = Path(scratch, str(seed))
            if end not in expected:
                plain = Path(scratch, f"plain-{end}")
                fork_server.run(plain, job, plain, 0, end, at, [], False)
                result = json.loads((plain / "result.json").read_text())
                expected[end] = {k: v for k, v in result["outcome"].items() if k != "kept"}
            try:
                code = fork_server.run(folder, job, folder, seed, end, at, faults, True).code
                word, why = verdict(folder, code, expected[end])
            except AssertionError as hung:
                word, why = "HUNG", str(hung)[-1500:]
            bad += word != "same"
            counts.update((fault, word) for fault in faults)
            print(f"seed {seed}: {word}; ends {end}; {', '.join(faults)}; {why}", flush=True)
            if word != "same" or given.show:
                print("  " + (folder / "stderr").read_text()[-3000:].replace("\n", "\n  "))
            _lock_off(folder)
            shutil.rmtree(folder, ignore_errors=True)
        fork_server.close()
    words = ["same", *sorted({word for _, word in counts} - {"same"})]
    table = Table("fault", "runs", *words)
    for fault in sorted({fault for fault, _ in counts}):
        each = [counts[fault, word] for word in words]
        table.add_row(fault, *map(str, (sum(each), *each)))
    Console(width=120).print(table)
    print(f"{done} runs from seed {given.seed}: {done - bad} as without us, {bad} not")
    return bad


def _lock_off(folder: Path) -> None:
    for place in [folder / "root", *folder.rglob("*")]:
        if place.is_dir():
            place.chmod(0o700)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
