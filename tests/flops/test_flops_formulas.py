"""Closed formulas: the reference, sizes from configurations, tokens from batches."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import TESTS

from lightning_perf.errors import ConfigError
from lightning_perf.flops.formulas import TransformerConfig, formula_for, megatron, nanogpt, palm

MODELS = json.loads((TESTS / "data" / "transformer_flops.json").read_text())
LETTERS = {
    "L": "layers",
    "d": "hidden",
    "h": "heads",
    "kv": "kv_heads",
    "hd": "head_dim",
    "f": "ffn",
    "V": "vocab",
    "T": "sequence",
    "sw": "swiglu",
    "rms": "rms",
    "bias": "bias",
    "pos": "positions",
    "tied": "tied",
}


def config(name):
    return TransformerConfig(**{LETTERS[k]: v for k, v in MODELS[name]["config"].items()})


@pytest.mark.parametrize("name", MODELS)
def test_reference_numbers(name):
    """All five reference models match exactly, in parameters and FLOPs."""
    model, sizes = MODELS[name], config(name)
    assert sizes.parameters == model["params_total"]
    assert sizes.matmul_parameters == model["params_matmul"]
    ours = {
        "exact_matmul_full_attn": palm(sizes),
        "megatron_HEAD": megatron(sizes),
        "forward_only_full_attn": palm(sizes, passes=1),
        "hfu_full_activation_recompute": palm(sizes, passes=4),
        "nanoGPT": nanogpt(sizes),
        "nemo": megatron(sizes),
    }
    rows = model["flops_per_token_forward_backward"].items()
    theirs = {name: next(v for row, v in rows if row.startswith(name)) for name in ours}
    assert ours == theirs
    assert palm(sizes) * sizes.sequence == model["exact_flops_per_sequence"]


def test_only_active_experts_cost_flops():
    """Only active experts count for FLOPs, all of them for parameters."""
    sizes = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 10, "sequence": 4, "bias": False}
    dense = TransformerConfig(**sizes)
    mixture = TransformerConfig(**sizes, experts=4, top_k=2)
    expert, router = 2 * 8 * 32, 8 * 4
    assert megatron(mixture) - megatron(dense) == 6 * 2 * (expert + router)
    assert mixture.parameters - dense.parameters == 2 * (3 * expert + router)


def test_hugging_face_llama():
    """The names of a Hugging Face configuration, and what they imply, are supported."""
    llama = SimpleNamespace(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        head_dim=None,
    )
    assert TransformerConfig.from_config(llama, sequence=8192) == TransformerConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        sequence=8192,
        swiglu=True,
        rms=True,
        bias=False,
        positions=False,
        tied=False,
    )


@pytest.mark.parametrize("end", ["block_size", "n_positions"])
def test_gpt2_and_nanogpt(end):
    """GPT-2's and nanoGPT's names give GPT-2's 124 million parameters."""
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, end: 1024}
    found = TransformerConfig.from_config({**gpt2, "n_inner": None})
    assert found.parameters == MODELS["gpt2-124M (V=50257)"]["params_total"]


def test_megatron_and_nemo():
    """NeMo's names, which fkat reads as well."""
    names = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    experts = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True}
    found = TransformerConfig.from_config(
        {**names, **experts, "padded_vocab_size": 9, "encoder_seq_length": 5, "num_query_groups": 1}
    )
    assert found == TransformerConfig(
        layers=2, hidden=8, heads=2, ffn=16, experts=4, top_k=2, swiglu=True, vocab=9, sequence=5,
        kv_heads=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "experts",
    [
        {"n_expert": 0, "n_expert_per_token": 0},  # LitGPT
        {"num_moe_experts": None, "moe_router_topk": 2},  # Megatron
    ],
    ids=str,
)
def test_a_model_without_experts_is_dense(experts):
    """Its configuration may have 0 experts or None, and experts per token all the same."""
    assert TransformerConfig.from_config({**SIZES, **experts}, sequence=32) == TINY


#: Published configurations of models whose fields differ from LLaMA's.
FALCON_7B = {
    "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024,
    "multi_query": True, "num_kv_heads": 71, "new_decoder_architecture": False, "bias": False,
}  # fmt: skip
FALCON_40B = {
    "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "vocab_size": 65024,
    "multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False,
}  # fmt: skip
OPT_6B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50272,
    "ffn_dim": 16384, "word_embed_proj_dim": 4096, "max_position_embeddings": 2048,
}  # fmt: skip
OLMO_7B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50304,
    "intermediate_size": 11008, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "intermediate_size": 256, "hidden_act": "relu2", "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3_MOE = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48, "vocab_size": 151936,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "matrices"),
    [
        (FALCON_7B, 32 * (2 * 4544 * (4544 + 64) + 8 * 4544**2) + 65024 * 4544),
        (FALCON_40B, 60 * (2 * 8192 * (8192 + 8 * 64) + 8 * 8192**2) + 65024 * 8192),
        (OPT_6B, 32 * 12 * 4096**2 + 50272 * 4096),
        (OLMO_7B, 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 50304 * 4096),
        (NEMOTRON, 2 * (4 * 64**2 + 2 * 64 * 256) + 100 * 64),
    ],
    ids=["falcon-7b", "falcon-40b", "opt-6.7b", "olmo-7b", "nemotron"],
)
def test_families_with_other_fields(config, matrices):
    """One head for keys and values, groups of heads, and gated and plain parts of any norm."""
    assert TransformerConfig.from_config(config, sequence=2048).matmul_parameters == matrices


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (QWEN3_MOE, "moe_intermediate_size"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 5632}, "shared_expert"),
        ({**OLMO_7B, "kv_lora_rank": 512}, "kv_lora_rank"),
        ({**OLMO_7B, "n_shared_experts": 1}, "n_shared_experts"),
        ({**OLMO_7B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**OPT_6B, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ],
)
def test_other_architectures_are_refused(fields, named):
    """A field that no formula describes is named, for objects as for mappings."""
    for config in (fields, SimpleNamespace(**fields)):
        with pytest.raises(ConfigError, match=f"has .*{named}.*no formula describes"):
            formula_for({"kind": "palm", "config": config})


def test_the_width_of_experts_can_be_given():
    """Qwen3-30B-A3B has 30.5e9 parameters, of which 3.3e9 are active."""
    config = TransformerConfig.from_config(QWEN3_MOE, sequence=2048, ffn=768)
    assert config.parameters == pytest.approx(30.5e9, rel=0.01)
    embeddings = config.vocab * config.hidden
    assert config.matmul_parameters + embeddings == pytest.approx(3.35e9, rel=0.01)


def test_a_missing_size_is_named():
    """The error for a missing size names it."""
    with pytest.raises(ConfigError, match="vocab"):
        TransformerConfig.from_config({"n_layer": 2, "n_embd": 8, "n_head": 2, "block_size": 4})


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_sizes_are_positive_whole_numbers(value):
    """An invalid size is refused at construction."""
    with pytest.raises(ConfigError, match="layers"):
        TransformerConfig(layers=value, hidden=8, heads=2, vocab=10, sequence=4)


SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}
TINY = TransformerConfig(**SIZES, sequence=32)
IDS = torch.zeros(8, 32, dtype=torch.long)
# Width 8, 2 heads of 4, 3 tokens; each matrix is written out, two FLOPs for a multiply-add.
WIDTH = 8
ATTENTION = 4 * 3 * 8  # two products of 3 keys with all query heads, per token
FULL = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("extra", "layer", "passes"),
    [
        # One key head: half the columns of keys and values.
        ({"kv_heads": 1}, 2 * 8 * 8 + 2 * 8 * 4 + 2 * 8 * 32, 3),
        # Gated: three matrices.
        ({"swiglu": True, "ffn": 20}, FULL + 3 * 8 * 20, 3),
        # Two of five experts, and a router of five columns.
        ({"experts": 5, "top_k": 2}, FULL + 2 * (2 * 8 * 32) + 8 * 5, 3),
        # All of the above, and the whole forward again.
        (
            {"kv_heads": 1, "swiglu": True, "ffn": 20, "experts": 5, "top_k": 2},
            2 * 8 * 8 + 2 * 8 * 4 + 2 * (3 * 8 * 20) + 8 * 5,
            4,
        ),
    ],
    ids=["gqa", "swiglu", "moe", "all with recomputation"],
)
def test_derived_models(extra, layer, passes):
    """Grouped queries, gates, experts and recomputation match hand-written sums."""
    config = {"layers": 2, "hidden": WIDTH, "heads": 2, "vocab": 10, **extra}
    formula = formula_for({"kind": "palm", "config": config, "passes": passes})
    forward = 2 * (2 * layer + 10 * WIDTH) + 2 * ATTENTION
    assert formula(torch.zeros(5, 3, dtype=torch.long)) == 15 * passes * forward


def test_each_name_is_its_formula():
    """The three formulas differ as published, and the forward alone is a third."""
    each = {kind: formula_for({"kind": kind, "config": TINY})(IDS) for kind in
            ("palm", "megatron", "nanogpt")}  # fmt: skip
    formulas = {"palm": palm, "megatron": megatron, "nanogpt": nanogpt}
    assert each == {kind: IDS.numel() * formula(TINY) for kind, formula in formulas.items()}
    assert formula_for({"kind": "palm", "config": TINY, "passes": 1})(IDS) == each["palm"] / 3


@dataclass
class Packed:
    mask: torch.Tensor
    tokens: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        [IDS, IDS[:, :1]],
        {"labels": IDS[:, :1], "input_ids": IDS},
        (torch.zeros(2, 2), {"text": IDS.int()}),
        Packed(IDS.bool(), IDS),
    ],
    ids=["tensor", "list", "input_ids", "nested", "dataclass"],
)
def test_tokens_are_found_in_the_batch(batch):
    """Token ids are input_ids at any depth, else the first integer tensor; masks are ignored."""
    assert formula_for({"kind": "palm", "config": SIZES})(batch) == IDS.numel() * palm(TINY)


def test_packed_ids_take_the_length_of_the_configuration():
    """For packed ids the sequence length comes from the configuration, or is an error."""
    row = IDS.flatten()
    known = formula_for({"kind": "palm", "config": {**SIZES, "block_size": 32}})
    assert known(row) == IDS.numel() * palm(TINY)
    with pytest.raises(ValueError, match="length"):
        formula_for({"kind": "palm", "config": SIZES})(row)


@pytest.mark.parametrize(
    "module",
    [
        SimpleNamespace(config=SimpleNamespace(**SIZES), hparams={"layers": 99}),
        SimpleNamespace(hparams=SIZES),
        SimpleNamespace(cfg=SIZES, hparams={"layers": 99}),
        SimpleNamespace(config={}, hparams=SIZES),
    ],
)
def test_a_name_alone_uses_the_module_s_sizes(module):
    """The sizes come from the module's config, or else its hparams."""
    assert formula_for("palm", module)(IDS) == IDS.numel() * palm(TINY)


def test_a_function_of_the_user_is_a_formula():
    """A callable is returned unchanged."""
    assert formula_for(len) is len


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chinchilla", "chinchilla.*expected one of palm, megatron, nanogpt"),
        (6.0, "expected a name"),
        ({"kind": ["palm"]}, "expected one of palm, megatron, nanogpt"),
        ({"kind": "palm", "sizes": 1}, "unknown keys: sizes"),
        ("palm", "formula={'kind': 'palm'} needs .* no config and no hparams"),
        ({"kind": "palm", "config": {"n_layer": 2, "n_head": 2}}, "lacks hidden, vocab"),
        ({"kind": "palm", "config": TINY, "passes": 2}, "passes=2"),
    ],
)
def test_invalid_formulas_are_refused(spec, message):
    """Unknown names, unknown keys and missing sizes are refused at construction."""
    with pytest.raises(ConfigError, match=message):
        formula_for(spec)


def test_a_batch_without_tokens_is_an_error():
    """A batch of floating-point numbers has no tokens."""
    with pytest.raises(ValueError, match="token ids"):
        formula_for({"kind": "palm", "config": TINY})([torch.zeros(2, 3), "text"])


def test_a_batch_without_ids_after_batches_with_ids_has_no_flops():
    """With several loaders, a batch without token ids counts as 0 FLOPs."""
    formula = formula_for({"kind": "palm", "config": SIZES})
    with pytest.raises(ValueError, match="token ids"):
        formula({"a": None})
    assert formula({"a": IDS, "b": None}) == IDS.numel() * palm(TINY)
    assert formula({"a": None, "b": torch.zeros(4)}) == 0
    assert formula(None) == 0


@pytest.mark.parametrize("family", ["bart", "deepseek_v3", "qwen3_moe", "bert"])
def test_families_that_were_not_proven_are_refused(family):
    """A wrong figure is worse than none: their layers are others than the fields say."""
    config = {"model_type": family, "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}
    with pytest.raises(ConfigError, match=f"model_type='{family}' is a family"):
        TransformerConfig.from_config(config, sequence=8)
    proven = TransformerConfig.from_config({**config, "model_type": "llama"}, sequence=8)
    assert proven.layers == 2
