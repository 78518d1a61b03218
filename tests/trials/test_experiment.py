"""Speed-ups with their intervals, what makes trainings equal, and what to write."""

from __future__ import annotations

import subprocess
from math import exp, inf, log
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import yaml
from helpers.small import Small
from lightning.pytorch.cli import LightningCLI

from lightning_perf.trials import compat, experiment
from lightning_perf.trials.advice import as_yaml, lines, patch
from lightning_perf.trials.changes import CHANGES, Compile
from lightning_perf.trials.experiment import Candidate, Experiment, Setting, TrialsFailed
from lightning_perf.trials.process import Outcome
from lightning_perf.trials.proof import LOOKS, same_training, speedup


def candidate(kind: str = "Workers", **fields: Any) -> Candidate:
    defaults = {
        "value": 2, "name": kind, "group": kind, "exact": True, "keeps": [], "predicted": None,
        "period": 1, "trainer": {}, "loader": {}, "code": "", "yaml": [],
    }  # fmt: skip
    return Candidate(kind=kind, **(defaults | fields))


def test_few_rounds_have_no_interval() -> None:
    found = speedup([log(2), log(2)], noise=0.0)
    assert (found.ratio, found.low, found.high) == (pytest.approx(2), 0.0, inf)
    assert not found.settled


def test_rounds_that_agree_by_chance_are_as_noisy_as_all() -> None:
    assert not speedup([0.05, 0.05, 0.05], noise=0.05).better
    assert speedup([0.7, 0.7, 0.7], noise=0.05).better


class Simulated(Experiment):
    """Trials whose times are drawn: each change has a speed-up, and all have noise."""

    def __init__(self, seed: int, noise: float, speedups: dict[str, float]) -> None:
        super().__init__(["true"], 1000, 1, [], lambda _: None)
        self.close()
        self.random, self.noise, self.speedups = np.random.default_rng(seed), noise, speedups
        self.first = outcome(1.0)

    def start(self) -> list[Candidate]:
        return [candidate(name) for name in self.speedups]

    def run(self, setting: Setting) -> Outcome:
        # Waiting for data that one change has removed is not removed by another one.
        gains = [self.speedups[each.name] for each in setting.changes if "/" not in each.name]
        gains += [max([self.speedups[e.name] for e in setting.changes if "/" in e.name], default=1)]
        if "fails" in {each.name for each in setting.changes}:
            return Outcome({}, "out of memory", 1.0, 0)
        return outcome(np.exp(self.random.normal(0, self.noise)) / np.prod(gains))


def outcome(seconds: float) -> Outcome:
    result = {
        "seconds": 20 * seconds, "timed": 20, "batch_size": 4, "startup": 1.0,
        "losses": ["0.1", "0.2"], "batches": ["a", "b"], "samples": ["1", "2"], "memory": 100,
        "done": 30, "weights": ["a"], "workers": 0, "prefetch": None,
        "besides": {}, "drawn": {"batch": [], "validation": []}, "starts": [], "stays": False,
        "order": {"first": [], "later": [], "end": [], "epochs": 2, "cut": False,
                  "eager": False},
        "dataset": "fixed",
    }  # fmt: skip
    return Outcome(result, None, 0.001, 0)


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
def test_changes_that_change_nothing_do_not_help(noise: float) -> None:
    """Of 200 at each level of noise, at most one has an interval above 1.02."""
    found = [Simulated(seed, noise, {"a": 1.0, "b": 1.0}).results() for seed in range(100)]
    assert sum(row.helps for rows, _ in found for row in rows) <= 1
    assert sum(best is not None for _, best in found) <= 1


class Periodic(Simulated):
    """Beside other work that comes back after so many trials."""

    def run(self, setting: Setting) -> Outcome:
        if not self.count:
            self.period, self.phase = self.random.uniform((2, 0), (12, 2 * np.pi))
        self.count += 1
        found = super().run(setting)
        slower = exp(0.3 * np.sin(2 * np.pi * self.count / self.period + self.phase))
        found.result["seconds"] *= slower  # type: ignore[index]
        return found


def test_periodic_work_favours_no_change() -> None:
    """In a fixed order, it fell on trials of the same setting in one of twenty comparisons."""
    found = [Periodic(seed, 0.01, {"a": 1.0, "b": 1.0}).results()[0] for seed in range(100)]
    assert sum(row.helps for rows in found for row in rows) <= 2


def test_a_fifth_is_found_on_a_noisy_machine() -> None:
    """Times of trials that differ by a tenth; not after so few rounds as without noise."""
    rows = [Simulated(seed, 0.1, {"a": 1.2}).results()[0][0] for seed in range(50)]
    assert sum(row.helps for row in rows) >= 30


def test_changes_that_help_are_found_and_combined() -> None:
    """The sum is measured: two ways to remove one cause are not both kept."""
    given = {"one/cause": 1.5, "same/cause": 1.45, "another": 1.2, "nothing": 1.0, "slower": 0.5}
    rows, best = Simulated(0, 0.01, given | {"fails": 2.0}).results()
    assert [row.setting.name for row in rows if row.helps] == ["one/cause", "same/cause", "another"]
    assert best is not None
    assert best.setting.name == "one/cause + another"
    assert best.speedup is not None
    assert best.speedup.ratio == pytest.approx(1.8, rel=0.1)
    by_name = {row.setting.name: row for row in rows}
    assert by_name["fails"].failure == "out of memory"
    slower, unclear = by_name["slower"].speedup, by_name["nothing"].speedup
    assert slower is not None
    assert slower.rounds == 2  # no more time for it
    assert unclear is not None
    assert unclear.rounds in LOOKS


def test_what_trials_leave_out_is_counted() -> None:
    """Of a training whose time is validation for three quarters, alone and in the sum."""
    trials = Simulated(0, 0.01, {"a": 4.0, "b": 3.0, "c": 1.5})
    trials.first.result["besides"] = {"validation": 15.0}  # type: ignore[index]
    made = [candidate("a"), candidate("b"), candidate("c", keeps=["validation"])]
    trials.start = lambda: made  # type: ignore[method-assign]
    rows, best = trials.results()
    assert best is not None
    found = [each for each in (*rows, best) if each.speedup and each.in_trials]
    assert [each.speedup.ratio for each in found if each.speedup] == pytest.approx(
        [1 / (0.25 / 4 + 0.75), 1 / (0.25 / 3 + 0.75), 1.5, 18], rel=0.1
    )
    assert [round(each.in_trials.ratio) for each in found if each.in_trials] == [4, 3, 2, 18]
    assert rows[0].as_dict()["in_trials"]["ratio"] == pytest.approx(4, rel=0.1)
    assert rows[0].better
    # A gain that the whole hides is none.
    trials = Simulated(0, 0.001, {"a": 1.05})
    trials.first.result["besides"] = {"validation": 19.0}  # type: ignore[index]
    assert trials.results()[1] is None


@pytest.mark.parametrize(("first", "claims"), [(1.2, True), (1.8, False)])
def test_nothing_is_claimed_of_cached_samples(first: float, claims: bool) -> None:
    """Trials as it is that are much faster than the first run, which alone had to load them."""
    trials = Simulated(0, 0.01, {"a": 1.5, "b": 0.5})
    trials.first.result.update(  # type: ignore[attr-defined]
        seconds=20 * first / 0.5, besides={"validation": 20 * first}
    )
    rows, best = trials.results()
    assert (best is not None) == claims
    cached = "samples come from a cache, or times vary too much: as it is, a batch took 1.80 s "
    assert [str(row.failure).startswith(cached) for row in rows] == [not claims] * 2


@pytest.mark.parametrize(("changes", "seconds", "dataset"), [(12, 48, "fixed"), (1, 9, "random")])
def test_all_the_time_is_used_if_nothing_helps(
    changes: int, seconds: float, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of twelve changes need the time kept for combinations; one, that for other seeds.

    Nine seconds less two runs of other seeds, of three seconds each, have no time for a trial.
    """
    trials = Simulated(0, 0.01, dict.fromkeys("abcdefghijkl"[:changes], 0.5))
    trials.first = trials.first._replace(wall_seconds=3.0)
    trials.first.result["dataset"] = dataset  # type: ignore[index]
    now, run = 0.0, trials.run
    trials._end = seconds

    def second(setting: Setting) -> Outcome:
        nonlocal now
        now += 1
        return run(setting)

    monkeypatch.setattr(experiment, "monotonic", lambda: now)
    monkeypatch.setattr(trials, "run", second)
    rows, _ = trials.results()
    assert [row.speedup and row.speedup.rounds for row in rows] == [2] * changes


def test_times_are_compared_per_sample() -> None:
    larger = outcome(1.5)
    larger.result["batch_size"] = 8  # type: ignore[index]
    assert larger.per_sample < outcome(1.0).per_sample


def result(losses: list[float], batches: str = "abcd", samples: str = "1234") -> dict[str, Any]:
    return {
        "losses": [repr(each) for each in losses], "batches": [*batches], "samples": [*samples],
        "batch_size": 4, "epoch": None, "weights": ["a"],
    }  # fmt: skip


BASE = [0.4, 0.3, 0.2, 0.1]
SEEDED = [result([0.4, 0.4, 0.3, 0.15]), result([0.4, 0.4, 0.1, 0.1])]


@pytest.mark.parametrize(
    ("ours", "exact", "dataset", "expected"),
    [
        (result(BASE), True, "fixed", "equal"),
        (result(BASE, samples="1243"), True, "fixed", "not equal: batch 2 has other samples"),
        (result(BASE, batches="abxd"), True, "fixed", "not equal: batch 2 differs"),
        (result(BASE, batches="abxd"), True, "stateful", "not equal: batch 2 differs"),
        (result(BASE, batches="abxd"), True, "random",
         "alike (the dataset draws random numbers, in each process)"),
        (result([0.4, 0.3, 0.2, 0.11]), True, "fixed", "not equal: the loss of batch 3 differs"),
        (result([0.4, 0.3, 0.2, 0.11]), False, "fixed", "alike (rounding)"),
        (result([0.4, 0.3, 0.8, 0.9]), False, "fixed",
         "not equal: losses differ by more than those of other seeds (rounding)"),
        (result([0.4, 0.3, 0.2, float("nan")]), False, "fixed",
         "not equal: losses differ by more than those of other seeds (rounding)"),
    ],
)  # fmt: skip
def test_what_is_the_same_training(
    ours: dict[str, Any], exact: bool, dataset: str, expected: str
) -> None:
    assert same_training(ours, [result(BASE)] * 2, SEEDED, exact, dataset) == expected


def test_a_training_that_never_repeats_is_compared_by_its_losses() -> None:
    again = result([0.4, 0.3, 0.2, 0.12])
    ours, base = result([0.4, 0.3, 0.2, 0.13]), [result(BASE), again]
    assert same_training(ours, base, SEEDED, True, "") == "alike (two runs as it is differ, too)"
    assert same_training(ours, base, [], True, "").startswith("unknown (")


def test_weights_are_compared_where_there_is_no_loss() -> None:
    """As with manual optimization, whose step returns nothing."""
    base, other = result([]), result([]) | {"weights": ["b"]}
    assert same_training(result([]), [base, result([])], [], True, "fixed") == "equal"
    found = same_training(other, [base], [], True, "fixed")
    assert found == "not equal: the weights after some batches differ"
    assert same_training(other, [base], SEEDED, False, "") == "unknown (rounding)"


def test_only_the_first_epoch_is_compared() -> None:
    """Workers that stay draw the order of later epochs from other random numbers."""
    base, ours = result(BASE), result(BASE, samples="1243")
    base["epoch"] = ours["epoch"] = 2
    assert same_training(ours, [base], [], True, "fixed") == "equal"


def test_a_stream_in_another_order_each_time_is_unknown() -> None:
    """Workers may repeat its items, which cannot be seen: it is never recommended."""
    base, again, ours = (result(BASE, batches=each) for each in ("abcd", "bcda", "aacc"))
    found = same_training(ours, [base, again], SEEDED, True, "unknown")
    assert found == "unknown: two runs as it is have other batches, too"
    assert same_training(ours, [base, again], SEEDED, True, "stateful") == found
    assert same_training(ours, [base, again], SEEDED, True, "fixed").startswith("alike")
    assert same_training(ours, [base, again], SEEDED, True, "").startswith("alike")


def test_rounding_is_measured_where_nothing_is_random() -> None:
    """Seeds change nothing there; how losses differ between batches says what chance is."""
    losses = [0.5, 0.3, 0.4, 0.2, 0.3, 0.1]
    base, rounded, other = (result([each + more for each in losses]) for more in (0, 1e-6, 0.2))
    assert same_training(rounded, [base], [base] * 2, False, "fixed") == "alike (rounding)"
    assert same_training(other, [base], [base] * 2, False, "fixed").startswith("not equal")
    # Other batches at other seeds are a measure themselves.
    seeded = [result(losses, batches="dcba")] * 2
    assert same_training(other, [base], seeded, False, "fixed").startswith("not equal")


def test_shorter_trials_of_other_seeds_are_no_chance() -> None:
    """A training that learns has larger losses in them."""
    falling = [1 / (1 + number) for number in range(16)]
    base, other = result(falling), result([each + 0.1 for each in falling])
    seeded = [result(falling[:8], batches="dcba")] * 2
    found = same_training(other, [base], seeded, False, "fixed")
    assert found.startswith("not equal: losses differ by more")


def test_random_items_in_workers_are_seldom_called_another_training() -> None:
    """Their losses differ by chance: as those of two other seeds, but not within their range."""
    random = np.random.default_rng(0)

    def drawn(batches: str, shift: float = 0.0) -> dict[str, Any]:
        return result(random.normal(1 + shift, 0.1, 100).tolist(), batches)

    def found(shift: float) -> str:
        seeded = [drawn("bcda"), drawn("cdab")]
        return same_training(drawn("dabc", shift), [drawn("abcd")], seeded, True, "random")

    answers = [[found(shift)[:5] for _ in range(200)] for shift in (0.0, 0.2)]
    assert [each.count("not e") for each in answers] == [pytest.approx(0, abs=10), 200]


def test_larger_batches_are_compared_over_the_same_samples() -> None:
    """A training that learns has smaller losses after more samples."""
    falling = [1 / (1 + number) for number in range(16)]
    base = result(falling)
    seeded = [result([each * scale for each in falling]) for scale in (0.97, 1.03)]
    larger = [sum(falling[at : at + 4]) / 4 for at in range(0, 16, 4)]
    ours = result([*larger, *(0.05 for _ in range(12))]) | {"batch_size": 16}
    assert same_training(ours, [base], seeded, False, "fixed") == "alike (other batches)"


def test_workers_that_stay_do_not_see_a_dataset_that_changes() -> None:
    """Such as one of a curriculum, which is told the epoch."""
    base = result(BASE) | {"dataset_changes": True}
    assert same_training(result(BASE), [base], [], True, "fixed") == "equal"
    found = same_training(result(BASE) | {"stays": True}, [base], [], True, "fixed")
    assert found.startswith("not equal: the training changes the dataset")


def test_samples_are_compared_although_losses_never_repeat() -> None:
    base, again = result(BASE), result([0.4, 0.3, 0.2, 0.12])
    ours = result(BASE, samples="1243")
    assert same_training(ours, [base, again], [], True, "").startswith("not equal: batch 2")


@pytest.mark.parametrize(
    ("listed", "epoch", "timed", "expected"),
    [
        # Half as often is half of the cost of validation, not none of it.
        (candidate(keeps=["validation"], period=80.0), 40, 500, [160, 160, 120]),
        # Four workers deliver four batches at once.
        (candidate(loader={"num_workers": 4}), None, 500, [88, 88, 88]),
        # A training that ends after so many batches.
        (candidate(keeps=["validation"], period=20.0), None, 50, [40, 40, 50]),
    ],
)
def test_trials_have_whole_periods(
    monkeypatch: pytest.MonkeyPatch,
    listed: Candidate,
    epoch: int | None,
    timed: int,
    expected: list[int],
) -> None:
    specs: list[Any] = []
    trials = started(monkeypatch, specs, listed, epoch=epoch, timed=timed)
    (change,) = trials.start()
    trials.run(Setting((change,), tuple(change.keeps)))
    trials.run(Setting(keeps=tuple(change.keeps)))
    trials.run(Setting())
    assert [each["batches"] for each in specs[1:]] == expected


def test_trials_have_the_periods_of_all_changes_that_keep_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that of the last one: they share the trials as it is."""
    both = [candidate("a", keeps=["validation"], period=80.0), candidate("b", keeps=["validation"])]
    specs: list[Any] = []
    listed = [each._asdict() for each in both]
    trials = started(monkeypatch, specs, both[0], epoch=40, timed=500, candidates=listed)
    trials.start()
    trials.run(Setting(keeps=("validation",)))
    assert specs[-1]["batches"] == 160


@pytest.mark.parametrize(
    ("change", "timed", "expected"),
    [({"num_workers": 4}, 500, 100), ({"prefetch_factor": 4}, 50, 40)],
)
def test_trials_have_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], timed: int, expected: int
) -> None:
    """Of four workers and of the training's five, after the 20 batches that five load ahead."""
    listed = candidate(loader=change)
    trials = started(monkeypatch, [], listed, timed=timed, workers=5, prefetch=2)
    trials.start()
    assert trials.batches == expected


def started(
    monkeypatch: pytest.MonkeyPatch, specs: list[Any], listed: Candidate, **fields: Any
) -> Experiment:
    """Trials whose first run, of batches of 58 ms, proposes one change."""

    def run_trial(*args: Any) -> Outcome:
        specs.append(args[3])
        found = outcome(1.0)
        defaults: dict[str, Any] = {
            "median": 0.058, "candidates": [listed._asdict()], "dataset": "fixed",
            "done": fields["timed"] + 10,
        }  # fmt: skip
        found.result.update(  # type: ignore[attr-defined]
            defaults | fields | {"seconds": fields.get("seconds_per_batch", 0.06) * fields["timed"]}
        )
        return found

    monkeypatch.setattr(experiment, "run_trial", run_trial)
    trials = Experiment(["true"], 1, 5, [], lambda _: None)
    trials.close()
    return trials


@pytest.mark.parametrize(("period", "timed"), [(200.0, 500), (60.0, 50)])
def test_a_change_whose_period_is_too_long_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, period: float, timed: int
) -> None:
    """For the time, or for a training that ends: the number of validations would be chance."""
    listed = candidate(keeps=["validation"], period=period)
    trials = started(monkeypatch, [], listed, epoch=None, timed=timed)
    assert trials.start() == []
    assert trials.too_long == [listed]


def test_without_time_a_change_has_no_period_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing is time, and the output says so."""
    trials = started(monkeypatch, [], candidate(), timed=500)
    trials._end = 0.0
    assert [each.name for each in trials.start()] == ["Workers"]
    assert not trials.too_long


def test_slow_batches_are_not_taken_for_a_short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = started(monkeypatch, [], candidate(), timed=9, seconds_per_batch=3.0)
    with pytest.raises(TrialsFailed, match=r"takes 3\.00 s, .* 20 of them: raise --minutes"):
        trials.start()
    with pytest.raises(TrialsFailed, match=r"19 of the 20 batches .*: raise max_epochs"):
        started(monkeypatch, [], candidate(), timed=9, done=19).start()


def test_a_trial_without_timed_batches_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose larger batches are too few; there is no time per batch."""
    trials = started(monkeypatch, [], candidate(), timed=0, done=7)
    trials.batches = 20
    assert trials.run(Setting()).error == "the training ended after 7 batches"


def test_no_trial_lasts_longer_than_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for some seconds, in which one that has begun ends; not four times the usual ones."""
    limits: list[float] = []

    def run_trial(*args: Any) -> Outcome:
        limits.append(args[4])
        return outcome(1.0)

    monkeypatch.setattr(experiment, "run_trial", run_trial)
    for minutes, most in ((0.1, 16.0), (1e-9, 10.1)):
        trials = Experiment(["true"], minutes, 1, [], lambda _: None)
        trials.close()
        trials.allowed = 600.0
        trials.run(Setting())
        assert 10.0 <= limits[-1] <= most


class Hanging(Simulated):
    """One of the changes hangs, in the third round, after which there is no time."""

    def run(self, setting: Setting) -> Outcome:
        self.count += 1
        if self.count == 7 or "hangs" in {each.name for each in setting.changes}:
            self._end, self.first = 0.0, self.first._replace(wall_seconds=inf)
            return Outcome({}, "stopped after 9 s without a result", 9.0, 0, late=True)
        return super().run(setting)


def test_what_is_ended_with_the_time_has_not_failed() -> None:
    """What was measured before stays; a row without a result says what happened."""
    rows, best = Hanging(0, 0.01, {"a": 1.5, "b": 1.0}).results()
    assert [row.failure for row in rows] == [None, None]
    assert [row.speedup and row.speedup.rounds for row in rows] == [2, 2]
    assert best is None
    rows, _ = Hanging(0, 0.01, {"hangs": 1.0}).results()
    assert rows[0].failure == "stopped after 9 s without a result, at the end of --minutes"


def test_seeds_are_not_run_after_the_time() -> None:
    trials = Simulated(0, 0.01, {"a": 1.5})
    trials._end = 0.0
    row = experiment.Row(Setting(), speedup([0.5] * 3, 0.0), "unknown (rounding)")
    trials._row = lambda _: row  # type: ignore[method-assign]
    assert trials._rows([Setting()]) == [row]
    assert not trials._outcomes


class Needy(Simulated):
    """A training that fails without validation."""

    def run(self, setting: Setting) -> Outcome:
        if not self._whole:
            return Outcome({}, "KeyError: 'val_loss'", 1.0, 0)
        return super().run(setting)


def test_a_training_that_needs_validation_has_it_in_trials() -> None:
    rows, best = Needy(0, 0.01, {"a": 1.5}).results()
    assert [row.failure for row in rows] == [None]
    assert best is not None


class Broken(Simulated):
    """A training that fails in all trials but the first one."""

    def run(self, setting: Setting) -> Outcome:
        return Outcome({}, "OSError: locked", 1.0, 0)


class Late(Simulated):
    """A training that needs validation where it writes checkpoints, and is faster without."""

    def run(self, setting: Setting) -> Outcome:
        if self._whole:
            return super().run(setting)
        return Outcome({}, "KeyError: 'val_loss'", 1.0, 0) if setting.keeps else outcome(0.01)


def test_trials_before_validation_was_needed_are_forgotten() -> None:
    """Rounds in which only one side had it are no comparison."""
    trials = Late(0, 0.01, {"a": 1.5, "b": 1.5})
    both = [candidate("a", keeps=["checkpoint"]), candidate("b")]
    trials.start = lambda: both  # type: ignore[method-assign]
    rows, _ = trials.results()
    assert [row.speedup and round(row.speedup.ratio, 1) for row in rows] == [1.5, 1.5]


def test_a_trial_that_hangs_does_not_need_validation() -> None:
    trials = Simulated(0, 0.01, {})
    trials.run = lambda _: Outcome({}, "stopped", 11.0, 0, late=True)  # type: ignore[method-assign]
    trials._measure(Setting())
    assert not trials._whole


def test_a_change_is_not_blamed_for_what_fails_without_it() -> None:
    rows, _ = Broken(0, 0.01, {"a": 1.5}).results()
    assert rows[0].failure == "as it is fails, too, in a trial: OSError: locked"


WORKERS = candidate(loader={"num_workers": 2}, yaml=[[["data", "num_workers"], 2]])
PRECISION = candidate(
    "MixedPrecision", trainer={"precision": "bf16-mixed"},
    yaml=[[["trainer", "precision"], "bf16-mixed"]],
)  # fmt: skip
COMPILE = candidate("Compile", code="model = torch.compile(model)")


def test_lines_to_write() -> None:
    assert lines([WORKERS, PRECISION, COMPILE]) == [
        "Trainer(..., precision='bf16-mixed')", "DataLoader(..., num_workers=2)",
        "model = torch.compile(model)",
    ]  # fmt: skip


def test_lines_are_python() -> None:
    """Of all changes, with the values that are proposed."""
    values: dict[str, Any] = {
        "Workers": {"num_workers": 2, "persistent_workers": True},
        "NoWorkers": {"num_workers": 0, "multiprocessing_context": None},
        "LargerBatch": {"batch_size": 8, "accumulate_grad_batches": 1},
        "FusedOptimizer": ["SGD", "AdamW"], "MixedPrecision": "bf16-mixed",
        "ValidationInterval": {"val_check_interval": 0.5},
    }  # fmt: skip
    made = [kind(values.get(kind.__name__, 2)) for kind in CHANGES]
    made += [Compile("steps"), Compile(["net"])]
    for each in made:
        fields = {"trainer": each.trainer, "loader": each.loader, "code": each.code}
        written = lines([candidate(type(each).__name__, **fields)])
        assert written
        compile("\n".join(written), each.name, "exec")


class Data(L.LightningDataModule):
    """Of a command line."""

    def __init__(self, num_workers: int = 0, batch_size: int = 4) -> None:
        super().__init__()
        self.num_workers, self.batch_size = num_workers, batch_size


@pytest.mark.parametrize("nested", [False, True])
def test_a_command_line_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """After the training's own, also with a data module that is chosen by name."""
    arguments = {"num_workers": 1, "batch_size": 8}
    chosen = {"class_path": f"{__name__}.Data", "init_args": arguments} if nested else arguments
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    base, fast = tmp_path / "base.yaml", tmp_path / "fast.yaml"
    config = {"trainer": options, "data": chosen}
    base.write_text(yaml.safe_dump(config))
    place = list(compat.path_of(config, "num_workers", 1))
    workers = WORKERS._replace(yaml=[[place, 2]])
    fast.write_text(as_yaml([workers, PRECISION, COMPILE]))
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(base), "--config", str(fast)])
    found = LightningCLI(
        Small,
        Data,
        subclass_mode_data=nested,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert (found.datamodule.num_workers, found.datamodule.batch_size) == (2, 8)
    assert found.trainer.precision == "bf16-mixed"


def test_yaml_for_the_command_line() -> None:
    """What has no place in it is a comment."""
    text = as_yaml([WORKERS, PRECISION, COMPILE])
    assert yaml.safe_load(text) == {
        "data": {"num_workers": 2}, "trainer": {"precision": "bf16-mixed"},
    }  # fmt: skip
    assert "# In the code: model = torch.compile(model)" in text
    alone = as_yaml([WORKERS._replace(yaml=[])])
    assert yaml.safe_load(alone) == yaml.safe_load(as_yaml([])) == {}  # a valid file
    assert "num_workers=2" in alone


LARGER = candidate(
    "LargerBatch", loader={"batch_size": 32}, trainer={"accumulate_grad_batches": 1},
    yaml=[[["trainer", "accumulate_grad_batches"], 1]],
)  # fmt: skip


def test_half_of_a_change_is_only_a_comment() -> None:
    """Without the larger batch, an optimizer step would have fewer samples."""
    text = as_yaml([LARGER])
    assert yaml.safe_load(text) == {}
    assert "accumulate_grad_batches=1" in text
    for size, steps in (("8", "n"), ("n", "4")):
        source = f"DataLoader(d, batch_size={size})\nTrainer(accumulate_grad_batches={steps})\n"
        assert patch(source, "train.py", [LARGER]) == ""


SCRIPT = '''\
class Data:
    """Schön."""

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, num_workers=0,
                          shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data)

trainer = L.Trainer(
    max_epochs=3,
)
trainer.fit(Model(), Data())
'''


def changed(source: str, *changes: Candidate) -> list[str]:
    diff = patch(source, "train.py", changes).splitlines()
    return [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_a_patch_sets_literal_arguments() -> None:
    assert changed(SCRIPT, WORKERS, PRECISION) == [
        "-        return DataLoader(self.data, batch_size=4, num_workers=0,",
        "+        return DataLoader(self.data, batch_size=4, num_workers=2,",
        "-    max_epochs=3,",
        "+    max_epochs=3, precision='bf16-mixed',",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "a = DataLoader(x)\nb = DataLoader(y)\n",
        "DataLoader(x, num_workers=args.workers)\n",
        "DataLoader(x, **options)\n",
        "print(1)\n",
        "not python at all\n",
        "DataLoader(x, shuffle=(sampler is None))\n",
        "DataLoader((x))\n",
        "DataLoader(x for x in y)\n",
        "DataLoader(x, 8, True, None, None, 4)\n",
        "DataLoader(*args)\n",
        "def val_dataloader(self):\n    return DataLoader(x)\n",
        "def train_dataloader(self):\n    return DataLoader(x)\nDataLoader(y)\n",
        "x = 1\rDataLoader(x)\r",
    ],
)
def test_a_doubt_gives_no_patch(source: str) -> None:
    assert patch(source, "train.py", [WORKERS]) == ""


def test_a_form_feed_is_no_line() -> None:
    (_, new) = changed("\x0cimport torch\nd = DataLoader(x)\n", WORKERS)
    assert new == "+d = DataLoader(x, num_workers=2)"


def test_a_call_without_arguments_gets_them() -> None:
    assert changed("t = Trainer()\n", PRECISION)[1] == "+t = Trainer(precision='bf16-mixed')"
    assert changed("d = DataLoader[int](x)\n", WORKERS)[1] == (
        "+d = DataLoader[int](x, num_workers=2)"
    )


@pytest.mark.parametrize("name", ["train.py", "my train.py"])
@pytest.mark.parametrize("command", [["git", "apply", "-"], ["patch", "-p1"]])
@pytest.mark.parametrize(
    "source",
    [
        "import x\n\nDataLoader(x)",
        "import x\r\n\r\nDataLoader(x)\r\nx.y()\r\n",
        "import x\n\f\nDataLoader(x)\n",
        "if 1:\n\tDataLoader(x)\n",
        "x = 'ä\x85ö\u2028'; DataLoader(x)\n",
    ],
)
def test_programs_apply_a_patch(tmp_path: Path, source: str, command: list[str], name: str) -> None:
    """Without an end of the last line, and with other ends and controls than usual."""
    if command[0] == "patch" and "\r" in source:
        command = [*command, "--binary"]  # as its own documentation says
    script = tmp_path / name
    script.write_bytes(source.encode())
    diff = patch(source, name, [WORKERS])
    subprocess.run(command, cwd=tmp_path, input=diff.encode(), check=True)
    changed = source.replace("DataLoader(x)", "DataLoader(x, num_workers=2)")
    assert script.read_bytes() == changed.encode()
