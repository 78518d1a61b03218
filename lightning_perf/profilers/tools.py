"""The tools behind the profilers: options, conflicts, and programs that process their files."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import Parameter, Signature, signature
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from lightning_perf.background import wait_until
from lightning_perf.checks import flag, whole
from lightning_perf.errors import ConfigError, RecorderBusy, describe, did_you_mean
from lightning_perf.run import compat
from lightning_perf.timing.clock import collection_callback

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Bytes at the end of a JSON file that hold its last brace.
_END = 16
#: Seconds that a program may take, and that a garbage collection on another thread is waited for.
_TIMEOUT, _COLLECTION_TIMEOUT = 300.0, 5.0


def defaults(tool: Any, ours: Collection[str]) -> dict[str, Any]:
    """The arguments of a tool but ours, with their defaults; None where there is no default.

    Example:
        >>> def profile(activities=None, schedule=None, with_modules=False): ...
        >>> defaults(profile, ours={"schedule"})
        {'activities': None, 'with_modules': False}
    """
    return {
        name: None if argument.default is Parameter.empty else argument.default
        for name, argument in signature(tool).parameters.items()
        if name not in ours
    }


def signature_of(profiler: type) -> Signature:
    """The signature of a profiler, with the arguments that its ``**kwargs`` passes to its base."""
    own = signature(profiler.__init__).parameters  # type: ignore[misc]
    parameters = [argument for name, argument in own.items() if name != "self"]
    if any(argument.kind is Parameter.VAR_KEYWORD for argument in parameters):
        parameters += (
            argument.replace(kind=Parameter.KEYWORD_ONLY)
            for name, argument in signature(profiler.__mro__[1]).parameters.items()
            if name not in own and argument.kind is not Parameter.VAR_KEYWORD
        )
    return Signature(sorted(parameters, key=attrgetter("kind")))


#: Names of our options in Lightning's profilers.
_OTHERS = {"dirpath": "folder"}


def check_options(
    profiler: type, options: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that are set: LightningCLI passes all arguments of the tool, as None.

    Refuses those that a tool does not have, and values of the wrong kind for a bool or an int.

    Raises:
        ConfigError: Suggests the most similar of the ``known`` arguments of the tool.

    Example:
        >>> class Tracer: ...
        >>> check_options(Tracer, {"log_gz": True}, {"log_gc": False})
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: log_gz=True is not an option of Tracer. Did you mean \
log_gc?
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            own = set(signature(profiler).parameters) - {"kwargs"}
            names = {*known, *own}
            hint = did_you_mean(
                _OTHERS.get(name, name), names, f"It has {', '.join(sorted(names))}"
            )
            raise ConfigError(name, value, f"is not an option of {profiler.__name__}. {hint}", None)
        if isinstance(known[name], bool):
            flag(name, value)
        elif isinstance(known[name], int) and not isinstance(value, float):
            given[name] = whole(name, value, min(known[name], 1), str(known[name]))
    return given


@contextmanager
def blaming(options: Mapping[str, Any]) -> Iterator[None]:
    """Turn a ``TypeError`` or ``ValueError`` of a tool about its options into a ``ConfigError``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not options:
            raise
        problem = f"was refused ({describe(error)})"
        raise ConfigError("options", dict(options), problem, None) from error


#: The remedy for two tools that cannot record beside each other.
REMOVE_ONE = "remove one of the two"


def refuse_torch_profiler(profiler: object, context: Run) -> None:
    """Refuse to start torch.profiler beside another one: each would empty the other's trace.

    Lightning's is refused in all windows, since it may start in any of them.
    """
    name = type(getattr(context.trainer, "profiler", None)).__name__
    if name == "PyTorchProfiler":
        raise RecorderBusy(type(profiler).__name__, f"Trainer(profiler={name}())", REMOVE_ONE)
    if torch_profilers.busy:
        raise RecorderBusy(type(profiler).__name__, "another torch.profiler", REMOVE_ONE)


class TorchProfilers:
    """Notices torch profilers of others during a run.

    A process has one: torch crashes if a second one starts while the first one warms up.
    """

    def __init__(self) -> None:
        #: The profilers of ours that give way.
        self._ours: WeakSet[Any] = WeakSet()
        self._undo: Callable[[], None] | None = None
        #: Whether a profiler of ours starts now.
        self._starting = False
        #: The last profiler of others, and its results before it.
        self._other: tuple[Callable[[], Any], object] = (lambda: None), None

    def watch(self, profiler: object) -> None:
        """Until `forget`, call its ``make_way`` before another one begins to warm up or record."""
        self._ours.add(profiler)
        if self._undo is None:
            self._undo = compat.before_torch_profilers(self._make_way)

    def forget(self, profiler: object) -> None:
        """End what `watch` began."""
        self._ours.discard(profiler)
        if self._undo is not None and not self._ours:
            self._undo()
            self._undo = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A profiler of ours may start."""
        self._starting = True
        try:
            with no_collection():
                yield
        finally:
            self._starting = False

    @property
    def busy(self) -> bool:
        """Whether another profiler warms up or records."""
        find, results = self._other
        warms_up = (other := find()) is not None and (
            getattr(other, "kineto_results", None) is results
        )
        return warms_up or compat.is_profiled()

    def _make_way(self, profiler: Any) -> None:
        if not self._starting:
            for each in list(self._ours):
                each.make_way()
            self._other = weakref.ref(profiler), getattr(profiler, "kineto_results", None)


torch_profilers = TorchProfilers()


def refuse_python_profiler(profiler: object) -> None:
    """Refuse to record while cProfile or another VizTracer has the hook for Python calls."""
    if has_python_profiler():
        raise RecorderBusy(type(profiler).__name__, "another Python profiler", REMOVE_ONE)


def has_python_profiler() -> bool:
    """Whether another tool has the hook for Python calls on this thread.

    From Python 3.12 on, cProfile registers with ``sys.monitoring`` instead of ``sys.setprofile``.
    """
    hook = sys.getprofile()
    if hook is None and sys.version_info >= (3, 12):
        hook = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
    return hook is not None


def check_whole(path: Path) -> None:
    """Delete a truncated JSON file, which tools leave without an error on a full disk.

    Raises:
        OSError: The file does not end with ``}``, or does not exist.
    """
    with path.open("rb") as file:
        file.seek(-min(_END, path.stat().st_size), os.SEEK_END)
        if not file.read().rstrip().endswith(b"}"):
            path.unlink()  # it would take the space that training needs
            raise OSError("the file was cut short: is the disk full?")


@contextmanager
def plain_name(path: Path) -> Iterator[str]:
    """The path for tools that write it to JSON unescaped, or take UTF-8 only.

    It leads through a link if the folder has another name.
    """
    if (name := path.as_posix()).isprintable() and not {*'"\\'} & {*name}:
        yield name
        return
    with TemporaryDirectory(prefix="lightning_perf-") as folder:
        link = Path(folder, "link")
        link.symlink_to(path.parent.absolute())
        yield str(link / path.name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection while a profiler starts or stops.

    memray and torch (``with_stack``) walk the stacks of all threads, and torch hooks them. If a
    collection runs Python code meanwhile, on this thread or as another one enters a function, the
    profiler reads frames and hooks that no longer exist: the process crashes. So this waits for a
    collection on another thread, for some seconds at most.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        wait_until(_nothing_collects, _COLLECTION_TIMEOUT)
        yield
    finally:
        if enabled:
            gc.enable()


def _nothing_collects() -> bool:
    # While another thread collects, gc.collect() returns without calling the callbacks.
    ran: list[object] = []

    note = collection_callback(ran.append)
    gc.callbacks.append(note)
    gc.collect(0)
    gc.callbacks.remove(note)
    return bool(ran)


def run_program(command: str, *arguments: Path | str) -> str:
    """Run a command of ``lightning_perf.profilers.programs``; returns what it prints.

    It has a process of its own, so that training keeps the GIL. OSError has the last line of its
    error message.
    """
    with ExitStack() as links:
        named = (
            links.enter_context(plain_name(each)) if isinstance(each, Path) else each
            for each in arguments
        )
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-P", "-m", "lightning_perf.profilers.programs", command, *named],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT, check=False,
        )  # fmt: skip
    if done.returncode:
        # A reader written in C may crash on a damaged file without a message.
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise OSError(f"{command}: {lines[-1][-200:]}")
    return done.stdout
