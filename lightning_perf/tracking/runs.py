"""Reads a run back, from MLflow or from its folder."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from concurrent.futures import thread as pools
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_perf.background import Worker
from lightning_perf.errors import describe, did_you_mean, without_credentials
from lightning_perf.files import MOST_BYTES, files_below, limited, opened, parsed, walked
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.tracking.mlflow import (
    SUMMARY_TAG,
    MlflowRun,
    is_on_other_server,
    tracking_problem,
    use_for_artifacts,
)
from lightning_perf.tracking.summary import (
    FILE_NAME,
    PAGE_NAME,
    RATES,
    SUMMARIES,
    VERSION,
    SummaryError,
    read_summary,
    summaries_in,
    trains,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlflow import MlflowClient

    from lightning_perf.tracking.summary import Summary

T = TypeVar("T")

#: MLflow's own folders, which contain copies: of a client, and of a server's artifacts.
_COPIES = ("mlruns", "mlartifacts")
#: Levels of folders below the current one that are searched for runs.
_DEPTH = 4
#: The most runs of a name that are counted.
_MOST_COUNTED = 100
#: Limits of what a server answers: seconds to read a run, pages of experiments, and levels and
#: entries of a run's folders.
SECONDS, _MOST_PAGES, _LEVELS, MOST_ENTRIES = 120.0, 100, 32, 20_000
#: Bytes of memory with what a server answers: MLflow reads answers as a whole.
MOST_MEMORY = 2 << 30
#: The keys of the set-up in a run's param, with their types.
_SETUP = {
    "device": str, "world_size": int, "precision": str, "peak_flops": float, "peak_source": str,
}  # fmt: skip


class UnreadableError(LookupError):
    """MLflow has failed or has not answered in time."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as it is found in MLflow or in a folder."""

    #: Its name, and its id in MLflow or its folder.
    title: str
    summary: Summary
    #: The paths or addresses of all its files.
    files: tuple[str, ...]
    #: The address of MLflow; None for a folder.
    tracking_uri: str | None = None
    #: The run's page, below the address of MLflow's UI.
    page: str = ""
    #: A note if other runs have its name; otherwise empty.
    note: str = ""
    #: Why MLflow could not be searched for a later run; otherwise empty.
    unread: str = ""
    #: Which of its files is the page about it.
    report: str = ""


def find_run(what: str | None, tracking_uri: str | None) -> Run:
    """A run by its folder, its file, its id or its name; by default the latest one.

    Without an address, the folders below the current one are searched too, not only
    MLflow. Raises `LookupError` with one line if there is no such run or it cannot be read, and
    `ImportError` if MLflow is not installed.
    """
    if what is not None and Path(what).is_file():
        return read_folder(Path(what))
    folders = local_folders(what, tracking_uri)
    if what is not None and folders:
        found = read_folder(folders[-1])
        return replace(found, note=_note(len(folders)) or found.note)
    folder = folders[-1] if folders else None
    unread = ""

    def latest(client: MlflowClient) -> Run | None:
        runs = _find(client, what)
        if folder is not None and _is_older(runs[0], folder):
            return None
        return replace(_read(client, runs[0]), note=_note(len(runs)) if what is not None else "")

    try:
        if run := ask(tracking_uri or default_tracking_uri(), latest):
            return run
    except (LookupError, ImportError) as error:
        if folder is None:
            if tracking_uri is not None or address() or isinstance(error, ImportError):
                raise
            place = "" if what is None else f"in a folder {what} "
            missing = f"there is no {FILE_NAME} {place}below the current folder"
            names = [] if what is None else [each.name for each in folders_of(Path())]
            hint = did_you_mean(what, names)
            raise LookupError(f"{missing}, and {error}. {hint}".rstrip()) from error
        if isinstance(error, UnreadableError):
            unread = f"{without_credentials(default_tracking_uri())} could not be read ({error})"
    assert folder is not None  # otherwise there is a run, or an error
    return replace(read_folder(folder), unread=unread)


def run_in_mlflow(what: str, tracking_uri: str | None) -> MlflowRun:
    """A run of MLflow by its id or name, the latest of several.

    Raises:
        LookupError: There is no such run, or MLflow does not answer.
    """
    uri = tracking_uri or default_tracking_uri()
    return MlflowRun(uri, ask(uri, lambda client: str(_find(client, what)[0].info.run_id)))


def _note(count: int) -> str:
    return f"{count} runs have this name: this is the latest one" if count > 1 else ""


# -- folders ----------------------------------------------------------------------------------


def local_folders(what: str | None, tracking_uri: str | None) -> list[Path]:
    """The folders of the runs that a path or a name means, the latest last.

    A name with an address means runs in MLflow.
    """
    path = Path(what or ".")
    if what is not None and (os.sep in what or set(what) == {"."}):
        if path.exists():
            return [folder_of(path)]
        if what.startswith((".", os.sep)):
            raise SummaryError(f"{what} does not exist")
    if tracking_uri is not None:
        return []
    found = [] if what is None and address() else folders_of(Path(), what)
    if not found and what is not None and path.is_dir():
        with suppress(LookupError):  # it may be the name of a run, too
            found = [folder_of(path)]
    return found


def folders_of(root: Path, name: str | None = None) -> list[Path]:
    """The folders of runs below another one, the latest last; those of this name, if one is given.

    Packages predict with another Trainer after training: a finished run that did not train counts
    only if there is no other one.
    """
    found: list[tuple[int, float, Path]] = []
    for path, summary in summaries_below(root, _DEPTH):
        if name in (None, path.parent.name, summary["run"]):
            with suppress(OSError):  # it was deleted meanwhile
                found.append((trains(summary), path.stat().st_mtime, path.parent))
    trained = any(each[0] for each in found)
    latest = {folder: None for its, _, folder in sorted(found, reverse=True) if its == trained}
    return [*reversed(latest)]


def summaries_below(
    root: Path, levels: int, unreadable: list[SummaryError] | None = None
) -> Iterator[tuple[Path, Summary]]:
    """The summaries of each folder below another one, with their files; the latest last."""
    for folder, files in walked(root, levels, lambda name: name[0] != "." and name not in _COPIES):
        if any(map(SUMMARIES.fullmatch, files)):
            yield from summaries_in(folder, unreadable=unreadable)


def folder_of(path: Path) -> Path:
    """The folder of a run's file, of a run, or of the latest run below a folder."""
    folder = path.parent if path.is_file() else path
    if path.is_file() or summaries_in(folder):
        return folder
    found = next(reversed(folders_of(folder)), None)
    if found is None and not (folder / FILE_NAME).exists():
        above = [each for each in folder.absolute().parents if (each / FILE_NAME).is_file()]
        advice = f". Try {above[0]}" if above else ""
        raise SummaryError(f"there is no {FILE_NAME} below {folder}{advice}")
    return found or folder


def read_folder(path: Path) -> Run:
    """Read a run from its folder, from the latest one below a folder, or from its summary."""
    if path.is_file() and _begins_with(path, b"SQLite format 3"):
        raise SummaryError(f"{path} is a database. Try --tracking-uri sqlite:///{path}")
    folder, file = folder_of(path), path
    note = ""
    if not path.is_file():
        file, found = latest_in(folder)
        note = f"{found} runs left a summary there: this is the latest one" if found > 1 else ""
    summary = read_summary(file)
    files = tuple(sorted(str(each.resolve()) for each in files_below(folder)))
    page = folder / PurePosixPath(summary.get("report") or PAGE_NAME).name
    title = f"{summary['run']} ({file if note else folder})"
    return Run(title, summary, files, note=note, report=str(page.resolve()))


def latest_in(folder: Path) -> tuple[Path, int]:
    """The file of the latest summary in a folder, and how many there are."""
    found = summaries_in(folder)
    return (found[-1][0] if found else folder / FILE_NAME), len(found)


def _begins_with(path: Path, head: bytes) -> bool:
    with opened(path) as file:
        return file.read(len(head)) == head


# -- MLflow -----------------------------------------------------------------------------------


def default_tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or MLflow's default database in the current folder."""
    return address() or "sqlite:///mlflow.db"


def address() -> str:
    """The address of MLflow in the environment; empty if there is none."""
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def ask(tracking_uri: str, question: Callable[[MlflowClient], T]) -> T:
    """What a function returns for a client; any error is raised as `LookupError`.

    It runs on a thread that is not waited for any longer: a server decides how many pages there
    are, how slowly it sends them, and how long MLflow waits before it tries again.
    """
    # Before the address is checked, because no address helps without the package.
    from mlflow import MlflowClient

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    if problem := tracking_problem(tracking_uri):
        raise LookupError(problem)
    use_for_artifacts(tracking_uri)
    worker = Worker("lightning_perf reading MLflow")
    try:
        with limited(MOST_MEMORY, "DATA"):
            return worker.call(lambda: question(MlflowClient(tracking_uri)), SECONDS)
    except LookupError:
        raise
    except TimeoutError as error:
        # MLflow downloads in a pool, whose threads Python would wait for at its end.
        getattr(pools, "_threads_queues", {}).clear()
        place = without_credentials(tracking_uri)
        raise UnreadableError(f"{place} has not answered in full within {SECONDS:g} s") from error
    except Exception as error:  # MLflow, databases and networks raise many kinds of errors
        raise UnreadableError(describe(error)) from error
    finally:
        worker.close(0.0)


def _is_older(run: Any, folder: Path) -> bool:
    """Whether a run of MLflow ended before that of a folder, if they are not the same run."""
    ended = run.info.end_time or run.info.start_time
    later: bool = latest_in(folder)[0].stat().st_mtime > ended / 1e3
    return later and folder.name != run.info.run_name


def _find(client: MlflowClient, what: str | None) -> Sequence[Any]:
    """The runs with this id or name, or all, the latest first; at most as many as are counted."""
    from mlflow.exceptions import MlflowException

    named = ""
    if what is not None:
        with suppress(MlflowException):
            return [client.get_run(what)]
        quote = '"' if "'" in what else "'"
        named = f"attributes.run_name = {quote}{what}{quote}"
    experiments = [each.experiment_id for each in all_of(client.search_experiments)]
    newest = ["attributes.start_time DESC"]
    most = _MOST_COUNTED if named else 1
    found: Sequence[Any] = client.search_runs(experiments, named, order_by=newest, max_results=most)
    if not found and what is not None:
        others = client.search_runs(experiments, order_by=newest, max_results=_MOST_COUNTED)
        hint = did_you_mean(what, {each.info.run_name for each in others})
        raise LookupError(f"there is no run with the id or name {what}. {hint}".rstrip())
    if not found:
        raise LookupError("there is no run yet")
    return found


def all_of(search: Callable[..., Any]) -> Iterator[Any]:
    """The results of a search of MLflow, one request per page."""
    page = search()
    for _ in range(_MOST_PAGES):
        yield from page
        if not page.token:
            return
        page = search(page_token=page.token)


def _read(client: MlflowClient, run: Any) -> Run:
    paths = tuple(sorted(_paths(client, run.info.run_id))) if is_trusted(client, run) else ()
    # The tag names our own file: the user may have added summaries of other runs.
    own = run.data.tags.get(SUMMARY_TAG, "")
    found = downloaded(client, run, own) if own in paths else None
    root = without_credentials(run.info.artifact_uri or "").removeprefix("file://").rstrip("/")
    return Run(
        f"{run.info.run_name or run.info.run_id} ({run.info.run_id})",
        found or _from_metrics(client, run),
        tuple(f"{root}/{path}" for path in paths),
        client.tracking_uri,
        f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}",
        report=f"{root}/{own.removesuffix(FILE_NAME)}{PAGE_NAME}" if found else "",
    )


def _paths(client: MlflowClient, run_id: str) -> Iterator[str]:
    """The paths of a run's files, those of the upper folders first."""
    waiting, entries = deque[tuple[str | None, int]]([(None, 0)]), 0
    while waiting:
        folder, level = waiting.popleft()
        for entry in client.list_artifacts(run_id, folder):
            entries += 1
            if entries > MOST_ENTRIES:
                return
            if not entry.is_dir:
                yield entry.path
            elif level < _LEVELS:
                waiting.append((entry.path, level + 1))


def is_trusted(client: MlflowClient, run: Any) -> bool:
    """Whether a run's files may be read: its maker may have named any server.

    That one would get the user's password.
    """
    return not is_on_other_server(run.info.artifact_uri or "", client.tracking_uri)


def downloaded(client: MlflowClient, run: Any, summary: str) -> Summary:
    """A summary among a run's artifacts, by its path."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    download: Callable[..., str] = partial(client.download_artifacts, run.info.run_id)
    with suppress(TypeError):  # MLflow 2 has no such argument
        store = get_artifact_repository(run.info.artifact_uri, tracking_uri=client.tracking_uri)
        download = store.download_artifacts  # two requests instead of five
    with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
        with limited(MOST_BYTES):
            path = download(summary, scratch)
        return read_summary(Path(path))


def _from_metrics(client: MlflowClient, run: Any) -> Summary:
    """The last report of a run that has not ended or was killed, from its metrics."""
    metrics, run_id = run.data.metrics, run.info.run_id
    rates = {rate: key for rate, (*_, key) in RATES.items() if key in metrics}
    if "mfu" not in rates and (key := "throughput/device/mfu") in metrics:  # without Flops
        rates["mfu"] = key
    times = {name: key for name in CATEGORIES if (key := f"timings/{name}") in metrics}
    windows = {}
    for key in [*rates.values(), *times.values()][:1]:
        step = max(point.step for point in client.get_metric_history(run_id, key))
        windows["last_window"] = {
            "first": step,
            "last": step,
            "batches": 1,  # times are per batch
            "throughput": {rate: metrics[key] for rate, key in rates.items()},
            "timings": {name: metrics[key] for name, key in times.items()},
        }
    return {
        "version": VERSION,
        "run": run.info.run_name or run_id,
        "status": run.info.status.lower(),
        "setup": setup_of(run),
        "stages": {"train": windows} if windows else {},
    }


def setup_of(run: Any) -> dict[str, Any]:
    """The set-up of a run of MLflow, as far as its param contains it."""
    with suppress(ValueError, AttributeError):  # the user's own param
        known = parsed(run.data.params.get("lightning_perf", "{}"))
        return {key: known[key] for key in _SETUP if isinstance(known.get(key), _SETUP[key])}
    return {}
