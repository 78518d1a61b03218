"""The command that uploads what trainings could not upload."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.cli import JSON, Failure, argument, command, flag, print_json
from lightning_perf.errors import describe
from lightning_perf.traces.names import remote_format
from lightning_perf.traces.uploads import FILE_NAME, PendingUpload, read_pending, rewrite_pending
from lightning_perf.tracking.tracker import STORE, check_store, store_target, tracker_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_perf.traces.uploads import Target

_Key = tuple[str, str, frozenset[tuple[str, str]]]
_MISSING = "the file is missing; --forget-missing removes it from the list"


@command(
    argument("folder", "The folder to search for lists, with subfolders.", nargs="?", default="."),
    argument(
        "--tracking-uri",
        "The tracking address to use instead of the listed one, for example with a "
        "password. MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD work, too.",
    ),
    flag("--forget-missing", "Remove missing files from the lists."),
    flag(
        "--outside",
        "Also upload files outside of the folder of their list. Only for lists that you "
        "trust: they could name any of your files.",
    ),
    JSON,
)
def upload(
    folder: str,
    tracking_uri: str | None,
    forget_missing: bool,
    json: bool = False,
    outside: bool = False,
) -> int:
    """Upload the files listed in pending_uploads.jsonl, each to its MLflow run or store.

    The lists contain no passwords; those of stores are read from fsspec's settings.
    """
    if not Path(folder).is_dir():
        raise Failure(f"there is no folder {folder}")
    target_at = cache(_target)  # each is checked once
    send = partial(_send, tracking_uri=tracking_uri, outside=outside, target_at=target_at)
    forgotten = _MISSING if forget_missing else ""
    sent = [each for place in _places(folder) for each in _send_all(place, send, forgotten)]
    for path, error in sent:
        if error:
            gone = "the file is missing and was removed from the list"
            print(f"{path}: {gone if error == forgotten else error}", file=sys.stderr)
    done = sum(not error for _, error in sent)
    left = [each for each in sent if each[1] not in ("", forgotten)]
    if json:
        listed = [{"path": path, "error": error} for path, error in left]
        print_json({"uploaded": done, "left": listed})
    else:
        print(f"{done} uploaded, {len(left)} left")
    return 1 if left else 0


def _send_all(
    place: Path, send: Callable[[PendingUpload, Path], str], forgotten: str
) -> list[tuple[str, str]]:
    """Upload what a folder lists; returns each path, and why it was not uploaded.

    Entries stay listed for other reasons than the forgotten one.
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    entries = {_key(entry): entry for entry in read_pending(place)}
    errors: dict[_Key, str] = {}
    try:
        for key in track(entries, "uploading", console=console, disable=not console.is_terminal):
            errors[key] = send(entries[key], place)
    finally:
        # Read again: a running training may have added entries.
        kept = [
            replace(each, error=errors.get(_key(each), each.error))
            for each in read_pending(place)
            if errors.get(_key(each)) not in ("", forgotten)
        ]
        rewrite_pending(place, kept)
    return [(entries[key].path, error) for key, error in errors.items()]


def _places(folder: str) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        # Hidden folders belong to other tools and may be large.
        below[:] = sorted(name for name in below if not name.startswith("."))
        if FILE_NAME in files:
            yield Path(place)


def _key(entry: PendingUpload) -> _Key:
    return entry.path, entry.remote, frozenset(entry.target.items())


def _send(
    entry: PendingUpload,
    place: Path,
    tracking_uri: str | None,
    outside: bool,
    target_at: Callable[[frozenset[tuple[str, str]]], Target | str],
) -> str:
    """Upload a file listed in the folder ``place``; returns why it stays listed, or nothing."""
    try:
        path = Path(entry.path).resolve()
        if not path.is_file():
            return _MISSING
        if not (outside or path.is_relative_to(place.resolve())):
            return "the file is outside of its list's folder; try --outside"
        remote_format(entry.remote.replace("{", "{{").replace("}", "}}"))
        address = dict(entry.target)
        if tracking_uri is not None and "tracking_uri" in address:
            address["tracking_uri"] = tracking_uri
        target = target_at(frozenset(address.items()))
        if isinstance(target, str):
            return target
        target.send(Path(entry.path), entry.remote)
    except Exception as error:  # of the target, or a path with a null byte
        return describe(error)
    return ""


def _target(items: frozenset[tuple[str, str]]) -> Target | str:
    """The target at an address, or why nothing can be sent to it."""
    address = dict(items)
    if STORE in address:
        check_store(address[STORE])
        return store_target(address[STORE]) or "its entry names no store"
    tracker = tracker_at(address)
    if tracker is None:
        return "its entry names no run that an installed tracker knows"
    return tracker.problem() or tracker.target
