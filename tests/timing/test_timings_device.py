"""Device times of segments, from CUDA events without synchronization."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_device import Device, Unsynchronized, synchronization_restored
from helpers.small import Records, Small, TwoOptimizers, trainer

from lightning_perf import Timings
from lightning_perf.timing import cuda_events
from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceTimer, Events
from lightning_perf.timing.totals import Action, Cost, Floor

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


SECONDS = {
    "dataloader_next": 0.5, "to_device": 1.0, "forward": 2.0, "backward": 4.0,
    "optimizer_step": 0.25, "other": 0.125,
}  # fmt: skip


def batch(device: Device, clock: DeviceTimer) -> DeviceBatchTime | None:
    """Run the segments of one batch."""
    for category, seconds in SECONDS.items():
        device.queued += seconds
        if category != "other":
            clock.mark(category)
    return clock.end()


def timer_of(device: Device) -> DeviceTimer:
    """A timer in training."""
    clock = device.device_timer()
    clock.wanted, clock.stage = True, "train"
    clock.enter()
    return clock


def cost(category: str, calls: int) -> tuple[Action, Cost]:
    return Action("train", category, "device"), Cost(calls * SECONDS[category], calls)


def test_segments_are_read_when_the_device_has_completed_them() -> None:
    """Each event ends a segment, and a batch is their sum. Floors are kept on request."""
    device = Device()
    clock = timer_of(device)
    clock.floors["backward"] = Floor()
    times = [batch(device, clock) for _ in range(9)]
    device.done = device.queued - sum(SECONDS.values())
    clock.read()
    assert clock.costs == dict([cost(name, 8) for name in SECONDS])
    device.done = device.queued
    clock.read()
    assert clock.costs == dict([cost(name, 9) for name in SECONDS])
    assert times == [DeviceBatchTime(sum(SECONDS.values()), known=True)] * 9
    assert clock.floors["backward"].total() == 9 * SECONDS["backward"]


def test_batches_count_whole() -> None:
    """Of a batch that the device has not completed, no segment counts yet."""
    device = Device()
    clock = timer_of(device)
    for _ in range(4):
        batch(device, clock)
    length = sum(SECONDS.values())
    for done in (1.6, 2.2, 2.99, 3.0, 4.0):
        device.done = done * length
        clock.read()
        calls = {action.category: cost.calls for action, cost in clock.costs.items()}
        assert calls["forward"] == calls["backward"] == calls["other"] == int(done)
    assert clock.costs[Action("train", "forward", "device")] == Cost(8.0, 4)


def test_the_last_batches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run reads the segments of all batches, however far the host was ahead."""
    device = Device()
    device.replace_cuda(monkeypatch)

    class Ahead(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            device.queued += 2.0
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            data = super().train_dataloader().dataset
            return torch.utils.data.DataLoader(data, batch_size=1)

    def complete(*_: Any) -> None:
        device.pace = 1.0

    monkeypatch.setattr(Ahead, "on_train_epoch_end", complete, raising=False)
    timings = Timings(schedule="1000ba")
    trainer(tmp_path, timings).fit(Ahead())
    assert timings.metrics["timings/device/forward"] == 2.0


def test_a_slow_device_is_not_waited_for_and_events_are_reused() -> None:
    """Pending events are read later; the number of events is bounded."""
    device = Device()
    clock = timer_of(device)
    for _ in range(10):
        batch(device, clock)
    assert clock.costs == {}
    for _ in range(1000):
        device.done = device.queued
        batch(device, clock)
    assert device.made < cuda_events._MANY_WAITING + 2 * len(SECONDS)
    clock.read()
    assert clock.costs[Action("train", "forward", "device")].calls >= 1000


def test_pending_events_are_limited() -> None:
    """Beyond a maximum nothing is recorded; later segments are correct again."""
    device = Device()
    clock = timer_of(device)
    for _ in range(500):
        batch(device, clock)
    assert device.made <= cuda_events._MOST_WAITING + 1  # the last one that was read
    device.done = device.queued
    for _ in range(10):
        batch(device, clock)
        device.done = device.queued
    clock.read()
    seconds, calls = clock.costs[Action("train", "backward", "device")]
    assert seconds == 4.0 * calls


def test_validation_between_batches_is_excluded() -> None:
    """A change of stage starts a new sequence of events."""
    device = Device()
    clock = timer_of(device)
    batch(device, clock)
    device.queued += 100.0
    clock.stage = "validate"
    clock.enter()
    batch(device, clock)
    device.queued += 100.0
    clock.stage = "train"
    clock.exit()
    for _ in range(5):
        batch(device, clock)
    device.done = device.queued
    clock.read()
    seconds, calls = clock.costs[Action("train", "dataloader_next", "device")]
    assert seconds == calls * SECONDS["dataloader_next"]


def test_events_are_not_used_during_graph_capture() -> None:
    """Events are neither recorded nor queried, and the time around the capture is excluded."""
    device = Device()
    clock = timer_of(device)
    for index in range(10):
        device.capturing = index == 4
        batch(device, clock)
        device.capturing = False
        device.done = device.queued
    clock.read()
    assert not device.touched_while_capturing
    assert clock.costs[Action("train", "forward", "device")] == Cost(
        2.0 * 8, 8
    )  # without the next one, whose start is unknown


def test_failed_events_warn_once() -> None:
    """A driver error ends device timing, but not training."""

    def broken() -> Any:
        raise RuntimeError("CUDA error: planted")

    clock = DeviceTimer(Events("a loss", 256, broken, lambda: False))
    clock.wanted = True
    with pytest.warns(UserWarning, match=r"CUDA events failed .*planted"):
        clock.enter()
    clock.mark("backward")
    clock.end()


@pytest.mark.parametrize("kind", [Small, TwoOptimizers])
def test_device_times_by_category(
    kind: type[Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real training, device time has the right category, also with manual optimization."""
    device = Device()
    device.replace_cuda(monkeypatch)

    class Working(kind):  # type: ignore[misc, valid-type]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            device.work(1.0)
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            device.work(2.0)
            loss = super().training_step(batch, batch_idx)
            device.work(2.0)
            return loss

        def backward(self, loss: torch.Tensor, *args: Any) -> None:
            device.work(4.0)
            super().backward(loss, *args)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            device.work(0.5)

        def on_train_batch_end(self, *_: Any) -> None:
            device.work(8.0)

    timings, records = Timings(), Records()
    trainer(tmp_path, timings, logger=records, limit_train_batches=12).fit(Working())
    passes = 2 if kind is TwoOptimizers else 1
    found = {key.removeprefix("timings/"): values[-1][1] for key in records.keys
             if (values := records.of(key))}  # fmt: skip
    assert found["device/to_device"] == 1.0
    assert found["device/forward"] == 4.0
    assert found["device/backward"] == 4.0 * passes
    assert found["device/optimizer_step"] == 0.5 * passes
    assert "device/other" not in found  # it was always 0
    # The work of a hook after ours runs before the next batch is fetched.
    assert found["exposed_input"] == 8.0


@pytest.mark.gpu
@NEEDS_CUDA
def test_real_events_never_synchronise(tmp_path: Path) -> None:
    """A run on a GPU passes with synchronizing calls forbidden."""
    timings = Timings()
    with synchronization_restored():
        trainer(tmp_path, timings, accelerator="gpu", limit_val_batches=0).fit(Unsynchronized())
    assert timings.metrics["timings/device/forward"] > 0
    assert timings.metrics["timings/exposed_input"] >= 0


@pytest.mark.gpu
@NEEDS_CUDA
def test_device_time_of_a_long_kernel(tmp_path: Path) -> None:
    """A long kernel in forward is device time of forward, although the host continues at once."""

    class Heavy(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.cuda._sleep(20_000_000)  # cycles: about ten milliseconds
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.05)  # so that the last report has a batch that the device has completed

    timings = Timings()
    trainer(tmp_path, timings, accelerator="gpu").fit(Heavy())
    found = timings.metrics
    assert found["timings/device/forward"] > 0.005
    assert found["timings/device/backward"] < found["timings/device/forward"] / 2
