"""Waiting for other ranks: when the rank's own gradients are ready, and the columns of waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_perf.run.signals import DEVICE_COLUMNS, SpanSignal, WaitSignal
from lightning_perf.run.spans import BUFFERS, GRADIENTS, START, GradientsReady
from lightning_perf.timing.totals import Action, Cost, Totals


def test_own_gradients_are_reported_ready_before_the_ddp_wait() -> None:
    """DDP queues its wait at the last gradient; our callback runs before it, once."""
    weight = torch.ones(3, requires_grad=True)
    events: list[str] = []

    def last_gradient(_: Tensor) -> None:
        events.append("gradient")
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: events.append("wait"))

    weight.register_post_accumulate_grad_hook(last_gradient)
    backward = GradientsReady(
        lambda loss: loss.backward(retain_graph=True),
        ready=lambda: not events.append("ready"),  # type: ignore[func-returns-value]
        waited=lambda seconds: events.append(f"{seconds >= 0} waited"),
    )
    loss = (weight * 2).sum()
    backward(loss)
    assert events == ["gradient", "ready", "wait", "True waited"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    # Without a wait, such as for accumulated gradients, none is reported.
    events.clear()
    GradientsReady(lambda loss: loss.backward(retain_graph=True), lambda: False, events.append)(
        loss
    )
    assert events == ["gradient", "wait"]
    # The hook is removed from the loss.
    events.clear()
    loss.backward()
    assert "ready" not in events


def test_invalid_losses_are_passed_to_the_original_backward() -> None:
    """A loss without a gradient, or of another type, gives torch's own error and no event."""
    seen: list[Any] = []
    backward = GradientsReady(seen.append, lambda: True, seen.append)
    for given in (torch.ones(1), "loss", None):
        backward(given)
    assert len(seen) == 3
    with pytest.raises(RuntimeError, match="does not require grad"):
        GradientsReady(lambda loss: loss.backward(), lambda: True, seen.append)(torch.ones(1))
    assert len(seen) == 3


def spans(clocked: bool) -> Any:
    """Some recorded times."""
    host = {
        Action("train", "other", START): Cost(1.0, 2),
        Action("train", "other", "loop"): Cost(10.0, 2),
        Action("train", "forward", BUFFERS): Cost(2.0, 2),
        Action("train", "backward", "backward"): Cost(8.0, 2),
        Action("train", "backward", GRADIENTS): Cost(4.0, 0),
        Action("validate", "backward", GRADIENTS): Cost(99.0, 0),
        Action("validate", "reduce_metrics", "DDPStrategy.reduce"): Cost(5.0, 1),
    }
    device = {
        Action("train", name, "device"): Cost(seconds, 2)
        for name, seconds in {
            "backward": 16.0, GRADIENTS: 32.0, "other": 64.0, START: 128.0, "forward": 256.0,
        }.items()
    }  # fmt: skip
    totals = Totals(host, 0.0, device if clocked else {})
    return SimpleNamespace(
        device=clocked, totals=lambda: totals, exchange=SimpleNamespace(total=lambda: 3.5)
    )


def test_waits_are_columns_of_their_own_and_part_of_their_categories() -> None:
    """Waits of host and device are part of their categories; other stages are left out."""
    for clocked in (False, True):
        recorded = spans(clocked)
        signal = WaitSignal(recorded, node_rank=3)
        found = dict(zip(signal.columns, signal.totals("train"), strict=True))
        expected = {
            "waits/node_rank": 3, "waits/exchange": 3.5, "waits/validation": 5.0,
            "waits/start": 1.0, "waits/forward": 2.0, "waits/backward": 4.0,
        }  # fmt: skip
        if clocked:
            expected |= {"waits/device/start": 128.0, "waits/device/backward": 32.0}
        assert found == expected
        times = SpanSignal(recorded)
        whole = dict(zip(times.columns, times.totals("train"), strict=True))
        assert whole["timings/backward"] == 12.0
        if clocked:
            assert whole["timings/device/backward"] == 48.0
            assert whole["timings/device/other"] == 192.0
            assert sum(whole[f"timings/{name}"] for name in DEVICE_COLUMNS.values()) == 496.0
            assert whole["timings/device/batches"] == 2
