"""A user's own schedule: at most 12 lines, and it works wherever the built-in ones do."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.small import Small, ours, trainer
from jsonargparse import ArgumentParser

from lightning_perf import (
    ConfigError,
    Flops,
    PerfWarning,
    PyTorch,
    Schedule,
    Stages,
    Timings,
    VizTracer,
)
from lightning_perf.core.progress import Moment


class EveryOtherEpoch(Schedule):
    """True in every second epoch."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def window(self, moment: Moment) -> int | None:
        """Return the epoch."""
        epoch = moment.timestamp.epoch
        return epoch if epoch % 2 == self.first else None


class Raises(EveryOtherEpoch):
    """Fails after some batches."""

    def window(self, moment: Moment) -> int | None:
        """Raise."""
        return {0: None, 1: None}[moment.timestamp.batch]


class Array(EveryOtherEpoch):
    """Its windows cannot be compared."""

    def window(self, moment: Moment) -> Any:
        """Return an array."""
        return np.zeros(2)


class NeverQuiet(EveryOtherEpoch):
    """Its next window has no number."""

    def quiet_until(self, moment: Moment) -> Any:
        """Return None."""


@pytest.mark.parametrize("kind", [PyTorch, Flops])
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Raises(),
            r" failed \(KeyError: 2\)\. Training continues\. Check Raises: window\(\) returns",
        ),
        (Raises() | Stages("test"), r" failed \(KeyError: 2\).* Check Raises: window"),
        (
            NeverQuiet(first=1),
            r"Check NeverQuiet: window\(\) returns a hashable value or None, quiet_until",
        ),
    ],
    ids=str,
)
def test_an_error_of_a_schedule_names_its_class(
    tmp_path: Path, kind: Any, schedule: Schedule, message: str
) -> None:
    """The warning says what its methods have to return."""
    healthy = Timings()
    callbacks = [kind(schedule=schedule), healthy]
    with pytest.warns(PerfWarning, match=message) as caught:
        trainer(tmp_path, *callbacks).fit(Small())
    assert len(ours(caught)) == 1
    assert healthy.metrics


def test_an_error_of_a_schedule_switches_off_its_own_profiler(tmp_path: Path) -> None:
    """Another profiler that begins where its window may end records."""
    healthy = VizTracer(schedule="at 2ba for 3ba")
    broken = PyTorch(schedule=Array())
    with pytest.warns(PerfWarning, match="PyTorch is off.* Check Array") as caught:
        trainer(tmp_path, healthy, broken).fit(Small())
    assert len(ours(caught)) == 1
    assert len(healthy.saved_traces) == 1


def test_a_lead_that_is_no_number_is_refused() -> None:
    """At construction of what uses the schedule."""

    class Early(EveryOtherEpoch):
        lead = "2"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Early\.lead='2' .* Try Early\.lead=2"):
        PyTorch(schedule=Early())


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
