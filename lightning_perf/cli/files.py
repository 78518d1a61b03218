"""The commands about files: traces of the PyTorch profiler, and uploads."""

from __future__ import annotations

import os
import sys
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lightning_perf.cli import Failure, check_output, print_json
from lightning_perf.errors import describe, without_credentials, without_user
from lightning_perf.files import walked
from lightning_perf.terminal import new_console, say
from lightning_perf.traces.names import remote_format, split_url
from lightning_perf.traces.uploads import FILE_NAME, PendingUpload, taken_pending
from lightning_perf.tracking.installed import tracker_at
from lightning_perf.tracking.mlflow import MlflowRun, is_default_database
from lightning_perf.tracking.tracker import STORE, check_store, store_target
from lightning_perf.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_T = TypeVar("_T")


def trace(
    file: str | None = None,
    *,
    combine: str | None = None,
    output: str = "all.json.gz",
    window: str | None = None,
    json: bool = False,
) -> int:
    """Summarize a trace of the PyTorch profiler, or merge those of all ranks for Perfetto.

    Args:
        file: The trace to summarize: .json or .json.gz.
        combine (FOLDER): Merge the traces of this folder.
        output (FILE): The file to write.
        window: Which window if there are several, such as 12 for rank0.12.pt.trace.json.gz, and
            validate/12 for that of validation.
        json: Print JSON.
    """
    if file is not None and combine is None:
        _summarize(Path(file), json)
    elif file is None and combine is not None:
        target = Path(output)
        # The user's own link; not /dev/stdout, which may be one to a file of the shell.
        if target.is_symlink() and not target.is_relative_to("/dev"):
            target = target.resolve()
        _merge(Path(combine), window, target, json)
    else:
        raise Failure("name either a trace or --combine FOLDER")
    return 0


def _summarize(path: Path, json: bool) -> None:
    from rich.table import Table

    from lightning_perf.traces.summary import facts, summarize, tables

    summary = summarize(path).as_dict()
    if json:
        print_json(summary)
        return
    console = new_console()
    grid = Table(show_header=False)
    for fact in facts(summary):
        grid.add_row(*fact)
    console.print(grid)
    for title, headings, rows in tables(summary):
        console.print(title, style="bold")
        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in summary["notes"]:
        console.print(f"Note: {note}.", soft_wrap=True)


def _tracked(items: Sequence[_T], what: str) -> Iterable[_T]:
    """The items, with a progress bar on a terminal."""
    from rich.progress import track

    console = new_console(stderr=True)
    if not console.is_terminal:
        return items  # rich before 14.3 prints an empty line, even for a bar that is disabled
    return track(items, what, console=console, transient=True)


def _merge(folder: Path, window: str | None, target: Path, json: bool) -> None:
    from lightning_perf.traces import combine

    check_output(target, combine.BEGINNING)  # before seconds of reading
    traces = combine.find_window(folder, window)
    for trace in _tracked(traces, "reading"):
        combine.read_head(trace)
    combine.check(traces)
    events = combine.write(_tracked(traces, "writing"), target, traces[0].base)
    ranks = [trace.rank for trace in traces]
    missing = sorted({*range(traces[0].head["world_size"])} - {*ranks})
    if json:
        found = {"file": str(target), "events": events, "ranks": ranks, "missing_ranks": missing}
        print_json(found)
        return
    say(f"{target}: {counted(len(ranks), 'rank')}, {events:,} events")
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        say(f"No traces of ranks {', '.join(map(str, missing[:10]))}{more}.")


# -- uploads --------------------------------------------------------------------------------------


def upload(
    folder: str = ".",
    *,
    tracking_uri: str | None = None,
    to: list[str] | None = None,
    outside: bool = False,
    json: bool = False,
) -> int:
    """Upload the files listed in pending_uploads.jsonl, each to its MLflow run or store.

    Files go only to the tracking server that --tracking-uri or MLFLOW_TRACKING_URI names, and to
    the places of --to; for others, the message says which option to add. The lists contain no
    passwords; those of stores are read from fsspec's settings, or from the URL of --to.

    Args:
        folder: The folder to search for lists, with subfolders.
        tracking_uri (ADDRESS): The MLflow tracking address to use instead of the listed one, for
            example with a password; by default MLFLOW_TRACKING_URI, or ./mlflow.db. It gets your
            credentials.
        to (URL): Also send what is listed for this place, such as s3://bucket or
            file:///mnt/traces, or below it. May be repeated. Only for lists that you trust.
        outside: Also upload files outside of the folder of their list. Only for lists that you
            trust: they could name any of your files.
        json: Print JSON.
    """
    if not Path(folder).is_dir():
        raise Failure(f"there is no folder {folder}")
    send = partial(_send, outside=outside, places=NamedPlaces(tracking_uri, to or ()))
    # Otherwise the server decides for how many days MLflow waits before it tries again.
    os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")
    sent, unread = list[tuple[str, str]](), list[OSError]()
    # Hidden folders belong to other tools and may be large.
    below = walked(Path(folder), enters=lambda name: name[0] != ".", failed=unread.append)
    places = [place for place, files in below if any(file.startswith(FILE_NAME) for file in files)]
    for place in places:
        try:
            sent += _send_all(place, send)
        except OSError as failed:  # those of other folders are sent nevertheless
            unread.append(failed)
    sent += ((str(error.filename), f"{error.strerror}; no list here was read") for error in unread)
    left = [each for each in sent if each[1]]
    for path, error in left:
        say(f"{path}: {error}", file=sys.stderr)
    done = len(sent) - len(left)
    if json:
        listed = [{"path": path, "error": error} for path, error in left]
        print_json({"uploaded": done, "left": listed})
    else:
        nothing = f"nothing to upload: there is no {FILE_NAME} below {folder}"
        say(f"{done} uploaded, {len(left)} left" if places or left else nothing)
    return 1 if left else 0


def _send_all(place: Path, send: Callable[[PendingUpload, Path], str]) -> list[tuple[str, str]]:
    """Upload what a folder lists; returns each path, and why it was not uploaded."""
    sent, damaged = [], dict[bytes, None]()
    with taken_pending(place, damaged) as left:
        for key, entry in _tracked(list(left.items()), "uploading"):
            error = send(entry, place)
            sent.append((entry.path, error))
            # An entry that is left stays as it is: with other errors, the list could become larger
            # than what is read.
            if not error:
                del left[key]
    return [*sent, *((str(place / FILE_NAME), "a damaged line") for _ in damaged)]


class NamedPlaces:
    """The places that the user names, by the environment or an option: files go nowhere else.

    A list is data of a stranger. It may ask to overwrite any file through a store that is a folder,
    or to send the credentials of the environment to any server.
    """

    def __init__(self, tracking_uri: str | None, to: Sequence[str]) -> None:
        self._tracking_uri, self._to = tracking_uri, to
        self.at = cache(self._at)  # each is checked once
        # Errors of servers that did not answer: MLflow takes minutes to give up.
        self._silent: dict[str, str] = {}

    def _at(self, items: frozenset[tuple[str, str]]) -> _Destination | str:
        """The destination at an address, or why nothing can be sent to it."""
        address = dict(items)
        if STORE in address:
            own = (each for each in self._to if _is_below(address[STORE], _base(each)))
            url = _base(next(own, address[STORE]))  # with the user's password
            check_store(url)
            store = store_target(url)
            if store is None:
                return "its entry names no store"
            return _Destination(store.send, [_base(address[STORE])])
        own_server = True
        if "tracking_uri" in address:
            listed = address["tracking_uri"]
            given = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
            if given and (self._tracking_uri or _is_same(listed, given)):
                address["tracking_uri"] = given
            elif is_default_database(listed):
                own_server = False
            else:
                return (
                    f"it is listed for {without_credentials(listed)}, which neither "
                    "MLFLOW_TRACKING_URI nor an option names: if you trust that server with your "
                    f"password, try --tracking-uri {without_credentials(listed)}"
                )
        tracker = tracker_at(address)
        if tracker is None:
            return "its entry names no run that an installed tracker knows"
        if not isinstance(tracker, MlflowRun):
            places = [f"{key}://{value}" for key, value in sorted(address.items())]
            destination = _Destination(tracker.upload_later, places)
            return self.refuse(destination, "") or tracker.problem() or destination
        return self._in_mlflow(tracker, own_server)

    def _in_mlflow(self, run: MlflowRun, own_server: bool) -> _Destination | str:
        """As `_at`, for a run of MLflow, whose server decides where the files are."""
        if problem := run.problem() or self._silent.get(run.tracking_uri):
            return problem
        try:
            place = run.files_place(own_server)
        except Exception as error:
            if _is_unanswered(error):
                self._silent[run.tracking_uri] = describe(error)
            raise
        known = [] if own_server else [f"file://{Path.cwd()}"]
        return _Destination(run.upload_later, [place], known)

    def refuse(self, destination: _Destination, remote: str) -> str:
        """Why a file may not be sent; empty if it may."""
        for place in destination.places:
            whole = f"{place}/{remote.lstrip('/')}"
            named = (*self._to, *destination.known)
            if place and not any(_is_below(whole, each) for each in named):
                local = _folder_of(whole)
                try_this = f"file://{local.parent}" if local else place
                return (
                    f"it would be sent to {without_credentials(whole)}, a place that you have not "
                    f"named: if you trust this list, try --to {without_credentials(try_this)}"
                )
        return ""


class _Destination(NamedTuple):
    """Where files are sent."""

    send: Callable[[Path, str], None]
    #: The URLs below which they are sent; those that are not empty must be named.
    places: Sequence[str]
    #: URLs that need not be named.
    known: Sequence[str] = ()


def _base(url: str) -> str:
    """The URL of a store without a path."""
    protocol, host, _ = split_url(url)
    return f"{protocol}://{host}" if protocol else url


def _is_unanswered(error: BaseException | None) -> bool:
    """Whether a server did not answer; not if it answered each time that it has no time."""
    if isinstance(error, OSError) and type(error).__name__ != "RetryError":
        return True
    return error is not None and _is_unanswered(error.__context__)


def _is_same(one: str, other: str) -> bool:
    return without_credentials(one).rstrip("/") == without_credentials(other).rstrip("/")


def _folder_of(url: str) -> Path | None:
    """The path that a URL of this machine's files means, through links; None for others."""
    protocol, host, path = split_url(url)
    local = protocol.lower() in ("file", "local") and not host
    return Path("/", path).resolve() if local else None


def _is_below(place: str, root: str) -> bool:
    """Whether a URL is another one, or below it; that of the user may have a password."""
    here, folder = _folder_of(place), _folder_of(root)
    if here is not None or folder is not None:
        return here is not None and folder is not None and here.is_relative_to(folder)
    (*mine, path), (*named, above) = split_url(place), split_url(without_user(root))
    return mine == named and PurePosixPath(path).is_relative_to(above.rstrip("/"))


def _send(entry: PendingUpload, place: Path, outside: bool, places: NamedPlaces) -> str:
    """Upload a file listed in the folder ``place``; returns why it stays listed, or nothing."""
    try:
        path = Path(entry.path).resolve()
        if not path.is_file():
            return f"the file is missing; delete its line of {FILE_NAME} to forget it"
        if not (outside or path.is_relative_to(place.resolve())):
            return "the file is outside of its list's folder; try --outside"
        remote_format(entry.remote.replace("{", "{{").replace("}", "}}"))
        destination = places.at(frozenset(entry.target.items()))
        if isinstance(destination, str):
            return destination
        if refused := places.refuse(destination, entry.remote):
            return refused
        destination.send(path, entry.remote)
    except Exception as error:  # of the target, or a path with a null byte
        return describe(error)
    return ""
