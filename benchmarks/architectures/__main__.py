"""Trains the models, and prints the table."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from families import grouped_product
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from architectures.by_hand import ByHand
from architectures.case import Case
from architectures.plain import plain_cases
from lightning_perf import ConfigError, Flops
from lightning_perf.flops import formula_for

BATCHES = 16
#: Why the count by hand does not see all of a model.
UNSEEN = {
    "reformer (masked language)": "its layers run in a backward of their own",
    "yoso (masked language)": "has functions with a backward of their own",
}


class Explained(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch's counter is known to miss (positive) and to count too much (negative)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        name = operator.name().removeprefix("aten::").partition(".")[0]
        if name in ("_grouped_mm",):
            self.reasons["grouped products"] += grouped_product(args, out)
        if name == "convolution_backward" and args[-1][1]:
            grad, x, weight, *_, transposed, _padding, groups, _mask = args
            outputs = x if transposed else grad
            flops = 2 * outputs.numel() * (weight.numel() // weight.size(0))
            self.reasons["grouped convolutions"] -= (groups - 1) * flops
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            backward = name.endswith("backward")
            q, k, v = args[backward : 3 + backward]
            pairs = q.numel() // q.size(-1) * k.size(-2)
            flops = 2 * pairs * (q.size(-1) + v.size(-1)) * (1 + backward)
            self.reasons["attention on a CPU"] += flops
        if name.startswith("mkldnn_rnn_layer"):
            x, of_input, of_state = args[:3]
            flops = 2 * x.numel() // x.size(-1) * (of_input.numel() + of_state.numel())
            self.reasons["fused LSTM"] += flops * (2 if name.endswith("backward") else 1)
        if name in ("mv", "addmv", "dot", "vdot"):
            matrix = args[name == "addmv"]
            self.reasons["products with a vector"] += 2 * matrix.numel()
        if name == "affine_grid_generator":
            self.reasons["grid of an affine map"] += 2 * out.numel() * args[0].size(-1)
        if name == "mm" and args[0].layout != torch.strided:
            self.reasons["sparse products as dense ones"] -= 2 * out.numel() * args[0].size(-1)
        if name in ("mm", "bmm", "addmm", "baddbmm") and out.is_complex():
            a = args[name in ("addmm", "baddbmm")]
            self.reasons["complex products"] += 3 * 2 * out.numel() * a.size(-1)
        return out


class UnderModes(L.Callback):
    """Runs each batch of a training under another mode."""

    def __init__(self, *modes: Any) -> None:
        self.modes = modes

    def on_train_batch_start(self, *args: Any) -> None:
        """Enter the mode of the batch."""
        self.modes[args[-1]].__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        """Leave it."""
        self.modes[args[-1]].__exit__(None, None, None)


def train(
    case: Case, callback: L.Callback, folder: str, batches: int = BATCHES
) -> L.LightningModule:
    """Train some batches of a case, which are all the same."""
    L.seed_everything(7, verbose=False)
    module = case.make()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **case.options,
    )
    trainer.fit(module, DataLoader([module.batch] * batches, batch_size=None))
    return module


def torchs_counter() -> FlopCounterMode:
    """Torch's counter, without the hooks by module, which raise under ``torch.autograd.grad``."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = nullcontext()  # type: ignore[assignment]
    counter.mod_tracker.parents = {"Global"}  # type: ignore[attr-defined]
    return counter


@dataclass(slots=True)
class Row:
    """One model."""

    name: str
    ours: float
    hardware: float
    torch: int
    by_hand: int
    #: FLOPs by reason why torch's counter differs.
    reasons: dict[str, int]
    #: Operators that lightning_perf names as not counted.
    unknown: str
    formulas: dict[str, float | str] = field(default_factory=dict)
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether both counts agree but for the reasons."""
        return self.torch + sum(self.reasons.values()) == self.ours


def measure(case: Case) -> Row:
    """Count one model in trainings."""
    with tempfile.TemporaryDirectory() as folder:
        flops = Flops(peak_flops=1e9)
        module = train(case, flops, folder)
        (summary,) = Path(folder).rglob("summary.json")
        unknown = json.loads(summary.read_text())["setup"].get("flops_not_counted", "")
        theirs, explained, hand = torchs_counter(), Explained(), ByHand()
        train(case, UnderModes(nullcontext(), theirs, explained, hand), folder, 4)
    by_hand = hand.flops if case.by_hand is None else case.by_hand
    ours = flops.metrics.get("batch_flops", 0.0)
    hardware = ours and float(f"{ours * flops.metrics['hfu'] / flops.metrics['mfu']:.10g}")
    found = {**explained.reasons, **case.reasons}
    reasons = {name: flops for name, flops in found.items() if flops}
    if hardware != ours:
        reasons["recomputation"] = round(ours - hardware)
    row = Row(
        case.name,
        ours,
        hardware,
        theirs.get_total_flops(),
        by_hand,
        reasons,
        unknown,
        note=case.note,
    )
    config = getattr(getattr(module, "model", None), "config", None)
    if config is not None:
        for kind in ("palm", "megatron", "nanogpt"):
            try:
                formula = formula_for({"kind": kind, "config": config})
                row.formulas[kind] = formula(module.batch)
            except (ConfigError, ValueError) as error:
                row.formulas[kind] = str(error)
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--plain", action="store_true", help="without transformers")
    parser.add_argument("--pretrained", action="store_true", help="transformers only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases = [] if options.pretrained else plain_cases()
    if not options.plain:
        from architectures.pretrained import pretrained_cases

        cases += pretrained_cases()
    failed, left_out = 0, []
    print("| model | MFLOP | FlopCounterMode | why | by hand | not counted, by name | formulas |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        if options.names and not any(name in case.name for name in options.names):
            continue
        try:
            row = measure(case)
        except Exception as error:
            left_out.append(f"{case.name}: {type(error).__name__}: {error}".splitlines()[0][:150])
            continue
        why = ", ".join(row.reasons) + ("" if row.exact else " NOT EXPLAINED")
        hand = "exact" if row.by_hand == row.ours else f"{row.by_hand / row.ours:.6g}"
        if row.name in UNSEEN:
            hand += f" ({UNSEEN[row.name]})"
        failed += not row.exact or (row.by_hand != row.ours and row.name not in UNSEEN)
        claims = ", ".join(
            f"{kind} {value / row.ours:.4g}"
            for kind, value in row.formulas.items()
            if isinstance(value, float | int)
        )
        ratio = row.torch / row.ours if row.ours else math.nan
        print(
            f"| {row.name} | {row.ours / 1e6:.6g} | {ratio:.4g} | {why} | {hand} | {row.unknown} "
            f"| {claims} |",
            flush=True,
        )
    print(f"\n{failed} failed.\n\nLeft out:\n")
    print("\n".join(f"- {each}" for each in left_out))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
