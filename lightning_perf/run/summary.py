"""The summary of a run: made from its windows and callbacks, during the run and at its end."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from lightning_perf.core.cost import cost_of, priced
from lightning_perf.core.goodput import FINISHED
from lightning_perf.core.progress import STAGES
from lightning_perf.core.window import throughput, utilization
from lightning_perf.errors import ConfigError, describe, own_errors_dropped, warn
from lightning_perf.files import files_below, finite, write_text, written_whole
from lightning_perf.run import compat, destination
from lightning_perf.run.compat import rank_zero_info
from lightning_perf.run.run import LONG, Run
from lightning_perf.run.window_log import table
from lightning_perf.system.process import is_alive, this_process
from lightning_perf.terminal import new_console, unread
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.traces.names import numbered
from lightning_perf.tracking.summary import (
    ATTEMPTS,
    FILE_NAME,
    PAGE_NAME,
    RUNNING,
    SUMMARIES,
    VERSION,
    SummaryError,
    main_stage,
    panel,
    read_summary,
    summaries_in,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.window import Window
    from lightning_perf.tracking.summary import Summary

    #: By stage: windows, each with the step of its first batch.
    _Windows = Mapping[str, Sequence[tuple[int, Window]]]

_STATUS = {"teardown": FINISHED, "exception": "stopped by an exception"}
_PACKAGES = ("lightning_perf", "lightning", "torch", "mlflow")
#: Suffixes of traces, after ``.gz`` is removed, and of pages.
_TRACES, _PAGES = (".json", ".bin", ".pickle"), (".html",)
#: Names of the page.
_PAGE = re.compile(r"report(?:-\d+)?\.html")
#: The stage of ``trainer.validate()``, which is not that inside of fit.
_ALONE = "validate_alone"
#: Evaluations of one kind in a file: the first one and the latest ones, since packages test once
#: per epoch.
_MOST_EVALUATIONS = 5
#: Characters of a time up to its milliseconds.
_MOMENT = len("2026-01-01T00:00:00.000")
#: Files listed at most, the latest by name.
_MOST_FILES = 1000
#: Seconds between updates of a run's summary, and the most of the time that these may take.
REFRESH, MOST_TIME = 2.0, 0.01
#: The summary of each Trainer's earlier functions, as it was before the current one.
_EARLIER: WeakKeyDictionary[Trainer, Summary] = WeakKeyDictionary()
#: The file of the last run of each Trainer of this process, and that run.
_FILES: WeakKeyDictionary[Trainer, tuple[Path, weakref.ref[Run]]] = WeakKeyDictionary()
#: The training thread and the one that makes files do not take two names for one run.
_CLAIMING = RLock()


def end_summary(context: Run, callbacks: Sequence[Any], reason: str) -> RunSummary | None:
    """Write the summary of a run at its end; return None if it is empty, or on other ranks."""
    if context.ranks.global_rank != 0 or reason not in _STATUS:
        return None
    try:
        sections: dict[str, Any] = {}
        for callback in callbacks:
            sections |= callback.call(callback.summary_sections) or {}
        if culprits := sections.get("culprits"):
            sections["overhead"] = _overhead(culprits, callbacks)
        summary = RunSummary(context, _STATUS[reason], _windows(context), sections, callbacks)
    except Exception as error:
        warn(f"the summary of the run was not made ({describe(error)}).")
        return None
    recorded = destination.saved_by(callbacks) or (
        context.leaves_files and summary.path.parent.exists()
    )
    if not (summary.content["stages"] or recorded):
        return None
    try:
        summary.write()
    except Exception as error:  # it is shown nevertheless
        warn(f"the summary of the run was not written ({describe(error)}).")
    return summary


def hang_summary(context: Run) -> None:
    """Write the summary so far and its page: while a training hangs, no report does."""
    if context.ranks.global_rank == 0:
        windows = _windows(context, now=False)
        RunSummary(context, RUNNING, windows, _sections(context)).write()


def add_hang(context: Run, hang: Mapping[str, Any]) -> None:
    """Add a hang to the summary of rank 0, from another rank of its machine, or replace it."""
    process = {"pid": context.processes.get(0), "host": this_process()["host"]}
    for path, summary in summaries_in(context.reporting.run_folder().folder, context.run_name):
        if summary["status"] == RUNNING and process.items() <= summary.get("process", {}).items():
            hangs = {each["began"]: each for each in (*summary.get("hangs", ()), hang)}
            write_text(path, text_of({**summary, "hangs": [*hangs.values()]}))


def _sections(context: Run) -> dict[str, Any]:
    """The verdicts and hangs so far; for any thread."""
    verdicts = [v.as_dict() for part in context.members for v in getattr(part, "verdicts", ())]
    hangs = [dict(hang) for part in context.members for hang in getattr(part, "hangs", ())]
    return {"verdicts": verdicts} | ({"hangs": hangs} if hangs else {})


def _windows(context: Run, now: bool = True) -> _Windows:
    """The windows of each stage, up to ``now`` on the training thread, or to the last report."""
    return {stage: context.windows.summary_windows(stage, now) for stage in STAGES}


class LiveSummary:
    """Keeps `summary.json` up to date on rank 0, for ``lightning-perf watch`` and after a kill."""

    def __init__(self) -> None:
        #: When the next update is due, in monotonic seconds.
        self.due = time.monotonic() + REFRESH
        self._watched = False

    def refresh(self, context: Run) -> None:
        """Start an update, on the training thread. The file is written on another thread."""
        began, self.due = time.monotonic(), inf  # until it is written
        root = context.reporting.root(None)
        # A trial leaves no file, and a store would get each version.
        local = not root.discards and root.mirror is None
        if context.ranks.global_rank == 0 and local and context.leaves_files:
            job = partial(self._write, context, _windows(context), time.monotonic() - began)
            if not context.file_worker.submit(job, "the summary so far"):
                self.due = began + REFRESH
        elif local:
            self.due = began + REFRESH

    def write(self, context: Run) -> None:
        """Write it without a report, on the thread that makes files."""
        self._write(context, _windows(context, now=False), 0.0)

    def _write(self, context: Run, windows: _Windows, spent: float) -> None:
        began = time.monotonic()
        # An error here occurs again at the end of the run, which warns.
        with own_errors_dropped():
            folder = context.reporting.run_folder().claim()
            summary = RunSummary(context, RUNNING, windows, _sections(context))
            if summary.join():
                return  # the training of another process has the file
            summary.claim()
            if page := (summary._earlier or {}).get("report"):  # made while it hung
                summary.content["report"] = page
            if not self._watched:
                # `watch PID` finds the folder because it is open until the end of the run.
                with suppress(OSError):  # Windows does not open folders
                    held = os.open(folder, os.O_RDONLY)
                    context.on_close(weakref.finalize(self, os.close, held))
                self._watched = True
            with written_whole(summary.path, durable=False) as file:
                file.write(json.dumps(finite(summary.content), default=str).encode())
            now = time.monotonic()
            self.due = now + max(REFRESH, (spent + now - began) / MOST_TIME)


class RunSummary:
    """The content of `summary.json`; ``callbacks`` are known at the end of the run only."""

    def __init__(
        self,
        context: Run,
        status: str,
        windows: _Windows,
        sections: Mapping[str, Any],
        callbacks: Sequence[Any] = (),
    ) -> None:
        self._context, self._callbacks, self._written = context, callbacks, False
        self._root = context.reporting.root(None)
        self.path, self._earlier = _file(context, context.reporting.run_folder().folder)
        stages = {stage: _stage_windows(each) for stage, each in windows.items()}
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        content: dict[str, Any] = {
            "version": VERSION,
            "run": context.run_name,
            "status": status,
            "updated" if status == RUNNING else "ended": now,
            "process": this_process(),
            "setup": _setup(context),
            "stages": {stage: windows for stage, windows in stages.items() if windows},
            **sections,
        }
        stage, figures = main_stage(content)
        content |= _job(context, content, stage, windows)
        log = context.windows.logs.get(stage)
        if log is not None and (history := table(log)):
            figures["windows"] = history
        if context.trainer.state.fn != "fit":
            mark = {"began": context.began, "status": status}
            content["stages"] = {
                _ALONE if name == "validate" else name: mark | figures
                for name, figures in content["stages"].items()
            }
        #: The content to show: of this function only.
        self._own = self.content = content

    def claim(self) -> None:
        """Take the name of the file: no other process, and no other Trainer, gets it then."""
        context, own = self._context, self._own
        folder = context.reporting.run_folder().claim()
        first = {key: own[key] for key in ("version", "run", "process")}
        text = json.dumps(first | {"status": RUNNING, "stages": {}})
        with _CLAIMING:
            while True:
                self.path, self._earlier = _file(context, folder)
                if self._earlier is not None:
                    break
                with suppress(FileExistsError):  # another process was first
                    with written_whole(self.path, durable=False, replaces=False) as file:
                        file.write(text.encode())
                    others = summaries_in(folder, own["run"])[:-1]
                    for other, _ in others[-1:]:
                        rank_zero_info(
                            f"lightning_perf: {other} is the summary of another run of this name "
                            f"and is kept: that of this run is {self.path.name}, and its page has "
                            "a number too."
                        )
                    break
            _FILES[context.trainer] = self.path, weakref.ref(context)

    def _page(self) -> str:
        """The page of the run, or an empty text; one of that name that is not ours stays."""
        page = str((self._earlier or {}).get("report", ""))
        if _PAGE.fullmatch(PurePosixPath(page).name):
            return page
        if not {"culprits", "hangs"} & self._own.keys():
            return ""
        folder = self.path.parent
        first = next(n for n in count(1) if numbered(FILE_NAME, n) == self.path.name)
        names = (numbered(PAGE_NAME, number) for number in count(first))
        name = next(name for name in names if not os.path.lexists(folder / name))
        return _shown(folder / name, self._root.path)

    def join(self) -> bool:
        """Add the stages of earlier functions of the run; whether another process trained.

        For a run with a fit, the fit is what the summary is about: an evaluation adds to it, and
        changes neither its status nor its time.
        """
        context, content = self._context, self._own
        earlier = self._earlier or _EARLIER.get(context.trainer)
        if earlier is None or earlier["run"] != content["run"]:
            return False
        kept: dict[str, Any] = {}
        if "train" in earlier["stages"] and context.trainer.state.fn != "fit":
            kept, times = dict(earlier), ("updated", "ended")
            hangs = [hang for each in (earlier, content) for hang in each.get("hangs", ())]
            if hangs:  # one of this function may have ended since its report
                kept["hangs"] = [*{hang["began"]: hang for hang in hangs}.values()]
            content = {key: each for key, each in content.items() if key not in times}
        stages = _joined(earlier["stages"], content["stages"])
        self.content = {**content, **kept, "stages": stages}
        return bool(self.content.get("process") != content["process"])

    def write(self) -> None:
        """Write the file after all others of the run."""
        context = self._context
        if not context.leaves_files:
            return
        self.claim()
        if page := self._page():
            self._own["report"] = page
        self.join()
        _EARLIER[context.trainer] = self.content
        write = partial(context.write_files, "{run_name}", stage="train", overwrite=True)
        prefix = self._prefix()
        write({self.path.name: self._write}, remote=prefix + FILE_NAME, durable=True)
        if page:
            from lightning_perf.tracking.page import report_page  # the rules take 20 ms to import

            # After the summary, whose content it shows.
            name = PurePosixPath(page).name
            write(
                {name: lambda path: write_text(path, report_page(self.content))},
                remote=prefix + PAGE_NAME,
            )
        self._written = True

    def _prefix(self) -> str:
        """What the names of an evaluation's artifacts begin with; empty in the run of its fit.

        In a run of MLflow, a test that does not know of the fit keeps away from its files, and
        from those of tests in other folders, which may run at the same time.
        """
        context, stages = self._context, self.content["stages"]
        function = context.trainer.state.fn
        if context.reporting.tags is None or function == "fit" or "train" in stages:
            return ""
        # That of the first evaluation in the file, so that the file replaces itself alone.
        own = context.began, str(getattr(function, "value", function))
        began = [(each["began"], name) for name, each in stages.items() if "began" in each]
        moment, name = min(began, default=own)
        return re.sub(r"[^\w-]", "-", f"{name.partition('_')[0]}-{moment[:_MOMENT]}-")

    def _write(self, path: Path) -> None:
        """Runs on the thread that writes files, after all other files are written."""
        root, paths = self._root.path, set(destination.saved_by(self._callbacks))
        # Meanwhile another process of the run may have added its stages.
        if self._earlier is not None:
            with suppress(SummaryError):
                self._earlier = read_summary(self.path)
        self.join()
        for key, value in self.content.items():
            if callable(value):  # it takes time, or needs the files of the run
                self.content[key] = value()
        if self._root.mirror is None:  # the store has what is no longer here
            paths = {each for each in paths if each.exists()}
        paths.update(files_below(path.parent))
        files = sorted(
            _shown(each, root)
            for each in paths
            if not each.name.startswith(".")
            and not SUMMARIES.fullmatch(each.name)
            and each.parent.name != ATTEMPTS
        )
        if (page := self.content.get("report")) and page not in files:
            files.append(page)
        for kind, endings in {"traces": _TRACES, "pages": _PAGES}.items():
            listed = [file for file in files if file.removesuffix(".gz").endswith(endings)]
            self.content[kind] = listed[-_MOST_FILES:]
        write_text(path, text_of(self.content))

    def show(self) -> bool:
        """Print the summary if a callback of the run wants that; returns whether it was printed.

        Not of a short prediction or test: packages run many of them.
        """
        windows = self._own["stages"].values()
        short = sum(stage["whole_run"].get("seconds", 0.0) for stage in windows) < LONG
        fits = "train" in self._own["stages"]
        if (short and not fits) or not any(each.show_summary for each in self._callbacks):
            return False
        if unread(sys.stdout):
            return True
        console = new_console()
        console.print(f"lightning_perf: {self.content['run']}", style="bold")
        console.print(panel(self._own))
        folder, name = self.path.parent, self.path.name
        place = f"{self._root.place}/{folder.name}" if self._root.place else folder
        if self._written and not self._root.discards:
            console.print(f"{place}/{name}", soft_wrap=True)
        return True


def _joined(earlier: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of a run with those of its next function, or of a new report of its last one.

    An evaluation keeps the earlier ones of its kind, with numbers.
    """
    stages = dict(earlier)
    for name, figures in own.items():
        if began := figures.get("began"):
            # Its earlier report, to which a process on another machine may have given a number.
            stages = {key: each for key, each in stages.items() if each.get("began") != began}
            _number(stages, name)
        stages[name] = figures
    # Without a fit, the first stage is what the summary is about.
    return stages if "train" in stages else {**own, **stages}


def _number(stages: dict[str, Any], name: str) -> None:
    """Give an evaluation the next number of its kind, and remove more than the file may hold."""
    if name not in stages:
        return
    found = (re.fullmatch(rf"{name}_(\d{{1,9}})", each) for each in stages)
    numbers = sorted(int(each[1]) for each in found if each)
    numbers.append(max(numbers, default=0) + 1)
    stages[f"{name}_{numbers[-1]}"] = stages.pop(name)
    surplus = max(len(numbers) + 1 - _MOST_EVALUATIONS, 0)  # with the one that takes the name
    for number in numbers[1 : 1 + surplus]:
        stages.pop(f"{name}_{number}", None)


def _shown(path: Path, root: Path) -> str:
    """A path as the summary names it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _file(context: Run, folder: Path) -> tuple[Path, Summary | None]:
    """The file for the summary of a run, and what it holds.

    It is that of the Trainer's last run, unless a fit follows another one; or the latest one of
    this name that the run continues: of the same job, a resumed fit, a test of a trained
    checkpoint, or the same run of MLflow. A file of another live process, or one that is not a
    summary of the run, such as the user's, is never ours.
    """
    trainer, found = context.trainer, dict(summaries_in(folder, context.run_name))
    in_mlflow = context.reporting.tags is not None  # then the folder is of one run id
    resumes = trainer.state.fn != "fit" or compat.resumes(trainer) or in_mlflow
    own, run = _FILES.get(trainer, (None, None))
    if own is not None and own in found:
        summary = found[own]
        fitted = "train" in summary["stages"]
        if resumes or not fitted or (run is not None and run() is context):
            return own, summary
        _EARLIER.pop(trainer, None)
    own_job = "" if in_mlflow else context.attempt.job
    for path, summary in reversed(found.items()):
        if own_job and (job := summary.get("goodput", {}).get("job")):
            continues = job == own_job
        else:  # what the user has named continues until it has finished
            ended = summary["status"] == FINISHED and "train" in summary["stages"]
            continues = resumes or bool(destination.named_run() and not ended)
        if continues and not _is_held(path, summary):
            return path, summary
    paths = (folder / numbered(FILE_NAME, number) for number in count(1))
    return next(path for path in paths if not os.path.lexists(path)), None


def _is_held(path: Path, summary: Summary) -> bool:
    """Whether another process of this machine still writes a summary."""
    process = summary.get("process", {})
    if summary["status"] != RUNNING or process.get("pid") == os.getpid():
        return False
    return bool(is_alive(process, path.stat().st_mtime))


def log_folder(context: Run) -> None:
    """Log where the files are, if there is no logger; once per generated name."""
    folder = context.reporting.run_folder().folder
    if destination.announce(context.trainer) and folder.exists():
        rank_zero_info(f"lightning_perf: this Trainer has no logger: files are in {folder}.")


def _setup(context: Run) -> dict[str, Any]:
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    versions = {name: getattr(each, "__version__", None) for name, each in loaded.items()}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    return context.setup() | {"nodes": context.trainer.num_nodes, "versions": versions}


def _job(context: Run, content: Mapping[str, Any], stage: str, windows: _Windows) -> dict[str, Any]:
    """The goodput of the job, if this is a fit, and what the stage costs."""
    sections = {"goodput": context.attempt.goodput(context, content["status"])}
    whole = main_stage(content)[1].get("whole_run", {})
    if seconds := sum(whole.get("timings", {}).values()) or whole.get("seconds", 0.0):
        kind, devices = compat.devices_of(context.trainer)
        verdicts = content.get("verdicts", ())
        sections["cost"] = cost_of(windows[stage][0][1], kind, devices * seconds, verdicts)
        try:
            sections["cost"] = priced(sections["cost"])
        except ConfigError as error:
            warn(f"{error} It is ignored.")
    return {name: section for name, section in sections.items() if section}


def _stage_windows(windows: Sequence[tuple[int, Window]]) -> dict[str, Any]:
    """The figures of a stage's windows: the whole run, and the last window if it is shorter."""
    names = ("whole_run", "last_window")
    pairs = zip(names, windows, strict=False)
    figures = {name: finite(_figures(*each)) for name, each in pairs}
    return figures if windows and windows[0][1].batches else {}


def _figures(first: int, window: Window) -> dict[str, Any]:
    """The figures of one window from its first step on, without unmeasured ones."""
    figures: dict[str, Any] = {"first": first, "last": window.step, "batches": window.batches}
    columns, rates = window.columns, dict[str, float]()
    if "progress/seconds" in columns:
        figures["seconds"] = window.mean("progress/seconds")
    if "batch/seconds" in columns and window.total("batch/seconds") > 0:
        rates = {
            name.rpartition("/")[2]: rate
            for name, rate in throughput(window).items()
            if not name.startswith("throughput/device/") or name.endswith("/mfu")
        }
        if "flops_per_sec" in rates:
            rates["flops_per_sec_per_device"] = rates["flops_per_sec"] / window.world_size
    if "flops/known" in columns and window.least("flops/known_batches"):
        known = utilization(window)
        figures["flops_per_batch"] = known["batch_flops"]
        if "total_flops" in known:
            figures["peak_flops"] = known["total_flops"] / window.world_size
        if "mfu" in rates and "hfu" in known:
            rates["hfu"] = known["hfu"]
    if rates:
        figures["throughput"] = rates
    if "timings/forward" in columns:
        figures["timings"] = {name: window.mean(f"timings/{name}") for name in CATEGORIES}
    return figures


def _overhead(culprits: Sequence[Mapping[str, Any]], callbacks: Sequence[Any]) -> dict[str, float]:
    """The time of our callbacks and of loggers for their reports, and the share of recorders.

    From a table of all costs.
    """
    kinds = {type(each).__name__: hasattr(each, "saved_traces") for each in callbacks}
    kinds["lightning_perf"] = False  # the hooks of the run, and its calls of loggers
    rows = [(row, row["name"].partition(".")[0]) for row in culprits]
    ours = [(row, kinds[kind]) for row, kind in rows if kind in kinds]
    figures = {key: sum(row[key] for row, _ in ours) for key in ("seconds", "share")}
    return figures | {"recording": sum(row["share"] for row, records in ours if records)}
