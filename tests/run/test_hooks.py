"""Lifecycle methods of callbacks: their order, their progress counts, and errors in them."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.lifecycle_log import LifecycleLog
from helpers.small import Records, Small, ours, trainer
from helpers.versions import REPEATED
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.requirements import Requirement

from lightning_perf import (
    At,
    Every,
    Flops,
    Moment,
    PerfWarning,
    Schedule,
    SpeedMonitor,
    Suite,
    Timings,
)
from lightning_perf.run.context import RunContext


def test_lifecycle_methods_come_in_order_without_the_sanity_check(tmp_path: Path) -> None:
    """Validation within fit is nested in training; sanity-check batches are not delivered."""
    log = LifecycleLog()
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1}
    trainer(tmp_path, log, num_sanity_val_steps=1, **options).fit(Small())
    assert log.entries == [
        ("start", "train", 0),
        ("before", "train", 0),
        ("after", "train", 1),
        ("before", "train", 1),
        ("after", "train", 2),
        ("start", "validate", 0),
        ("before", "validate", 0),
        ("after", "validate", 1),
        ("end", "validate", 1),
        ("end", "train", 2),
        ("close:teardown", "", 0),
    ]


def test_several_callbacks_see_the_same_progress(tmp_path: Path) -> None:
    """Progress advances once per batch, for any number and order of callbacks."""
    logs = [LifecycleLog("a"), LifecycleLog("b"), LifecycleLog("c")]
    run = trainer(tmp_path, logs[0], L.Callback(), logs[1], Suite([logs[2]]), max_epochs=2)
    run.fit(Small())
    assert logs[0].entries == logs[1].entries == logs[2].entries
    last = logs[0].stamps[-1]
    assert (last.batch, last.sample, last.step, last.epoch, last.batch_in_epoch) == (
        32, 128, 32, 1, 16,
    )  # fmt: skip


def test_steps_are_not_batches_under_accumulation(tmp_path: Path) -> None:
    """Four batches make a step: eight batches are two steps, and the fraction follows steps."""
    log = LifecycleLog()
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 4, "max_epochs": -1}
    trainer(tmp_path, log, **options).fit(Small())
    assert [m.timestamp.step for m in log.moments[:8]] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert log.moments[7].fraction == 0.5
    assert log.moments[-1].fraction == 1.0


def test_the_upcoming_batch_belongs_to_the_next_epoch(tmp_path: Path) -> None:
    """After the last batch of an epoch, the upcoming batch is batch 0 of the next epoch."""
    seen = []

    class Upcoming(LifecycleLog):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            stamp = context.moment.timestamp
            seen.append((stamp.epoch, stamp.batch_in_epoch, stamp.batch))

    trainer(tmp_path, Upcoming(), limit_train_batches=2, max_epochs=2).fit(Small())
    assert seen == [(0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 0, 4)]


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": 9, "max_steps": 32}])
def test_schedules_by_fraction_of_training_select_the_right_batches(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    """`previous_fraction` at an epoch's end uses the batch count of that epoch."""
    at, every = At("0.5dur", lasting="2ba"), Every("0.25dur")
    fractions: list[tuple[float | None, float | None]] = []
    found: dict[str, list[int]] = {"at": [], "every": []}

    class AsksSchedules(LifecycleLog):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            moment = context.moment
            at.observe(moment)
            fractions.append((moment.previous_fraction, moment.fraction))
            for name, schedule in (("at", at), ("every", every)):
                if schedule(moment):
                    found[name].append(moment.timestamp.batch)

    trainer(tmp_path, AsksSchedules(), **limits).fit(Small())
    assert found == {"at": [16, 17], "every": [8, 16, 24, 32]}
    assert [before for before, _ in fractions[1:]] == [now for _, now in fractions[:-1]]


@pytest.mark.parametrize("method", ["on_start", "before_batch", "after_batch", "on_end", "close"])
def test_a_failing_callback_is_switched_off(tmp_path: Path, method: str) -> None:
    """An error in a lifecycle method gives one warning; training and other callbacks continue."""

    class Broken(LifecycleLog):
        pass

    def fail(self: Any, *args: Any) -> None:
        raise ZeroDivisionError("planted")

    fail.__name__ = method
    setattr(Broken, method, fail)
    healthy, broken = LifecycleLog("healthy"), Broken("broken")
    run = trainer(tmp_path, broken, healthy, max_epochs=2)
    with pytest.warns(PerfWarning, match=rf"Broken is off.*{method}.*planted") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 1
    assert run.global_step == 32
    assert sum(method == "after" for method, *_ in healthy.entries) == 32


def test_warnings_as_errors_do_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under `-W error` our warnings go to the log and training continues."""

    class Broken(LifecycleLog):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            raise ZeroDivisionError

    run = trainer(tmp_path, Broken())
    run.fit(Small())
    assert run.global_step == 16
    assert "Broken is off for the rest of this run" in caplog.text
    caplog.clear()


def test_an_unexpected_error_at_set_up_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing can be measured, each callback warns once, and one rank trains without them."""

    def fail(*_: Any) -> None:
        raise AttributeError("a newer Lightning")

    monkeypatch.setattr("lightning_perf.run.compat.data_parallel_size", fail)
    run = trainer(tmp_path, SpeedMonitor(), Flops(), max_epochs=2)
    with pytest.warns(PerfWarning, match="setup failed .*a newer Lightning") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 2
    assert run.global_step == 32
    assert not list(tmp_path.iterdir())


def test_an_exception_closes_all_callbacks_and_propagates(tmp_path: Path) -> None:
    """The user's exception is raised after our callbacks are closed."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    log = LifecycleLog()
    with pytest.raises(KeyError, match="the user's own"):
        trainer(tmp_path, log).fit(Failing())
    assert log.entries[-1][0] == "close:exception"


def test_one_callback_serves_fit_test_and_predict(tmp_path: Path) -> None:
    """Each stage has its own counts, and a second fit continues from the first one's."""
    log = LifecycleLog()
    run = trainer(tmp_path, log)
    model = Small()
    run.fit(model)
    run.test(model, verbose=False)
    run.predict(model)
    run.fit_loop.max_epochs = 2
    run.fit(model)
    ends = [entry for entry in log.entries if entry[0] == "end"]
    assert ends == [
        ("end", "train", 16), ("end", "test", 16), ("end", "predict", 16), ("end", "train", 32),
    ]  # fmt: skip


def test_progress_is_restored_from_lightning_without_our_state(tmp_path: Path) -> None:
    """A callback added at resume, without a state of its own, continues Lightning's counts."""
    first = trainer(tmp_path)
    first.fit(Small())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    log = LifecycleLog()
    trainer(tmp_path, log, max_epochs=2).fit(Small(), ckpt_path=tmp_path / "plain.ckpt")
    stamp = log.stamps[0]
    assert (stamp.batch, stamp.step, stamp.epoch, stamp.batch_in_epoch) == (17, 17, 1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"barebones": True, "logger": None, "log_every_n_steps": None, "enable_progress_bar": None,
         "enable_model_summary": None, "enable_checkpointing": None},
        {"limit_train_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
        {"max_time": {"seconds": 2}, "limit_train_batches": 2},
        {"accumulate_grad_batches": 3},
        {"profiler": "simple"},
    ],
    ids=lambda o: next(iter(o)),
)  # fmt: skip
def test_every_trainer_option_works(tmp_path: Path, options: dict[str, Any]) -> None:
    """The callbacks give no warning and no error, whatever the Trainer's options."""
    trainer(tmp_path, Suite([SpeedMonitor(window_size=2), Flops()]), **options).fit(Small())


def test_a_suite_refuses_foreign_and_duplicate_callbacks() -> None:
    """The constructor refuses callbacks of others and two of a kind."""
    with pytest.raises(ValueError, match=r"callbacks=.*lightning_perf.*Try"):
        Suite([L.Callback()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="twice"):
        Suite([Flops(), Flops()])


def test_a_failing_logger_does_not_affect_the_others(tmp_path: Path) -> None:
    """One warning names the failing logger; the other one receives every report."""

    class Failing(Records):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise OSError("disk full")

    healthy = Records()
    with pytest.warns(PerfWarning, match="Failing did not accept metrics.*disk full") as caught:
        trainer(tmp_path, SpeedMonitor(4), logger=[Failing(), healthy]).fit(Small())
    assert len(ours(caught)) == 1
    assert len(healthy.of("time/train")) == 16


def test_loggers_are_called_as_lightning_calls_them(tmp_path: Path) -> None:
    """A logger whose `log_metrics` takes keyword arguments only receives every report."""

    class Named(Records):
        def log_metrics(self, **named: Any) -> None:
            super().log_metrics(**named)

    logger = Named()
    trainer(tmp_path, SpeedMonitor(4), logger=logger).fit(Small())
    assert len(logger.of("time/train")) == 16


@pytest.mark.parametrize("every", [16, 7], ids=["epoch end", "mid-epoch"])
def test_a_resumed_epoch_matches_lightning_s(tmp_path: Path, every: int) -> None:
    """A checkpoint saved at an epoch's last batch resumes in the next epoch."""
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True}
    trainer(tmp_path, SpeedMonitor(), saving, **options).fit(Small())
    log = LifecycleLog()
    run = trainer(tmp_path, SpeedMonitor(), log, max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        run.fit(Small(), ckpt_path=tmp_path / f"step={every}.ckpt")
    first, last = log.stamps[0], log.stamps[-1]
    # Older releases of Lightning repeat the last batch, in its epoch.
    epoch, before = divmod(every - REPEATED, 16)
    assert (first.batch, first.epoch, first.batch_in_epoch) == (
        every + 1, epoch, before + REPEATED + 1,
    )  # fmt: skip
    assert (last.batch, last.epoch, last.batch_in_epoch) == (32 + REPEATED, 1, 16)
    assert log.moments[-1].fraction == 1.0


def test_unused_hooks_are_disabled_unless_overridden(tmp_path: Path) -> None:
    """Lightning skips hooks that we do not use, unless a subclass or an object overrides them."""
    seen: list[str] = []

    class Overrides(SpeedMonitor):
        def on_before_backward(self, *args: Any) -> None:
            super().on_before_backward(*args)
            seen.append("of the class")

    monitor = Overrides()
    monitor.on_after_backward = lambda *_: seen.append("of the object")  # type: ignore[method-assign]
    run = trainer(tmp_path, monitor, limit_train_batches=2)
    run.fit(Small())
    run.fit(Small())  # the first run restored them, otherwise this one would not find them
    assert seen == ["of the class", "of the object"] * 2
    assert callable(monitor.on_before_zero_grad)
    assert vars(copy.deepcopy(monitor)).keys() == vars(monitor).keys() - {"state_key"}


HOOKS = (
    "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end",
    "on_train_epoch_end", "on_train_end", "teardown",
)  # fmt: skip


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("calls_super", [False, True])
def test_a_hook_of_a_subclass_may_leave_out_super(
    tmp_path: Path, calls_super: bool, hosted: bool
) -> None:
    """Each batch counts once for all callbacks, with or without `super()`."""
    seen: list[str] = []

    def hook(name: str) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(name)
            if calls_super:
                getattr(super(theirs, self), name)(*args, **kwargs)

        return run

    theirs: Any = type("Overrides", (LifecycleLog,), {name: hook(name) for name in HOOKS})
    other, usual, first = LifecycleLog("other"), LifecycleLog(), theirs()
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}
    trainer(tmp_path, usual, **options).fit(Small())
    run = trainer(tmp_path, Suite([first]) if hosted else first, other, **options)
    run.fit(Small())
    assert first.entries == other.entries == usual.entries
    assert [m.timestamp.epoch for m in other.moments] == [m.timestamp.epoch for m in usual.moments]
    assert [seen.count(name) for name in HOOKS] == [1, 6, 6, 3, 2, 1, 1]  # with a sanity check
    assert first._context is None


def test_a_schedule_that_raises_switches_off_one_callback(tmp_path: Path) -> None:
    """The other callbacks report as before."""

    class Failing(Schedule):
        def window(self, moment: Moment) -> int | None:
            if moment.timestamp.batch > 5:
                raise ZeroDivisionError("planted")
            return None

    records = Records()
    timings = Timings(schedule=Failing())
    run = trainer(tmp_path, timings, Flops(peak_flops=1e9), logger=records)
    with pytest.warns(PerfWarning, match="Timings is off.*planted.*") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 1
    assert [step for step, _ in records.of("mfu")] == [4, 9, 14]


def test_an_epoch_that_stops_early_counts_as_an_epoch_for_schedules(tmp_path: Path) -> None:
    """Its end is known only afterwards: the report comes one batch later and is not missed."""

    class Short(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    records, log = Records(), LifecycleLog()
    timings = Timings(schedule="every epoch")
    trainer(tmp_path, timings, log, logger=records, max_epochs=3).fit(Short())
    assert [step for step, _ in records.of("timings/forward")] == [5, 10, 14]
    assert [m.timestamp.epoch for m in log.moments] == [0] * 5 + [1] * 5 + [2] * 5
    assert [m.previous.epoch for m in log.moments][4:7] == [0, 1, 1]
    assert log.moments[5].previous.batch_in_epoch == 0


OTHER_PACKAGE = """
import sys
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning import Callback
options = ["fit", "--trainer.max_steps=3", "--trainer.accelerator=cpu"]
options += ["--trainer.callbacks=lightning_perf.SpeedMonitor", "--trainer.logger=false"]
options += [f"--trainer.default_root_dir={sys.argv[1]}"]
cli = LightningCLI(BoringModel, args=options, save_config_callback=None)
monitor = cli.trainer.callbacks[0]
assert isinstance(monitor, Callback)
assert monitor.metrics["throughput/samples_per_sec"] > 0
"""


@pytest.mark.slow
def test_the_cli_of_the_other_package_accepts_our_callbacks(tmp_path: Path) -> None:
    """The LightningCLI of pytorch_lightning constructs them, and its Trainer runs them."""
    pytest.importorskip("pytorch_lightning")
    asked = map(Requirement, requires("pytorch_lightning") or ())
    wanted = next(each.specifier for each in asked if each.name == "jsonargparse")
    if not wanted.contains(version("jsonargparse")):
        pytest.skip(f"its LightningCLI asks for jsonargparse {wanted}")
    command = [sys.executable, "-W", "ignore", "-c", OTHER_PACKAGE, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
