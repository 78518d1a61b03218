"""VizTracer at work, in a training process and in its children."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Each rank's processes have ids of their own: 10001 is the first child of rank 0.
_CHILDREN = 10_000

_recording: Any = None


def new_tracer(rank: int, entries: int, options: Mapping[str, Any], child: int = 0) -> Any:
    """A VizTracer that leaves no trace but its file.

    Args:
        rank: Global rank.
        entries: The most calls that it remembers.
        options: Further arguments of VizTracer.
        child: The number of the child process that this is, or 0.
    """
    from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]

    name = f"rank {rank} {multiprocessing.current_process().name}" if child else f"rank {rank}"
    with _unhooked():
        tracer = Tracer(
            tracer_entries=entries,
            process_name=name,
            dump_raw=True,
            register_global=False,
            verbose=0,
            **options,
        )
    # Processes of several nodes may share an id, and to VizTracer 0 is no id.
    tracer.setpid((rank + 1) * _CHILDREN + child % _CHILDREN if child else rank + 1)
    return tracer


def start(tracer: Any) -> None:
    """Record; processes that are forked meanwhile do not go on with it."""
    global _recording
    _recording = tracer
    try:
        with _unhooked():
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
    raw.replace(path)


def record_child(
    rank: int, entries: int, options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as ``children`` asks for it."""
    if sys.getprofile() is not None:
        return  # somebody else's
    tracer = new_tracer(rank, entries, options, number)
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
