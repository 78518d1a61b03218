"""Compares the FLOP counts of several tools with closed formulas, and what counting costs per step.

    python benchmarks/counting.py

Every number in docs/mfu.md comes from here. fkat is included if it can be imported. Its wheel is
enough: pip download fkat==0.1.2 --no-deps, unpacked on PYTHONPATH.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric.utilities.throughput import measure_flops
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import spread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_perf.flops import FlopCounter, TransformerConfig, count_on_shadow, palm

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_gpt import GPT, VOCABULARY

REPEATS = 60


@dataclass
class Case:
    """A model, a batch, and the FLOPs of one step, computed by hand."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]
    #: FLOPs of forward and backward.
    exact: int
    #: Tokens per batch; None for batches without tokens.
    tokens: int | None = None
    #: FLOPs by Composer's convention; None where it has no formula.
    composer: int | None = None


class Convolutions(nn.Module):
    """A plain, a depthwise and a grouped convolution, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = self.grouped(self.depthwise(self.first(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


def gpt(layers: int, width: int, heads: int, batch: int, context: int) -> Case:
    """The demo's GPT with the given sizes."""
    tokens = batch * context
    sizes = TransformerConfig(
        layers=layers, hidden=width, heads=heads, vocab=VOCABULARY, sequence=context
    )

    def loss(model: nn.Module, text: Tensor) -> Tensor:
        return F.cross_entropy(model(text).flatten(0, 1), text.flatten())

    parameters = sum(p.numel() for p in GPT(layers, width, heads, context).parameters())
    return Case(
        lambda: GPT(layers, width, heads, context),
        lambda: torch.ones((batch, context), dtype=torch.long),
        loss,
        tokens * palm(sizes),
        tokens,
        # llm-foundry's flops_per_batch: all parameters, plus attention in full.
        tokens * (6 * parameters + 12 * layers * width * context),
    )


def convolutions() -> Case:
    """Grouped convolutions over images of 32 x 32; the first layer computes no input gradient."""
    pixels = 16 * 32 * 32
    first, depthwise, grouped = 32 * 3 * 9, 32 * 9, 64 * 8 * 9
    products = pixels * (2 * first + 3 * depthwise + 3 * grouped) + 3 * 16 * 64 * 10
    return Case(
        Convolutions, lambda: torch.ones(16, 3, 32, 32), lambda m, x: m(x).sum(), 2 * products
    )


def lstm() -> Case:
    """Two layers over a sequence that requires a gradient."""
    matrices = 4 * 128 * (64 + 128) + 4 * 128 * (128 + 128)
    return Case(
        lambda: nn.LSTM(64, 128, 2),
        lambda: torch.ones(32, 16, 64, requires_grad=True),
        lambda m, x: m(x)[0].sum(),
        3 * 2 * 32 * 16 * matrices,
    )


def mlp() -> Case:
    """A minimal model."""
    return Case(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)),
        lambda: torch.ones(16, 32),
        lambda m, x: m(x).sum(),
        2 * 16 * (2 * 32 * 64 + 3 * 64 * 8),
    )


CASES = {
    "demo GPT": gpt(layers=4, width=192, heads=6, batch=16, context=128),
    "grouped convolutions": convolutions(),
    "LSTM": lstm(),
}
TIMED = {"tiny MLP": mlp(), "0.9M GPT": gpt(layers=4, width=128, heads=4, batch=8, context=64)}


def ours(case: Case) -> int:
    """Counted during training."""
    with FlopCounter() as counter:
        case.loss(case.make(), case.batch()).backward()
    return counter.counts.model_flops


def on_shadow(case: Case) -> int:
    """Counted on a shadow, as for a compiled module."""
    return count_on_shadow(case.make(), case.batch(), case.loss).model_flops


def pytorch(case: Case) -> int:
    """PyTorch's FlopCounterMode."""
    with FlopCounterMode(display=False) as counter:
        case.loss(case.make(), case.batch()).backward()
    return counter.get_total_flops()


def lightning(case: Case) -> int:
    """Lightning's measure_flops, as in the documentation of its ThroughputMonitor."""
    model, batch = case.make(), case.batch()
    return measure_flops(model, lambda: case.loss(model, batch), lambda loss: loss)


def lightning_on_meta(case: Case) -> int:
    """The same on the meta device, as its documentation recommends."""
    with torch.device("meta"):
        return lightning(case)


def fkat(case: Case) -> int:
    """The counter of fkat's Flops callback."""
    from fkat.pytorch.callbacks.profiling.flops import Trace

    counter = Trace()
    with counter:
        case.loss(case.make(), case.batch()).backward()
    return counter.get_batch_flop(None)


def six_n(case: Case) -> int | None:
    """Six FLOPs per parameter and token."""
    parameters = sum(p.numel() for p in case.make().parameters())
    return 6 * parameters * case.tokens if case.tokens else None


TOOLS: dict[str, Callable[[Case], int | None]] = {
    "lightning_perf": ours,
    "lightning_perf, on a shadow": on_shadow,
    "PyTorch FlopCounterMode": pytorch,
    "Lightning measure_flops": lightning,
    "Lightning measure_flops on meta": lightning_on_meta,
    "fkat 0.1.2": fkat,
    "6 N per token": six_n,
    "Composer (llm-foundry's formula)": lambda case: case.composer,
}


def difference(tool: Callable[[Case], int | None], case: Case) -> str:
    """The relative error of a tool, in percent."""
    try:
        found = tool(case)
    except Exception as error:
        return f"fails ({type(error).__name__})"
    if found is None:
        return "no formula"
    return "exact" if found == case.exact else f"{found / case.exact - 1:+.1%}"


def compared() -> Table:
    """The first table: counts compared with the closed formula."""
    table = Table("tool", *CASES, title="FLOPs of one batch, compared with the closed formula")
    table.add_row("closed formula", *(f"{case.exact:,}" for case in CASES.values()))
    for name, tool in TOOLS.items():
        table.add_row(name, *(difference(tool, case) for case in CASES.values()))
    return table


def seconds(case: Case, model: nn.Module, batch: Tensor, way: str) -> float:
    """The duration of one step with one way to count."""
    start = time.perf_counter()
    if way == "Lightning measure_flops":
        measure_flops(model, lambda: case.loss(model, batch), lambda loss: loss)
    elif way == "lightning_perf, on a shadow":
        count_on_shadow(model, batch, case.loss)
    else:
        modes = {
            "lightning_perf": FlopCounter,
            "PyTorch FlopCounterMode": lambda: FlopCounterMode(display=False),
        }
        with modes.get(way, nullcontext)():
            case.loss(model, batch).backward()
    return time.perf_counter() - start


WAYS = (
    "lightning_perf", "PyTorch FlopCounterMode", "Lightning measure_flops",
    "lightning_perf, on a shadow",
)  # fmt: skip


def costs() -> Table:
    """The second table: the ratio of a counted step to the uncounted step right before it.

    It uses one thread, because on a busy machine waiting for other threads takes longer than a
    small step.
    """
    torch.set_num_threads(1)
    table = Table("tool", *TIMED, title="counted step / plain step: median (10 % to 90 %)")
    ratios: dict[str, dict[str, list[float]]] = {way: {name: [] for name in TIMED} for way in WAYS}
    for name, case in TIMED.items():
        model, batch = case.make(), case.batch()
        for way in ("plain", *WAYS):
            seconds(case, model, batch, way)
        for _ in track(range(REPEATS), name, transient=True):
            for way in WAYS:
                plain = seconds(case, model, batch, "plain")
                ratios[way][name].append(seconds(case, model, batch, way) / plain)
    for way in WAYS:
        table.add_row(way, *(spread(ratios[way][name]) for name in TIMED))
    return table


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    console = Console(width=110)
    console.print(compared())
    console.print(costs())
