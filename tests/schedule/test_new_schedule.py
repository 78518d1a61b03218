"""A user's own schedule: at most 12 lines, and it works wherever the built-in ones do."""

import inspect
import pickle
from pathlib import Path

import pytest
from helpers.small import Small, trainer
from jsonargparse import ArgumentParser

from lightning_perf import PyTorch, Schedule, Stages
from lightning_perf.core.progress import Moment


class EveryOtherEpoch(Schedule):
    """True in every second epoch."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def window(self, moment: Moment) -> int | None:
        """Return the epoch."""
        epoch = moment.timestamp.epoch
        return epoch if epoch % 2 == self.first else None


def test_it_takes_12_lines() -> None:
    """A constructor and `window` are enough."""
    assert len(inspect.getsource(EveryOtherEpoch).splitlines()) <= 12


def test_it_is_a_value_and_combines() -> None:
    """Equality, pickling and the operators come from the base class."""
    schedule = EveryOtherEpoch(first=1) & "every 2ba"
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule != EveryOtherEpoch() & "every 2ba"


def test_a_forgotten_attribute_is_named():
    """The error says where each argument must be kept."""

    class Forgetful(EveryOtherEpoch):
        def __init__(self, length: int = 0) -> None:
            super().__init__(length)

    with pytest.raises(AttributeError, match="'length': keep each constructor argument"):
        repr(Forgetful())


def test_it_can_be_written_in_yaml() -> None:
    """LightningCLI constructs it from class_path and init_args."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--schedule", type=Schedule | str | None)
    class_path = f"{__name__}.EveryOtherEpoch"
    config = parser.parse_object(
        {"schedule": {"class_path": class_path, "init_args": {"first": 1}}}
    )
    # The names up to jsonargparse 4.48, and since.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert instantiate(config).schedule == EveryOtherEpoch(first=1)


def test_it_schedules_a_profiler(tmp_path: Path) -> None:
    """A profiler records one trace for each of the epochs 1 and 3."""
    profiler = PyTorch(schedule=EveryOtherEpoch(first=1) & Stages("train"), batches_per_trace=1000)
    made = trainer(tmp_path, profiler, max_epochs=4)
    made.fit(Small())
    epoch = made.num_training_batches
    assert [stamp.batch for stamp, _ in profiler.saved_traces] == [2 * epoch, 4 * epoch]
