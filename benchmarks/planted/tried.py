"""Follows the advice of verdicts by `lightning-perf try`: predicted against measured speed-ups.

From the repository, on a machine without other programs (about 45 minutes)::

    PYTHONPATH=benchmarks python -m planted.tried --aa 20

Each case plants a fault in a small training and lets `try` measure the changes of one group.
``--aa N`` also makes N comparisons of a training with itself, none of which may be an improvement.
``--fork`` starts trials by forks of one process that has imported torch, for a busy machine, where
imports take most of the time. Results are added to ``benchmarks/results/try.json``, from which
``try.md`` and the summary in ``docs/diagnosis.md`` are written; ``--write`` only writes them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from planted.faults import FAULTS, Run, spin
from planted.workloads import WORKLOADS
from shared import QUIET, RESULTS, quiet

from lightning_perf.callbacks import suite  # noqa: F401  before a fork
from lightning_perf.diagnosis import Verdict
from lightning_perf.extend import CHANGES, Change
from lightning_perf.files import read_json, write_text
from lightning_perf.tracking.summary import text_of
from lightning_perf.trials import experiment, trial  # noqa: F401  before a fork
from lightning_perf.trials.experiment import Candidate, Experiment, Row
from lightning_perf.trials.process import RESULT, VARIABLE, Outcome

DATA, TABLE = RESULTS / "try.json", RESULTS / "try.md"
PAGE, MARK = Path(__file__).parents[2] / "docs/diagnosis.md", "**What following it gives**"
#: Batches per epoch, and seconds of timed batches per trial.
EPOCH, SECONDS = 25, 2.0
#: A fault takes as long as a step without it.
MAGNITUDE = 1.0


class SlowTable(CSVLogger):
    """Writes slowly; other loggers than those of Lightning write nothing in trials."""

    def __init__(self, folder: str, seconds: float) -> None:
        super().__init__(folder)
        self.seconds = seconds

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        time.sleep(self.seconds)
        super().log_metrics(metrics, step)


def slow_table(run: Run) -> None:
    run.options |= {"logger": SlowTable(run.folder, run.extra), "log_every_n_steps": 1}


def slow_validation(run: Run) -> None:
    run.options["limit_val_batches"] = 8
    run.module.places["validation"] = lambda index: run.sleep(EPOCH * run.extra / 8)


def too_many_threads(run: Run) -> None:
    torch.set_num_threads(2 * (os.cpu_count() or 1))


def too_many_workers(run: Run) -> None:
    """Items that cost less than their transfer from a worker."""
    run.module.data.item = lambda index: spin(1e-5)
    run.module.loader = {"num_workers": 2 * (os.cpu_count() or 1)}


class Case(NamedTuple):
    """A fault, and the group of changes that may resolve it."""

    plant: Callable[[Run], None]
    code: str
    group: str
    workload: str = "emulated"


PLANTED = {each.name: each.plant for each in FAULTS}
CASES = {
    "slow_items": Case(PLANTED["slow_items"], "input-bound", "input"),
    "items_that_compute": Case(PLANTED["items_that_compute"], "input-bound", "input"),
    "too_few_workers": Case(PLANTED["too_few_workers"], "input-bound", "input"),
    "workers_of_short_epochs": Case(PLANTED["workers_of_short_epochs"], "epoch-restart", "input"),
    "collections": Case(PLANTED["collections"], "gc-pauses", "gc"),
    "slow_table": Case(slow_table, "logger-bound", "logging"),
    "slow_disk": Case(PLANTED["slow_disk"], "checkpoint-bound", "checkpoint"),
    "slow_validation": Case(slow_validation, "validation-bound", "validation"),
    "too_many_threads": Case(too_many_threads, "cpu-saturated", "threads", "perceptron"),
    "too_many_workers": Case(too_many_workers, "cpu-saturated", "input", "perceptron"),
}
#: The training that is compared with itself.
NOTHING = "nothing"


class Nothing(Change):
    """Changes nothing."""

    title, group = NOTHING, NOTHING


def train(name: str) -> None:
    """What a trial runs: a training with a fault, which ends with the trial."""
    quiet(threads=None)
    CHANGES.append(Nothing)
    case = CASES.get(name, Case(lambda run: None, "", "", "perceptron"))
    workload = WORKLOADS[case.workload]
    module = workload(0, EPOCH)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(module, MAGNITUDE * workload.step, workload.step, folder)
        case.plant(run)
        options = QUIET | {"logger": False, "limit_val_batches": 0, "max_epochs": 10_000}
        L.Trainer(**options | run.options, callbacks=run.callbacks, default_root_dir=folder).fit(
            module
        )


class Itself(Experiment):
    """A training compared with itself."""

    def start(self) -> list[Candidate]:
        super().start()
        return [Candidate("Nothing", None, NOTHING, NOTHING, True, [], None, 1, {}, {}, "", [])]


def forked(
    command: Sequence[str], shared: Path, folder: Path, spec: Mapping[str, Any], limit: float
) -> Outcome:
    """As `run_trial`, in a forked process instead of the command's own."""
    folder.mkdir()
    write_text(
        folder / "spec.json", text_of({"folder": str(folder), "shared": str(shared), **spec})
    )
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.environ |= {VARIABLE: str(folder / "spec.json"), "LIGHTNING_PERF": "0"}
            os.dup2(os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT), 2)
            train(command[-1])
        finally:
            os._exit(1)
    file = folder / RESULT
    while not file.exists() and time.monotonic() < began + limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.killpg(pid, 9)  # with its workers
        os.waitpid(pid, 0)
    result = read_json(file) if file.exists() else {"error": "there is no result"}
    error = result.get("error") or (None if result["timed"] else "nothing was timed")
    return Outcome({} if error else result, error, time.monotonic() - began, 0)


def measured(name: str, minutes: float) -> list[dict[str, Any]]:
    """What `try` finds about a case: one entry per change."""
    case = CASES.get(name)
    command = [sys.executable, "-m", "planted.tried", "--train", name]
    kind, only = (Itself, []) if case is None else (Experiment, [case.group])
    with closing(kind(command, minutes, SECONDS, only, print)) as tried:
        rows, _ = tried.results()
        verdicts = [Verdict(**each) for each in tried.first.result["verdicts"]]
    found = next((each for each in verdicts if case and each.code == case.code), None)
    about = {
        "case": name, "code": case.code if case else "", "found": found is not None,
        "without_it": found.predicted_speedup if found else None,
        "verdicts": [each.code for each in verdicts],
    }  # fmt: skip
    entries = [about | entry_of(row) for row in rows]
    return entries or [{**about, "change": None}]


def entry_of(row: Row) -> dict[str, Any]:
    """A row in JSON."""
    own = row.as_dict()
    return {
        "change": own["setting"], "predicted": own["predicted"], "measured": own["speedup"],
        "same": own["same"], "helps": own["helps"], "failure": own["failure"],
    }  # fmt: skip


# -- results --------------------------------------------------------------------------------------


def interval(entry: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """The measured speed-up and its interval; None if there were too few rounds."""
    found = entry.get("measured") or {}
    return (found["ratio"], found["low"], found["high"]) if "high" in found else None


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of planted faults."""
    lines = [
        "| fault | verdict | change | predicted | without the cause | measured | 95 % interval | "
        "same training? |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in entries:
        found, own = interval(each), each.get("measured")
        ratio = f"{own['ratio']:.2f}" if own else each.get("failure")
        limits = f"{found[1]:.2f} to {found[2]:.2f}" if found else "too few rounds" if own else ""
        promised = [f"{each[key]:.2f}" if each.get(key) else "" for key in PREDICTIONS]
        verdict = each["code"] if each["found"] else f"not found: {', '.join(each['verdicts'])}"
        if not each["change"]:
            lines.append(f"| {each['case']} | {verdict} | none | | | | | |")
            continue
        lines.append(
            f"| {each['case']} | {verdict} | `{each['change']}` | {promised[0]} | {promised[1]} "
            f"| {ratio} | {limits} | {each['same'] if found else ''} |"
        )
    return lines


PREDICTIONS = ("predicted", "without_it")


def summary(entries: Sequence[Mapping[str, Any]], alike: Sequence[Mapping[str, Any]]) -> str:
    """The figures in a few sentences, for the documentation."""
    cases = {each["case"] for each in entries}
    found = {each["case"] for each in entries if each["found"]}
    helped = {each["case"] for each in entries if each.get("helps")}
    pairs = [(e["predicted"], f) for e in entries if e.get("predicted") and (f := interval(e))]
    above = sum(promised > high for promised, (_, _, high) in pairs)
    text = (
        f"in {len(cases)} trainings with a planted fault, the verdict was found in {len(found)}, "
        f"and [`try`](try.md) measured a change that certainly helps in {len(helped)}."
    )
    if pairs:
        more = median(ratio / promised for promised, (ratio, _, _) in pairs) - 1
        text += (
            f" Of {len(pairs)} predicted speed-ups, which are lower bounds, {above} are above the "
            f"interval that was measured; the median of the measured ones is {abs(more):.0%} "
            f"{'larger' if more >= 0 else 'smaller'}."
        )
    if alike:
        false = sum(bool(each.get("helps")) for each in alike)
        text += (
            f" Of {len(alike)} comparisons of a training with itself, {false} were taken for an "
            "improvement."
        )
    return text


def write() -> None:
    """Write the page of figures, and their summary in the documentation, from the data."""
    stored = read_json(DATA)
    entries = [each for each in stored["entries"] if each["case"] != NOTHING]
    alike = [each for each in stored["entries"] if each["case"] == NOTHING]
    loads = [each["load"] for each in stored["entries"]]
    forks = any(each["forked"] for each in stored["entries"])
    text = summary(entries, alike)
    how = "Trials were forked from one process" if forks else "Trials were processes of their own"
    lines = [
        "# Predicted and measured speed-ups",
        "",
        "Written by `PYTHONPATH=benchmarks python -m planted.tried --aa 20`, from "
        "[try.json](try.json).",
        "",
        f"{stored['date']}, {stored['machine']}, torch {stored['torch']}, Lightning "
        f"{stored['lightning']}. Load average while it ran: {min(loads):.1f} to {max(loads):.1f}"
        f"{', a busy machine: intervals are wide' if max(loads) > stored['cpus'] else ''}. {how}, "
        f"with {SECONDS:g} s of timed batches each.",
        "",
        text[0].upper() + text[1:],
        "",
        "*Predicted* is what the verdict promises if its advice is followed, for the advised value "
        "alone; *without the cause* is the most that it says can be gained.",
        "",
        *table(entries),
    ]
    if alike:
        bounds = [found for each in alike if (found := interval(each))]
        lines += ["", "## A training compared with itself", ""]
        lines += [
            f"{len(alike)} comparisons, {sum(bool(e.get('helps')) for e in alike)} false "
            "improvements. Measured, with 95 % intervals:", "",
            ", ".join(f"{r:.2f} ({low:.2f} to {high:.2f})" for r, low, high in bounds) + ".",
        ]  # fmt: skip
    TABLE.write_text("\n".join(lines) + "\n")
    page = PAGE.read_text()
    sentence = f"{MARK}: {text} ([table](../benchmarks/results/try.md))."
    sentence = sentence.replace(". ([", " ([")
    PAGE.write_text(re.sub(rf"^{re.escape(MARK)}: .*$", lambda _: sentence, page, flags=re.M))
    print(TABLE)


def add(entries: Sequence[dict[str, Any]], is_forked: bool, replaces: str | None) -> None:
    """Add entries to the data; those of a case replace earlier ones."""
    stored = read_json(DATA) if DATA.exists() else {"entries": []}
    kept = [each for each in stored["entries"] if each["case"] != replaces]
    own = {"load": round(os.getloadavg()[0], 1), "forked": is_forked}
    about = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "cpus": os.cpu_count(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "torch": torch.__version__,
        "lightning": L.__version__,
    }  # fmt: skip
    new = {**about, "entries": kept + [each | own for each in entries]}
    DATA.write_text(json.dumps(new, indent=1) + "\n")


def main() -> None:
    """Measure all cases, or those named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"Of {', '.join(CASES)}.")
    parser.add_argument("--aa", type=int, default=0, help="Comparisons of a training with itself.")
    parser.add_argument("--minutes", type=float, default=4.0, help="Of each case.")
    parser.add_argument("--fork", action="store_true", help="Fork trials.")
    parser.add_argument("--write", action="store_true", help="Only write the pages again.")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    if given.fork:
        gc.freeze()
        experiment.run_trial = forked
    for name in [] if given.write else given.cases or CASES:
        add(measured(name, given.minutes), given.fork, name)
    for _ in range(given.aa):
        add(measured(NOTHING, given.minutes), given.fork, None)
    write()


if __name__ == "__main__":
    main()
