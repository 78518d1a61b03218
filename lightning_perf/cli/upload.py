"""``lightning-perf upload``: upload the files that training could not upload."""

from __future__ import annotations

import json as json_format
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from lightning_perf.cli import fail
from lightning_perf.errors import describe
from lightning_perf.traces.names import remote_format
from lightning_perf.traces.uploads import FILE_NAME, PendingUpload, read_pending, rewrite_pending
from lightning_perf.tracking.stores import STORE, check_store, store_target
from lightning_perf.tracking.tracker import tracker_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_perf.traces import Target

_Key = tuple[str, str, frozenset[tuple[str, str]]]


def parser() -> ArgumentParser:
    """The arguments of the command."""
    parser = ArgumentParser(
        description=f"Upload the files listed in {FILE_NAME}, each to its MLflow run or store. "
        "The lists contain no passwords; those of stores are read from fsspec's settings."
    )
    parser.add_argument(
        "folder", nargs="?", default=".", help="The folder to search for lists, with subfolders."
    )
    parser.add_argument(
        "--tracking-uri",
        type=str,
        help="The tracking address to use instead of the listed one, for example with a password. "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD work, too.",
    )
    parser.add_argument(
        "--forget-missing", action="store_true", help="Remove missing files from the lists."
    )
    parser.add_argument(
        "--outside",
        action="store_true",
        help="Also upload files outside of the folder of their list. Only for lists that you "
        "trust: they could name any of your files.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(
    folder: str,
    tracking_uri: str | None,
    forget_missing: bool,
    json: bool = False,
    outside: bool = False,
) -> int:
    """Upload the listed files; code 1 if a file is left, 2 if the folder does not exist."""
    if not Path(folder).is_dir():
        return fail("upload", f"there is no folder {folder}")
    sender = _Sender(tracking_uri, forget_missing, outside)
    for place in _places(folder):
        _send_all(place, sender)
    for entry in sender.left:
        print(f"{entry.path}: {entry.error}", file=sys.stderr)
    if json:
        left = [{"path": entry.path, "error": entry.error} for entry in sender.left]
        print(json_format.dumps({"uploaded": sender.done, "left": left}))
    else:
        print(f"{sender.done} uploaded, {len(sender.left)} left")
    return 1 if sender.left else 0


def _places(folder: str) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        # Hidden folders belong to other tools and may be large.
        below[:] = sorted(name for name in below if not name.startswith("."))
        if FILE_NAME in files:
            yield Path(place)


def _send_all(place: Path, sender: _Sender) -> None:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    entries = {_key(entry): entry for entry in read_pending(place)}
    kept: dict[_Key, PendingUpload | None] = {}
    try:
        for key in track(entries, "uploading", console=console, disable=not console.is_terminal):
            kept[key] = sender.send(entries[key], place)
    finally:
        # Read again: a running training may have added entries.
        listed = [kept.get(_key(entry), entry) for entry in read_pending(place)]
        rewrite_pending(place, [entry for entry in listed if entry is not None])


def _key(entry: PendingUpload) -> _Key:
    return entry.path, entry.remote, frozenset(entry.target.items())


class _Sender:
    """Uploads listed files to their targets and counts the results."""

    def __init__(self, tracking_uri: str | None, forget_missing: bool, outside: bool) -> None:
        self.done = 0
        self.left: list[PendingUpload] = []
        self._override = {} if tracking_uri is None else {"tracking_uri": tracking_uri}
        self._forget_missing, self._outside = forget_missing, outside
        # By address, so that each is checked once: its target, or its problem.
        self._targets: dict[frozenset[tuple[str, str]], Target | str] = {}

    def send(self, entry: PendingUpload, place: Path) -> PendingUpload | None:
        """Try once; returns what stays on the list in the folder ``place``."""
        try:
            path = Path(entry.path).resolve()
            if not path.is_file():
                if self._forget_missing:
                    gone = "the file is missing and was removed from the list"
                    print(f"{entry.path}: {gone}", file=sys.stderr)
                    return None
                error = "the file is missing; --forget-missing removes it from the list"
            elif not (self._outside or path.is_relative_to(place.resolve())):
                error = "the file is outside of its list's folder; try --outside"
            else:
                error = self._upload(entry)
        except Exception as failure:  # of the target, or a path with a null byte
            error = describe(failure)
        if not error:
            self.done += 1
            return None
        kept = replace(entry, error=error)
        self.left.append(kept)
        return kept

    def _upload(self, entry: PendingUpload) -> str:
        """Upload a file; returns why its target takes none, or an empty text."""
        address = entry.target | (self._override if "tracking_uri" in entry.target else {})
        key = frozenset(address.items())
        remote_format(entry.remote.replace("{", "{{").replace("}", "}}"))
        if key not in self._targets:
            self._targets[key] = _target(address)
        target = self._targets[key]
        if isinstance(target, str):
            return target
        target.send(Path(entry.path), entry.remote)
        return ""


def _target(address: Mapping[str, str]) -> Target | str:
    """The target at an address, or why nothing can be sent to it."""
    if STORE in address:
        check_store(address[STORE])
        return store_target(address[STORE]) or "its entry names no store"
    tracker = tracker_at(address)
    if tracker is None:
        return "its entry names no run that an installed tracker knows"
    return tracker.problem() or tracker.target
