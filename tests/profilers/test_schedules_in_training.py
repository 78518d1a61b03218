"""Schedules in whole trainings, compared with a plain reading of what they mean."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from helpers.small import Records, Small, ours, trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf import (
    All,
    Always,
    AnyOf,
    At,
    Cyclic,
    Every,
    Never,
    Not,
    OnSignal,
    Profiler,
    Schedule,
    Stages,
)
from lightning_perf.run.window_callback import WindowCallback

pytestmark = [
    pytest.mark.slow,
    *map(
        pytest.mark.filterwarnings,
        (
            "ignore::lightning_perf.PerfWarning",
            "ignore:Length of IterableDataset",
            "ignore:Your `IterableDataset` has `__len__` defined",
        ),
    ),
]
LENGTH = 6


class Batch(NamedTuple):
    """A batch of a training, as the module sees it."""

    stage: str
    #: Counted in the stage.
    number: int
    epoch: int
    in_epoch: int


class Training(Small):
    """Epochs end after these numbers of batches, by a hook or with the data."""

    def __init__(self, lengths: list[int], by_hook: bool, signal_at: int = -1) -> None:
        super().__init__()
        self.lengths, self.by_hook, self.signal_at = lengths, by_hook, signal_at
        self.ran: list[Batch] = []
        self.validations = -1

    def note(self, stage: str, epoch: int, in_epoch: int) -> None:
        number = sum(each.stage == stage for each in self.ran)
        self.ran.append(Batch(stage, number, epoch, in_epoch))
        if len(self.ran) - 1 == self.signal_at:
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        ends = self.by_hook and batch_idx >= self.lengths[self.current_epoch]
        return -1 if ends else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", self.current_epoch, batch_idx)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.validations += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate", self.validations, batch_idx)

    def train_dataloader(self) -> Any:
        module, small = self, super().train_dataloader().dataset

        class Claims(IterableDataset[Any]):
            def __len__(self) -> int:
                return 4 * LENGTH

            def __iter__(self) -> Iterator[Any]:
                epoch = module.trainer.current_epoch
                batches = LENGTH if module.by_hook else min(module.lengths[epoch], LENGTH)
                return (small[index] for index in range(4 * batches))

        return DataLoader(Claims(), batch_size=4)


class Notes(Profiler):
    """Keeps which batches ran while it recorded, in a list per file."""

    def __init__(self, schedule: Schedule, module: Training, warms_up: bool = False) -> None:
        super().__init__(schedule, folder=f"{id(self)}", filename="{stage}{batch}")
        self.module, self.warms_up, self.files = module, warms_up, []

    def record(self, path: Path, context: Any, warmup: int) -> Any:
        begun = len(self.module.ran)
        yield None
        path.write_text("")
        self.files.append(self.module.ran[begun + warmup :])

    @property
    def recorded(self) -> list[Batch]:
        return [batch for file in self.files for batch in file]


class Reports(WindowCallback):
    """Keeps after how many batches of training it reported."""

    columns = ("batch/count",)

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.at: list[int] = []

    def on_window(self, window: Any) -> None:
        if window.stage == "train" and not window.at_end:
            self.at.append(window.last.batch)


Test = Callable[[list[Batch], int], bool]


def crossing(unit: Callable[[Batch], int], number: Callable[[int], int], lasting: int) -> Test:
    """For ``lasting`` batches of a stage from each one on that passes a milestone."""

    def test(ran: list[Batch], at: int) -> bool:
        same = [each for each in ran[: at + 1] if each.stage == ran[at].stage]
        numbers = [0, *(number(unit(each)) for each in same)]
        opened = [now > before for before, now in itertools.pairwise(numbers)]
        return any(opened[-lasting:])

    return test


def cyclic(o: dict[str, Any]) -> Test:
    def test(ran: list[Batch], at: int) -> bool:
        place = ran[at].in_epoch if o["per_epoch"] else ran[at].number
        cycle, place = divmod(
            place - o["skip_first"], o["wait"] + o["warmup"] + (active := o["active"])
        )
        idle = o["wait"] + o["warmup"]
        return cycle >= 0 and idle <= place < idle + active and not 0 < o["repeat"] <= cycle

    return test


few = st.integers(0, 3)
some = st.integers(1, 4)
stages = st.sampled_from(["train", "validate"])
UNITS: dict[str, Callable[[Batch], int]] = {
    "ba": lambda batch: batch.number,
    "sp": lambda batch: 4 * batch.number,
    "ep": lambda batch: batch.epoch,
}


def every(amount: int, unit: str, lasting: int) -> tuple[Schedule, Test]:
    if unit == "ba":  # a longer window is refused
        lasting = min(lasting, amount)
    schedule = Every(f"{amount}{unit}", lasting=f"{lasting}ba")
    return schedule, crossing(UNITS[unit], lambda place: place // amount, lasting)


def at(amount: int, unit: str, lasting: int) -> tuple[Schedule, Test]:
    schedule = At(f"{amount}{unit}", lasting=f"{lasting}ba")
    return schedule, crossing(UNITS[unit], lambda place: int(place >= amount), lasting)


#: A schedule, and what it means.
LEAVES: st.SearchStrategy[tuple[Schedule, Test]] = st.one_of(
    st.builds(every, st.integers(1, 9), st.sampled_from([*UNITS]), some),
    st.builds(at, st.integers(0, 9), st.sampled_from([*UNITS]), some),
    st.fixed_dictionaries(
        {
            **dict.fromkeys(("skip_first", "wait", "warmup", "repeat"), few),
            "active": some,
            "per_epoch": st.booleans(),
        }
    ).map(lambda options: (Cyclic(**options), cyclic(options))),
    stages.map(lambda stage: (Stages(stage), lambda ran, at: ran[at].stage == stage)),
    st.just((Always(), lambda ran, at: True)),
    st.just((Never(), lambda ran, at: False)),
)


def composed(inner: Any) -> Any:
    both = st.tuples(inner, inner)
    return st.one_of(
        inner.map(lambda a: (Not(a[0]), lambda ran, at: not a[1](ran, at))),
        both.map(
            lambda p: (All([p[0][0], p[1][0]]), lambda *x: p[0][1](*x) and p[1][1](*x)),
        ),
        both.map(
            lambda p: (AnyOf([p[0][0], p[1][0]]), lambda *x: p[0][1](*x) or p[1][1](*x)),
        ),
    )


LENGTHS = st.lists(st.integers(0, LENGTH + 1), min_size=1, max_size=5)
once = settings(
    deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), database=None
)


def fit(module: Training, *callbacks: Any, validation: int) -> None:
    with TemporaryDirectory() as folder:
        options = {"max_epochs": len(module.lengths), "limit_val_batches": validation}
        options["num_sanity_val_steps"] = 0
        trainer(Path(folder), *callbacks, logger=Records(), **options).fit(module)


@once
@given(st.recursive(LEAVES, composed, max_leaves=4), LENGTHS, few, st.booleans(), st.booleans())
def test_a_profiler_records_what_its_schedule_selects(
    pair: tuple[Schedule, Test], lengths: list[int], validation: int, by_hook: bool, warms: bool
) -> None:
    """Whatever is composed, and wherever epochs end, with and without warm-up."""
    schedule, selects = pair
    module = Training(lengths, by_hook)
    notes = Notes(schedule, module, warms)
    fit(module, notes, validation=validation)
    expected = [each for at, each in enumerate(module.ran) if selects(module.ran, at)]
    assert notes.recorded == expected


@once
@given(st.recursive(LEAVES, composed, max_leaves=3), LENGTHS, few, st.booleans())
def test_a_callback_reports_before_what_its_schedule_selects(
    pair: tuple[Schedule, Test], lengths: list[int], validation: int, by_hook: bool
) -> None:
    """The report comes one batch later if the epoch before ended early."""
    schedule, selects = pair
    module = Training(lengths, by_hook)
    reports = Reports(schedule)
    fit(module, reports, validation=validation)
    ran, expected, unforeseen = module.ran, set(), {0}
    trained = [at for at, each in enumerate(ran) if each.stage == "train"]
    for last, at in itertools.pairwise(trained):
        epochs = ran[at].epoch - ran[last].epoch
        early = epochs > 1 or (epochs == 1 and ran[last].in_epoch < LENGTH - 1)
        unforeseen |= {ran[at].number} if early else set()
        expected |= {ran[at].number + early} if selects(ran, at) else set()
    known = set(range(len(trained))) - unforeseen
    assert known & set(reports.at) == known & expected


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs POSIX signals")
@once
@given(LENGTHS, few, st.booleans(), st.integers(0, 30), some, st.sampled_from(["", "train"]))
def test_a_signal_records_the_next_batches_of_any_stage(
    lengths: list[int], validation: int, by_hook: bool, at: int, lasting: int, stage: str
) -> None:
    """One batch after the signal, also where a stage ends; of one stage, if only it is selected."""
    module = Training(lengths, by_hook, signal_at=at)
    schedule = OnSignal(lasting=f"{lasting}ba")
    notes = Notes(schedule & Stages(stage) if stage else schedule, module)
    fit(module, notes, validation=validation)
    later = [each for each in module.ran[at + 1 :] if stage in ("", each.stage)]
    assert notes.recorded == later[1 : 1 + lasting]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs POSIX signals")
@pytest.mark.parametrize(("at", "late"), [(2, False), (LENGTH - 2, True), (LENGTH - 1, True)])
def test_a_signal_that_comes_too_late_gives_a_warning(at: int, late: bool) -> None:
    """Whoever sent it waits for a file: nothing could be recorded after it."""
    module = Training([LENGTH], True, signal_at=at)
    notes = Notes(OnSignal(lasting="1ba"), module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, notes, validation=0)
    assert any("nothing for a signal" in each for each in ours(caught)) == late
    assert bool(notes.recorded) != late
