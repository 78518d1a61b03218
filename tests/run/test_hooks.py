"""The verbs and the driver behind them: what a callback of ours sees of a run."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.diary import Diary
from helpers.small import Records, Small, ours, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

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


def test_verbs_come_in_order_and_the_sanity_check_is_no_stage(tmp_path: Path) -> None:
    """Validation inside of fit is framed within training; sanity batches are not seen."""
    diary = Diary()
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1}
    trainer(tmp_path, diary, num_sanity_val_steps=1, **options).fit(Small())
    assert diary.entries == [
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
    """The driver moves once a batch, however many callbacks it serves, wherever they stand."""
    diaries = [Diary("a"), Diary("b"), Diary("c")]
    run = trainer(tmp_path, diaries[0], L.Callback(), diaries[1], Suite([diaries[2]]), max_epochs=2)
    run.fit(Small())
    assert diaries[0].entries == diaries[1].entries == diaries[2].entries
    last = diaries[0].stamps[-1]
    assert (last.batch, last.sample, last.step, last.epoch, last.batch_in_epoch) == (
        32, 128, 32, 1, 16,
    )  # fmt: skip


def test_steps_are_not_batches_under_accumulation(tmp_path: Path) -> None:
    """Two optimizer steps in eight batches, and the fraction done follows them."""
    diary = Diary()
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 4, "max_epochs": -1}
    trainer(tmp_path, diary, **options).fit(Small())
    assert [m.timestamp.step for m in diary.moments[:8]] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert diary.moments[7].fraction == 0.5
    assert diary.moments[-1].fraction == 1.0


def test_the_upcoming_batch_belongs_to_the_next_epoch(tmp_path: Path) -> None:
    """After the last batch of an epoch, what comes next is batch 0 of the next one."""
    seen = []

    class Upcoming(Diary):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            stamp = context.moment.timestamp
            seen.append((stamp.epoch, stamp.batch_in_epoch, stamp.batch))

    trainer(tmp_path, Upcoming(), limit_train_batches=2, max_epochs=2).fit(Small())
    assert seen == [(0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 0, 4)]


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": 9, "max_steps": 32}])
def test_a_window_at_a_fraction_of_the_epochs_ends(tmp_path: Path, limits: dict[str, int]) -> None:
    """The fraction one batch earlier counts the batches of its epoch, too."""
    at, every = At("0.5dur", lasting="2ba"), Every("0.25dur")
    fractions: list[tuple[float | None, float | None]] = []
    found: dict[str, list[int]] = {"at": [], "every": []}

    class Asking(Diary):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            moment = context.moment
            at.observe(moment)
            fractions.append((moment.previous_fraction, moment.fraction))
            for name, schedule in (("at", at), ("every", every)):
                if schedule(moment):
                    found[name].append(moment.timestamp.batch)

    trainer(tmp_path, Asking(), **limits).fit(Small())
    assert found == {"at": [16, 17], "every": [8, 16, 24, 32]}
    assert [before for before, _ in fractions[1:]] == [now for _, now in fractions[:-1]]


@pytest.mark.parametrize("verb", ["on_start", "before_batch", "after_batch", "on_end", "close"])
def test_a_failing_callback_gets_out_of_the_way(tmp_path: Path, verb: str) -> None:
    """One warning says which callback is off; training and the other callbacks go on."""

    class Broken(Diary):
        pass

    def fail(self: Any, *args: Any) -> None:
        raise ZeroDivisionError("planted")

    fail.__name__ = verb
    setattr(Broken, verb, fail)
    healthy, broken = Diary("healthy"), Broken("broken")
    run = trainer(tmp_path, broken, healthy, max_epochs=2)
    with pytest.warns(PerfWarning, match=rf"Broken is off.*{verb}.*planted") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 1
    assert run.global_step == 32
    assert sum(verb == "after" for verb, *_ in healthy.entries) == 32


def test_warnings_as_errors_do_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run under -W error outlives our warnings as well, which then are in the log."""

    class Broken(Diary):
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
    """Where nothing can be measured, each callback warns once, and one rank trains without them."""

    def fail(*_: Any) -> None:
        raise AttributeError("a newer Lightning")

    monkeypatch.setattr("lightning_perf.run.compat.data_parallel_size", fail)
    run = trainer(tmp_path, SpeedMonitor(), Flops(), max_epochs=2)
    with pytest.warns(PerfWarning, match="setup failed .*a newer Lightning") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 2
    assert run.global_step == 32
    assert not list(tmp_path.iterdir())


def test_an_exception_closes_everything_and_goes_on(tmp_path: Path) -> None:
    """The user sees the own exception; our callbacks were closed by then."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    diary = Diary()
    with pytest.raises(KeyError, match="the user's own"):
        trainer(tmp_path, diary).fit(Failing())
    assert diary.entries[-1][0] == "close:exception"


def test_one_object_serves_fit_then_test_then_predict(tmp_path: Path) -> None:
    """Each stage counts for itself, and a second fit goes on where the first one ended."""
    diary = Diary()
    run = trainer(tmp_path, diary)
    model = Small()
    run.fit(model)
    run.test(model, verbose=False)
    run.predict(model)
    run.fit_loop.max_epochs = 2
    run.fit(model)
    ends = [entry for entry in diary.entries if entry[0] == "end"]
    assert ends == [
        ("end", "train", 16), ("end", "test", 16), ("end", "predict", 16), ("end", "train", 32),
    ]  # fmt: skip


def test_progress_is_believed_from_lightning_without_a_state_of_ours(tmp_path: Path) -> None:
    """A callback added at resume counts on from the checkpoint's batches."""
    first = trainer(tmp_path)
    first.fit(Small())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    diary = Diary()
    trainer(tmp_path, diary, max_epochs=2).fit(Small(), ckpt_path=tmp_path / "plain.ckpt")
    stamp = diary.stamps[0]
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
def test_every_way_to_train_works(tmp_path: Path, options: dict[str, Any]) -> None:
    """The callbacks give no warning and no error, whatever the Trainer is told."""
    trainer(tmp_path, Suite([SpeedMonitor(window_size=2), Flops()]), **options).fit(Small())


def test_a_suite_says_what_it_cannot_hold() -> None:
    """Foreign callbacks and doubles are refused at construction."""
    with pytest.raises(ValueError, match=r"callbacks=.*lightning_perf.*Try"):
        Suite([L.Callback()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="twice"):
        Suite([Flops(), Flops()])


def test_one_logger_that_fails_starves_no_other(tmp_path: Path) -> None:
    """The failing one is named once; the healthy one has every report."""

    class Failing(Records):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise OSError("disk full")

    healthy = Records()
    with pytest.warns(PerfWarning, match="Failing did not accept metrics.*disk full") as caught:
        trainer(tmp_path, SpeedMonitor(4), logger=[Failing(), healthy]).fit(Small())
    assert len(ours(caught)) == 1
    assert len(healthy.of("time/train")) == 16


def test_loggers_are_called_as_lightning_calls_them(tmp_path: Path) -> None:
    """One that takes its arguments by name only receives every report."""

    class Named(Records):
        def log_metrics(self, **named: Any) -> None:
            super().log_metrics(**named)

    logger = Named()
    trainer(tmp_path, SpeedMonitor(4), logger=logger).fit(Small())
    assert len(logger.of("time/train")) == 16


@pytest.mark.parametrize("every", [16, 7], ids=["epoch end", "mid-epoch"])
def test_a_resumed_epoch_is_lightning_s(tmp_path: Path, every: int) -> None:
    """A checkpoint of an epoch's last batch resumes in the next epoch, not in a long one."""
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True}
    trainer(tmp_path, SpeedMonitor(), saving, **options).fit(Small())
    diary = Diary()
    run = trainer(tmp_path, SpeedMonitor(), diary, max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        run.fit(Small(), ckpt_path=tmp_path / f"step={every}.ckpt")
    first, last = diary.stamps[0], diary.stamps[-1]
    assert (first.batch, first.epoch, first.batch_in_epoch) == (
        every + 1, every // 16, every % 16 + 1,
    )  # fmt: skip
    assert (last.batch, last.epoch, last.batch_in_epoch) == (32, 1, 16)
    assert diary.moments[-1].fraction == 1.0


def test_hooks_that_no_verb_needs_stay_the_user_s(tmp_path: Path) -> None:
    """Lightning is spared them, unless a subclass or the object has its own, which may be super."""
    seen: list[str] = []

    class Theirs(SpeedMonitor):
        def on_before_backward(self, *args: Any) -> None:
            super().on_before_backward(*args)
            seen.append("of the class")

    monitor = Theirs()
    monitor.on_after_backward = lambda *_: seen.append("of the object")  # type: ignore[method-assign]
    run = trainer(tmp_path, monitor, limit_train_batches=2)
    run.fit(Small())
    run.fit(Small())  # put back after the first, or it would not know them again
    assert seen == ["of the class", "of the object"] * 2
    assert callable(monitor.on_before_zero_grad)
    assert vars(copy.deepcopy(monitor)).keys() == vars(monitor).keys() - {"state_key"}


DRIVEN = (
    "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end",
    "on_train_epoch_end", "on_train_end", "teardown",
)  # fmt: skip


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("calls_super", [False, True])
def test_a_hook_of_a_subclass_may_leave_out_super(
    tmp_path: Path, calls_super: bool, hosted: bool
) -> None:
    """As with Lightning's own callbacks: each batch counts once, for all callbacks."""
    seen: list[str] = []

    def hook(name: str) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(name)
            if calls_super:
                getattr(super(theirs, self), name)(*args, **kwargs)

        return run

    theirs: Any = type("Theirs", (Diary,), {name: hook(name) for name in DRIVEN})
    other, usual, first = Diary("other"), Diary(), theirs()
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}
    trainer(tmp_path, usual, **options).fit(Small())
    run = trainer(tmp_path, Suite([first]) if hosted else first, other, **options)
    run.fit(Small())
    assert first.entries == other.entries == usual.entries
    assert [m.timestamp.epoch for m in other.moments] == [m.timestamp.epoch for m in usual.moments]
    assert [seen.count(name) for name in DRIVEN] == [1, 6, 6, 3, 2, 1, 1]  # a sanity check, too
    assert first._context is None


def test_a_schedule_that_raises_switches_off_one_callback(tmp_path: Path) -> None:
    """The others report as before."""

    class Failing(Schedule):
        def window(self, moment: Moment) -> int | None:
            if moment.timestamp.batch > 5:
                raise ZeroDivisionError("planted")
            return None

    records = Records()
    timings = Timings(schedule=Failing())
    run = trainer(tmp_path, timings, Flops(peak_flops=1e9), logger=records)
    with pytest.warns(PerfWarning, match="Timings is off.*schedule failed.*planted") as caught:
        run.fit(Small())
    assert len(ours(caught)) == 1
    assert [step for step, _ in records.of("mfu")] == [4, 9, 14]


def test_an_epoch_that_ends_early_is_an_epoch_for_schedules(tmp_path: Path) -> None:
    """Before its end nothing says so: the window comes one batch later, and is not missed."""

    class Short(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    records, diary = Records(), Diary()
    timings = Timings(schedule="every epoch")
    trainer(tmp_path, timings, diary, logger=records, max_epochs=3).fit(Short())
    assert [step for step, _ in records.of("timings/forward")] == [5, 10, 14]
    assert [m.timestamp.epoch for m in diary.moments] == [0] * 5 + [1] * 5 + [2] * 5
    assert [m.previous.epoch for m in diary.moments][4:7] == [0, 0, 1]
    assert diary.moments[5].previous.batch_in_epoch == 5
