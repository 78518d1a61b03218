"""Nothing of ours holds a Trainer once its run is over, however it ended."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.small import Records, Small, trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torchmetrics import MeanMetric

from lightning_perf import (
    Diagnosis,
    Flops,
    PerfWarning,
    PyTorch,
    SpeedMonitor,
    Suite,
    SystemMetrics,
    Timings,
)
from lightning_perf.run import context as module

HOOKS = [
    "setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "teardown",
]  # fmt: skip


class Failing(L.Callback):
    """Raises in one hook."""

    def __init__(self, hook: str, error: type[BaseException] = ZeroDivisionError) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise error("planted")

        setattr(self, hook, fail)


class Metered(Small):
    """Has a metric, which Timings times, and a rate and a batch size for the tuners."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.mean, self.fails_at = 0.01, MeanMetric(), -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            raise ZeroDivisionError("planted")
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.mean.compute()


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Lightning ignores SIGINT after one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def everything() -> list[L.Callback]:
    return [
        SpeedMonitor(2),
        Flops(peak_flops=1e9),
        Timings(),
        SystemMetrics(interval=0.1),
        Diagnosis(terminal=False),
    ]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lightning_perf")]


def assert_gone(watched: list[weakref.ref[Any]]) -> None:
    # Where an on_exception raised, Lightning's own handler of a signal holds its Trainer.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    until = time.monotonic() + 60
    while (gc.collect(), threads())[1] and time.monotonic() < until:
        time.sleep(0.02)
    assert threads() == []
    assert [each() for each in watched] == [None] * len(watched)
    assert not module._CONTEXTS


def run(
    folder: Path,
    ours: list[L.Callback],
    others: list[L.Callback],
    act: Callable[[L.Trainer, Metered], object],
    **options: Any,
) -> list[weakref.ref[Any]]:
    """Train, and let go of all but our callbacks and the loggers."""
    defaults = {"limit_val_batches": 1, "limit_train_batches": 3, "logger": Records()}
    made, model = trainer(folder, *ours, *others, **defaults | options), Metered()
    watched: list[weakref.ref[Any]] = [weakref.ref(made), weakref.ref(model)]
    try:
        act(made, model)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        error.__traceback__ = None
    return watched


def fit(made: L.Trainer, model: Metered) -> None:
    made.fit(model)


WAYS: dict[str, Callable[[L.Trainer, Metered], object]] = {
    "fit": fit,
    "validate": lambda made, model: made.validate(model, verbose=False),
    "test": lambda made, model: made.test(model, verbose=False),
    "predict": lambda made, model: made.predict(model),
    "all": lambda made, model: [way(made, model) for name, way in WAYS.items() if name != "all"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosted", [False, True], ids=["apart", "suite"])
def test_a_run_that_ends_well_lets_go(tmp_path: Path, way: str, hosted: bool) -> None:
    """Callbacks and loggers that the user keeps hold neither the Trainer nor the module."""
    records = Records()
    ours: list[L.Callback] = [Suite(everything())] if hosted else everything()  # type: ignore[arg-type]
    assert_gone(run(tmp_path, ours, [], WAYS[way], logger=records))
    assert records.keys


def test_max_steps_lets_go(tmp_path: Path) -> None:
    """So does a training that ends in the middle of an epoch."""
    assert_gone(run(tmp_path, everything(), [], fit, max_steps=2, max_epochs=-1))


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_lets_go(tmp_path: Path, hook: str) -> None:
    """Another callback's error, before or after ours have heard of the hook."""
    assert_gone(run(tmp_path, everything(), [Failing(hook)], fit))
    ours = everything()
    assert_gone(run(tmp_path, [Failing(hook), *ours], [], fit))


def test_a_machine_without_threads_costs_the_sensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and the trace of the run is in its place."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ours: list[L.Callback] = [SystemMetrics(), PyTorch(schedule="first 1ba")]
    with pytest.warns(PerfWarning, match="machine is not measured .*new thread"):
        assert_gone(run(tmp_path, ours, [], fit))
    assert [*tmp_path.rglob("*.pt.trace.json.gz")]


def test_a_failing_end_costs_no_recording(tmp_path: Path) -> None:
    """Whatever one part raises at the end of a run, the others end."""
    ended: list[str] = []

    class Fails(SpeedMonitor):
        def prepare(self, context: Any) -> None:
            super().prepare(context)
            context.on_close(lambda: 1 / 0)
            context.on_close(lambda: ended.append("the other"))

    with pytest.warns(PerfWarning, match="did not end as it should .*ZeroDivisionError"):
        assert_gone(run(tmp_path, [Fails(2)], [], fit))
    assert ended == ["the other"]


def test_ctrl_c_lets_go(tmp_path: Path) -> None:
    """KeyboardInterrupt becomes SystemExit, and nothing stays."""
    ours = everything()  # kept, unlike the other one, on which Lightning's own methods stay
    others: list[L.Callback] = [Failing("on_train_batch_end", KeyboardInterrupt)]
    watched = run(tmp_path, ours, others, fit)
    others.clear()
    assert_gone(watched)


@pytest.mark.parametrize("tuner", [LearningRateFinder, BatchSizeFinder])
@pytest.mark.parametrize("fails_at", [-1, 1], ids=["works", "fails"])
@pytest.mark.filterwarnings("ignore")
def test_an_error_inside_a_tuner_lets_go(
    tmp_path: Path, tuner: type[L.Callback], fails_at: int
) -> None:
    """Tuners exchange the Trainer's callbacks, so that no hook of ours hears of the error."""
    option = "max_trials" if tuner is BatchSizeFinder else "num_training_steps"
    tuning = tuner(**{option: 3})

    def act(made: L.Trainer, model: Metered) -> None:
        model.fails_at = fails_at
        made.fit(model)

    ours = everything()
    watched = run(tmp_path, ours, [tuning], act, enable_checkpointing=True)
    del tuning
    assert_gone(watched)
    assert_gone(run(tmp_path, ours, [], fit))  # they can be used again


def test_an_on_exception_that_raises_keeps_no_trainer(tmp_path: Path) -> None:
    """Nobody tells ours of the end: the Trainer goes with them, or when the next run begins."""
    mean = [Failing("on_train_batch_end"), Failing("on_exception")]
    watched = run(tmp_path, everything(), [], fit)
    assert_gone(watched)
    watched = run(tmp_path, [*mean, *everything()], [], fit)
    mean.clear()
    assert_gone(watched)


def test_a_trainer_whose_end_nobody_told_fits_again(tmp_path: Path) -> None:
    """What is left of the run before is closed first, and the counts are the new run's."""
    records, monitor = Records(), SpeedMonitor(2)
    mean = [Failing("on_train_batch_end"), Failing("on_exception")]
    made = trainer(tmp_path, mean[0], mean[1], monitor, Timings(), logger=records)
    with pytest.raises(ZeroDivisionError):
        made.fit(Small())
    for each in mean:
        vars(each).clear()
    records.rows.clear()
    made.fit(Small())
    assert len(records.of("throughput/batches_per_sec")) > 10
    assert not monitor._context


def test_at_exit_runs_are_left(tmp_path: Path) -> None:
    """A run whose end nobody told is closed when the interpreter ends."""
    ends: list[str] = []

    class Ends(SpeedMonitor):
        def close(self, context: Any, reason: str) -> None:
            ends.append(reason)

    mean = [Failing("on_train_batch_end"), Failing("on_exception")]
    made = trainer(tmp_path, *mean, Ends())
    with pytest.raises(ZeroDivisionError):
        made.fit(Small())
    assert not ends
    module._leave_at_exit()
    assert ends == ["exception"]


def test_a_callback_that_moves_on_holds_only_the_new_trainer(tmp_path: Path) -> None:
    """It says so, and the first Trainer can go."""
    monitor = SpeedMonitor(2)
    watched = run(tmp_path, [Failing("on_train_end"), Failing("on_exception"), monitor], [], fit)
    with pytest.warns(PerfWarning, match="attached to another Trainer, which it leaves"):
        assert_gone([*watched, *run(tmp_path, [monitor], [], fit)])
