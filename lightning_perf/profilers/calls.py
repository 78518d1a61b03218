"""VizTracer at work, in a training process and in its children."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from lightning_perf.profilers.tools import python_profiler

#: Each rank's processes have ids of their own: 10001 is the first child of rank 0.
_CHILDREN = 10_000

_recording: Any = None


def ready_tracer(rank: int, entries: int, options: Mapping[str, Any], child: int = 0) -> Any:
    """A VizTracer that is ready to start and leaves nothing behind but its file.

    One tracer per process and buffer size serves all windows: each tracer that is made takes a
    pthread key, of which a process has 1,024, and never frees it.

    Args:
        rank: Global rank.
        entries: The most calls that it remembers.
        options: Further arguments of VizTracer.
        child: The number of the child process that this is, or 0.
    """
    tracer = _tracer(os.getpid(), entries)
    name = f"rank {rank} {multiprocessing.current_process().name}" if child else f"rank {rank}"
    with _unhooked():
        tracer.__init__(
            entries,
            process_name=name,
            dump_raw=True,
            register_global=False,
            verbose=0,
            **options,
        )
    tracer.clear()
    # Processes of several nodes may share an id, and to VizTracer 0 is no id.
    tracer.setpid((rank + 1) * _CHILDREN + child % _CHILDREN if child else rank + 1)
    return tracer


@cache
def _tracer(pid: int, entries: int) -> Any:
    """The tracer of a process for one buffer size; a forked child makes its own."""
    kind = _reusable()
    return kind.__new__(kind, entries)


@cache
def _reusable() -> Any:
    from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]
    from viztracer.snaptrace import Tracer as Core  # type: ignore[import-untyped]

    class Once(Core):  # type: ignore[misc]
        """Takes the buffer and the pthread key at the first initialization only."""

        def __init__(self, entries: int) -> None:
            if "taken" not in self.__dict__:
                super().__init__(entries)
                self.taken = True

    class Reusable(Tracer, Once):  # type: ignore[misc]
        """Initialized again for each window, with the options of its profiler."""

    return Reusable


def start(tracer: Any) -> None:
    """Record; processes that are forked meanwhile do not go on with it."""
    global _recording
    _recording = tracer
    try:
        with _unhooked():
            if sys.version_info < (3, 12):  # from then on VizTracer sees all threads by itself
                threading.setprofile(tracer.threadtracefunc)
            tracer.start()
    except BaseException:
        _recording = None
        with suppress(Exception):
            tracer.stop()
        raise


def stop(tracer: Any, path: Path) -> None:
    """Stop, and save to a file of any name."""
    global _recording
    _recording = None
    tracer.stop()
    # Or threads that start later would call it in vain.
    if getattr(threading.getprofile(), "__self__", None) is tracer:
        threading.setprofile(None)
    # VizTracer chooses the format by the suffix.
    raw = path.with_name(f"{path.name}.json")
    try:
        tracer.save(str(raw), verbose=0)
    except ValueError as error:  # its word for a file that cannot be opened
        raise OSError(str(error)) from error
    finally:
        _let_go(tracer)
    raw.replace(path)


def _let_go(tracer: Any) -> None:
    """Free what the window held: the tracer itself is kept."""
    tracer.clear()
    tracer.data, tracer.torch_profile = {}, None
    tracer.log_gc = False  # or the list of the collector's callbacks would grow


def record_child(
    rank: int, entries: int, options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as ``children`` asks for it."""
    if python_profiler() is not None:
        return  # somebody else's
    tracer = ready_tracer(rank, entries, options, number)
    start(tracer)
    yield
    stop(tracer, path)
    yield
    if sys.getprofile() is tracer:  # the hook of a thread is its own
        sys.setprofile(None)


@contextmanager
def _unhooked() -> Iterator[None]:
    """Free the hook for Python's calls where VizTracer, which takes it first, fails."""
    try:
        yield
    except BaseException:
        sys.setprofile(None)
        threading.setprofile(None)
        raise


def _forget() -> None:
    global _recording
    if _recording is not None:
        _recording.stop()
        _recording = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
