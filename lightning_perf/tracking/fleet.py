"""All runs of a tracking server or a folder, those that waste the most device hours first."""

from __future__ import annotations

import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import DAMAGE, did_you_mean
from lightning_perf.system.host import lives
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.tracking.attempts import attempts_in
from lightning_perf.tracking.mlflow import SUMMARY_TAG
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
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from mlflow import MlflowClient

    from lightning_perf.core.goodput import Attempt
    from lightning_perf.tracking.summary import Summary, SummaryError

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
    #: The share of its time that its verdicts explain, or that its goodput lacks.
    lost_share: float = 0.0
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
        return self.device_hours * self.lost_share + self.silent_hours

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
    latest = dict(summaries_below(root, _LEVELS, unreadable))
    attempts, found = _attempts_of(latest), []
    for path, summary in latest.items():
        with suppress(OSError):  # it was deleted meanwhile
            if (seen := path.stat().st_mtime) >= since:
                found.append(_of_summary(path.parent, summary, seen, attempts[path]))
    return sorted(found, key=_order)


def _attempts_of(latest: Mapping[Path, Summary]) -> dict[Path, list[Attempt]]:
    """The attempts of each run, by its summary; each attempt counts once.

    The file of a resumed one is in the folder of its job's first attempt, though its summary may
    be in another folder.
    """
    owners = {_process(summary): path for path, summary in latest.items()}
    found: dict[Path, list[Attempt]] = {path: [] for path in latest}
    for path, summary in latest.items():
        for each in attempts_in(path.parent / ATTEMPTS):
            process = each.host, each.pid
            owner = path if process == _process(summary) else owners.get(process, path)
            found[owner].append(each)
    return found


def _process(summary: Summary) -> tuple[Any, Any]:
    process = summary.get("process", {})
    return process.get("host"), process.get("pid")


def _order(run: FleetRun) -> tuple[float, float]:
    return -run.wasted_hours, -run.device_hours


def _of_summary(
    folder: Path, summary: Summary, written: float, attempts: Sequence[Attempt]
) -> FleetRun:
    stages = summary["stages"].values()
    seconds = sum((each.get("whole_run") or {}).get("seconds", 0.0) for each in stages)
    status, seen = summary["status"], written
    own = [each for each in attempts if (each.host, each.pid) == _process(summary)]
    if own:  # summaries follow reports, and attempts a clock
        last = max(own, key=attrgetter("seen"))
        # Earlier ones, whose summary this one has replaced.
        seconds = sum(each.seen - each.began for each in attempts if each.job == last.job)
        seen = min(max(seen, last.seen), _now()) if status == RUNNING else seen
    if _is_gone(summary, seen):
        status = "killed"
    elif status.startswith("stopped"):
        status = "failed"
    devices, later = _devices(summary.get("setup", {})), min(max(seen - written, 0.0), _LONGEST_RUN)
    hangs = bool(_hang(summary))
    times = _times(status, seconds - later if hangs and own else seconds, seen, devices)
    if hangs:  # all of the time since then is wasted
        times["silent_hours"] += later * devices / 3600
    run = FleetRun(_short(summary["run"]), str(folder), **times)
    return _with(run, summary, SILENT if seen > written else DEAD)


def _is_gone(summary: Summary, seen: float) -> bool:
    """Whether the process of a run that did not end was on this machine, and has ended."""
    process = summary.get("process", {})
    here = summary["status"] == RUNNING and process.get("host") == platform.node()
    return here and not lives(process.get("pid"), seen)


def _hang(summary: Summary) -> str:
    """Since when a run hangs; empty if it does not."""
    with suppress(*DAMAGE):
        if hang := standing_hang(summary):
            return _short(f"hanging since {hang['began']}")
    return ""


def _times(status: str, seconds: float, seen: float, devices: int) -> dict[str, Any]:
    """State and device hours of a run, from its seconds until its last sign of life."""
    seen = min(max(seen, 0.0), now := _now())
    silence = now - seen if status == RUNNING else 0.0
    silent = silence > SILENT
    return {
        "state": f"silent since {_clock(seen)}" if silent else _short(status),
        "device_hours": min(max(seconds, 0.0), _LONGEST_RUN) * devices / 3600,
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
        known["goodput"] = _share(summary["goodput"]["share"])
        # Verdicts and goodput may explain the same seconds: the larger one counts.
        known["lost_share"] = max(known["lost_share"], 1 - known["goodput"])
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

    All are ranked by their metrics, which come with the search; the summaries of those that are
    returned say more. Raises as `ask` does.
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
    began = (info.start_time or 0) / 1000
    seen = (info.end_time or 0) / 1000
    if info.status == "RUNNING":
        seen = max([began, *(each.timestamp / 1000 for each in run.to_proto().data.metrics)])
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
        **_times(info.status.lower(), seen - began, seen, _devices(setup_of(run))),
        lost_share=_share(sum(shares.values())),
        mfu=rates[0] if rates else None,
        verdict=_verdict(first, shares[first]) if shares[first] >= 0.005 else "",
        source=run,
    )


def _refined(client: MlflowClient, found: FleetRun) -> FleetRun:
    """A run with the figures of its summary, if it has uploaded one."""
    path = found.source.data.tags.get(SUMMARY_TAG, "")
    if path and is_trusted(client, found.source):
        with suppress(Exception):  # its files may be gone, and MLflow raises many kinds of errors
            summary = downloaded(client, found.source, path)
            if _is_gone(summary, found.seen):
                found = replace(found, state="killed", silent_hours=0.0)
            return _with(found, summary)
    return found
