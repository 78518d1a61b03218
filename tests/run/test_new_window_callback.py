"""Errors in a user's own metric callback: the message says what to write."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.small import Records, Small, trainer

from lightning_perf import ConfigError, Diagnosis, PerfWarning, Window, WindowCallback
from lightning_perf.extend import Run


class Silent(WindowCallback):
    """Without on_window."""

    columns = ("timings/forward",)


@pytest.mark.parametrize("columns", ["timings/forward", None, 5, b"timings", {"timings/forward"}])
def test_what_is_no_list_of_columns_is_refused(tmp_path: Path, columns: Any) -> None:
    """The message shows a tuple; a set has another order on each rank."""
    callback = Silent()
    callback.columns = columns
    with pytest.raises(ConfigError, match=r"Try columns=\('timings/forward',\)"):
        trainer(tmp_path, callback, logger=Records()).fit(Small())


def test_a_missing_on_window_is_reported(tmp_path: Path) -> None:
    """The callback is switched off, and training continues."""
    with pytest.warns(PerfWarning, match=r"on_window failed .*write on_window\(self, window\)"):
        trainer(tmp_path, Silent(), logger=Records()).fit(Small())


class Unprepared(Diagnosis):
    """Forgets what its base class needs."""

    def __init__(self) -> None:
        self.own = 1


def test_an_init_without_that_of_its_base_class_is_refused(tmp_path: Path) -> None:
    """The error is raised before training, says what to add, and is not hidden by another one."""
    with pytest.raises(ConfigError, match=r"Unprepared.*super\(\).__init__\(\)"):
        trainer(tmp_path, Unprepared(), logger=Records()).fit(Small())


class Returning(WindowCallback):
    """Returns a given value from `on_window`."""

    columns = ("timings/forward",)

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def on_window(self, window: Window) -> Any:
        return self.returned


def test_metrics_have_the_last_value_of_each_stage(tmp_path: Path) -> None:
    """Validation within fit and a test replace no value of training; the next fit does."""
    callback = Returning({"a": 1.0})
    run = trainer(tmp_path, callback, logger=Records(), limit_train_batches=2, limit_val_batches=1)
    run.fit(Small())
    assert callback.metrics == {"a": 1.0, "validate/a": 1.0}
    run.test(Small(), verbose=False)
    assert callback.metrics == {"a": 1.0, "validate/a": 1.0, "test/a": 1.0}
    callback.returned = {"b": 2.0}
    run.fit_loop.max_epochs = 2
    run.fit(Small())
    assert callback.metrics == {"b": 2.0, "validate/b": 2.0}


@pytest.mark.parametrize("nothing", [None, {}])
def test_metrics_stay_if_on_window_returns_nothing(tmp_path: Path, nothing: object) -> None:
    """None and an empty dict leave the `metrics` attribute as it is, and log nothing."""
    records = Records()
    callback = Returning({"a": 1.0})
    run = trainer(tmp_path, callback, logger=records, limit_train_batches=2)
    run.fit(Small())
    callback.returned = nothing
    run.test(Small(), verbose=False)
    assert callback.metrics == {"a": 1.0}
    assert not records.of("test/a")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a/b": np.zeros(2)}, r"on_window failed \(TypeError"),
        (3.0, r"on_window failed \(AttributeError"),
        ({1: 2.0}, r"on_window failed \(TypeError"),
    ],
)
def test_invalid_metrics_are_reported(tmp_path: Path, returned: object, message: str) -> None:
    """The callback is switched off, and training continues."""
    with pytest.warns(PerfWarning, match=message):
        trainer(tmp_path, Returning(returned), logger=Records()).fit(Small())


def test_a_metric_of_the_user_s_named_mfu_may_be_in_percent(tmp_path: Path) -> None:
    """Only the MFU of our callbacks is compared with the peak."""
    with warnings.catch_warnings(record=True) as caught:
        trainer(tmp_path, Returning({"mfu": 45.0}), logger=Records()).fit(Small())
    assert not [each for each in caught if issubclass(each.category, PerfWarning)]


def test_a_callback_may_keep_its_windows_with_their_costs(tmp_path: Path) -> None:
    """The log has each window of a stage; its named costs include those of the callback itself."""
    mine = ("mine", "", "counted")

    class Keeps(Returning):
        keeps_windows = True

        def costs(self) -> Any:
            return {mine: (0.0, self.calls)}

        def on_window(self, window: Window) -> None:
            self.calls += window.stage == "train"

        def close(self, context: Run, reason: str) -> None:
            super().close(context, reason)
            self.kept = context.log_of(self, "train")
            self.table = self.kept.table(context.times())

    callback = Keeps(None)
    callback.calls = 0
    trainer(tmp_path, callback, logger=Records(), log_every_n_steps=4).fit(Small())
    windows = callback.kept.windows()
    assert [window.batches for window in windows] == [4, 4, 4, 4]
    assert [window.costs[mine][1] for window in windows] == [0, 1, 1, 2]
    assert all(window.costs["train", "forward", "training_step"].calls == 4 for window in windows)
    assert callback.table
