"""Waiting for other ranks: when the rank's own gradients are ready, and the columns of waits."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_perf.run import spans as spans_module
from lightning_perf.run.signals import DEVICE_COLUMNS, SpanSignal, WaitSignal
from lightning_perf.run.spans import BUFFERS, GRADIENTS, START, GradientsReady
from lightning_perf.timing.totals import Action, Cost, Totals


def test_the_wait_is_from_own_gradients_to_the_last_callback_of_ddp() -> None:
    """DDP queues its wait at the last gradient; our callbacks run before and after it, once."""
    weight = torch.ones(3, requires_grad=True)
    events: list[str] = []

    def last_gradient(_: Tensor) -> None:
        events.append("gradient")
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: events.append("wait"))

    def original(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        events.append("the user's own code")

    def patched(waits: bool) -> GradientsReady:
        return GradientsReady(
            original,
            ready=lambda: events.append("ready") or waits,  # type: ignore[func-returns-value]
            ended=lambda: events.append("ended"),
            waited=lambda seconds: events.append(f"{seconds >= 0} waited"),
        )

    weight.register_post_accumulate_grad_hook(last_gradient)
    loss = (weight * 2).sum()
    patched(waits=True)(loss)
    expected = ["gradient", "ready", "wait", "ended", "the user's own code", "True waited"]
    assert events == expected
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    # Without a wait, such as for accumulated gradients, none is reported.
    events.clear()
    patched(waits=False)(loss)
    assert events == ["gradient", "ready", "wait", "the user's own code"]
    # The hook is removed from the loss.
    events.clear()
    loss.backward()
    assert "ready" not in events


def test_waits_of_one_backward_are_reported_as_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient penalty runs the engine twice: the exchange has one value, not also a 0."""
    times = iter((1.0, 1.0, 5.0, 9.0))
    monkeypatch.setattr(spans_module, "perf_counter", lambda: next(times))
    weight = torch.ones(3, requires_grad=True)
    seen: list[Any] = []

    def original(loss: Tensor) -> None:
        torch.autograd.grad(loss, weight, retain_graph=True)
        loss.backward()

    GradientsReady(original, lambda: True, partial(seen.append, "ended"), seen.append)(
        (weight * 2).sum()
    )
    assert seen == ["ended", "ended", 4.0]


def test_the_wait_ends_with_backward_if_the_last_callback_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if torch did not call what is queued by a callback, or an error came first."""
    engine = torch.autograd.Variable._execution_engine
    queued: list[Any] = []

    def queue(function: Any) -> None:
        queued.append(function)
        if len(queued) == 1:
            engine.queue_callback(function)

    fake = SimpleNamespace(_execution_engine=SimpleNamespace(queue_callback=queue))
    monkeypatch.setattr(spans_module, "Variable", fake)
    seen: list[Any] = []

    def original(loss: Tensor) -> None:
        loss.backward()
        seen.append("own")

    weight = torch.ones(3, requires_grad=True)
    ended = partial(seen.append, "ended")
    GradientsReady(original, lambda: True, ended, lambda _: seen.append("waited"))(weight.sum())
    assert len(queued) == 2
    assert seen == ["own", "ended", "waited"]


def test_invalid_losses_are_passed_to_the_original_backward() -> None:
    """A loss without a gradient, or of another type, gives torch's own error and no event."""
    seen: list[Any] = []
    ended = partial(seen.append, "ended")
    backward = GradientsReady(seen.append, lambda: True, ended, seen.append)
    for given in (torch.ones(1), "loss", None):
        backward(given)
    assert len(seen) == 3
    backward = GradientsReady(lambda loss: loss.backward(), lambda: True, ended, seen.append)
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(1))
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
        device=clocked,
        totals=lambda: totals,
        exchange=defaultdict(lambda: SimpleNamespace(total=lambda: 3.5)),
    )


def test_waits_are_columns_of_their_own_and_part_of_their_categories() -> None:
    """Waits of host and device are part of their categories; other stages are left out."""
    for clocked in (False, True):
        recorded = spans(clocked)
        signal = WaitSignal(recorded, node_rank=3)
        found = dict(zip(signal.columns, signal.totals("train"), strict=True))
        expected = {
            "waits/node_rank": 3, "waits/exchange": 3.5, "waits/exchange/start": 3.5,
            "waits/exchange/forward": 3.5, "waits/validation": 5.0,
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
