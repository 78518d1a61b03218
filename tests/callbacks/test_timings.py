"""Timings: keys, reports, rows, the table, and all kinds of trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import Records, Small, TwoOptimizers, ours, trainer
from helpers.timings import Stopped
from helpers.windows import rows_of
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_perf import ConfigError, PerfWarning, SpeedMonitor, Suite, Timings
from lightning_perf.run import windows
from lightning_perf.timing import clock
from lightning_perf.timing.totals import CATEGORIES

DETERMINED = {
    "dataloader_next", "to_device", "train_batch", "step_lr_schedulers", "from_device",
    "reduce_metrics",
}  # fmt: skip


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        for _ in range(12):
            yield torch.ones(8), torch.zeros(1)


class Streaming(Small):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2)


class Workers(Small):
    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.ones(16, 8), torch.zeros(16, 1))
        return DataLoader(data, batch_size=4, num_workers=1)


class Logging(Small):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())


class Planted(Exception):
    pass


class Failing(Small):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 5:
            raise Planted
        return super().training_step(batch, batch_idx)


class FailingStep(TwoOptimizers):
    """Each batch raises within an optimizer step and continues: Lightning never ends that span."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        def closure() -> None:
            raise Planted

        for optimizer in self.optimizers():
            with pytest.raises(Planted):
                optimizer.step(closure=closure)
        super().training_step(batch, batch_idx)


TRAININGS: dict[str, tuple[type[Small], str, dict[str, Any]]] = {
    "automatic": (Small, "fit", {}),
    "logging and checkpoints": (
        Logging, "fit", {"logger": True, "enable_checkpointing": True, "max_epochs": 3},
    ),
    "manual with two optimizers": (TwoOptimizers, "fit", {}),
    "manual with failures": (FailingStep, "fit", {}),
    "accumulation": (Small, "fit", {"accumulate_grad_batches": 2}),
    "iterable": (Streaming, "fit", {"max_epochs": 2}),
    "workers": (Workers, "fit", {"max_epochs": 2}),
    "validation every few steps": (
        Logging, "fit", {"val_check_interval": 4, "limit_val_batches": 3, "max_epochs": 2},
    ),
    "exception": (Failing, "fit", {}),
    "validate": (Logging, "validate", {"limit_val_batches": 1.0}),
    "test": (Small, "test", {}),
    "predict": (Small, "predict", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAININGS)
def test_the_categories_add_up_to_the_wall_time(name: str, tmp_path: Path) -> None:
    """Every second is in one category, for any training: within 1 % of the test's own clock."""
    kind, verb, options = TRAININGS[name]
    timings = Stopped()
    records = Records()
    if options.get("logger"):
        options = options | {"logger": records}
    run = trainer(tmp_path, timings, **options)
    try:
        getattr(run, verb)(kind())
    except Planted:
        assert name == "exception"
    accumulated = options.get("accumulate_grad_batches", 1)
    parts = accumulated * sum(sum(row.values()) for _, row in rows_of(timings))
    least, most = timings.wall
    assert least <= parts <= most
    costs = {key.rpartition("/")[2]: value for key, value in timings.metrics.items()}
    assert costs["forward"] > 0
    assert costs["dataloader_next"] > 0
    trains = verb == "fit"
    assert ("backward" in costs) == trains
    assert ("optimizer_step" in costs) == trains
    assert ("train_batch" in costs) == trains


def test_logged_keys_have_determined_s_names(tmp_path: Path, records: Records) -> None:
    """Its six keys and ours are logged at Lightning's steps, and no others."""
    options: dict[str, Any] = {"limit_val_batches": 2, "log_every_n_steps": 4}
    timings = Timings()
    trainer(tmp_path, timings, logger=records, **options).fit(Small())
    # Lightning logs and saves nothing, validation comes after the last report, and it has no
    # backward.
    never = {"checkpoint", "validation", "logging"}
    only_training = {"backward", "optimizer_step", "step_lr_schedulers"}
    train = {f"timings/{name}" for name in {*CATEGORIES, *DETERMINED} - never}
    nested = {f"validate/timings/{name}" for name in {*CATEGORIES} - never - only_training}
    assert records.keys == train | nested
    # Time after the last batch makes no second point at its step.
    steps = [step for step, _ in records.of("timings/train_batch")]
    assert steps == [3, 7, 11, 15]
    assert set(timings.metrics) == records.keys | {"timings/validation"}  # after the last report
    inclusive = timings.metrics["timings/train_batch"]
    parts = [timings.metrics[f"timings/{key}"] for key in ("forward", "backward", "optimizer_step")]
    assert 0 < sum(parts) <= inclusive


def test_work_done_twice_in_a_batch_is_summed(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two backward passes per batch are one point per batch, without gaps (det.timings)."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Twice(TwoOptimizers):
        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            now[0] += 0.5
            super().backward(loss)

    trainer(tmp_path, Timings(), logger=records).fit(Twice())
    points = records.of("timings/backward")
    # Steps count optimizer steps; Lightning's own axis has one per batch.
    assert points[:16] == [(step, 1.0) for step in range(16)]


def test_points_are_means_over_the_batches_since_the_last_one(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches take 1 to 8 seconds, and each report has two (det.aggregate)."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Growing(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            now[0] += batch_idx + 1
            return super().training_step(batch, batch_idx)

    timings = Timings(schedule="2ba")
    trainer(tmp_path, timings, logger=records, limit_train_batches=8).fit(Growing())
    assert [value for _, value in records.of("timings/forward")][:4] == [1.5, 3.5, 5.5, 7.5]
    assert [row["forward"] for _, row in rows_of(timings)] == [1.5, 3.5, 5.5, 7.5]


def test_moving_predictions_to_the_host_is_from_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which predict moves its results is ``from_device``, and no other time is."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Heavy:
        """A result that takes a second to move; Lightning moves all objects that have ``to``."""

        def to(self, device: Any, **kwargs: Any) -> Heavy:
            now[0] += 1.0
            return self

    class Predicting(Small):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return Heavy()

    timings = Timings()
    trainer(tmp_path, timings, limit_predict_batches=4).predict(Predicting())
    seconds = {name: sum(row[name] for _, row in rows_of(timings)) for name in CATEGORIES}
    # The last report comes after the last move, which belongs to the same batch.
    assert seconds == {name: 4.0 * (name == "from_device") for name in CATEGORIES}


def test_moving_logged_values_to_the_host_is_from_device(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion of values that are logged after a batch is measured."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    from lightning.pytorch.trainer.connectors.logger_connector import logger_connector

    original = logger_connector.convert_tensors_to_scalars

    def slow(data: Any) -> Any:
        now[0] += 1.0
        return original(data)

    monkeypatch.setattr(logger_connector, "convert_tensors_to_scalars", slow)

    class StepLogging(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    timings = Timings()
    trainer(tmp_path, timings, logger=records, limit_train_batches=4).fit(StepLogging())
    seconds = {name: sum(row[name] for _, row in rows_of(timings)) for name in CATEGORIES}
    assert seconds == {name: 4.0 * (name == "from_device") for name in CATEGORIES}


def test_validation_is_one_category_of_training_with_its_own_keys(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader and step count as validation in training, and by category in its own keys."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Validating(Small):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            now[0] += 2.0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            now[0] += 1.0 * bool(self.trainer.validating)
            return batch

    options: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 3}
    timings = Timings()
    run = trainer(tmp_path, timings, logger=records, val_check_interval=2, **options)
    run.fit(Validating())
    assert records.of("validate/timings/forward") == [(1, 2.0), (3, 2.0)]
    assert records.of("validate/timings/to_device") == [(1, 1.0), (3, 1.0)]
    seconds = {name: sum(row[name] for _, row in rows_of(timings)) for name in CATEGORIES}
    assert seconds == {name: 18.0 * (name == "validation") for name in CATEGORIES}


@pytest.mark.parametrize("kind", [Logging, TwoOptimizers])
def test_timings_does_not_change_results(kind: type[Small], tmp_path: Path) -> None:
    """Weights, losses and the random state are bit-identical with and without us."""

    def outcome(*callbacks: L.Callback) -> tuple[Any, ...]:
        L.seed_everything(7)
        model, records = kind(), Records()
        options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 2}
        trainer(tmp_path, *callbacks, logger=records, **options).fit(model)
        theirs = [
            {key: value for key, value in row.items() if "timings" not in key}
            for _, row in records.rows
        ]
        weights = {key: value.tolist() for key, value in model.state_dict().items()}
        return weights, [row for row in theirs if row], torch.get_rng_state().tolist()

    assert outcome(Timings()) == outcome()


def test_the_number_of_rows_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit adjacent rows are merged, and the totals stay the same."""
    monkeypatch.setattr(windows, "MOST", 5)
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Steady(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

    timings = Timings()
    trainer(tmp_path, timings, max_epochs=2).fit(Steady())
    steps = [step for step, _ in rows_of(timings)]
    assert len(steps) <= 5
    assert steps == sorted(steps)
    assert steps[-1] == 31
    assert all(row["forward"] == 1.0 for _, row in rows_of(timings))


def test_the_table_is_saved_on_the_page_and_in_the_summary(
    tmp_path: Path, mlflow_database: str
) -> None:
    """The page is in the run's folder and among its artifacts."""
    logger = MLFlowLogger("timings", run_name="table", tracking_uri=mlflow_database)
    timings = Timings()
    trainer(tmp_path, timings, logger=logger).fit(Logging())
    folder = tmp_path / "table"
    rows = json.loads((folder / "summary.json").read_text())["culprits"]
    assert [row["name"] for row in rows] == [row.name for row in timings.table]
    assert {"name", "seconds", "calls", "share"} == set(rows[0])
    assert "MLFlowLogger.log_metrics" in (folder / "report.html").read_text()
    client = MlflowClient(mlflow_database)
    found = [a.path for a in client.list_artifacts(logger.run_id, "table")]
    assert found == ["table/report.html", "table/summary.json"]


def test_a_run_that_fails_saves_its_table(tmp_path: Path) -> None:
    """The files have the times up to the exception."""
    timings = Timings()
    with pytest.raises(Planted):
        trainer(tmp_path, timings).fit(Failing())
    assert "lightning_perf.on_train_batch_end" in [row.name for row in timings.table]
    (summary,) = tmp_path.glob("*/summary.json")
    assert len(json.loads(summary.read_text())["culprits"]) == len(timings.table)


def test_a_run_without_a_batch_leaves_nothing(tmp_path: Path) -> None:
    """If no batch was counted there is no table and no folder."""

    class Refused(Small):
        def on_train_start(self) -> None:
            raise FileExistsError

    timings = Timings()
    run = trainer(tmp_path, timings)
    with pytest.raises(FileExistsError):
        run.fit(Refused())
    assert not list(tmp_path.rglob("*"))


def test_the_page_groups_small_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row sums everything below 0.1 %."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class Costly(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            now[0] += 1.0

    timings = Timings()
    trainer(tmp_path, timings, Costly(), limit_train_batches=4).fit(Small())
    (page,) = tmp_path.glob("*/report.html")
    assert "Costly.on_train_batch_start" in page.read_text()
    assert f"{len(timings.table) - 1} others" in page.read_text()


def test_the_chart_of_a_second_fit_starts_at_its_first_step(tmp_path: Path) -> None:
    """The first fit has a chart of its own."""
    run = trainer(tmp_path, Timings(), max_epochs=1, log_every_n_steps=8)
    run.fit(Small())
    run.fit_loop.max_epochs = 2
    run.fit(Small())
    charts = sorted(tmp_path.glob("*/report.html"), key=lambda path: path.stat().st_mtime_ns)
    assert ["steps 0 to 15" in charts[0].read_text(), "steps 16 to 31" in charts[1].read_text()]


def test_a_folder_without_write_access_gives_warnings(tmp_path: Path) -> None:
    """Training ends normally, warnings say why there are no files, and the table is shown."""
    (tmp_path / "taken").write_text("")
    timings = Timings()
    run = trainer(tmp_path / "taken", timings)
    with pytest.warns(PerfWarning) as caught:
        run.fit(Small())
    messages = " ".join(str(warning.message) for warning in caught)
    assert "summary of the run was not written" in messages
    assert timings.table


def test_barebones_and_no_logger_work(tmp_path: Path) -> None:
    """A Trainer without a logger still has one report, at the end of the run."""
    timings = Timings()
    bare = L.Trainer(
        barebones=True,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[timings],
        default_root_dir=tmp_path,
    )
    bare.fit(Small())
    assert [step for step, _ in rows_of(timings)] == [15]


@pytest.mark.parametrize("schedule", ["every now and then", 7, "0ba"])
def test_an_invalid_schedule_is_refused(schedule: Any) -> None:
    """The error at construction names the field."""
    with pytest.raises(ConfigError, match=r"schedule|interval"):
        Timings(schedule=schedule)


def test_it_works_in_a_suite_and_beside_others(tmp_path: Path, records: Records) -> None:
    """All share one span hub, and their overhead is listed under one name."""
    timings = Timings()
    suite = Suite([SpeedMonitor(window_size=2), timings])
    trainer(tmp_path, suite, logger=records).fit(Small())
    assert {"timings/forward", "throughput/batches_per_sec"} <= records.keys
    assert "lightning_perf.on_train_batch_end" in [row.name for row in timings.table]


def test_one_callback_serves_several_runs(tmp_path: Path) -> None:
    """A second fit and a test report their own times; the profiler is restored each time."""
    timings, model = Timings(), Logging()
    run = trainer(tmp_path, timings, logger=Records(), max_epochs=1)
    own = run.profiler
    run.fit(model)
    assert len(rows_of(timings)) == 16
    run.fit_loop.max_epochs = 2
    run.fit(model)
    assert [step for step, _ in rows_of(timings)] == list(range(16, 32))
    run.test(model, verbose=False)
    assert {key.split("/")[0] for key in timings.metrics} == {"timings", "test"}
    assert run.profiler is own


@pytest.mark.slow
@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_the_trial_fits_of_tuners_do_no_harm(finder: Any, tmp_path: Path) -> None:
    """Callbacks and loggers are swapped for trials and restored afterwards."""

    class Tunable(Small):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    searching = (
        finder(num_training_steps=4) if finder is LearningRateFinder else finder(max_trials=1)
    )
    timings, records = Timings(), Records()
    run = trainer(tmp_path, timings, searching, logger=records, enable_checkpointing=True)
    own = run.profiler
    run.fit(Tunable())
    assert timings.metrics["timings/forward"] > 0
    assert run.profiler is own
    assert "log_metrics" not in vars(records)


def test_a_plain_run_gives_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """This includes a fast development run."""
    trainer(tmp_path, Timings(), fast_dev_run=True).fit(Small())
    assert not ours(recwarn)
