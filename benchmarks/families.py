"""Counts one training step of a tiny model of each causal language model in transformers.

``pip install transformers``, then ``python benchmarks/families.py [FAMILY ...]``: prints, for each
family, what lightning_perf and torch's ``FlopCounterMode`` count, what explains the difference
exactly, and what the formula ``palm`` gives or why it refuses the configuration. Where it accepts
it, ``megatron`` is divided by the count less half of attention, and ``nanogpt`` by attention and 6
FLOPs per token and parameter of the real model, positions left out: each by its own definition. The
latter assumes biases and norms, which no configuration names; all matrices must be the real ones.
Attention runs as separate products (``eager``), which both count. Families whose configuration does
not take small sizes as others do are listed at the end.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_perf import ConfigError
from lightning_perf.flops import FlopCounter, TransformerConfig, formula_for

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BATCH, LENGTH, MOST_PARAMETERS = 2, 32, 20_000_000
#: Sizes, by the names that configurations have for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim",
         "decoder_ffn_dim", "dff"), 96,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers"), 2,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts"), 4,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_top_k", "eos_token_id"), 2
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "sliding_window"), 64
    ),
    "head_dim": 16, "rotary_dim": 16, "vocab_size": 128, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0,
    "bos_token_id": 1,
}  # fmt: skip


def grouped_product(args: Any, out: Any) -> int:
    """One product per group of rows; of two matrices the groups split what is summed."""
    a, b = args[:2]
    if a.dim() == b.dim() == 2:
        return int(2 * a.size(0) * a.size(1) * b.size(1))
    return int(2 * out.numel() * a.size(-1))


class Explained(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch's counter is known to miss, and what it counts too often.

    It has no formula for grouped products, and multiplies the weight gradient of a grouped
    convolution by the number of groups.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed = self.excess = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        name = operator.name()
        if name.startswith("aten::_grouped_mm"):
            self.missed += grouped_product(args, out)
        if name.startswith("aten::convolution_backward") and args[-1][1]:
            grad, _x, weight, *_, groups, _mask = args
            self.excess += (groups - 1) * 2 * grad.numel() * (weight.numel() // weight.size(0))
        return out


@dataclass(frozen=True, slots=True)
class Row:
    """One family."""

    family: str
    parameters: int
    ours: int
    torch: int
    missed: int
    excess: int
    #: By the formula ``palm``, or why it refuses.
    palm: float | str
    #: By the formulas ``megatron`` and ``nanogpt``, divided by their definitions; None if refused.
    megatron: float | None
    nanogpt: float | None
    #: Whether the latter has all matrices, so that only biases and norms make it differ.
    matrices: bool

    @property
    def exact(self) -> bool:
        """Whether both counts agree but for the known faults."""
        return self.torch + self.missed - self.excess == self.ours


def configuration(kind: type[Any]) -> Any:
    """A configuration of a family with small sizes."""
    usual = kind()
    sizes: dict[str, Any] = {
        name: size
        for name, size in SIZES.items()
        if hasattr(usual, name) and isinstance(getattr(usual, name), int | None)
    }
    if kind.model_type == "falcon":  # its width per head follows from the others
        del sizes["head_dim"]
    if kind.model_type == "gpt_neo":
        sizes["attention_types"] = [[["global", "local"], 1]]
    if getattr(usual, "layer_types", None):
        sizes["layer_types"] = usual.layer_types[:2]
    config = kind(**sizes)
    config._attn_implementation = "eager"
    config.is_decoder = True
    return config


def measure(kind: type[Any], model_class: type[Any]) -> Row:
    """Count one step of a tiny model of a family."""
    config = configuration(kind)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(3, 120, (BATCH, LENGTH))

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with FlopCounter() as counter:
        step()
    with FlopCounterMode(display=False) as theirs:
        step()
    with Explained() as explained:
        step()
    megatron = nanogpt = None
    matrices = True
    try:
        palm: float | str = formula_for({"kind": "palm", "config": config})({"input_ids": ids})
    except ConfigError as error:
        palm = error.problem
    else:
        by_kind = theirs.get_flop_counts()["Global"]
        attention = by_kind.get(torch.ops.aten.bmm, 0) + by_kind.get(torch.ops.aten.baddbmm, 0)
        megatron = formula_for({"kind": "megatron", "config": config})({"input_ids": ids})
        megatron /= counter.counts.model_flops - attention / 2
        nanogpt = formula_for({"kind": "nanogpt", "config": config})({"input_ids": ids})
        others = parameters - positions(model)
        nanogpt /= 6 * others * ids.numel() + attention
        vectors = sum(
            each.numel()
            for name, each in model.named_parameters()
            if each.dim() == 1 or name.endswith("bias")
        )
        sizes = TransformerConfig.from_config(config, sequence=LENGTH)
        known = replace(sizes, top_k=sizes.experts).matmul_parameters
        known += 0 if sizes.tied else sizes.vocab * sizes.hidden
        matrices = known == others - vectors
    return Row(
        kind.model_type, parameters, counter.counts.hardware_flops, theirs.get_total_flops(),
        explained.missed, explained.excess, palm, megatron, nanogpt, matrices,
    )  # fmt: skip


def positions(model: nn.Module) -> int:
    """Parameters of learned positions."""
    named = (
        (name.rpartition(".")[2], part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding)
    )
    return sum(part.weight.numel() for name, part in named if name == "wpe" or "position" in name)


def families(wanted: list[str]) -> Iterator[Row | str]:
    """The rows of families, or why there is none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    kinds = {kind.model_type: (kind, model) for kind, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    for family, (kind, model) in sorted(kinds.items()):
        if not wanted or family in wanted:
            try:
                yield measure(kind, model[0] if isinstance(model, tuple) else model)
            except Exception as error:
                yield f"{family}: {type(error).__name__}: {error}".splitlines()[0][:100]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    torch.set_num_threads(1)
    left_out, same = [], 0
    print("| family | MFLOP | FlopCounterMode | why it differs | `palm` | `megatron` | `nanogpt` |")
    print("|---|---|---|---|---|---|---|")
    for row in families(parser.parse_args().families):
        if isinstance(row, str):
            left_out.append(row)
            continue
        reasons = {"grouped products": row.missed, "grouped convolutions": row.excess}
        why = ", ".join(name for name, flops in reasons.items() if flops)
        why = why if row.exact else f"NOT EXPLAINED {why}"
        palm = row.palm if isinstance(row.palm, str) else f"{row.palm / row.ours:.4g}"
        others = " | ".join(
            "" if ratio is None else f"{ratio:.4g}" for ratio in (row.megatron, row.nanogpt)
        )
        others += "" if row.matrices else " NOT EXPLAINED"
        same += row.exact
        print(
            f"| {row.family} | {row.ours / 1e6:.6g} | {row.torch / row.ours:.4g} | {why} | {palm} "
            f"| {others} |"
        )
    print(f"\n{same} families agree with FlopCounterMode but for its known faults.\n\nLeft out:\n")
    print("\n".join(f"- {each}" for each in left_out))


if __name__ == "__main__":
    main()
