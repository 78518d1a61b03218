"""The demo's GPT: the FLOPs of the formula are those counted while it trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from helpers.small import Records, trainer

from lightning_perf import Flops, SpeedMonitor

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("layers", "width", "heads", "context"), [(2, 48, 4, 32), (3, 64, 2, 48)])
def test_counted_flops_equal_the_formula(
    tmp_path: Path, example: ModuleType, layers: int, width: int, heads: int, context: int
) -> None:
    """A token costs exactly 6 N_mm + 12 L H Q T (letters: transformer_flops.json)."""
    model = example.GPT(layers, width, heads, context)
    data = example.StandardLibrary(context=context, batch_size=4, megabytes=0.05)
    flops, monitor = Flops(peak_flops=1e12), SpeedMonitor(window_size=3)
    trainer(tmp_path, flops, monitor, logger=Records(), max_steps=8).fit(model, data)

    # Parameters in products with a token: all matrices except the two embeddings.
    products = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and not name.startswith(("tokens", "positions"))
    )
    head_size = width // heads
    token = 6 * products + 12 * layers * heads * head_size * context
    assert flops.metrics["batch_flops"] == 4 * context * token
    assert flops.metrics["untracked_operations"] == 0
    speed = monitor.metrics
    assert speed["throughput/flops_per_sec"] / speed["throughput/tokens_per_sec"] == pytest.approx(
        token, rel=1e-9
    )


@pytest.mark.slow
def test_it_learns(tmp_path: Path, example: ModuleType) -> None:
    """The loss on the demo's data falls well below that of guessing bytes."""
    model = example.GPT(layers=1, width=64, heads=2, context=32, learning_rate=3e-3)
    data = example.StandardLibrary(context=32, batch_size=16, megabytes=0.2)
    run = trainer(tmp_path, max_steps=120, max_epochs=-1)
    run.fit(model, data)
    assert run.callback_metrics["train/loss"] < 3.2  # log(256) is 5.5
