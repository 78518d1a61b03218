"""Stragglers: arithmetic on hand-written windows, and real ranks on gloo with a planted delay."""

from __future__ import annotations

import json
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.late import PHASES, Late, find, options
from helpers.signals import signals_of_ranks, with_costs
from helpers.small import trainer
from helpers.windows import ranks_window, window_of
from numpy.typing import NDArray
from torch import Tensor

from lightning_perf import Window, always_on
from lightning_perf.core.progress import Timestamp
from lightning_perf.diagnosis import LATENESS, Findings, Verdict, diagnose
from lightning_perf.diagnosis.report import headline
from lightning_perf.diagnosis.rules.lateness import Straggler, straggler_of, work_of
from lightning_perf.diagnosis.signals import Loader, Setup, Signals
from lightning_perf.timing.totals import CATEGORIES, Action, Cost


def find_straggler(windows: list[Window]) -> Straggler | None:
    """Like the callers, skip windows without batches or with one rank."""
    several = [each for each in windows if each.batches and each.world_size > 1]
    return straggler_of([work_of(each) for each in several], LATENESS)


def late(category: str, rank: int = 2, ranks: int = 4, seconds: float = 5.0) -> Window:
    """One rank is late; the others wait for its gradients."""
    others = {each: seconds for each in range(ranks) if each != rank}
    return ranks_window(ranks, {category: {rank: seconds}}, {"waits/backward": others})


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
@pytest.mark.parametrize(
    ("category", "phase"),
    [
        ("dataloader_next", "input"), ("to_device", "input"), ("forward", "forward"),
        ("backward", "backward"), ("optimizer_step", "optimizer"), ("callbacks", "callback"),
        ("logging", "callback"), ("checkpoint", "callback"),
    ],
)  # fmt: skip
def test_the_late_rank_and_its_phase_are_named(category: str, phase: str, ranks: int) -> None:
    """This holds if the others wait in the same category as the late rank's own work."""
    found = find_straggler([late(category, 1, ranks)] * 5)
    assert found is not None
    assert (found.rank, found.node, found.phase, found.chronic) == (1, 0, phase, True)
    assert found.seconds == pytest.approx(0.5)
    assert found.share == pytest.approx(5 / 16)


@pytest.mark.parametrize(
    ("batches", "firsts", "named", "severity"),
    [
        ([35], [], True, "info"),
        ([35], [], False, "info"),
        # Hooks at the end of an epoch are in the first batch of the next one, and those at the end
        # of the last one in no batch.
        ([35], [35], True, "info"),
        ([], [], True, "info"),
        ([], [], False, "info"),
        ([31, 35, 39], [], True, "critical"),
    ],
)
def test_one_event_in_which_a_rank_is_late_may_not_come_again(
    batches: list[int], firsts: list[int], named: bool, severity: str
) -> None:
    """It is in one window in either case, and takes most of the time, also if no rank is named."""
    quiet = signals_of_ranks({}, {}).windows[0]
    waits = dict.fromkeys((0, 1, 3), 60.0)
    own = {"forward" if named else "reduce_metrics": {2: 60.0}}
    paused = signals_of_ranks(own, waits, exchange={}).windows[0]
    steps = np.full(60, 1.1)
    steps[batches] += 60.0 / max(len(batches), 1)
    windows = [quiet, quiet, quiet, paused, quiet, quiet]
    signals = Signals(windows=windows, steps=steps, firsts=np.array(firsts, dtype=int))
    (found,) = [each for each in diagnose(signals).verdicts if each.code == "straggler"]
    assert (found.rank, found.severity) == (2 if named else None, severity)


def test_a_single_stall_of_a_worker_is_one_verdict_of_its_rank() -> None:
    """It is the same on each rank, and no series of batches that waited for data."""
    quiet = signals_of_ranks({}, {}, 2).windows[0]
    steps = np.full(60, 1.1)
    steps[35] += 60.0
    setup = Setup(world_size=2, cpus=8, loader=Loader(2))
    for rank in (0, 1):
        waits = {1 - rank: 60.0}
        paused = signals_of_ranks({"dataloader_next": {rank: 60.0}}, waits, 2, {}).windows[0]
        windows = [quiet, quiet, quiet, paused, quiet, quiet]
        verdicts = diagnose(Signals(windows=windows, steps=steps, setup=setup)).verdicts
        (found,) = [each for each in verdicts if each.share > 0.1]
        assert (found.code, found.rank, found.severity) == ("straggler", rank, "info")
        assert f"waited 60.0 s for rank {rank} once, in input" in found.advice


def test_a_rank_that_validates_longer_is_named_where_values_are_exchanged() -> None:
    """The others wait for it within validation, which takes as long on all ranks."""
    windows = [ranks_window(3, {"validation": {1: 5.0}}, {"waits/validation": {0: 5.0, 2: 5.0}})]
    found = find_straggler(windows * 3)
    assert found is not None
    assert (found.rank, found.phase) == (1, "validation")
    assert found.seconds == pytest.approx(0.5)


def test_a_late_rank_0_is_named_at_the_start_and_for_its_buffers() -> None:
    """Lightning and DDP broadcast from rank 0: the others then wait before backward."""
    for column in ("waits/start", "waits/forward"):
        windows = [ranks_window(3, {"callbacks": {0: 5.0}}, {column: {1: 5.0, 2: 5.0}})] * 3
        found = find_straggler(windows)
        assert found is not None
        assert (found.rank, found.phase) == (0, "callback")


@pytest.mark.parametrize(
    "windows",
    [
        [ranks_window(4, {}, {})] * 5,
        # Communication is slow on all ranks.
        [ranks_window(4, {}, {"waits/backward": dict.fromkeys(range(4), 9.0)})] * 5,
        # All ranks are equally slow.
        [ranks_window(4, {"forward": dict.fromkeys(range(4), 9.0)}, {})] * 5,
        # Late, but no other rank waits for it: independent ranks.
        [ranks_window(4, {"forward": {1: 9.0}}, {})] * 5,
        # The others wait for another cause.
        [ranks_window(4, {"forward": {1: 2.0}}, {"waits/backward": {0: 9.0, 2: 9.0, 3: 9.0}})] * 5,
        # The ranks take turns.
        [late("forward", rank) for rank in (0, 1, 2, 3, 0, 1, 2, 3)],
        # Too small to be reported.
        [late("forward", seconds=0.2)] * 5,
        [late("forward")] * 2,
        [window_of({**{f"timings/{name}": [1.0] for name in CATEGORIES}})] * 5,
        [],
    ],
)
def test_no_rank_is_named_without_a_straggler(windows: list[Window]) -> None:
    """A verdict needs excess work, waits of the other ranks, and the same rank repeatedly."""
    assert find_straggler(windows) is None


def test_a_rank_that_is_late_once_is_not_chronic() -> None:
    """It is still named if its delay is a large part of all windows."""
    usual = ranks_window(4, {}, {})
    found = find_straggler([usual, usual, late("dataloader_next", seconds=30.0), usual, usual])
    assert found is not None
    assert (found.rank, found.phase, found.chronic) == (2, "input", False)
    assert find_straggler([usual, usual, late("dataloader_next", seconds=3.0), usual]) is None


def test_too_few_reports_for_a_straggler_are_no_sign_of_health() -> None:
    """In a run of three reports the rule says what it lacks; with one more it names the rank."""
    signals = signals_of_ranks({"forward": {1: 5.0}}, {0: 5.0, 2: 5.0, 3: 5.0})
    short = diagnose(replace(signals, windows=signals.windows[:3]))
    why = "2 reports after the warm-up, and comparing ranks needs 3"
    assert short.abstained["straggler"] == why
    found = diagnose(replace(signals, windows=signals.windows[:4]))
    assert "straggler" not in found.abstained
    assert found.verdicts[0].culprit == "rank 1"


@pytest.mark.parametrize(
    ("workers", "code", "culprit"),
    [(0, "straggler", "rank 1"), (2, "input-bound", "train_dataloader_next")],
)
def test_a_rank_that_waits_for_its_workers_does_not_make_the_others_wait_alone(
    workers: int, code: str, culprit: str
) -> None:
    """The workers of the others may be as slow: once they have batches ahead, they keep them."""
    waits = dict.fromkeys((0, 2, 3), 5.0)
    signals = signals_of_ranks({"dataloader_next": {1: 5.0}}, waits, exchange={})
    setup = Setup(world_size=4, cpus=8, loader=Loader(workers))
    found = diagnose(replace(signals, setup=setup)).verdicts
    first = found[0]
    assert (first.code, first.culprit, first.severity) == (code, culprit, "critical")
    other = {"straggler", "input-bound"} - {code}
    assert not other & {each.code for each in found if each.severity != "info"}
    assert first.share == pytest.approx((5 + (workers > 0)) / 16)


def test_waits_in_metrics_are_not_called_those_of_changing_ranks() -> None:
    """One of them may be late by the work of its metrics, which is not told from waiting."""
    signals = signals_of_ranks({"reduce_metrics": dict.fromkeys((0, 2, 3), 5.0)}, {}, exchange={})
    (found,) = [each for each in diagnose(signals).verdicts if each.code == "straggler"]
    assert (found.phase, found.rank) == ("reduce_metrics", None)
    assert "slow_in" not in found.evidence
    assert "most of it in metrics" in found.advice


def few(first: float, second: float, steps: NDArray[np.float64], accumulated: int = 1) -> Findings:
    """Two reports after the warm-up, in which rank 0 waits for some seconds of rank 1."""
    windows = waiting(second, first, second)
    phases = np.zeros((len(steps), len(CATEGORIES)))
    phases[accumulated - 1 :: accumulated, CATEGORIES.index("optimizer_step")] = 0.1
    known = {"phases": phases} if accumulated > 1 else {}
    return diagnose(Signals(windows=windows, steps=steps, **known))


def waiting(*seconds: float) -> list[Window]:
    """Windows in which rank 0 waits for some seconds of rank 1."""
    return [
        replace(
            signals_of_ranks({"forward": {1: own}}, {0: own}, 2, exchange={0: 1e-9}).windows[0],
            first=Timestamp(batch=10 * number), last=Timestamp(batch=10 * number + 10),
        )
        for number, own in enumerate(seconds)
    ]  # fmt: skip


def test_a_rank_that_is_late_in_each_batch_is_named_with_few_reports() -> None:
    """All batches are as long, so that it is not late in a few of them."""
    found = few(5.0, 5.0, np.full(30, 1.6))
    assert "straggler" not in found.abstained
    (first, *_) = found.verdicts
    assert (first.code, first.rank, first.severity) == ("straggler", 1, "critical")


@pytest.mark.parametrize("accumulated", [2, 4])
def test_with_accumulated_gradients_ranks_wait_once_per_optimizer_step(accumulated: int) -> None:
    """Batches without one are shorter on the ranks that wait; a rank may be late in all of them."""
    steps = np.full(30, 1.1)
    steps[accumulated - 1 :: accumulated] += accumulated * 0.5
    found = few(5.0, 5.0, steps, accumulated)
    assert "straggler" not in found.abstained
    (first, *_) = found.verdicts
    assert (first.code, first.rank, first.severity) == ("straggler", 1, "critical")


@pytest.mark.parametrize(("accumulated", "long"), [(2, [13, 17]), (4, [15]), (15, [29])])
def test_a_few_long_optimizer_steps_name_no_rank(accumulated: int, long: list[int]) -> None:
    """It is late in some of them alone, or there are too few to tell."""
    steps = np.full(30, 1.1)
    steps[long] += 12.0 / len(long)
    found = few(6.0, 6.0, steps, accumulated)
    assert found.abstained["straggler"].startswith("2 reports after the warm-up")


def test_ranks_that_wait_are_not_healthy_if_few_reports_do_not_tell_which_is_late() -> None:
    """A rank that is late in a fifth of the batches may be late by chance."""
    steps = np.full(30, 1.1)
    steps[14:20] += 2.5
    found = few(5.0, 5.0, steps)
    assert found.abstained["straggler"].startswith("2 reports after the warm-up")
    codes = {each.code: each for each in found.verdicts}
    assert codes["straggler"].severity == "info"
    assert "a smaller log_every_n_steps tells" in codes["straggler"].advice
    assert "healthy" not in codes


@pytest.mark.parametrize(("late", "long"), [(0.5, []), (6.0, [14])])
def test_short_waits_and_a_single_pause_in_few_reports_are_healthy(
    late: float, long: list[int]
) -> None:
    """A pause of one batch may not come again."""
    steps = np.full(30, 1.1)
    steps[long] += 6.0
    assert few(late, 0.5, steps).verdicts[0].code == "healthy"


@pytest.mark.parametrize("start", [0, 3])
def test_a_rank_that_is_no_longer_late_gains_nothing(start: int) -> None:
    """Windows show it if enough of them follow. One that is less late than before is late."""

    def verdicts(*seconds: float) -> list[Verdict]:
        found = diagnose(Signals(windows=waiting(*seconds))).verdicts
        return [each for each in found if each.code == "straggler"]

    before = [0.1] * start
    (found,) = verdicts(*before, 20.0, 20.0, 20.0, 20.0, 0.1, 0.1, 0.1, 0.1)
    assert (found.rank, found.severity, found.predicted_speedup) == (1, "warning", 1.0)
    assert f"in batches {10 * start} to {10 * start + 39}" in found.advice
    assert "This is over" in found.advice
    # It goes on until the end, has gone on until just now, comes again, or goes on in part.
    for later in ([20.0] * 4, [0.1] * 2, [0.1, 0.1, 0.1, 20.0, 20.0, 20.0], [5.0] * 8):
        (found,) = verdicts(*before, 20.0, 20.0, 20.0, 20.0, *later)
        assert (found.rank, found.severity) == (1, "critical")
        assert found.predicted_speedup > 1.2
        assert "This is over" not in found.advice


def turns(waits: str, category: str) -> Signals:
    """Two ranks that are late in every fourth batch by turns, where rank 0 waits in a category."""
    seconds = {waits: {0: 5.0, 1: 5.0}}
    window = ranks_window(2, {}, seconds, **{"waits/exchange": [0.0, 0.0]})
    phases = np.zeros((60, len(CATEGORIES)))
    phases[:, CATEGORIES.index("forward")] = 1.1
    phases[::4, CATEGORIES.index(category)] += 1.5
    return Signals(windows=[window] * 6, steps=phases.sum(axis=1), phases=phases)


@pytest.mark.parametrize(
    ("waits", "category"), [("waits/start", "other"), ("waits/forward", "forward")]
)
def test_ranks_that_wait_by_turns_outside_of_backward_are_no_stall(
    waits: str, category: str
) -> None:
    """While gradients accumulate, ranks wait at the start of batches, each as long as the other."""
    signals = turns(waits, category)
    found = {each.code: each for each in diagnose(signals).verdicts}
    assert "periodic-stall" not in found
    assert found["straggler"].evidence["slow_in"] == "changing ranks"
    assert found["straggler"].share == pytest.approx(5 / 16)


def on_gpu(device: dict[str, float], host: dict[str, float]) -> Window:
    """Rank 1 takes more seconds than the others in some categories, on its GPU or its host."""
    plain = ranks_window(3, {name: {1: seconds} for name, seconds in host.items()}, {})
    columns = {name: plain[name].tolist() for name in plain.columns}
    more = sum(device.values())
    for name in ("device/to_device", "device/forward", "device/backward", "device/optimizer_step",
                 "device/other", "exposed_input"):  # fmt: skip
        columns[f"timings/{name}"] = [1.0, 1.0 + device.get(name.partition("/")[2], 0.0), 1.0]
    columns["timings/exposed_input"][1] += device.get("exposed_input", 0.0)
    columns["timings/device/batches"] = [10.0] * 3
    columns["waits/device/start"] = [0.0] * 3
    columns["waits/device/backward"] = [more, 0.0, more]
    for rank in (0, 2):
        columns["timings/device/backward"][rank] += more
    return window_of(columns)


@pytest.mark.parametrize(
    ("device", "host", "phase"),
    [
        # A throttled clock slows all kernels; the host waits where it reads a loss.
        ({"forward": 2.0, "backward": 4.0}, {"callbacks": 6.5}, "backward"),
        # A late host: its device is idle meanwhile.
        ({"forward": 5.0}, {"forward": 6.0}, "forward"),
        # Part of a late input was hidden by kernels that were still queued.
        ({"exposed_input": 3.0}, {"dataloader_next": 9.0}, "input"),
        ({"other": 5.0}, {"callbacks": 5.0}, "callback"),
    ],
)
def test_phases_are_those_of_the_gpu(
    device: dict[str, float], host: dict[str, float], phase: str
) -> None:
    """Where the device is late, and not where its host waits for it."""
    found = find_straggler([on_gpu(device, host)] * 3)
    assert found is not None
    assert (found.rank, found.phase) == (1, phase)


def test_the_delay_of_another_rank_elsewhere_in_a_batch_does_not_make_up_for_a_late_one() -> None:
    """Rank 1 loads longer, for which rank 0 waits in backward; rank 0 has a callback, for which
    rank 1 waits at the start of the next batch.
    """
    waits = {"waits/start": {1: 4.0}, "waits/backward": {0: 7.0}}
    own = {"callbacks": {0: 4.0}, "dataloader_next": {1: 7.0}}
    window = ranks_window(2, own, waits, **{"waits/exchange": [0.0, 0.0]})
    action = Action("train", "callbacks", "Plots.on_train_batch_end")
    costs = [{action: Cost(4.0, 10)}] * 6
    found = {v.code: v for v in diagnose(with_costs(Signals([window] * 6), costs)).verdicts}
    assert (found["straggler"].rank, found["straggler"].phase) == (1, "input")
    assert found["straggler"].share == pytest.approx(7 / 22)
    assert found["callback-bound"].share == pytest.approx(4 / 22)


@pytest.mark.parametrize(("first", "other"), [(6.0, 3.0), (6.0, 6.0), (4.0, 6.0)])
def test_two_ranks_whose_callbacks_delay_each_other_have_a_verdict_each(
    first: float, other: float
) -> None:
    """Rank 0 has one at the start of batches, for which rank 1 waits in backward; rank 1 has one
    at their end, for which rank 0 waits at the start of the next.
    """
    waits = {"waits/start": {0: other}, "waits/backward": {1: first}}
    own = {"callbacks": {0: first - 1, 1: other - 1}}  # each has one second of others
    window = ranks_window(2, own, waits)
    action = Action("train", "callbacks", "Plots.on_train_batch_start")
    costs = [{action: Cost(first, 10)}] * 6
    verdicts = diagnose(with_costs(Signals([window] * 6), costs)).verdicts
    wall = 10 + first + other
    found = {(each.code, each.rank): each.share * wall for each in verdicts}
    assert found["callback-bound", None] == pytest.approx(first)
    assert found["straggler", 1] == pytest.approx(other, rel=0.2)
    assert ("straggler", 0) not in found


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_is_late_in_some_batches_and_others_in_the_rest(ranks: int) -> None:
    """What it waits for one of them does not make up for what all others wait for it."""
    rank = ranks - 1 if ranks > 2 else 0
    starts = {each: 6.0 * (each != 1) + 2.0 * (each != rank) for each in range(ranks)}
    own = {"optimizer_step": {1: 6.0}, "forward": {rank: 2.0}}
    works = [ranks_window(ranks, own, {"waits/start": starts})] * 5
    found = find_straggler(works)
    assert found is not None
    assert (found.rank, found.phase) == (1, "optimizer")
    assert found.seconds == pytest.approx(0.6)


def test_a_rare_cost_of_a_rank_is_found_beside_one_that_is_late_in_each_batch() -> None:
    """Rank 1 is late in one batch of twenty, in a callback, and rank 0 in each, in loading."""
    own = {"dataloader_next": {0: 2.5}}
    usual = ranks_window(2, own, {"waits/backward": {1: 2.5}})
    rare = {"waits/backward": {0: 6.75, 1: 2.25}}
    works = [usual, ranks_window(2, own | {"callbacks": {1: 7.0}}, rare)] * 3
    found = find_straggler(works)
    assert found is not None
    assert (found.rank, found.phase, found.chronic) == (1, "callback", False)
    assert found.seconds == pytest.approx(0.3375)
    (verdict,) = [each for each in diagnose(Signals(works)).verdicts if each.code == "straggler"]
    assert verdict.rank == 1


def test_ranks_may_wait_for_one_at_different_points_of_a_batch() -> None:
    """For a callback of rank 2: rank 0 waits in backward, and rank 1 at the start, for rank 0."""
    own = {"callbacks": {2: 4.0}, "forward": {0: 1.5}}
    waits = {"waits/start": {1: 4.0}, "waits/backward": {0: 4.0, 1: 1.5, 2: 1.5}}
    works = [ranks_window(3, own, waits)] * 5
    found = find_straggler(works)
    assert found is not None
    assert (found.rank, found.phase) == (2, "callback")
    assert found.seconds == pytest.approx(0.4)


def test_a_cost_of_one_rank_counts_as_far_as_the_others_wait_for_it() -> None:
    """Another rank's longer step, before the same point of waiting, hides it otherwise."""

    def cost(
        own: dict[str, dict[int, float]],
        start: dict[int, float],
        gradients: float = 0.5,
        **hooks: float,
    ) -> tuple[float, float]:
        waits = {"waits/start": start, "waits/backward": {0: 0.5, 1: gradients}}
        columns = {"waits/exchange": [0.5, 0.5]}
        columns |= {f"timings/{name}": [0.0, 0.0] for name in ("callbacks", "logging")}
        for name in ("callbacks", "logging"):
            for rank, seconds in own.get(name, {}).items():
                columns[f"timings/{name}"][rank] = seconds
        window = ranks_window(2, own, waits, **columns)
        costs = {
            Action("train", "logging" if "log" in name else "callbacks", f"Plots.{name}"): Cost(
                seconds, 10
            )
            for name, seconds in hooks.items()
        }
        signals = with_costs(Signals([window] * 6), [costs] * 6)
        verdicts = diagnose(signals).verdicts
        assert sum(each.share for each in verdicts) <= 1 + 1e-9
        assert not any(each.code == "straggler" and each.rank == 0 for each in verdicts)
        codes = ("callback-bound", "logger-bound")
        wall = float(signals.wall[0])
        found = [sum(v.share for v in verdicts if v.code == code) * wall for code in codes]
        return found[0], found[1]

    # What both ranks spend.
    both = {"callbacks": {0: 10.0, 1: 10.0}, "optimizer_step": {1: 6.0}}
    assert cost(both, {0: 6.0}, on_train_batch_end=10.0)[0] == pytest.approx(10.0)
    # Alone; longer, and shorter than the other rank's step.
    alone = {"callbacks": {0: 10.0}}
    assert cost(alone, {1: 10.0}, on_train_batch_end=10.0)[0] == pytest.approx(10.0)
    longer = alone | {"optimizer_step": {1: 6.0}}
    assert cost(longer, {1: 4.0}, on_train_batch_end=10.0)[0] == pytest.approx(4.0)
    shorter = {"callbacks": {0: 6.0}, "optimizer_step": {1: 10.0}}
    assert cost(shorter, {0: 4.0}, on_train_batch_end=6.0)[0] < 1.0
    # The other rank has its longer steps in other batches, or ranks wait for each other by chance.
    turns = {"callbacks": {0: 6.0}, "optimizer_step": {1: 12.0}}
    found = cost(turns, {0: 10.5, 1: 4.5}, on_train_batch_end=6.0)
    assert found[0] == pytest.approx(2.94)  # 6 % of 26 s may be chance
    both = {"callbacks": {0: 6.0}, "optimizer_step": {1: 6.0}}
    assert cost(both, {0: 1.0, 1: 1.0}, on_train_batch_end=6.0)[0] < 0.1
    # The other rank waits for one cost, and another of its own hides the other one.
    two = {"callbacks": {0: 8.0}, "optimizer_step": {1: 6.0}}
    hooks = {"on_train_batch_start": 4.0, "on_train_batch_end": 4.0}
    found = cost(two, {0: 2.0, 1: 0.1}, 4.5, **hooks)
    assert found[0] == pytest.approx(4.0, abs=0.2)
    # Two costs share what the other rank waits.
    two = {"callbacks": {0: 6.0}, "logging": {0: 6.0}, "optimizer_step": {1: 6.0}}
    found = cost(two, {1: 6.0}, on_train_batch_end=6.0, log_metrics=6.0)
    assert found == pytest.approx((3.0, 3.0))
    # For a hook at the start of a batch it waits in backward.
    even = {0: 0.1, 1: 0.1}
    assert cost(alone, even, 10.5, on_train_batch_start=10.0)[0] == pytest.approx(10.0)
    hidden = {"callbacks": {0: 6.0}, "forward": {1: 10.0}}
    assert cost(hidden, even, on_train_batch_start=6.0)[0] < 1.0


def batches_of(late: NDArray[np.float64], node: int = 0) -> Window:
    """Ten batches in which each rank is late in forward by some seconds, and the first ones wait.

    One row per batch, one column per rank.
    """
    waits = (late.max(axis=1, keepdims=True) - late).sum(axis=0)
    own, waits = (dict(enumerate(each.tolist())) for each in (late.sum(axis=0), waits))
    ranks = late.shape[1]
    columns = {"waits/exchange": [0.0] * ranks}
    return ranks_window(ranks, {"forward": own}, {"waits/backward": waits}, node, **columns)


def six_windows(late: list[float], jitter: float) -> list[NDArray[np.float64]]:
    """The seconds that each rank is late in ten batches of each window, in part by chance."""
    chance = np.random.default_rng(7)
    return [np.array(late) + chance.uniform(0, jitter, (10, len(late))) for _ in range(6)]


def gain(late: NDArray[np.float64], ranks: tuple[int, ...]) -> float:
    """The seconds per batch that training gains if some ranks are late no longer."""
    rest = np.delete(late, ranks, axis=1)
    return float((late.max(axis=1) - rest.max(axis=1)).mean())


@pytest.mark.parametrize(
    ("late", "ranks"),
    [
        ([0.0, 0.4], (1,)), ([0.0, 0.4, 0.0], (1,)), ([0.0, 0.4, 0.0, 0.0], (1,)),
        # Those that are late by less hide a part of it.
        ([0.0, 2.0, 1.4], (1,)), ([0.0, 2.0, 1.0], (1,)), ([0.5, 2.0, 0.7, 0.0, 0.6], (1,)),
        # They are as late as others, or nearly.
        ([0.0, 0.0, 1.2, 1.2], (2, 3)), ([0.0, 0.0, 1.0, 1.6], (2, 3)),
        ([0.0, 0.9, 0.0, 1.2, 1.1, 0.0], (1, 3, 4)), ([0.0] * 6 + [1.2] * 2, (6, 7)),
        ([0.0] * 63 + [1.2], (63,)), ([0.0] * 48 + [1.2] * 16, tuple(range(48, 64))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("jitter", [0.0, 0.04])
def test_late_ranks_are_named_for_what_repairing_them_gives(
    late: list[float], ranks: tuple[int, ...], jitter: float
) -> None:
    """Of several that are late, all are named if they are about as late."""
    each = six_windows(late, jitter)
    found = find_straggler([batches_of(batches) for batches in each])
    assert found is not None
    assert (found.ranks, found.phase, found.chronic) == (ranks, "forward", True)
    assert found.rank in ranks
    truth = gain(np.concatenate(each), ranks)
    assert found.seconds == pytest.approx(truth, rel=0.1 if jitter else 1e-9)
    (verdict, *_) = diagnose(Signals([batches_of(batches) for batches in each])).verdicts
    assert verdict.code == "straggler"
    assert verdict.rank in ranks
    assert verdict.share == pytest.approx(truth * 10 / (11 + 10 * max(late)), rel=0.1)


@pytest.mark.parametrize("late", [[0.0, 2.0, 1.9], [0.0, 2.0, 2.0], [0.0, 1.0, 2.0, 2.1, 1.9]])
def test_no_rank_is_named_if_most_are_as_late(late: list[float]) -> None:
    """Repairing one of them gives nothing."""
    windows = [batches_of(batches) for batches in six_windows(late, 0.04)]
    found = diagnose(Signals(windows)).verdicts
    (verdict,) = [each for each in found if each.code == "straggler"]
    assert (verdict.rank, verdict.evidence["slow_in"]) == (None, "changing ranks")


@pytest.mark.parametrize("other", [0.0, 0.4, 1.4])
def test_ranks_that_are_late_by_turns_are_not_promised_to_gain_more_than_one(other: float) -> None:
    """Rank 1 is late in five batches of ten, and rank 2 by less in the others."""
    late = np.zeros((10, 3))
    late[::2, 1], late[1::2, 2] = 2.0, other
    found = find_straggler([batches_of(late)] * 6)
    assert found is not None
    assert found.ranks == (1,)
    assert 0.6 < found.seconds <= gain(late, (1,)) + 1e-9
    works = work_of(batches_of(late)).beside_others((1,))
    assert works.waits.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("late", "node", "text", "evidence"),
    [
        ([0.0, 0.0, 1.2, 1.2], 0, "for ranks 2 and 3, which are slow in forward. ", "2, 3"),
        ([0.0, 0.0, 1.2, 1.2], 2, "for ranks 2 and 3, all of node 1, which are slow in", "2, 3"),
        ([0.0, 1.2, 1.2, 0.0], 2, "for ranks 1 and 2, which are slow in forward. ", "1, 2"),
        ([0.0, 0.0, 0.0, 1.2, 1.2, 1.2], 3, "for ranks 3 to 5, all of node 1, which", "3, 4, 5"),
        ([0.0, 0.0, 0.0, 1.2], 2, "for rank 3, which is slow in forward. ", None),
    ],
)
def test_a_slow_node_is_named_with_its_ranks(
    late: list[float], node: int, text: str, evidence: str | None
) -> None:
    """All of a node's ranks, and no others."""
    signals = Signals([batches_of(np.tile(late, (10, 1)), node)] * 6)
    verdict = diagnose(signals).verdicts[0]
    assert text in verdict.advice
    assert verdict.evidence.get("ranks") == evidence
    assert f" for {verdict.culprit}, " in verdict.advice
    assert verdict.predicted_speedup == pytest.approx((11 + 12) / 11)
    assert headline(verdict).count("rank") == 1


def test_several_ranks_that_wait_for_their_workers_are_named_with_the_input() -> None:
    """As one that waits for its workers."""
    waits = dict.fromkeys((0, 1), 5.0)
    own = {"dataloader_next": dict.fromkeys((2, 3), 5.0)}
    signals = signals_of_ranks(own, waits, exchange={})
    setup = Setup(world_size=4, cpus=8, loader=Loader(2))
    found = diagnose(replace(signals, setup=setup)).verdicts[0]
    assert found.code == "input-bound"
    assert "wait for ranks 2 and 3; their workers may be as slow" in found.advice
    assert found.share == pytest.approx((5 + 1) / 16)


def test_callbacks_of_rank_0_hide_a_part_of_what_another_is_late() -> None:
    """Rank 1's optimizer takes 20 s longer, rank 0's callback at the end of batches 14 s."""
    own = {"callbacks": {0: 14.0}, "optimizer_step": {1: 20.0}}
    waits = {"waits/start": {0: 6.0, 2: 20.0}, "waits/backward": dict.fromkeys(range(3), 0.5)}
    windows = [ranks_window(3, own, waits, **{"waits/exchange": [0.5] * 3})] * 6
    found = find_straggler(windows)
    assert found is not None
    assert (found.rank, found.ranks, found.seconds) == (1, (1,), pytest.approx(0.6))
    action = Action("train", "callbacks", "Plots.on_train_batch_end")
    signals = with_costs(Signals(windows), [{action: Cost(14.0, 10)}] * 6)
    (verdict,) = [each for each in diagnose(signals).verdicts if each.share > 0.1]
    assert (verdict.code, verdict.rank) == ("straggler", 1)
    assert verdict.share * 31.5 == pytest.approx(6.0, rel=0.15)


def late_optimizer(action: Action, calls: int, seconds: float, batches: int = 1) -> Signals:
    """Rank 1 of three is 1 s late in each of ten batches, and rank 0 has a cost in some of them.

    Where that takes longer, rank 1 waits for it, and otherwise rank 0 and rank 2 for rank 1.
    """
    each = seconds / batches
    apart, longer = 10.0 - batches, batches * max(each - 1.0, 0.0)
    shorter = batches * max(1.0 - each, 0.0)
    waits = {
        "waits/start": {0: apart + shorter, 1: longer, 2: apart + batches * max(each, 1.0)},
        "waits/backward": dict.fromkeys(range(3), 0.5),
    }
    own = {"optimizer_step": {1: 10.0}}
    columns = {f"timings/{action.category}": [seconds, 0.0, 0.0], "waits/exchange": [0.5] * 3}
    window = ranks_window(3, own, waits, **columns)
    phases = np.zeros((60, len(CATEGORIES)))
    phases[:, CATEGORIES.index("forward")] = 1.0
    for first in range(batches):
        phases[first::10, CATEGORIES.index(action.category)] = each
    signals = Signals([window] * 6, steps=phases.sum(axis=1), phases=phases)
    return with_costs(signals, [{action: Cost(seconds, calls)}] * 6)


@pytest.mark.parametrize(
    ("code", "action", "calls"),
    [
        ("checkpoint-bound", Action("train", "checkpoint", "checkpoint writing (K.save)"), 1),
        ("checkpoint-bound", Action("validate", "checkpoint", "checkpoint writing (K.save)"), 1),
        ("logger-bound", Action("train", "logging", "Logger.log_metrics"), 1),
        # A hook that works in one of its calls.
        ("callback-bound", Action("train", "callbacks", "Plots.on_train_batch_end"), 10),
    ],
)
def test_a_rare_cost_is_hidden_by_a_late_rank_only_in_its_batches(
    code: str, action: Action, calls: int
) -> None:
    """In the other batches there is no such cost to hide."""
    signals = late_optimizer(action, calls, 20.0)
    verdicts = diagnose(signals).verdicts
    wall = float(signals.wall[0])
    found = {(each.code, each.rank): each.share * wall for each in verdicts}
    assert found[code, None] == pytest.approx(19.0)
    assert found["straggler", 1] == pytest.approx(9.5, abs=0.6)
    assert sum(found.values()) <= 30.0


@pytest.mark.parametrize(("seconds", "counts"), [(6.0, 0.0), (20.0, 10.0)])
def test_a_cost_of_each_batch_is_hidden_by_a_late_rank_in_all(
    seconds: float, counts: float
) -> None:
    """What it takes longer than the other rank's delay counts."""
    action = Action("train", "callbacks", "Plots.on_train_batch_end")
    signals = late_optimizer(action, 10, seconds, batches=10)
    found = [v.share for v in diagnose(signals).verdicts if v.code == "callback-bound"]
    assert sum(found) * signals.wall[0] == pytest.approx(counts)


@pytest.mark.parametrize("phase", ["backward", "reduce_metrics"])
def test_what_ranks_wait_for_a_checkpoint_is_in_no_other_verdict(phase: str) -> None:
    """Neither in its seconds nor in its words: ranks wait for it, and by turns for one another."""
    metrics = 7.5 * (phase == "reduce_metrics")  # one rank does not wait in them
    gradients = dict.fromkeys(range(3), 0.5 if metrics else 5.5)
    waits = {"waits/start": {1: 20.0, 2: 20.0}, "waits/backward": gradients}
    columns = {"timings/checkpoint": [20.0, 0.0, 0.0], "waits/exchange": [0.5] * 3}
    own = {"reduce_metrics": {0: metrics, 1: 0.0, 2: metrics}}
    window = ranks_window(3, own, waits, **columns)
    action = Action("train", "checkpoint", "checkpoint writing (K.save)")
    signals = with_costs(Signals([window] * 6), [{action: Cost(20.0, 1)}] * 6)
    found = {each.code: each for each in diagnose(signals).verdicts}
    assert found["checkpoint-bound"].share * signals.wall[0] == pytest.approx(20.0)
    late = found["straggler"]
    assert late.share * signals.wall[0] == pytest.approx(5.0)
    assert (late.rank, late.phase) == (None, phase)
    assert not re.search(r"\d", late.advice)


@pytest.mark.parametrize(
    ("code", "category", "name"),
    [
        ("checkpoint-bound", "checkpoint", "checkpoint writing (K.save)"),
        ("logger-bound", "logging", "Logger.log_metrics"),
        ("callback-bound", "callbacks", "Plots.on_train_batch_end"),
    ],
)
def test_a_late_rank_0_is_late_besides_its_rare_costs(code: str, category: str, name: str) -> None:
    """None of the seconds in which the others wait for its forward are those of the cost."""
    waits = {"waits/start": {1: 20.0}, "waits/backward": {0: 0.5, 1: 10.5}}
    columns = {f"timings/{category}": [20.0, 0.0], "waits/exchange": [0.5] * 2}
    window = ranks_window(2, {"forward": {0: 10.0}}, waits, **columns)
    costs = {Action("train", category, name): Cost(20.0, 1)}
    signals = with_costs(Signals([window] * 6), [costs] * 6)
    found = {each.code: each.share * signals.wall[0] for each in diagnose(signals).verdicts}
    assert found[code] == pytest.approx(20.0)
    assert found["straggler"] == pytest.approx(10.0)


def test_the_same_by_the_clocks_of_gpus() -> None:
    """Rank 1 loads longer, and rank 0 logs longer at the end of a batch."""
    window = on_gpu({"exposed_input": 5.0}, {"dataloader_next": 5.0})
    columns = {name: window[name].tolist() for name in window.columns}
    columns["waits/device/start"] = [0.0, 3.0, 3.0]
    columns["timings/device/other"] = [4.0] * 3
    found = find_straggler([window_of(columns)] * 3)
    assert found is not None
    assert (found.rank, found.phase) == (1, "input")
    assert found.seconds == pytest.approx(0.5)


def test_ranks_that_are_late_by_turns_within_a_part_of_the_batch_do_not_wait() -> None:
    """More time in forward makes up for less in input: no rank waits between them."""
    own = {"forward": {0: 4.0}, "dataloader_next": {1: 4.0}}
    assert find_straggler([ranks_window(2, own, {})] * 5) is None


def test_a_straggler_among_ten_thousand_ranks_is_found() -> None:
    """The late rank is found."""
    ranks = 10_000
    others = {each: 5.0 for each in range(ranks) if each != 4711}
    found = find_straggler(
        [ranks_window(ranks, {"forward": {4711: 5.0}}, {"waits/backward": others}, 8)] * 3
    )
    assert found is not None
    assert (found.rank, found.node) == (4711, 588)


# -- real ranks -------------------------------------------------------------------------------


def named(found: dict[str, Any]) -> tuple[int, str] | None:
    """Rank and phase of a verdict."""
    late = found["straggler"]
    return None if late is None else (late["rank"], late["phase"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "ranks", "seconds"),
    [("input", 3, 0.02), ("forward", 2, 0.005), ("backward", 4, 0.05), ("callback", 2, 0.02)],
)
def test_a_planted_delay_is_found(tmp_path: Path, phase: str, ranks: int, seconds: float) -> None:
    """On real ranks, rank and phase are found. If a busy machine delayed another rank more, another
    seed is tried.

    ``benchmarks/stragglers.py`` counts how often.
    """
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rank = (PHASES.index(phase) + seed) % ranks
        found = find(folder, ranks, Late({rank}, phase, seconds, seed))
        if named(found) == (rank, phase) and found["straggler"]["chronic"]:
            break
    else:
        pytest.fail(f"{found['straggler']} is not rank {rank} in {phase}")
    assert found["straggler"]["seconds"] > seconds / 2
    last = found["seen"][-2] if not found["seen"][-1] else found["seen"][-1]
    assert last["straggler/rank"] == rank
    numbers = ("input", "forward", "backward", "optimizer", "callback")
    assert last["straggler/phase"] == numbers.index(phase)
    (page,) = folder.rglob("report.html")
    _, table = page.read_text().split("the latest ranks first.")
    assert re.findall("<td.*?>(.*?)</td>", table)[0] == str(rank)


class Turns(Late):
    """Another rank of two is late in each batch, while gradients accumulate over four."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.fit_loop.total_batch_idx % 2 == self.global_rank:
            time.sleep(0.03)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_ranks_that_wait_while_gradients_accumulate_are_no_stall(tmp_path: Path) -> None:
    """They wait at the start of batches, where a rank has no stalls of its own."""
    torch.set_num_threads(1)
    given = options(2, batches=40, every=8) | {"accumulate_grad_batches": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path, always_on(show_summary=False), **given).fit(Turns(set(), "forward", 0.0))
    (path,) = tmp_path.rglob("summary.json")
    summary = json.loads(path.read_text())
    verdicts = {(each["code"], each["phase"]): each for each in summary["verdicts"]}
    assert ("periodic-stall", "other") not in verdicts
    found = verdicts["straggler", "backward"]
    assert (found["rank"], found["share"] > 0.25) == (None, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", ["none", "all"])
def test_no_rank_is_named_if_nothing_is_planted(tmp_path: Path, ranks: int, slow: str) -> None:
    """This includes ranks that are all equally slow. If a busy machine delayed one, another seed is
    tried.
    """
    late = set(range(ranks)) if slow == "all" else set()
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = find(folder, ranks, Late(late, "forward", 0.02, seed))["straggler"]
        if found is None or not found["chronic"]:
            break
    else:
        pytest.fail(f"{found} is named")
