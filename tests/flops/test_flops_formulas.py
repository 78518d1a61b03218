"""Closed formulas, compared with the reference and with FlopCounter."""

import json
from types import SimpleNamespace

import pytest
from helpers import TESTS

from lightning_perf.errors import ConfigError
from lightning_perf.flops import TransformerConfig, palm
from lightning_perf.flops.formulas import megatron, nanogpt

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


def test_a_missing_size_is_named():
    """The error for a missing size names it."""
    with pytest.raises(ConfigError, match="vocab"):
        TransformerConfig.from_config({"n_layer": 2, "n_embd": 8, "n_head": 2, "block_size": 4})


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_sizes_are_positive_whole_numbers(value):
    """An invalid size is refused at construction."""
    with pytest.raises(ConfigError, match="layers"):
        TransformerConfig(layers=value, hidden=8, heads=2, vocab=10, sequence=4)
