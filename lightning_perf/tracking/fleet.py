"""All runs of a tracking server or a folder, those that waste the most device hours first."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from lightning_perf.core.goodput import goodput, held_and_kept
from lightning_perf.errors import DAMAGE, did_you_mean
from lightning_perf.system.process import is_alive
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.tracking.attempts import attempts_in
from lightning_perf.tracking.mlflow import SUMMARY_TAG, job_of
from lightning_perf.tracking.runs import (
    all_of,
    ask,
    downloaded,
    is_trusted,
    setup_of,
    summaries_below,
)
from lightning_perf.tracking.summary import ATTEMPTS, RATES, RUNNING, main_stage, standing_hang

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from mlflow import MlflowClient

    from lightning_perf.core.goodput import Attempt
    from lightning_perf.tracking.summary import Summary, SummaryError

    #: By the folder of a run and its job: attempts by name, each with the folder of its run.
    _Jobs = dict[tuple[Path, str], dict[str, tuple[Path, Attempt]]]

#: Seconds without a sign of life after which a running run is silent, and after which it counts as
#: ended: it was probably killed.
SILENT, DEAD = 600.0, 86_400.0
#: Runs of one request, which every server of MLflow allows.
_PAGE = 1000
#: Levels of folders that are searched, and characters of a text that are kept.
_LEVELS, _LONGEST = 20, 100
#: Devices of a run, and seconds since its start, at most: strangers may have written more.
_MOST_DEVICES, _LONGEST_RUN = 1_000_000, 20 * 365 * 86_400.0
#: Categories that another set-up would save, for runs that have no verdicts yet.
_IDLE = ("dataloader_next", "callbacks", "logging", "checkpoint")
_VERDICT = re.compile(r"diagnosis/([a-z-]+)")


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One run among many. What is not known is None, or an empty text."""

    run: str
    #: Its id in MLflow, or its folder.
    place: str
    #: ``running``, ``finished``, ``failed``, ``killed``, or since when it is silent, lost or hangs.
    state: str
    #: Devices times the time from the start to the last sign of life.
    device_hours: float
    #: The same time after that, as long as the devices may be held.
    silent_hours: float = 0.0
    #: The share of its device hours that its verdicts explain.
    lost_share: float = 0.0
    #: Those that went into no step that was kept; None if that is not known.
    lost_hours: float | None = None
    mfu: float | None = None
    goodput: float | None = None
    verdict: str = ""
    culprit: str = ""
    #: Its last sign of life, in seconds since the epoch.
    seen: float = 0.0
    #: The run in MLflow.
    source: Any = field(default=None, repr=False)

    @property
    def wasted_hours(self) -> float:
        """Device hours without use."""
        return max(self.device_hours * self.lost_share, self.lost_hours or 0.0) + self.silent_hours

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "run": self.run, "place": self.place, "state": self.state,
            "device_hours": self.device_hours + self.silent_hours,
            "wasted_device_hours": self.wasted_hours, "mfu": self.mfu, "goodput": self.goodput,
            "verdict": self.verdict, "culprit": self.culprit,
        }  # fmt: skip


def in_folder(root: Path, since: float, unreadable: list[SummaryError]) -> list[FleetRun]:
    """The runs below a folder that gave a sign of life since a time, the most wasteful first.

    ``unreadable`` gets why summaries were left out.
    """
    summaries = [*summaries_below(root, _LEVELS, unreadable)]
    (attempts, copies), found = _attempts_of(path.parent for path, _ in summaries), []
    known = [(path.parent, each) for path, each in summaries if _key(path, each) in attempts]
    runs = {(each["run"], _job(each)) for _, each in known}
    originals = {(each["run"], _job(each)) for folder, each in known if folder not in copies}
    for path, summary in summaries:
        has_attempts = _key(path, summary) in attempts or (path.parent / ATTEMPTS).exists()
        run = summary["run"], _job(summary)
        if run in runs and not has_attempts:
            continue  # a copy of the summary alone, such as an artifact of MLflow
        if run in originals and path.parent in copies:
            continue  # a copy of the folder
        with suppress(OSError):  # it was deleted meanwhile
            if (seen := path.stat().st_mtime) >= since:
                found.append(_of_summary(path.parent, summary, seen, attempts))
    return sorted(found, key=_order)


def _job(summary: Summary) -> str:
    return str(summary.get("goodput", {}).get("job", ""))


def _key(path: Path, summary: Summary) -> tuple[Path, str]:
    """The key of a run's attempts, by its file."""
    return path.parent, _job(summary)


def _attempts_of(folders: Iterable[Path]) -> tuple[_Jobs, set[Path]]:
    """The attempts of each run's jobs, with those of other runs in these; and copied folders.

    The file of one that resumed is in the folder of its job's first attempt. Copies of folders have
    copies of attempts, which count once. Trainings that start together in containers may give one
    name to their jobs.
    """
    known, jobs = set(folders), dict[tuple[str, object], dict[str, Any]]()
    copies: set[Path] = set()
    found: _Jobs = {}
    for folder in sorted(known, key=lambda each: (len(each.parts), each)):  # of copies, one wins
        attempts = attempts_in(folder / ATTEMPTS)
        began = {each.name: each.began for each in attempts}
        for each in attempts:
            own = folder.parent / (each.folder or folder.name)
            own = own if own in known else folder
            copies |= {folder, own}
            job = jobs.setdefault((each.job, began.get(each.job, folder)), {})
            if each.name not in job or job[each.name][1].seen < each.seen:
                job[each.name] = own, each
            found[own, each.job] = job
    return found, copies - {own for job in jobs.values() for own, _ in job.values()}


def _order(run: FleetRun) -> tuple[float, float]:
    return -run.wasted_hours, -run.device_hours


def _of_summary(folder: Path, summary: Summary, seen: float, jobs: _Jobs) -> FleetRun:
    stages = summary["stages"].values()
    seconds = sum((each.get("whole_run") or {}).get("seconds", 0.0) for each in stages)
    kept, patience = None, DEAD
    noted = summary.get("goodput", {})
    job = jobs.get((folder, noted.get("job", "")), {})
    ordered = [job[name] for name in sorted(job)]
    while ordered and ordered[-1][0] != folder:  # another run repeated its steps: its waste
        ordered.pop()
    if ordered:  # summaries follow reports, and attempts a clock
        last = ordered[-1][1]
        others = [each for its, each in ordered if its != folder]
        seconds, kept = held_and_kept(goodput([each for _, each in ordered]), others)
        if summary["status"] == RUNNING and last.seen > seen:
            seen, patience = min(last.seen, _now()), SILENT
    elif "held_seconds" in noted:  # a copy of the summary alone, such as MLflow's
        seconds = noted.get("run_held_seconds", noted["held_seconds"])
        kept = noted.get("run_kept_seconds", noted.get("kept_seconds"))
    times = _times(_status(summary, seen), seconds, kept, seen, _devices(summary.get("setup", {})))
    return _with(FleetRun(_short(summary["run"]), str(folder), **times), summary, patience)


def _status(summary: Summary, seen: float) -> str:
    """How a run ended, or that it runs; killed if its process is gone."""
    status: str = summary["status"]
    if status == RUNNING and is_alive(summary.get("process", {}), seen) is False:
        return "killed"
    return "failed" if status.startswith("stopped") else status


def _hang(summary: Summary) -> str:
    """Since when a run hangs; empty if it does not."""
    with suppress(*DAMAGE):
        if hang := standing_hang(summary):
            return _short(f"hanging since {hang['began']}")
    return ""


def _times(
    status: str, seconds: float, kept: float | None, seen: float, devices: int
) -> dict[str, Any]:
    """State and device hours of a run, from its seconds until its last sign of life.

    ``kept`` are those of steps that were kept, if that is known.
    """
    seconds = min(max(seconds, 0.0), _LONGEST_RUN)
    seen = min(max(seen, 0.0), now := _now())
    silence = now - seen if status == RUNNING else 0.0
    silent = silence > SILENT
    return {
        "state": f"silent since {_clock(seen)}" if silent else _short(status),
        "device_hours": seconds * devices / 3600,
        "lost_hours": None if kept is None else max(seconds - kept, 0.0) * devices / 3600,
        "silent_hours": min(silence, DEAD) * devices / 3600 if silent else 0.0,
        "seen": seen,
    }


def _with(run: FleetRun, summary: Summary, patience: float = DEAD) -> FleetRun:
    """A run with the figures of its summary; one that hangs and is silent for longer is lost."""
    rates = (main_stage(summary)[1].get("whole_run") or {}).get("throughput", {})
    known: dict[str, Any] = {"lost_share": run.lost_share, "mfu": rates.get("mfu", run.mfu)}
    if verdicts := summary.get("verdicts"):
        first = max(verdicts, key=lambda each: each.get("share", 0.0))
        known["lost_share"] = _share(sum(each.get("share", 0.0) for each in verdicts))
        known["verdict"] = _verdict(first["code"], first.get("share", 0.0))
        known["culprit"] = _short(first.get("culprit") or "")
    with suppress(*DAMAGE):
        job = summary["goodput"]
        known["goodput"] = _share(job["share"] if run.goodput is None else run.goodput)
        # Verdicts and goodput may explain the same seconds: the larger one counts.
        if run.lost_hours is None:  # without attempts
            held = job.get("held_seconds")
            kept = job["kept_seconds"] / held if held else job["share"]
            known["lost_hours"] = run.device_hours * (1 - _share(kept))
    if hang := _hang(summary):
        lost = f"lost since {_clock(run.seen)}" if _now() - run.seen > patience else hang
        known["state"] = run.state if run.state == "killed" else lost
    return replace(run, **known)


def _verdict(code: str, share: float) -> str:
    return f"{_short(code)} {share:.0%}" if share > 0 else _short(code)


def _devices(setup: Mapping[str, Any]) -> int:
    count = setup.get("world_size", 1)
    return min(max(count, 1), _MOST_DEVICES) if isinstance(count, int) else 1


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _now() -> float:
    return time.time()  # noqa: TID251 (as files and MLflow have it)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# -- MLflow -----------------------------------------------------------------------------------


def in_mlflow(
    tracking_uri: str, experiment: str | None, since: float, most: int
) -> tuple[list[FleetRun], int]:
    """The most wasteful runs of a tracking server that began since a time, and how many it has.

    All are ranked by their metrics and the tag of their attempts, which come with the search; the
    summaries of those that are returned say more. Raises as `ask` does.
    """

    def question(client: MlflowClient) -> tuple[list[FleetRun], int]:
        found = sorted(_search(client, experiment, since), key=_order)
        return sorted((_refined(client, run) for run in found[:most]), key=_order), len(found)

    return ask(tracking_uri, question)


def _search(client: MlflowClient, experiment: str | None, since: float) -> Iterable[FleetRun]:
    """The runs with our param, one request for 1,000 of them."""
    known = {each.experiment_id: each.name for each in all_of(client.search_experiments)}
    ids = [each for each, name in known.items() if experiment in (None, each, name)]
    if not ids:
        hint = did_you_mean(experiment, known.values())
        raise LookupError(f"there is no experiment {experiment}. {hint}".rstrip())
    wanted = "params.lightning_perf LIKE '%'"
    if since > 0:
        wanted += f" AND attributes.start_time >= {since * 1000:.0f}"
    search = partial(client.search_runs, ids, wanted, max_results=_PAGE)
    return map(_of_mlflow, all_of(search))


def _of_mlflow(run: Any) -> FleetRun:
    info = run.info
    metrics = {key: value for key, value in run.data.metrics.items() if isfinite(value)}
    began, job, status = (info.start_time or 0) / 1000, job_of(run.data.tags), info.status.lower()
    seen = (info.end_time or 0) / 1000
    if status == RUNNING:
        points = (each.timestamp / 1000 for each in run.to_proto().data.metrics)
        seen = max([began, job.get("seen", 0.0), *points])
        status = "killed" if is_alive(job.get("process", {}), seen) is False else status
    seconds = job.get("held_seconds", seen - began)
    rates = [metrics[key] for key in (RATES["mfu"][3], "throughput/device/mfu") if key in metrics]
    verdicts = ((_VERDICT.fullmatch(key), value) for key, value in metrics.items())
    shares = {found[1]: _share(value) for found, value in verdicts if found}
    if not shares:
        times = {name: max(metrics.get(f"timings/{name}", 0.0), 0.0) for name in CATEGORIES}
        whole = sum(times.values()) or 1.0
        shares = {name: times[name] / whole for name in _IDLE}
    first = max(shares, key=shares.__getitem__)
    return FleetRun(
        _short(info.run_name or info.run_id),
        info.run_id,
        **_times(status, seconds, job.get("kept_seconds"), seen, _devices(setup_of(run))),
        lost_share=_share(sum(shares.values())),
        mfu=rates[0] if rates else None,
        goodput=_share(job["goodput"]) if job else None,
        verdict=_verdict(first, shares[first]) if shares[first] >= 0.005 else "",
        source=run,
    )


def _is_evaluated(summary: Summary) -> bool:
    """Whether a run has a fit and an evaluation."""
    stages = summary["stages"]
    return "train" in stages and any("status" in each for each in stages.values())


def _refined(client: MlflowClient, found: FleetRun) -> FleetRun:
    """A run with the figures of its summary, if it has uploaded one."""
    path = found.source.data.tags.get(SUMMARY_TAG, "")
    if path and is_trusted(client, found.source):
        with suppress(Exception):  # its files may be gone, and MLflow raises many kinds of errors
            summary = downloaded(client, found.source, path)
            job, status = job_of(found.source.data.tags), _status(summary, found.seen)
            if job and job["process"] != summary.get("process", {}):  # that of an earlier attempt
                summary = {**summary, "hangs": []}
            elif (status == "killed" and not job) or (
                # Lightning has set MLflow's status to that of the evaluation.
                status != RUNNING != found.source.info.status.lower() and _is_evaluated(summary)
            ):
                found = replace(found, state=status, silent_hours=0.0)
            return _with(found, summary)
    return found
