"""Nothing of this package keeps a Trainer alive after its run, however the run ended."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import memray
import pytest
from helpers.small import Records, Small, trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torchmetrics import MeanMetric

from lightning_perf import (
    Diagnosis,
    Flops,
    Memray,
    PerfWarning,
    PyTorch,
    SpeedMonitor,
    Suite,
    SystemMetrics,
    Timings,
    VizTracer,
)
from lightning_perf.run import context as module

pytestmark = pytest.mark.slow

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
    """Has a metric, which Timings times, and a learning rate and batch size to tune."""

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


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Leave what earlier tests have imported out of the many collections of these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Lightning ignores SIGINT after it has received one."""
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
    # Lightning's signal handler keeps its Trainer alive if `on_exception` raised.
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
    """Train, and drop all references but those to our callbacks and the loggers."""
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
def test_a_completed_run_releases_the_trainer(tmp_path: Path, way: str, hosted: bool) -> None:
    """Callbacks and loggers that the user keeps hold neither the Trainer nor the module."""
    records = Records()
    ours: list[L.Callback] = [Suite(everything())] if hosted else everything()  # type: ignore[arg-type]
    assert_gone(run(tmp_path, ours, [], WAYS[way], logger=records))
    assert records.keys


def test_all_objects_can_be_inspected_after_a_run(tmp_path: Path) -> None:
    """No weak proxy of a released object is left: who searches for tensors would get its error."""
    ours = everything()
    assert_gone(run(tmp_path, ours, [], fit))
    left = [each for each in gc.get_objects() if type(each) in weakref.ProxyTypes]
    for proxy in left:
        isinstance(proxy, Small)
    assert ours


def test_max_steps_releases_the_trainer(tmp_path: Path) -> None:
    """A training that ends in the middle of an epoch holds no reference either."""
    assert_gone(run(tmp_path, everything(), [], fit, max_steps=2, max_epochs=-1))


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_releases_the_trainer(tmp_path: Path, hook: str) -> None:
    """Another callback raises in a hook, before or after our callbacks receive it."""
    assert_gone(run(tmp_path, everything(), [Failing(hook)], fit))
    ours = everything()
    assert_gone(run(tmp_path, [Failing(hook), *ours], [], fit))


def test_without_threads_only_the_sensors_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can start, there is one warning, and the run's trace is still written."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ours: list[L.Callback] = [SystemMetrics(), PyTorch(schedule="first 1ba")]
    with pytest.warns(PerfWarning, match="machine is not measured .*new thread"):
        assert_gone(run(tmp_path, ours, [], fit))
    assert [*tmp_path.rglob("*.pt.trace.json")]  # the training thread does not compress it


def test_an_error_while_closing_does_not_stop_other_parts_from_closing(tmp_path: Path) -> None:
    """If one part raises at the end of a run, the other parts are closed all the same."""
    ended: list[str] = []

    class Fails(SpeedMonitor):
        def prepare(self, context: Any) -> None:
            super().prepare(context)
            context.on_close(lambda: 1 / 0)
            context.on_close(lambda: ended.append("the other"))

    with pytest.warns(PerfWarning, match="the end of the run failed .*ZeroDivisionError"):
        assert_gone(run(tmp_path, [Fails(2)], [], fit))
    assert ended == ["the other"]


def test_ctrl_c_releases_the_trainer(tmp_path: Path) -> None:
    """KeyboardInterrupt becomes SystemExit, and no reference to the Trainer stays."""
    ours = everything()  # kept, unlike the other callback, which Lightning's own methods reference
    others: list[L.Callback] = [Failing("on_train_batch_end", KeyboardInterrupt)]
    watched = run(tmp_path, ours, others, fit)
    others.clear()
    assert_gone(watched)


@pytest.mark.parametrize("tuner", [LearningRateFinder, BatchSizeFinder])
@pytest.mark.parametrize("fails_at", [-1, 1], ids=["works", "fails"])
@pytest.mark.filterwarnings("ignore")
def test_an_error_inside_a_tuner_releases_the_trainer(
    tmp_path: Path, tuner: type[L.Callback], fails_at: int
) -> None:
    """Tuners swap the Trainer's callbacks, so that no hook of ours receives the error."""
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


REMOVALS: dict[str, Callable[[Any], object]] = {
    "clears": lambda made: made.callbacks.clear(),
    "replaces": lambda made: setattr(made, "callbacks", []),
    "rebuilds": lambda made: setattr(
        made,
        "callbacks",
        [each for each in made.callbacks if not type(each).__module__.startswith("lightning_perf")],
    ),
}


@pytest.mark.parametrize(
    ("hook", "removal"),
    [
        *(("on_train_batch_end", removal) for removal in REMOVALS),
        ("on_fit_end", "clears"),
        ("teardown", "clears"),
    ],
)
@pytest.mark.parametrize(("recorder", "profiler"), [(VizTracer, None), (Memray, "simple")])
def test_a_run_ends_if_the_user_removes_its_hooks(
    tmp_path: Path, hook: str, removal: str, recorder: Any, profiler: str | None
) -> None:
    """A callback removes ours from the Trainer: files are written, and all patches are removed."""
    remove = REMOVALS[removal]

    class Removes(L.Callback):
        def __init__(self) -> None:
            setattr(self, hook, lambda made, *_, **__: made.global_step < 2 or remove(made))

    def act(made: Any, model: Metered) -> None:
        owners = (made.strategy, made.profiler, made._signal_connector, made.fit_loop.epoch_loop)
        known = [{*vars(each)} for each in owners]
        made.fit(model)
        new.update(*({*vars(each)} - names for each, names in zip(owners, known, strict=True)))
        profilers.extend([owners[1], made.profiler])

    new, profilers = set[str](), list[Any]()
    ours = [*everything(), recorder(schedule="first 9ba")]
    assert_gone(run(tmp_path, [Removes(), *ours], [], act, profiler=profiler, logger=False))
    assert [name for name in new if not name.startswith("_")] == []
    assert profilers[0] is profilers[1]
    assert sys.getprofile() is None
    assert [*tmp_path.rglob("summary.json")]
    with memray.Tracker(tmp_path / "again.bin"):  # refused while another one is active
        pass


def test_an_on_exception_that_raises_releases_the_trainer(tmp_path: Path) -> None:
    """If nothing notifies ours of the end, the Trainer is released with them or at the next run."""
    mean = [Failing("on_train_batch_end"), Failing("on_exception")]
    watched = run(tmp_path, everything(), [], fit)
    assert_gone(watched)
    watched = run(tmp_path, [*mean, *everything()], [], fit)
    mean.clear()
    assert_gone(watched)


def test_a_trainer_fits_again_after_an_end_without_notification(tmp_path: Path) -> None:
    """The state of the previous run is closed first, and the counts are those of the new run."""
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


def test_runs_are_closed_at_exit(tmp_path: Path) -> None:
    """A run whose end was not notified is closed when the interpreter exits."""
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


def test_a_callback_that_is_reused_releases_the_first_trainer(tmp_path: Path) -> None:
    """It warns, and the first Trainer is released."""
    monitor = SpeedMonitor(2)
    watched = run(tmp_path, [Failing("on_train_end"), Failing("on_exception"), monitor], [], fit)
    with pytest.warns(PerfWarning, match="attached to another Trainer, which it leaves"):
        assert_gone([*watched, *run(tmp_path, [monitor], [], fit)])
