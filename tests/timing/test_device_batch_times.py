"""Device times of batches, from events that are read later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_device import Device, Unsynchronized, synchronization_restored
from helpers.small import Records, Small, ours, trainer

from lightning_perf import Flops, PyTorch, SpeedMonitor, Timings
from lightning_perf.errors import PerfWarning
from lightning_perf.run import batches
from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceTimer, Events


def device_time(device: Device, device_timer: DeviceTimer, seconds: float) -> DeviceBatchTime:
    """Run a batch with the given seconds of work."""
    device.queued += seconds
    done = device_timer.end()
    assert done is not None
    return done


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def device_timer(device: Device) -> DeviceTimer:
    device_timer = device.device_timer()
    device_timer.wanted = True
    device_timer.enter()
    return device_timer


def test_a_batch_is_known_after_the_device_completed_it(
    device: Device, device_timer: DeviceTimer
) -> None:
    """Its seconds are unknown until the device completes it, and exact afterwards."""
    first, second = device_time(device, device_timer, 2.0), device_time(device, device_timer, 3.0)
    device.done = 2.0
    device_timer.read()
    assert (first.known, first.seconds, second.known) == (True, 2.0, False)
    device.done = 5.0
    device_timer.read()
    assert (second.known, second.seconds, second.whole) == (True, 3.0, True)


def test_pauses_and_nested_stages_are_excluded(device: Device, device_timer: DeviceTimer) -> None:
    """The seconds of a batch exclude pauses and nested stages."""
    device.queued += 1.0
    device_timer.pause()
    device.queued += 100.0
    device_timer.resume()
    device.queued += 2.0
    device_timer.enter()
    inner = device_time(device, device_timer, 50.0)
    device.queued += 100.0  # the rest of the inner stage contains no batch
    device_timer.exit()
    outer = device_time(device, device_timer, 4.0)
    device.done = device.queued
    device_timer.read()
    assert (inner.seconds, outer.seconds) == (50.0, 7.0)


def test_a_captured_batch_is_not_measured(device: Device, device_timer: DeviceTimer) -> None:
    """During CUDA graph capture no event is used; the batches around it are not whole."""
    found = []
    for index in range(5):
        device.capturing = index == 2
        found.append(device_time(device, device_timer, 1.0))
        device.capturing = False
    device.done = device.queued
    device_timer.read()
    assert not device.touched_while_capturing
    assert all(each.known for each in found)
    assert [each.whole for each in found] == [True, True, False, False, True]


def test_pending_events_are_limited(device: Device) -> None:
    """Beyond a maximum, batches are not measured; later ones are again."""
    device_timer = device.device_timer(most=10)
    device_timer.wanted = True
    device_timer.enter()
    found = [device_time(device, device_timer, 1.0) for _ in range(1000)]
    device.done = device.queued
    device_timer.read()
    found += [device_time(device, device_timer, 1.0) for _ in range(3)]
    device.done = device.queued
    device_timer.read()
    assert device.made == 10
    assert sum(each.whole for each in found) == 9 + 2
    assert {each.seconds for each in found if each.whole} == {1.0}


@pytest.mark.parametrize(("captured", "seconds"), [(False, 2.0), (True, 0.0)])
def test_a_lower_bound_uses_no_host_time(
    device: Device, device_timer: DeviceTimer, captured: bool, seconds: float
) -> None:
    """A slowed batch without a device time is left out, because host time would be too short."""
    totals = batches.BatchTotals(device_timer)
    totals.start()
    rolling = totals.rolling(4)
    device.queued += 2.0
    device.capturing = captured
    record = batches.BatchRecord(0.001, 4, 0, None, True, False, False)
    totals.end_batch("train", record, device_timer.end())
    device.capturing = False
    device.done = device.queued
    totals.fold("train")
    assert rolling.totals("train")[:2] == (seconds, float(not captured))


class Ahead(Small):
    """Every batch queues a second of work, which the host does not wait for."""

    gpu: Device

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.gpu.queued += 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.gpu.queued += 100.0
        return super().validation_step(batch, batch_idx)


def train(folder: Path, device: Device, *callbacks: Any, **limits: Any) -> Records:
    records, model = Records(), Ahead()
    model.gpu = device
    limits = {"limit_val_batches": 2, "val_check_interval": 8, "log_every_n_steps": 4} | limits
    trainer(folder, *callbacks, logger=records, **limits).fit(model)
    return records


@pytest.mark.slow
@pytest.mark.parametrize("pace", [0.4, 1.1, 1e9])
def test_rates_use_device_time(
    pace: float, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reports have the device's rate, however far the host runs ahead."""
    device.pace = pace
    device.replace_cuda(monkeypatch)
    callbacks = [SpeedMonitor(window_size=4), Flops(schedule="2ba", peak_flops=1e9), Timings()]
    found = train(tmp_path, device, *callbacks)
    for key in ("throughput/batches_per_sec", "actual_batches_per_sec"):
        rates = [value for _, value in found.of(key)]
        assert rates == pytest.approx([1.0] * len(rates), rel=0.01)
        assert rates
    assert found.of("validate/throughput/batches_per_sec") or pace < 1e9
    validated = [value for _, value in found.of("validate/throughput/batches_per_sec")]
    assert validated == pytest.approx([0.01] * len(validated), rel=0.01)
    mfu = found.of("batch_flops")[0][1] / 1e9
    utilizations = [value for _, value in found.of("mfu")]
    assert utilizations == pytest.approx([mfu] * len(utilizations), rel=0.01)
    assert found.of("mfu")
    assert found.of("batch_flops")[0][0] == 0


def test_the_last_report_covers_the_whole_run(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device completes nothing before the end, the last report covers the whole run."""
    device.replace_cuda(monkeypatch)
    model_of_formula = Flops(schedule="2ba", peak_flops=1e9, formula=lambda batch: 1e6)

    def finish(*_: Any) -> None:
        device.pace = 1.0

    monkeypatch.setattr(Ahead, "on_train_epoch_end", finish, raising=False)
    found = train(tmp_path, device, SpeedMonitor(window_size=4), model_of_formula)
    assert [step for step, _ in found.of("throughput/batches_per_sec")] == [15]
    assert [step for step, _ in found.of("batch_flops")] == [0, 1, 15]
    assert found.of("actual_batches_per_sec") == [(15, pytest.approx(1.0, 0.01))]
    assert found.of("mfu_from_formula") == [(15, pytest.approx(1e-3, 0.01))]


def test_the_end_waits_for_a_bounded_time(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device never completes a batch, the run ends without its rate."""
    device.replace_cuda(monkeypatch)
    monkeypatch.setattr(batches, "DEVICE_TIMEOUT", 0.05)
    began = time.monotonic()
    found = train(tmp_path, device, SpeedMonitor(window_size=4), Timings())
    assert time.monotonic() - began >= 0.05
    assert found.of("timings/train_batch")
    assert not found.of("throughput/batches_per_sec")


def test_events_are_reused_without_reports(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from time to time even if there is no report."""
    monkeypatch.setattr(batches, "MOST_RECORDS", 10)
    device.pace = 1e9
    device.replace_cuda(monkeypatch)
    monitor = SpeedMonitor(window_size=4)
    found = train(tmp_path, device, monitor, log_every_n_steps=10_000, max_epochs=20)
    assert found.of("throughput/batches_per_sec") == [(319, 1.0)]
    assert device.made < 40


def test_profiler_overhead_is_excluded(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle time while a recording starts or stops is excluded."""
    device.pace = 1e9
    device.replace_cuda(monkeypatch)
    record = PyTorch.record

    def slow(*args: Any) -> Any:
        device.queued += 1000.0
        recorded = yield from record(*args)
        device.queued += 1000.0
        return recorded

    monkeypatch.setattr(PyTorch, "record", slow)
    profiler = PyTorch(schedule="every 8ba for 2ba")
    found = train(tmp_path, device, SpeedMonitor(window_size=4), profiler)
    assert profiler.saved_traces
    rates = [value for _, value in found.of("throughput/batches_per_sec")]
    assert rates
    assert rates == pytest.approx([1.0] * len(rates))


def test_failed_events_fall_back_to_host_time(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning is shown; training and reports continue."""
    device.replace_cuda(monkeypatch)

    def broken() -> Any:
        if device.queued > 5.0:
            raise RuntimeError("CUDA error: planted")
        return device.event()

    events = Events("by the host's clock", 100, broken, lambda: False)
    monkeypatch.setattr("lightning_perf.run.run.DeviceTimer", lambda: DeviceTimer(events))
    with pytest.warns(PerfWarning, match="CUDA events failed .*planted.*host's clock") as caught:
        found = train(tmp_path, device, SpeedMonitor(window_size=4))
    assert len(ours(caught)) == 1
    assert found.of("throughput/batches_per_sec")[-1][1] > 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_timed_without_waiting(tmp_path: Path) -> None:
    """The host runs ahead of long kernels, and every report has the device's rate."""

    class Heavy(Unsynchronized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.cuda._sleep(20_000_000)  # cycles: about ten milliseconds
            return super().training_step(batch, batch_idx)

    records, speed = Records(), SpeedMonitor(window_size=4, gpu_flops_available=1e12)
    options: dict[str, Any] = {"accelerator": "gpu", "limit_val_batches": 0, "log_every_n_steps": 2}
    with synchronization_restored():
        trainer(tmp_path, speed, logger=records, **options).fit(Heavy())
    rates = [value for _, value in records.of("throughput/batches_per_sec")]
    assert rates
    assert all(20 < rate < 200 for rate in rates)
