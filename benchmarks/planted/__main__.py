"""Plants faults in small trainings and scores what the diagnosis says.

Run it from the repository: ``PYTHONPATH=benchmarks python -m planted --part held_out``.
``--record FILE`` keeps what was measured, and ``--replay FILE`` diagnoses it again.

``--peer VENV/bin/traceml`` trains once per case under TraceML instead (``pip install traceml-ai
lightning``, in an environment of its own), on one rank. Its verdicts are mapped to our codes
twice: strictly, to the code of the same meaning, and generously, to all codes that it may mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning as L
import torch
from planted.faults import COMPOUNDS, FAULTS, RANK_FAULTS, RANK_TRAPS, TRAPS, Fault, Run
from planted.workloads import HELD_OUT, WORKLOADS
from shared import QUIET, quiet

from lightning_perf import Diagnosis
from lightning_perf.diagnosis import diagnose

ROOT = Path(__file__).parents[2]
#: Thresholds may be tuned on the first; the second was used only when everything was written.
PARTS: dict[str, dict[str, Any]] = {
    "tune": {"magnitudes": (0.35, 1.0), "seeds": (0,), "workloads": WORKLOADS},
    "held_out": {"magnitudes": (0.6,), "seeds": (101,), "workloads": WORKLOADS},
    "held_out_workload": {"magnitudes": (0.6,), "seeds": (202,), "workloads": HELD_OUT},
    "ranks": {"magnitudes": (0.35, 1.0), "seeds": (0,), "workloads": WORKLOADS, "ranks": 2},
    "held_out_ranks": {"magnitudes": (0.6,), "seeds": (303,), "workloads": WORKLOADS, "ranks": 2},
}
#: The code of the same meaning as a verdict of TraceML, and the codes that it may mean.
_GROWTH = ("host-memory-growth", "device-memory-growth")
STRICT: dict[str, tuple[str, ...]] = {
    "INPUT_BOUND": ("input-bound",), "H2D_BOUND": ("transfer-bound",),
    "CREEP_EARLY": _GROWTH, "CREEP_CONFIRMED": _GROWTH,
}  # fmt: skip
IN_STEPS = ("warmup", "recompile", "gc-pauses", "periodic-stall", "slowdown")
GENEROUS = STRICT | {
    "INPUT_BOUND": ("input-bound", "transfer-bound", "epoch-restart", "periodic-stall"),
    "COMPUTE_BOUND": IN_STEPS,
    "RESIDUAL_HEAVY": (
        "callback-bound", "logger-bound", "checkpoint-bound", "validation-bound", "transfer-bound",
        "epoch-restart", *IN_STEPS,
    ),
}  # fmt: skip
#: Verdicts about the machine, which other programs use meanwhile.
ENVIRONMENT = {"cpu-saturated"}
OPTIONS: dict[str, Any] = QUIET | {
    "logger": False, "log_every_n_steps": 10, "limit_val_batches": 0, "num_sanity_val_steps": 0,
}  # fmt: skip


class Wall(L.Callback):
    """The wall time of the training, by a clock of its own."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seconds = time.perf_counter() - self.began


class Recorded(Diagnosis):
    """Writes the wall time and the measured signals to a file on rank 0."""

    def __init__(self, wall: Wall) -> None:
        super().__init__(terminal=False)
        self.wall = wall

    def close(self, context: Any, reason: str) -> None:
        super().close(context, reason)
        if context.ranks.global_rank == 0:
            path = Path(context.trainer.default_root_dir, "found.pickle")
            path.write_bytes(pickle.dumps((self.wall.seconds, self._diagnosed)))


def step_seconds(workload: type[Any], seed: int) -> float:
    """Seconds per step without faults."""
    with tempfile.TemporaryDirectory() as folder:
        wall = Wall()
        run = L.Trainer(**OPTIONS, max_epochs=1, callbacks=[wall], default_root_dir=folder)
        run.fit(workload(seed, 30))
    return wall.seconds / 30


def train(
    faults: list[Fault],
    workload: type[Any],
    seed: int,
    magnitude: float,
    step: float,
    active: bool = True,
    ranks: int = 1,
    diagnosed: bool = True,
    workers: int | None = None,
) -> tuple[float, Any]:
    """One training, with or without the faults: its seconds and its signals.

    ``workers`` is an advised ``num_workers``.
    """
    with tempfile.TemporaryDirectory() as folder:
        epochs, steps = max(f.epochs for f in faults), max(f.steps for f in faults)
        module = workload(seed, ranks * steps // epochs)
        run = Run(module, magnitude * step, step, folder, active=active)
        for fault in faults:
            fault.plant(run)
        if workers is not None:
            module.loader = {"num_workers": workers, "persistent_workers": True}
        options = {**OPTIONS, "max_epochs": epochs, "default_root_dir": folder}
        if ranks > 1:
            torch.set_num_threads(1)  # a fork cannot inherit the threads of its parent
            options |= {"devices": ranks, "strategy": "ddp_fork"}
        wall = Wall()
        callbacks = [wall, *run.callbacks, *([Recorded(wall)] if diagnosed else [])]
        L.Trainer(**options | run.options, callbacks=callbacks).fit(module)
        if not diagnosed:
            return wall.seconds, None
        found: tuple[float, Any] = pickle.loads(Path(folder, "found.pickle").read_bytes())
    return found


def start(function: Any, *args: Any) -> tuple[Any, Any]:
    """Run a function in a forked process, so that runs do not share garbage."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sending.send(function(*args))
        sending.close()
        os._exit(0)  # the interpreter's own end takes seconds

    child = context.Process(target=work)
    child.start()
    sending.close()
    return receiving, child


def in_child(function: Any, *args: Any) -> Any:
    """The result of a function in a forked process; None if it fails."""
    receiving, child = start(function, *args)
    try:
        return receiving.recv()
    except EOFError:
        return None
    finally:
        child.join()


def all_cases(todo: list[Any], jobs: int) -> Iterator[dict[str, Any]]:
    """The results of several cases, several at a time."""
    waiting, running = list(todo), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            receiving, child = start(case, *waiting.pop(0))
            running[receiving] = child
        for receiving in wait(list(running)):
            child = running.pop(receiving)
            with suppress(EOFError):
                yield receiving.recv()
            child.join()


def verdicts(signals: Any) -> list[Any]:
    """The verdicts of the rules."""
    return [verdict.as_dict() for verdict in diagnose(signals).verdicts]


def issues(command: str, *setting: Any) -> list[tuple[str, str]]:
    """Kind and severity of TraceML's verdicts on the times and the memory of one training."""
    faults, workload, *numbers = setting
    given = json.dumps([[f.name for f in faults], workload.__name__.lower(), *numbers])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [command, "run", __file__, "--run-name", "run", "--logs-dir", folder,
             "--args", "--train", given],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"},
            cwd=folder, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        (path,) = Path(folder).rglob("final_summary.json")
        summary = json.loads(path.read_text())
    sections = (summary[name] for name in ("step_time", "step_memory"))
    return [(each["kind"], each["severity"]) for one in sections for each in one["issues"]]


def mapped(result: dict[str, Any], codes: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Verdicts of TraceML in our codes; those without one keep their name."""
    found = []
    for kind, severity in result["issues"]:
        meant = [code for code in result["codes"] if code in codes.get(kind, ())]
        for code in meant or ([] if severity == "info" else [kind]):
            named = "critical" if severity == "crit" else "warning"
            found.append({"code": code, "severity": named, "share": 0.0, "culprit": None})
    return found


def case(
    kind: str,
    faults: list[Fault],
    name: str,
    seed: int,
    magnitude: float,
    ranks: int,
    peer: str | None = None,
) -> dict[str, Any]:
    """Train with and without the faults, and return the result."""
    workload = (WORKLOADS | HELD_OUT)[name]
    step = in_child(step_seconds, workload, seed)
    found = {
        "kind": kind, "faults": [f.name for f in faults], "workload": name, "seed": seed,
        "magnitude": magnitude, "codes": [f.codes[0] for f in faults if f.codes],
        "culprits": {f.codes[0]: f.culprit for f in faults if f.culprit},
    }  # fmt: skip
    setting = faults, workload, seed, magnitude, step
    what = (train, *setting, True, ranks) if peer is None else (issues, peer, *setting)
    planted = in_child(*what)
    if planted is None:
        return {**found, "failed": True}
    if peer is not None:
        return {**found, "seconds": 1.0, "issues": planted}
    found |= {"seconds": planted[0], "verdicts": verdicts(planted[1]), "signals": planted[1]}
    if kind == "fault":
        clean = in_child(train, *setting, False, ranks)
        found |= {"clean_seconds": clean and clean[0], "clean_signals": clean and clean[1]}
    if workers := advised_workers(found["verdicts"]):
        followed = in_child(train, *setting, True, ranks, True, workers)
        found |= {"workers": workers, "followed_signals": followed and followed[1]}
    return found


def advised_workers(verdicts: list[dict[str, Any]]) -> int | None:
    """The number of workers that a verdict promises to be faster."""
    for verdict in verdicts:
        number = re.search(r"num_workers=(\d+) (?:hides|loads)", verdict["advice"])
        if number is not None and verdict["severity"] != "info":
            return int(number[1])
    return None


def promise(result: dict[str, Any]) -> tuple[float, float] | None:
    """The promised speed-up of a batch by more workers, and that of following the advice."""
    if advised_workers(result["verdicts"]) != result.get("workers") or not result.get(
        "followed_signals"
    ):
        return None
    (verdict,) = [v for v in result["verdicts"] if v["code"] == "input-bound"]
    before, after = (result[name].step_seconds for name in ("signals", "followed_signals"))
    return before / verdict["evidence"]["advised_step_seconds"], before / after


def cases(part: str, only: str | None) -> list[tuple[str, list[Fault], str, int, float, int]]:
    """All cases of a part."""
    plan, named = PARTS[part], {fault.name: fault for fault in FAULTS}
    names, ranks = list(plan["workloads"]), plan.get("ranks", 1)
    faults, traps, compounds = FAULTS, TRAPS, COMPOUNDS
    if ranks > 1:
        faults, traps, compounds = RANK_FAULTS, RANK_TRAPS, []
    found: list[tuple[str, list[Fault], str, int, float, int]] = []
    for seed in plan["seeds"]:
        for number, magnitude in enumerate(plan["magnitudes"]):
            for index, fault in enumerate(faults):
                # Each fault is planted in each workload, with varying magnitudes.
                name = names[(index + number) % len(names)]
                found.append(("fault", [fault], name, seed + number, magnitude, ranks))
        for index, each in enumerate(traps):
            found.append(("trap", [each], names[index % len(names)], seed, 0.0, ranks))
        for index, pair in enumerate(compounds):
            both = [named[each] for each in pair]
            name = names[index % len(names)]
            found.append(("compound", both, name, seed, plan["magnitudes"][-1], ranks))
    return [each for each in found if only is None or any(only in f.name for f in each[1])]


def claimed(result: dict[str, Any]) -> float:
    """The sum of the shares of all verdicts."""
    return sum(float(verdict["share"]) for verdict in result["verdicts"])


def median(errors: list[float]) -> str:
    """The median of errors, in percent."""
    return f"{statistics.median(errors):.1%}" if errors else "-"


def blamed(result: dict[str, Any], *severities: str) -> list[dict[str, Any]]:
    """Verdicts of the given severities that are not about the machine."""
    wanted = severities or ("warning", "critical")
    verdicts = result["verdicts"]
    return [v for v in verdicts if v["severity"] in wanted and v["code"] not in ENVIRONMENT]


def score(results: list[dict[str, Any]]) -> dict[str, str]:
    """The figures of a table."""
    done = [r for r in results if not r.get("failed")]
    faults = [r for r in done if r["kind"] == "fault"]
    planted = [r for r in done if r["kind"] != "trap"]
    traps = [r for r in done if r["kind"] == "trap"]
    wanted = [(r, code) for r in planted for code in r["codes"]]
    hits = [(r, c) for r, c in wanted if c in [v["code"] for v in blamed(r)]]
    said = [(r, v) for r in done for v in blamed(r)]
    right = [1 for r, v in said if v["code"] in r["codes"]]
    top = [1 for r in faults if blamed(r) and blamed(r)[0]["code"] in r["codes"]]
    named = [(r, c) for r, c in hits if c in r["culprits"]]
    correct = [
        1
        for r, c in named
        if r["culprits"][c] in [v["culprit"] for v in blamed(r) if v["code"] == c]
    ]
    errors = []
    for r in faults:
        shares = [v for v in blamed(r) if v["code"] in r["codes"] and v["share"]]
        if shares and r.get("clean_seconds"):
            actual = r["seconds"] / r["clean_seconds"]
            errors.append(abs(1 / (1 - min(shares[0]["share"], 0.99)) / actual - 1))
    promises = [found for r in done if (found := promise(r))]
    broken = [abs(promised / actual - 1) for promised, actual in promises]

    def part(count: int, of: int) -> str:
        return f"{count / of:.2f} ({count}/{of})" if of else "-"

    return {
        "trainings": f"{len(done)} (+ {len(results) - len(done)} that failed)",
        "recall": part(len(hits), len(wanted)),
        "precision": part(len(right), len(said)),
        "top-1": part(len(top), len(faults)),
        "culprit": part(len(correct), len(named)),
        "speed-up without the fault, median error": median(errors),
        "speed-up with the advised workers, median error": f"{median(broken)} of {len(broken)}",
        "largest sum of shares in a run": f"{max(map(claimed, done), default=0):.2f}",
        "traps with a warning": part(sum(bool(blamed(r)) for r in traps), len(traps)),
        "traps with a critical": part(sum(bool(blamed(r, "critical")) for r in traps), len(traps)),
    }


def main() -> None:
    """Run a part of the benchmark, print its table, and the cases with wrong verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="tune")
    parser.add_argument("--only", help="Cases whose faults contain this text.")
    parser.add_argument("--jobs", type=int, default=1, help="Cases at a time.")
    parser.add_argument("--score", type=Path, nargs="*", help="Only score files of --out.")
    parser.add_argument("--out", type=Path, help="Write all results as JSON lines.")
    parser.add_argument("--record", type=Path, help="Keep what was measured.")
    parser.add_argument("--peer", help="TraceML's command.")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, nargs="*", help="Diagnose files of --record again.")
    given = parser.parse_args()
    quiet(threads=None)
    results = []
    if given.train:
        names, name, *numbers = json.loads(given.train)
        known = {fault.name: fault for fault in [*FAULTS, *TRAPS]}
        train(
            [known[each] for each in names], (WORKLOADS | HELD_OUT)[name], *numbers, diagnosed=False
        )
        return
    if given.score:
        lines = [line for path in given.score for line in path.read_text().splitlines()]
        compare(given.part, [json.loads(line) for line in lines])
        return
    if given.replay:
        results = [result for path in given.replay for result in recorded(path)]
        for result in results:
            result["verdicts"] = verdicts(result["signals"])
            print(line(result))
        show(given.part, results)
        return
    gc.freeze()  # imported objects are not garbage of the runs
    todo = [(*each, given.peer) for each in cases(given.part, given.only)]
    for result in all_cases(todo, given.jobs):
        results.append(result)
        if given.record:
            with given.record.open("ab") as record:
                pickle.dump(result, record)
        if given.out:
            kept = {name: each for name, each in result.items() if not name.endswith("signals")}
            with given.out.open("a") as out:
                out.write(json.dumps(kept) + "\n")
        if result.get("failed"):
            print("failed:", result)
            continue
        if given.peer:
            result["verdicts"] = mapped(result, GENEROUS)
        print(line(result), *result.get("issues", ()), flush=True)
    compare(given.part, results)


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The results in a file of --record."""
    with path.open("rb") as file, suppress(EOFError):
        while True:
            result = pickle.load(file)
            if not result.get("failed"):
                yield result


def line(result: dict[str, Any]) -> str:
    """One case: the expected and the found verdicts."""
    found = [f"{v['code']}/{v['severity']}/{v['share']:.2f}/{v['culprit']}" for v in blamed(result)]
    actual = result["seconds"] / (result.get("clean_seconds") or result["seconds"])
    if followed := promise(result):
        workers = result["workers"]
        found.append(f"num_workers={workers}: {followed[0]:.2f}x promised, {followed[1]:.2f}x true")
    return (
        f"{'+'.join(result['faults']):32} {result['workload']:11} {result['magnitude']:4} wanted "
        f"{','.join(result['codes']) or 'nothing':18} actual {actual:.2f}x  {'  '.join(found)}"
    )


def compare(part: str, results: list[dict[str, Any]]) -> None:
    """Print the table of a part, two for a peer."""
    if not any("issues" in result for result in results):
        show(part, results)
        return
    for way, codes in (("strictly", STRICT), ("generously", GENEROUS)):
        translated = [each | {"verdicts": mapped(each, codes)} for each in results]
        show(f"{part}, TraceML {way}", translated)


def show(part: str, results: list[dict[str, Any]]) -> None:
    """Print the table of a part."""
    load = os.getloadavg()[0]
    print(f"\n{part}, {date.today()}, {os.cpu_count()} CPUs, {platform.machine()}, load {load:.1f}")
    for name, value in score(results).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
