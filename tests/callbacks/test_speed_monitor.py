"""SpeedMonitor: the documented keys and their values."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Records, Small, ours, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_perf import ConfigError, Flops, PerfWarning, SpeedMonitor, WindowCallback
from lightning_perf.core.window import Window
from lightning_perf.flops.peaks import BatchCost
from lightning_perf.run.batches import BatchRecord, BatchTotals

KEYS = (
    {
        f"throughput/{device}{what}_per_sec"
        for device in ("", "device/")
        for what in ("batches", "samples", "flops")
    }
    | {"throughput/device/mfu", "time/train", "time/val", "time/total"}
    | {"time/remaining_estimate"}
)


class Slow(Small):
    """Every batch takes at least a few milliseconds."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_a_plain_training_reports_all_keys_but_tokens(tmp_path: Path, records: Records) -> None:
    """Without token counts there are no token keys; MFU needs no code from the user."""
    trainer(tmp_path, SpeedMonitor(window_size=4), logger=records).fit(Small())
    assert records.keys - {"epoch"} == KEYS


def test_token_keys_are_logged_if_the_module_counts_tokens(
    tmp_path: Path, records: Records
) -> None:
    """get_num_tokens_in_batch on the module adds the token keys, with the right values."""

    class Tokens(Slow):
        def get_num_tokens_in_batch(self, batch: list[Tensor]) -> int:
            return batch[0].numel()

    trainer(tmp_path, SpeedMonitor(window_size=4), logger=records).fit(Tokens())
    for _, row in records.rows:
        if "throughput/tokens_per_sec" in row:
            assert row["throughput/tokens_per_sec"] == pytest.approx(
                8 * row["throughput/samples_per_sec"]
            )
            break
    else:
        pytest.fail("no tokens")


def test_rates_agree_with_the_clock_and_with_each_other(tmp_path: Path, records: Records) -> None:
    """Samples, FLOPs and MFU are consistent with batches, and batches with the wall clock."""
    monitor = SpeedMonitor(window_size=8, gpu_flops_available=1e9)
    trainer(tmp_path, monitor, logger=records).fit(Slow())
    row = monitor.metrics
    batches = row["throughput/batches_per_sec"]
    assert 0 < batches < 100
    assert row["throughput/samples_per_sec"] == pytest.approx(4 * batches)
    assert row["throughput/flops_per_sec"] == pytest.approx(4 * FLOPS_PER_SAMPLE * batches)
    assert row["throughput/device/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / 1e9)


def test_a_short_run_reports_once_at_its_end(tmp_path: Path, records: Records) -> None:
    """A window that is never full is reported at the end of training only."""
    trainer(tmp_path, SpeedMonitor(window_size=100), logger=records).fit(Small())
    assert len(records.of("throughput/batches_per_sec")) == 1


def test_a_run_of_one_batch_reports_its_time(tmp_path: Path, records: Records) -> None:
    """Elapsed time needs no timed batch."""
    trainer(tmp_path, SpeedMonitor(), logger=records, max_steps=1, limit_val_batches=0).fit(Small())
    assert records.keys == {"time/train", "time/val", "time/total"}


def test_a_last_validation_is_in_the_elapsed_time(tmp_path: Path, records: Records) -> None:
    """It comes after the last report of the throughput, which is not repeated."""
    monitor = SpeedMonitor(window_size=2)
    options: dict[str, Any] = {"log_every_n_steps": 4, "limit_val_batches": 2}
    trainer(tmp_path, monitor, logger=records, **options).fit(Small())
    assert [step for step, _ in records.of("time/val")] == [3, 7, 11, 15, 15]
    assert [step for step, _ in records.of("throughput/batches_per_sec")] == [3, 7, 11, 15]
    assert monitor.metrics["time/val"] > 0


def test_reports_follow_log_every_n_steps(tmp_path: Path, records: Records) -> None:
    """Reports are logged at the same steps as Lightning's own metrics."""
    trainer(tmp_path, SpeedMonitor(window_size=3), logger=records, log_every_n_steps=5).fit(Small())
    assert [step for step, _ in records.of("throughput/batches_per_sec")] == [4, 9, 14]


def test_accumulated_batches_are_counted_once_per_step(tmp_path: Path, records: Records) -> None:
    """With gradient accumulation there is one report per step, and it includes every batch."""
    monitor = SpeedMonitor(window_size=4)
    run = trainer(tmp_path, monitor, logger=records, log_every_n_steps=2, accumulate_grad_batches=4)
    run.fit(Small())
    assert [step for step, _ in records.of("throughput/samples_per_sec")] == [1, 3]
    _, row = records.rows[-1]
    ratio = row["throughput/samples_per_sec"] / row["throughput/batches_per_sec"]
    assert ratio == pytest.approx(4)


def test_validation_time_is_excluded_from_training(tmp_path: Path, records: Records) -> None:
    """Time in validation is logged as time/val and is not part of the training throughput."""

    class SlowValidation(Slow):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            time.sleep(0.03)

    monitor = SpeedMonitor(window_size=100, time_unit="seconds")
    options: dict[str, Any] = {"limit_val_batches": 4, "val_check_interval": 4}
    start = time.perf_counter()
    trainer(tmp_path, monitor, logger=records, **options).fit(SlowValidation())
    wall = time.perf_counter() - start
    last = monitor.metrics
    assert 4 * 4 * 0.03 <= last["time/val"] < wall
    assert last["time/total"] == pytest.approx(last["time/train"] + last["time/val"])
    assert last["time/total"] < wall
    # Fifteen of the sixteen batches, in at most the time of training alone.
    assert last["throughput/batches_per_sec"] >= 15 / last["time/train"]
    validated = records.of("validate/throughput/batches_per_sec")
    assert len(validated) == 4
    assert all(rate < 1 / 0.03 for _, rate in validated)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_keys_of_other_stages_have_a_prefix(tmp_path: Path, records: Records, stage: str) -> None:
    """Outside of fit, keys are prefixed by the stage, and every batch is a step."""
    run = trainer(tmp_path, SpeedMonitor(window_size=5), logger=records, limit_val_batches=1.0)
    getattr(run, stage)(Small(), verbose=False) if stage != "predict" else run.predict(Small())
    ours = {key for key in records.keys if "throughput" in key}
    assert f"{stage}/throughput/samples_per_sec" in ours
    assert all(key.startswith(f"{stage}/") for key in ours)


def test_elapsed_time_resumes_with_the_checkpoint(tmp_path: Path, records: Records) -> None:
    """time/train continues from the checkpoint, under weights_only as well."""
    first = trainer(tmp_path, SpeedMonitor(time_unit="seconds"), logger=Records())
    first.fit(Slow())
    spent = first.callbacks[0].metrics["time/train"]
    first.save_checkpoint(tmp_path / "last.ckpt")
    second = trainer(tmp_path, SpeedMonitor(time_unit="seconds"), logger=records, max_epochs=2)
    torch.load(tmp_path / "last.ckpt", weights_only=True)  # Trainer.fit has the option since 2.6
    second.fit(Slow(), ckpt_path=tmp_path / "last.ckpt")
    assert records.of("time/train")[0][1] > spent > 0.16


def test_the_remaining_time_of_a_resumed_run_without_validation_has_none(
    tmp_path: Path, records: Records
) -> None:
    """The validation of the run before it took 20 times as long as its batches."""

    class Validates(Small):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            time.sleep(1)

    options: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    first = trainer(tmp_path, SpeedMonitor(), logger=Records(), **options)
    first.fit(Validates())
    first.save_checkpoint(tmp_path / "last.ckpt")
    monitor = SpeedMonitor(window_size=4, time_unit="seconds")
    second = trainer(tmp_path, monitor, logger=records, max_epochs=100, max_steps=32)
    second.fit(Small(), ckpt_path=tmp_path / "last.ckpt")
    left = [seconds for _, seconds in records.of("time/remaining_estimate")]
    assert left
    assert max(left) < 0.9


def test_a_validation_without_flops_has_all_its_batches(tmp_path: Path) -> None:
    """Of each of its loaders, but for the very first batch."""

    class NoProducts(Small):
        def validation_step(
            self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0
        ) -> Tensor:
            return batch[0].sum()

        def val_dataloader(self) -> Any:
            return [self._loader() for _ in range(3)]

    monitor, flops = SpeedMonitor(window_size=4), Flops(peak_flops=1e9)
    totals: dict[str, float] = {}

    class Look(WindowCallback):
        columns = ("batch/count", "batch/samples")

        def on_window(self, window: Window) -> None:
            totals.update({name: window.since_start(name) for name in self.columns})

    run = trainer(tmp_path, monitor, flops, Look(), limit_val_batches=1.0)
    run.validate(NoProducts(), verbose=False)
    assert totals == {"batch/count": 3 * 16 - 1, "batch/samples": 3 * 64 - 4}


def test_a_batch_that_cannot_be_counted_warns_once(tmp_path: Path, records: Records) -> None:
    """Training continues without sample keys, and the warning says what to define."""

    class Odd(Small):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return {"x": batch[0], "odd": torch.zeros(99), "y": batch[1]}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch["x"], batch["y"]], batch_idx)

    with pytest.warns(PerfWarning, match="get_num_samples_in_batch") as caught:
        trainer(tmp_path, SpeedMonitor(window_size=4), logger=records).fit(Odd())
    assert len(ours(caught)) == 1
    assert "throughput/samples_per_sec" not in records.keys
    assert "throughput/batches_per_sec" in records.keys


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"window_size": 0}, "window_size"),
        ({"window_size": -3}, "window_size"),
        ({"window_size": 2.5}, "window_size"),
        ({"time_unit": "weeks"}, "time_unit"),
        ({"gpu_flops_available": 0}, "gpu_flops_available"),
        ({"gpu_flops_available": float("nan")}, "gpu_flops_available"),
    ],
)
def test_bad_settings_are_refused_at_construction(options: dict[str, Any], field: str) -> None:
    """The message names the field, the value and a valid example."""
    with pytest.raises(ConfigError, match=f"{field}=.*Try {field}="):
        SpeedMonitor(**options)


def test_a_rolling_window_keeps_only_its_latest_batches() -> None:
    """Its sums are those of the latest batches, however many came before.

    A batch that was slowed down has its own waiting, and the usual time of a step.
    """
    batches = BatchTotals()
    batches.start()
    rolling = batches.rolling(2)
    cost = BatchCost(total=8.0)
    for seconds, slowed, first in [(9, False, True), (5, False, False), (1, False, False),
                                   (7, True, False), (2, False, False)]:  # fmt: skip
        record = BatchRecord(seconds, 4, 0, cost, slowed, first, False, 0.5)
        batches.end_batch("train", record)
    batches.fold("train")
    found = dict(zip(rolling.columns, rolling.totals("train"), strict=True))
    usual = (4.5 + 0.5 + 1.5) / 3
    assert found["rolling_2/batch/seconds"] == pytest.approx(0.5 + usual + 2.0)
    assert found["rolling_2/batch/count"] == 2
    assert found["rolling_2/batch/samples"] == 8
    assert found["rolling_2/flops/model"] == 16
    whole = dict(zip(batches.columns, batches.totals("train"), strict=True))
    assert (whole["batch/count"], whole["flops/known_batches"]) == (4, 5)


@pytest.mark.parametrize(
    ("counting", "seconds"),
    [(None, 2.5), ((4.0, 5.0), 2.5), ((0.5, 2.0), 5.75), ((6.0, 7.0), 1.0)],
)
def test_a_counted_batch_has_its_own_time_where_counting_cannot_explain_it(
    counting: tuple[float, float] | None, seconds: float
) -> None:
    """7 s, of which counting took 4 to 5, may be the usual 2.5 s; after 6 to 7, 1 s is nearest.

    After 2 at most, the step was longer than usual: between 5 and 6.5 s.

    The first batch of a run keeps its time, and whoever reads single batches reads the same ones.
    """
    batches, read = BatchTotals(), list[float]()
    batches.listeners.append(lambda _, records: read.extend(each.seconds for each in records))
    batches.start()
    for number, (slowed, spent) in enumerate([(True, 9.0), (False, 2.5), (True, 7.0)]):
        own = counting if slowed else None
        record = BatchRecord(spent, 4, 0, BatchCost(1.0), slowed, number == 0, False, 0.0, own)
        batches.end_batch("train", record)
    batches.fold("train")
    assert batches.totals("train")[0] == pytest.approx(2.5 + seconds)
    assert read == pytest.approx([9.0, 2.5, seconds])


@pytest.mark.parametrize(("constant", "per_flop"), [(0.0, 0.5), (2.0, 0.5), (3.0, 0.0)])
@pytest.mark.parametrize("timed", [[4.0], [2.0, 16.0] * 30])
def test_a_counted_batch_has_the_usual_time_of_its_flops(
    constant: float, per_flop: float, timed: list[float]
) -> None:
    """MFU is right whichever batches are counted, as large ones, and whichever have no FLOPs.

    From one timed step the time is in proportion to its FLOPs, from many it is on a line.
    """
    batches = BatchTotals()
    batches.start()
    counted, unknown = [64.0, 8.0, 32.0], [100.0] * 3

    def end(flops: float, slowed: bool = False, known: bool = True, first: bool = False) -> None:
        cost = BatchCost(total=flops) if known else None
        seconds = (100.0 if slowed else 1.0) * (constant + per_flop * flops)
        counting = (0.0, 1e4) if slowed else None
        record = BatchRecord(seconds, 4, 0, cost, slowed, first, False, 0.0, counting)
        batches.end_batch("train", record)

    end(1.0, first=True)
    for flops in counted:
        end(flops, slowed=True)
    for flops in timed:
        end(flops)
    for flops in unknown:
        end(flops, known=False)
    batches.fold("train")
    found = dict(zip(batches.columns, batches.totals("train"), strict=True))
    assert found["flops/model"] == sum(counted) + sum(timed)
    step = constant + per_flop * timed[0]
    line = step / timed[0] * sum(counted)
    if len(timed) > 1:
        line = len(counted) * constant + per_flop * sum(counted)
    own = len(timed) * constant + per_flop * sum(timed)
    assert found["flops/seconds"] == pytest.approx(own + line, rel=0.02)


def test_slow_first_steps_of_epochs_are_in_the_time(tmp_path: Path) -> None:
    """They are counted, and take longer than counting can explain."""

    class Draws(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(0.6 * (batch_idx == 0))
            return super().training_step(batch, batch_idx)

    monitor = SpeedMonitor(window_size=100)
    trainer(tmp_path, monitor, Flops(peak_flops=1e9), max_epochs=4).fit(Draws())
    assert monitor.metrics["throughput/batches_per_sec"] < (4 * 16 - 1) / (3 * 0.6 * 0.9)


@pytest.mark.parametrize("traced", [False, True])
def test_changes_of_the_step_time_are_told_once(traced: bool) -> None:
    """Longer steps may cost more FLOPs, which are counted again then, if no tracer slows them."""
    told, tracer = list[str](), sys.gettrace()
    if tracer is not None:
        pytest.skip("a tracer is on")
    batches = BatchTotals(on_change=told.append)
    batches.start()
    for number in range(200):
        seconds = 1.0 if number < 100 else 2.0
        batches.end_batch("train", BatchRecord(seconds, 1, 0, None, False, number == 0, False))
        if number % 10 == 9:
            sys.settrace((lambda *_: None) if traced else None)
            batches.fold("train")
            sys.settrace(None)
    assert told == ([] if traced else ["train"])


class NewShapes(Small):
    """Each of eight training batches has another size, so that the FLOPs of each are counted."""

    def train_dataloader(self) -> Any:
        rows = [(torch.ones(n, 8), torch.ones(n, 1)) for n in range(3, 11)]
        return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


class Pairs(Small):
    """Two DataLoaders of one batch size, whose last batches have 2 and 3 samples."""

    def train_dataloader(self) -> Any:
        loaders = [torch.utils.data.DataLoader(torch.ones(n, 8), 4) for n in (30, 31)]
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(torch.cat(batch)).mean()


def test_the_samples_of_the_first_loader_count(tmp_path: Path) -> None:
    """The throughput of a run is known although the last batches of its loaders differ."""
    monitor = SpeedMonitor(window_size=3)
    trainer(tmp_path, monitor, max_epochs=2, log_every_n_steps=1).fit(Pairs())
    row = monitor.metrics
    assert row["throughput/samples_per_sec"] == pytest.approx(
        (4 + 4 + 2) / 3 * row["throughput/batches_per_sec"]
    )


@pytest.mark.parametrize("window_size", [3, 100])
def test_a_stage_of_counted_batches_only_reports_a_lower_bound(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture, window_size: int
) -> None:
    """Throughput of its last batches is reported at the end, without MFU, with an explanation."""
    monitor = SpeedMonitor(window_size, gpu_flops_available=1e9)
    run = trainer(tmp_path, monitor, Flops(peak_flops=1e9), logger=records, log_every_n_steps=1)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run.fit(NewShapes())
    row = monitor.metrics
    size = sum(range(3, 11)[-window_size:][-7:]) / min(window_size, 7)
    assert row["throughput/samples_per_sec"] == pytest.approx(
        size * row["throughput/batches_per_sec"]
    )
    assert len(records.of("throughput/batches_per_sec")) == 1
    assert not {"mfu", "throughput/device/mfu", "throughput/flops_per_sec"} & records.keys
    assert caplog.text.count("Throughput is a lower bound") == 1


def test_one_timed_batch_takes_precedence_over_slowed_ones() -> None:
    """Once a batch is timed, its step replaces those that were slowed down."""
    batches = BatchTotals()
    batches.start()
    rolling = batches.rolling(4)
    cost = BatchCost(total=8.0)
    found = []
    for seconds, slowed, first in [(9, True, True), (5, True, False), (1, False, False)]:
        batches.end_batch("train", BatchRecord(seconds, 4, 0, cost, slowed, first, False))
        batches.fold("train")
        found.append(dict(zip(rolling.columns, rolling.totals("train"), strict=True)))
    assert [each["rolling_4/batch/seconds"] for each in found] == [0, 5, 2]
    assert [each["rolling_4/flops/model"] for each in found] == [0, 0, 16]


def test_declared_flops_take_precedence_over_counting(tmp_path: Path) -> None:
    """flops_per_batch is this rank's, as a number or as a function of the batch."""

    class Declared(Slow):
        def flops_per_batch(self, batch: list[Tensor]) -> int:
            return 1000 * len(batch[0])

    monitor = SpeedMonitor(window_size=4, gpu_flops_available=1e9)
    trainer(tmp_path, monitor, logger=Records()).fit(Declared())
    row = monitor.metrics
    assert row["throughput/flops_per_sec"] == pytest.approx(
        1000 * row["throughput/samples_per_sec"]
    )


def test_a_failing_flops_per_batch_removes_only_mfu(tmp_path: Path) -> None:
    """There is one warning and there are no FLOPs; all other metrics are logged."""

    class Failing(Small):
        def flops_per_batch(self, batch: list[Tensor]) -> float:
            return float("nan")

    monitor = SpeedMonitor(window_size=4)
    with pytest.warns(PerfWarning, match="flops_per_batch") as caught:
        trainer(tmp_path, monitor, logger=Records()).fit(Failing())
    assert len(ours(caught)) == 1
    assert "throughput/flops_per_sec" not in monitor.metrics
    assert monitor.metrics["throughput/samples_per_sec"] > 0


def test_samples_are_exact_with_an_uneven_last_batch(tmp_path: Path) -> None:
    """64 samples in batches of 10 are 64 samples, not 70."""
    monitor = SpeedMonitor(window_size=100)
    run = trainer(tmp_path, monitor, logger=Records(), max_epochs=2)
    run.fit(Small(batch_size=10))
    assert monitor.state_dict()["progress"]["stages"]["train"]["sample"] == 128
    assert torch.is_grad_enabled()
