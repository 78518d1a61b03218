"""Unusual modules train unchanged, and are counted exactly or not at all."""

from __future__ import annotations

import threading
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Records, Small, ours, trainer
from torch import Tensor, nn

from lightning_perf import Flops, PerfWarning, SpeedMonitor
from lightning_perf.flops import counter

EXACT = 4 * FLOPS_PER_SAMPLE


class Branching(Small):
    """Control flow that depends on data."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (2 if batch[0].sum() > 0 else 1)


class Masked(Small):
    """Sizes that depend on data, after the products."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.net(batch[0])
        return (found - batch[1])[batch[1].abs() >= 0].square().mean() + len(batch[0].unique())


class Square(torch.autograd.Function):
    """An autograd function with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Custom(Small):
    """A custom autograd function."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return Square.apply(self.net(batch[0]) - batch[1]).mean()


class Locked(Small):
    """An attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Hooked(Small):
    """Forward and backward hooks, and a parametrized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.net[0].register_forward_hook(lambda m, i, o: self.seen.append(o.detach().sum().item()))
        self.net[2].register_full_backward_hook(lambda m, i, o: None)
        nn.utils.parametrizations.weight_norm(self.net[2])


class Nested(Small):
    """Samples of different lengths in one nested tensor."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        parts = [batch[0][:1], batch[0][1:]]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        return self.net(nested).values().square().mean()


class Labelled(Tensor):
    """A class of tensors with a constructor of its own, as PINA has."""

    def __new__(cls, values: Any, label: str) -> Labelled:
        return super().__new__(cls, values)

    def __init__(self, values: Any, label: str) -> None:
        self.label = label


class Constructing(Small):
    """Constructs such tensors from other tensors and from numbers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.net(Labelled(batch[0], "in")) - Labelled([0.5], "out")
        assert isinstance(found, Labelled)
        return Labelled(found, "loss").square().mean()


def train(folder: Path, kind: type[Small], *callbacks: Any) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    model = kind()
    trainer(folder, *callbacks, logger=Records(), max_epochs=2).fit(model)
    return [each.detach().clone() for each in model.parameters()], torch.get_rng_state()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Branching, EXACT),
        (Masked, EXACT),
        (Custom, EXACT),
        (Locked, EXACT),
        (Hooked, EXACT),  # weight normalization is elementwise
        (Nested, EXACT),
        (Constructing, EXACT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_training_is_the_same_and_the_count_exact(
    tmp_path: Path, kind: type[Small], expected: int
) -> None:
    """Weights and random state end bit-identical, and the FLOPs equal the expected sum."""
    plain = train(tmp_path / "plain", kind)
    flops = Flops(peak_flops=1e9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(tmp_path / "watched", kind, SpeedMonitor(window_size=4), flops)
    assert not ours(caught)
    assert torch.equal(plain[1], watched[1])
    for before, after in zip(plain[0], watched[0], strict=True):
        assert torch.equal(before, after)
    assert flops.metrics["batch_flops"] == expected


def test_a_user_error_in_a_counted_batch_is_raised_unchanged(tmp_path: Path) -> None:
    """The error is unchanged, and a second training is counted normally."""

    class Raising(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise ValueError("the user's own")

    flops = Flops(peak_flops=1e9)
    with pytest.raises(ValueError, match="the user's own"):
        trainer(tmp_path, flops).fit(Raising())
    trainer(tmp_path, flops).fit(Small())
    assert flops.metrics["batch_flops"] == EXACT


@pytest.mark.parametrize("part", ["formula_of", "is_recomputation", "work_of"])
def test_an_error_while_counting_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """An error in our own code makes the operator count as unknown."""
    plain = train(tmp_path / "plain", Small)
    original, fails = getattr(counter, part), cycle([False, True])

    def broken(*args: Any) -> Any:
        if next(fails):
            raise RuntimeError("planted")
        return original(*args)

    monkeypatch.setattr(counter, part, broken)
    flops = Flops(peak_flops=1e9)
    found = train(tmp_path / "watched", Small, flops)
    assert all(map(torch.equal, plain[0], found[0]))
    assert flops.metrics["untracked_operations"] > 0


def test_uncounted_operators_are_reported(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators without a formula are reported by number of calls, and by name in the log."""

    class Spectral(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return torch.fft.fft(self.net(batch[0])).abs().mean()

    flops = Flops(peak_flops=1e9)
    trainer(tmp_path, flops, logger=records).fit(Spectral())
    assert flops.metrics["untracked_operations"] > 0
    assert caplog.text.count("are not counted: MFU is a lower bound") == 1
    assert "aten::_fft_r2c" in caplog.text


def test_flops_in_the_transfer_of_a_batch_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their time is that of the batch, so MFU without them is a lower bound; a copy has none."""

    class Encodes(Small):
        def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
            return [batch[0] @ torch.eye(batch[0].shape[1]), batch[1]]

    for module, named in ((Small(), False), (Encodes(), True)):
        flops = Flops(peak_flops=1e9)
        run = trainer(tmp_path, flops)
        run.fit(module)
        assert "batch_to_device" not in vars(run.strategy)
        assert flops.metrics["batch_flops"] == EXACT
        text = "the FLOPs of Encodes.on_after_batch_transfer are not counted"
        assert (text in caplog.text) is named


def test_operators_of_a_model_without_known_flops_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason for the missing MFU is in the log, also if no other operator was counted."""

    class Pairs(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Bilinear(8, 8, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0], batch[0]).mean()

    with pytest.warns(PerfWarning, match="no FLOPs were found"):
        trainer(tmp_path, Flops(peak_flops=1e9), limit_val_batches=0).fit(Pairs())
    assert "aten::_trilinear" in caplog.text
