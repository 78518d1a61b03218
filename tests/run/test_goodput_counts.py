"""Goodput of simulated jobs: random steps, saves, stalls, validations and kills, and a fake clock.

Real are the log of attempts with its files, the stages and the clock of spans.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_perf.core.goodput import LOSSES, STALLED
from lightning_perf.core.progress import Limits, Ranks
from lightning_perf.run import attempts, stages
from lightning_perf.run.attempts import AttemptLog
from lightning_perf.run.stages import Progress, StageStack
from lightning_perf.timing import clock as clock_module
from lightning_perf.timing.clock import Clock, Span
from lightning_perf.traces.writer import RunFolder

RANKS = Ranks()
#: Steps of a job, and where the monotonic clock begins.
STEPS, BOOT = 40, 5000.0
PARTS = ("kept", *LOSSES)


class Killed(Exception):
    """The simulated process is no more."""


class World:
    """The time, and what the thread that makes files has to do."""

    def __init__(self) -> None:
        self.now, self.wall_offset, self.kill_at = BOOT, 1.7e9, float("inf")
        self.numbers, self.jobs = count(), list[tuple[float, int, Callable[[], object]]]()
        #: The last sign of life, and when the process began.
        self.seen = self.began = 0.0

    def time(self) -> float:
        return self.now + self.wall_offset

    def perf_counter(self) -> float:
        return self.now

    def submit(self, job: Callable[[], object], _label: str, delay: float = 0.0) -> bool:
        heapq.heappush(self.jobs, (self.now + delay, next(self.numbers), job))
        return True

    def work(self, until: float) -> None:
        while self.jobs and self.jobs[0][0] <= until:
            due, _, job = heapq.heappop(self.jobs)
            self.now = self.seen = max(due, self.now)
            job()

    def advance(self, seconds: float) -> None:
        until = min(self.now + seconds, self.kill_at)
        self.work(until)
        self.now = until
        if until == self.kill_at:
            self.jobs.clear()
            raise Killed


class FakeRun(SimpleNamespace):
    """What the log reads of a run."""


class Process:
    """One attempt, which notes what it does: kind, step, start, end."""

    def __init__(self, world: World, folder: Path, state: dict[str, Any] | None) -> None:
        self.world, self.events = world, list[tuple[str, int, float, float]]()
        self.began = world.began = world.now
        self.saved: dict[str, Any] | None = None
        self.step = 0 if state is None else state["step"]
        self.clock, self.progress, self.log = Clock(), Progress(), AttemptLog()
        self.span = Span(self.clock, ("checkpoint", "save"), "save")
        self.stack = StageStack(self.progress, RANKS, "job")
        if state is not None:
            self.progress.load_state_dict(state["progress"])
        root = SimpleNamespace(discards=False, mirror=None, path=folder)
        run_folder = RunFolder(folder, "{run_name}", RANKS, "job", None)
        self.run: Any = FakeRun(
            trainer=SimpleNamespace(state=SimpleNamespace(fn="fit"), ckpt_path=None),
            ranks=RANKS, progress=self.progress, stages=self.stack, file_worker=world,
            spans=SimpleNamespace(recorder=SimpleNamespace(clock=self.clock)),
            reporting=SimpleNamespace(
                root=lambda _: root, run_folder=lambda *_: run_folder, tags=None
            ),
            windows=SimpleNamespace(subscribed=True), leaves_files=True, note_summary=lambda: None,
        )  # fmt: skip

    def does(self, kind: str, seconds: float) -> None:
        before = self.world.now
        try:
            self.world.advance(seconds)
        finally:
            self.events.append((kind, self.step, before, self.world.now))

    def enter(self, stage: str) -> None:
        self.clock.begin(stage)
        if stage != self.stack.stage:
            self.stack.enter(stage, Limits())
        self.run.stage = self.stack.stage

    def leave(self) -> None:
        self.stack.exit()
        self.clock.begin(self.stack.stage)
        self.run.stage = self.stack.stage

    def save(self, seconds: float) -> None:
        with self.span:
            self.does("checkpoints", seconds / 3)
            for _ in range(3):  # of each callback
                self.log.save(self.run)
                self.world.advance(0.001)
            state = {"step": self.step, "progress": deepcopy(self.progress.state_dict())}
            self.does("checkpoints", seconds * 2 / 3)
        self.saved = state

    def train(self, dice: random.Random) -> None:
        """All steps that are left; raises `Killed`."""
        long = dice.choice((0.5, 4.0, 12.0))
        save = dice.choice((0.2, 5.0, 45.0, 100.0))
        self.does("setup", dice.uniform(1, 60))
        self.enter("train")
        self.log.resumed = self.progress.stages["train"].total_wct
        self.stack.begin_batches()
        self.log.begin(self.run)
        self.does("setup", dice.uniform(0, 40))  # loads the first batch
        self.log.begin_first_batch(self.run)
        counters = self.progress.stages["train"]
        while self.step < STEPS:
            self.step += 1
            self.does("step", dice.uniform(long / 4, long))
            if dice.random() < 0.04:
                self.does("stalls", dice.uniform(70, 300))
                self.does("step", dice.uniform(0, long))
            counters.add(self.world.now, 1, None, self.step, epoch_ends=False)
            if dice.random() < 0.2:
                for _ in range(dice.choice((1, 1, 2))):
                    self.save(dice.uniform(save / 2, save))
            if dice.random() < 0.1:
                self.enter("validate")
                self.stack.within_loop = True
                self.does("validation", dice.uniform(1, 90))
                self.stack.end()
                if dice.random() < 0.5:
                    self.save(dice.uniform(save / 2, save))
                self.leave()
        self.stack.end()
        self.leave()
        self.run.stage = ""


def by_hand(processes: list[tuple[Process, float]]) -> dict[str, float]:
    """The seconds of each part from the events alone; a batch of over a minute is a stall.

    What a killed process did after its last sign of life, other than steps that a checkpoint has,
    belongs to the restart.
    """
    found = dict.fromkeys(PARTS, 0.0)
    limit, later = float("inf"), 0.0
    for number, (process, seen) in reversed([*enumerate(processes)]):
        batches: dict[int, float] = {}
        for kind, step, began, ended in process.events:
            if kind in ("step", "stalls"):
                batches[step] = batches.get(step, 0.0) + max(min(ended, seen) - began, 0.0)
        for kind, step, began, ended in process.events:
            name = "restarts" if number and kind == "setup" else kind
            if kind in ("step", "stalls"):
                name = "kept" if step <= limit else "repeated_steps"
                name = "stalls" if batches[step] > STALLED else name
            until = ended if name == "kept" else min(ended, seen)
            found[name] += max(until - began, 0.0)
            if later and name != "kept":
                found["restarts"] += ended - max(until, began)
        end = process.events[-1][3]
        found["restarts"] += later - end if later else 0.0
        limit, later = min(limit, process.events[0][1]), process.began
    return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """The fake clock in all modules that read one."""
    world = World()
    for module in (attempts, stages, clock_module):
        monkeypatch.setattr(module, "perf_counter", world.perf_counter)
    fake = SimpleNamespace(time=world.time, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(attempts, "time", fake)
    monkeypatch.setattr(attempts, "_process_start", lambda: world.began + world.wall_offset)
    monkeypatch.setattr(attempts, "_trained", 0)
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "job")
    return world


def job(world: World, folder: Path, dice: random.Random, kills: int) -> tuple[Any, Any]:
    """A job that is killed at most so often: its goodput, and its processes with their ends."""
    processes: list[tuple[Process, float]] = []
    while True:
        saved = [process.saved for process, _ in processes if process.saved is not None]
        process = Process(world, folder, saved[-1] if saved else None)
        attempts._trained = 0
        may_fail = len(processes) < kills
        world.kill_at = world.now + dice.uniform(70, 900) if may_fail else float("inf")
        try:
            process.train(dice)
            found = process.log.goodput(process.run, "finished")
            world.work(world.now)
            return found, [*processes, (process, world.now)]
        except Killed:
            processes.append((process, world.seen))
            world.kill_at = float("inf")
            world.advance(dice.uniform(0, 600))


def tolerance(processes: list[tuple[Process, float]]) -> float:
    """The end of a stall is found to one interval, and so are checkpoints just before it."""
    stalls = sum(kind == "stalls" for process, _ in processes for kind, *_ in process.events)
    return 2 * attempts.INTERVAL * stalls + 0.1


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_random_jobs_are_those_counted_by_hand(
    world: World, tmp_path: Path, seed: int
) -> None:
    """They also add up to the whole; a kill loses what came after the last sign of life."""
    found, processes = job(world, tmp_path, random.Random(seed), kills=5)
    own = {"kept": found["kept_seconds"], **found["losses"]}
    assert found["attempts"] == len(processes)
    assert sum(own.values()) == pytest.approx(found["seconds"])
    assert found["seconds"] == pytest.approx(world.now - BOOT)
    saves = 0
    for process, seen in processes:
        times = {step: ended for kind, step, _, ended in process.events if kind == "checkpoints"}
        saves += sum(ended <= seen for ended in times.values())
    written = [json.loads(path.read_text())["saves"] for path in tmp_path.rglob("attempts/*.json")]
    assert saves <= sum(written) <= saves + len(processes)  # each may end in one
    assert own == pytest.approx(by_hand(processes), abs=tolerance(processes))


def test_batches_that_all_take_over_a_minute_are_no_stalls(world: World, tmp_path: Path) -> None:
    """But for the first two, and one that takes far longer than those before it."""
    process = Process(world, tmp_path, None)
    process.enter("train")
    process.stack.begin_batches()
    process.log.begin(process.run)
    process.log.begin_first_batch(process.run)
    for seconds in (64.0, 64.0, 64.0, 70.0, 400.0, 64.0):
        process.step += 1
        process.does("step", seconds)
        counters = process.progress.stages["train"]
        counters.add(world.now, 1, None, process.step, epoch_ends=False)
    process.stack.end()
    process.leave()
    process.run.stage = ""
    found = process.log.goodput(process.run, "finished")
    assert found["losses"]["stalls"] == pytest.approx(64 + 64 + 400, abs=3 * attempts.INTERVAL)
    assert found["kept_seconds"] == pytest.approx(64 + 70 + 64, abs=3 * attempts.INTERVAL)


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_is_set_while_training_changes_no_time(
    world: World, tmp_path: Path, jump: float
) -> None:
    """An attempt is measured by a clock that nobody sets."""
    world.submit(lambda: setattr(world, "wall_offset", world.wall_offset + jump), "", 80.0)
    found, processes = job(world, tmp_path, random.Random(2), kills=0)
    own = {"kept": found["kept_seconds"], **found["losses"]}
    assert found["seconds"] == pytest.approx(world.now - BOOT)
    assert own == pytest.approx(by_hand(processes), abs=tolerance(processes))


def test_a_clock_that_is_set_back_gives_no_negative_time(world: World, tmp_path: Path) -> None:
    """The next attempt began before the last sign of life: no time is counted twice."""
    world.submit(lambda: setattr(world, "wall_offset", world.wall_offset - 7200.0), "", 65.0)
    found, processes = job(world, tmp_path, random.Random(3), kills=1)
    assert len(processes) == 2
    hand = by_hand(processes)
    assert min(found["losses"].values()) >= 0
    assert sum(found["losses"].values()) + found["kept_seconds"] == pytest.approx(found["seconds"])
    assert found["kept_seconds"] == pytest.approx(hand["kept"], abs=10.1)
    assert found["seconds"] <= sum(hand.values()) + 0.1


def test_a_process_that_replaced_an_attempt_began_after_it(world: World, tmp_path: Path) -> None:
    """As by ``exec``: the kernel says that it began before that attempt."""
    first = Process(world, tmp_path, None)
    world.kill_at = world.now + 300
    with pytest.raises(Killed):
        first.train(random.Random(4))
    world.kill_at = float("inf")
    attempts._trained = 0
    second = Process(world, tmp_path, first.saved)
    world.began = first.began
    second.train(random.Random(4))
    found = second.log.goodput(second.run, "finished")
    assert found["attempts"] == 2
    assert found["seconds"] == pytest.approx(world.now - BOOT)
