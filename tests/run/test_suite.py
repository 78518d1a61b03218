"""Callbacks in a Suite work as alone, and two of a kind are refused."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import Records, Small, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.callback import Callback

from lightning_perf import ConfigError, Diagnosis, Flops, PyTorch, SpeedMonitor, Suite, Timings

HOOKS = [name for name in vars(Callback) if name.startswith("on_")] + ["setup", "teardown"]


class SpanProfiler(SpeedMonitor):
    """Overrides every hook of Lightning's, calls `super()` in each, and keeps a state."""

    def __init__(self) -> None:
        super().__init__(window_size=2)
        self.received: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"received": len(self.received)}


def _hook(name: str) -> Any:
    def hook(self: SpanProfiler, *args: Any, **kwargs: Any) -> None:
        self.received.append(name)
        if name == "on_train_epoch_end":
            self.log("of_a_part", 1.0)  # type: ignore[attr-defined]
        getattr(super(SpanProfiler, self), name)(*args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(SpanProfiler, _name, _hook(_name))


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_a_suite_forwards_the_hooks_that_a_callback_receives_alone(
    tmp_path: Path, fails: bool
) -> None:
    """In two runs, hooks, their order, metrics and state are the same as without a Suite."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and batch_idx == 5:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    def train(callback: L.Callback) -> tuple[set[str], dict[str, Any]]:
        records, saving = Records(), ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 2}
        run = trainer(tmp_path, callback, saving, logger=records, **options)
        for _ in range(2):
            try:
                run.fit(Failing())
            except ZeroDivisionError:
                assert fails
            run.fit_loop.max_epochs = 2
        return records.keys, callback.state_dict()

    alone, hosted = SpanProfiler(), SpanProfiler()
    keys, state = train(alone)
    keys_hosted, states = train(Suite([Timings(), hosted]))
    assert hosted.received == alone.received
    assert keys <= keys_hosted
    assert "of_a_part" in keys or fails
    assert states["lightning_perf.SpanProfiler"].keys() == state.keys()
    assert states["lightning_perf.SpanProfiler"]["received"] == state["received"]
    assert states["lightning_perf.SpanProfiler"]["progress"]
    assert hosted._context is None


@pytest.mark.parametrize("hosted", [False, True])
def test_state_can_be_loaded_before_a_run(tmp_path: Path, hosted: bool) -> None:
    """A callback returns the state that it was given, and the next training continues from it."""

    def new() -> tuple[SpeedMonitor, SpeedMonitor | Suite]:
        monitor = SpeedMonitor(window_size=2, time_unit="seconds")
        return monitor, Suite([monitor, Timings()]) if hosted else monitor

    monitor, callback = new()
    trainer(tmp_path, callback).fit(Small())
    state, first = callback.state_dict(), monitor.metrics["time/train"]
    monitor, callback = new()
    callback.load_state_dict(state)
    assert callback.state_dict() == state
    trainer(tmp_path, callback).fit(Small())
    assert monitor.metrics["time/train"] > first
    assert monitor.state_dict()["progress"]["stages"]["train"]["batch"] == 32


def test_parts_are_callbacks_of_the_trainer_during_a_run(tmp_path: Path) -> None:
    """They follow it, between two callbacks of the run, and have no hook per batch."""
    suite, seen = Suite([SpeedMonitor(), Diagnosis(terminal=False, capture=True)]), []

    class Looking(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            first, *seen[:], last = trainer.callbacks[1:]  # type: ignore[attr-defined]
            assert type(first).__name__ == type(last).__name__ == "lightning_perf"
            called = [each for each in trainer.callbacks if callable(each.on_train_batch_end)]  # type: ignore[attr-defined]
            assert called == [looking, first]

    looking = Looking()
    run = trainer(tmp_path, looking, suite, limit_train_batches=1)
    monitor, diagnosis = suite.parts
    for _ in range(2):
        run.fit(Small())
        assert run.callbacks == [looking, suite]  # type: ignore[attr-defined]
        run.fit_loop.max_epochs = 2
        assert seen == [suite, monitor, diagnosis, *diagnosis.parts]
    assert not vars(suite).keys() & {*HOOKS, "log"}


def test_a_checkpoint_of_a_suite_has_each_state_once(tmp_path: Path) -> None:
    """That of the Suite contains them; a part also finds its own, of a training without a Suite."""
    files: dict[str, Any] = {}
    for name, callbacks in {
        "suite": [Suite([SpanProfiler(), Timings()])],
        "alone": [SpanProfiler(), Timings()],
    }.items():
        saving = L.Callback()
        saving.on_train_end = lambda run, _, to=name: run.save_checkpoint(tmp_path / to)  # type: ignore
        trainer(tmp_path, saving, *callbacks).fit(Small())
        saved = torch.load(tmp_path / name, weights_only=False)["callbacks"]
        files[name] = {key: saved[key] for key in saved if key.startswith("lightning_perf")}
    assert files["suite"].keys() == {"lightning_perf.Suite"}
    assert files["suite"]["lightning_perf.Suite"].keys() == {*files["alone"], "progress"}
    for name in files:
        loaded: list[Any] = []

        class Loads(SpanProfiler):
            def load_state_dict(self, state_dict: dict[str, Any], found: Any = loaded) -> None:
                found.append(state_dict["received"])

        Loads.__name__ = "SpanProfiler"
        run = trainer(tmp_path, Suite([Loads(), Timings()]), max_epochs=2)
        run.fit(Small(), ckpt_path=tmp_path / name)
        assert len(loaded) == 1


@pytest.mark.parametrize("kind", [SpeedMonitor, Flops, Timings])
@pytest.mark.parametrize("hosted", [0, 1, 2])
def test_two_of_a_kind_are_refused_at_set_up(tmp_path: Path, kind: type[Any], hosted: int) -> None:
    """The Trainer can be constructed; the run raises a `ConfigError`, also in a Suite."""
    callbacks = [Suite([kind()]) if number < hosted else kind() for number in range(2)]
    run = trainer(tmp_path, *callbacks)
    what = f"two of {'Suite' if hosted == 2 else kind.__name__}"
    with pytest.raises(ConfigError, match=f"{what}: remove one"):
        run.fit(Small())
    trainer(tmp_path, callbacks[0], limit_train_batches=1).fit(Small())


def test_callbacks_without_a_list_are_refused() -> None:
    """The error shows the list, and does not name the argument that the second one became."""
    with pytest.raises(ConfigError, match=r"callbacks=.* is not a list\. Try callbacks=\[Speed"):
        Suite(SpeedMonitor(), Flops())  # type: ignore[arg-type]


def test_checkpoints_are_keyed_by_the_kind_of_callback(tmp_path: Path) -> None:
    """A resume finds the state whichever object takes part."""
    monitor = SpeedMonitor(2)
    run = trainer(tmp_path, monitor)
    run.fit(Small())
    run.save_checkpoint(tmp_path / "one.ckpt")
    again = SpeedMonitor(2)
    other = trainer(tmp_path, again, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.fit(Small(), ckpt_path=tmp_path / "one.ckpt")
    assert not [w for w in caught if "add the following callbacks" in str(w.message)]
    assert again._progress is not None
    assert again._progress.stages["train"].batch == 32


@pytest.mark.parametrize("before", [True, False], ids=["a suite", "single callbacks"])
def test_a_resume_finds_the_progress_of_other_callbacks(tmp_path: Path, before: bool) -> None:
    """Elapsed time continues where a Suite replaces single callbacks, and the other way round."""

    def new(in_suite: bool) -> tuple[SpeedMonitor, list[L.Callback]]:
        monitor = SpeedMonitor(2, time_unit="seconds")
        return monitor, [Suite([monitor])] if in_suite else [Timings(), monitor]

    monitor, callbacks = new(before)
    run = trainer(tmp_path, *callbacks)
    run.fit(Small())
    first = monitor.metrics["time/train"]
    run.save_checkpoint(tmp_path / "one.ckpt")
    monitor, callbacks = new(not before)
    with pytest.warns(UserWarning, match="add the following callbacks"):
        trainer(tmp_path, *callbacks, max_epochs=2).fit(Small(), ckpt_path=tmp_path / "one.ckpt")
    assert monitor.metrics["time/train"] > first


def test_a_suite_within_a_suite_keeps_its_arguments_and_state() -> None:
    """The inner callbacks become the outer Suite's, with the keys that a resume looks up."""
    monitor, flops = SpeedMonitor(2), Flops()
    suite = Suite([Suite([monitor], show_summary=True, data_parallel_size=1), flops])
    assert suite.callbacks == suite.parts == [monitor, flops]
    assert (suite.show_summary, suite.data_parallel_size) == (True, 1)
    with pytest.raises(ConfigError, match="callback twice: remove a SpeedMonitor"):
        Suite([Suite([SpeedMonitor()]), SpeedMonitor()])
    with pytest.raises(ConfigError, match=r"is a class: write SpeedMonitor\(\)"):
        Suite([SpeedMonitor, Flops])  # type: ignore[list-item]


@pytest.mark.parametrize("options", [{}, {"logger": True}, {"fast_dev_run": True}])
def test_without_a_logger_one_line_says_where_the_files_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, bool]
) -> None:
    """It names the folder of the run, once, and is no warning."""
    caplog.set_level(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(caplog.handler)
    traces = PyTorch(schedule="first 1ba", folder="elsewhere")
    suite = Suite([SpeedMonitor(2), Timings()])
    try:
        logger = Records() if options.get("logger") else False
        trainer(tmp_path, suite, traces, **{**options, "logger": logger}).fit(Small())
    finally:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).removeHandler(caplog.handler)
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(caplog.handler)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.NOTSET)
    lines = {r.getMessage() for r in caplog.records if "has no logger" in r.getMessage()}
    if options:
        assert not lines
        return
    (line,) = lines
    (run,) = tmp_path.glob("run-*")
    assert line.endswith(f"files are in {run}.")


@pytest.mark.parametrize("window", [1, 3])
def test_the_first_batch_of_every_stage_run_is_excluded(tmp_path: Path, window: int) -> None:
    """The first batch of each validation."""
    seen: list[int] = []

    class Looking(SpeedMonitor):
        def on_window(self, window: Any) -> Any:
            if window.stage == "validate":
                seen.append(int(window.total("rolling_100/batch/count")))
            return super().on_window(window)

    monitor = Looking(window_size=100)
    run = trainer(tmp_path, monitor, limit_val_batches=window + 1, max_epochs=3)
    run.fit(Small())
    assert seen[-1] == 3 * window
