"""FLOPs of transformers from published formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_perf.checks import whole
from lightning_perf.errors import ConfigError
from lightning_perf.flops.batch import tensors

# Names of our fields in other configurations, in the order of lookup.
_ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": (
        "num_key_value_heads", "n_kv_heads", "n_query_groups", "num_query_groups", "num_kv_heads",
    ),
    "head_dim": ("head_dim", "head_size", "kv_channels"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "sequence": (
        "block_size", "n_positions", "max_position_embeddings", "max_seq_len", "encoder_seq_length",
    ),
    "experts": (
        "num_local_experts", "num_experts", "n_routed_experts", "n_expert", "num_moe_experts",
    ),
    "top_k": ("num_experts_per_tok", "n_expert_per_token", "moe_top_k", "moe_router_topk"),
    "tied": ("tie_word_embeddings",),
}  # fmt: skip
# Fields of architectures that no formula describes, and what the caller may give instead of each.
_REFUSED = {
    "moe_intermediate_size": "ffn", "shared_expert_intermediate_size": "", "n_shared_experts": "",
    "num_shared_experts": "", "shared_intermediate_size": "", "interleave_moe_layer_step": "",
    "ffn_config": "", "kv_lora_rank": "", "linear_num_key_heads": "", "mamba_d_state": "",
    "is_encoder_decoder": "",
}  # fmt: skip
# Families of transformers whose formula equals the count of a tiny model: benchmarks/families.py.
PROVEN = frozenset(
    [
        "apertus",
        "arcee",
        "bert-generation",
        "biogpt",
        "bloom",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "ernie4_5",
        "exaone",
        "exaone4",
        "falcon",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "internlm3",
        "jais2",
        "llama",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "mpt",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "openai-gpt",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "xglm",
        "xlm",
    ]
)
# Activations of gated feed-forward parts, also of models with LayerNorm, and of plain ones, also of
# models with RMSNorm.
_GATED, _PLAIN = ("silu", "swish", "swiglu", "geglu"), ("relu2", "xielu")
_EXAMPLE = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
_NEEDED = ("layers", "hidden", "heads", "vocab", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The sizes of a decoder-only transformer.

    Example:
        >>> gpt2 = TransformerConfig(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)
        >>> gpt2.parameters, gpt2.matmul_parameters
        (124439808, 123532032)
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    #: Tokens per sequence.
    sequence: int
    #: Key and value heads; None for the number of query heads.
    kv_heads: int | None = None
    #: Features per head; None for ``hidden / heads``.
    head_dim: int | None = None
    #: Features between the two feed-forward layers; None for ``4 * hidden``.
    ffn: int | None = None
    #: Whether the feed-forward part is gated: three matrices instead of two.
    swiglu: bool = False
    #: Whether norms have a scale but no bias.
    rms: bool = False
    bias: bool = True
    #: Whether positions are learned.
    positions: bool = True
    #: Whether the output layer shares the embedding's matrix.
    tied: bool = True
    #: Experts per layer, and experts per token.
    experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for field in (*_NEEDED, "experts", "top_k"):
            object.__setattr__(self, field, whole(field, getattr(self, field), 1, "12"))

    @classmethod
    def from_config(cls, config: object, **known: Any) -> TransformerConfig:
        """Read the sizes from the configuration of Hugging Face, nanoGPT or a module.

        Args:
            config: A mapping or an object with attributes.
            known: Fields that the configuration lacks, or values that replace its own: training
                ``sequence`` is often shorter than the maximum.

        Raises:
            ConfigError: If a size is missing, or the architecture is another one, such as latent
                attention or shared experts.

        Example:
            >>> sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 32}
            >>> TransformerConfig.from_config(sizes, vocab=256).parameters
            118528
        """
        read: Any = config.get if isinstance(config, Mapping) else partial(getattr, config)
        _refuse_others(read, known)
        # These go together since LLaMA; earlier models have none of them.
        rms = read("rms_norm_eps", None) is not None
        activation = read("hidden_act", None)
        modern = rms or activation in _GATED
        values: dict[str, Any] = {"swiglu": modern and activation not in _PLAIN, "rms": rms}
        values |= dict.fromkeys(("bias", "positions", "tied"), not modern)
        for field in (one.name for one in fields(cls)):
            aliases = (read(name, None) for name in (field, *_ALIASES.get(field, ())))
            if (value := next((size for size in aliases if size is not None), None)) is not None:
                values[field] = value
        if values.get("experts", 0) in (0, 1):  # dense, whatever the experts per token
            values |= {"experts": 1, "top_k": 1}
        # Falcon's newer models have groups of heads instead, and the field as well.
        if read("multi_query", None) and not read("new_decoder_architecture", None):
            values["kv_heads"] = 1
        values |= known
        if missing := [field for field in _NEEDED if field not in values]:
            known = {field: values[field] for field in _NEEDED if field in values}
            example = str({**known, **dict.fromkeys(missing, 12)})
            raise ConfigError("config", known, f"lacks {', '.join(missing)}", example)
        return cls(**values)

    @property
    def attention_width(self) -> int:
        """Total features of all query heads."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def _kv_width(self) -> int:
        return self.attention_width // self.heads * (self.kv_heads or self.heads)

    @property
    def _ffn(self) -> int:
        return self.ffn or 4 * self.hidden

    def _layer_matrices(self, experts: int) -> int:
        attention = 2 * self.hidden * (self.attention_width + self._kv_width)
        feed_forward = (3 if self.swiglu else 2) * self.hidden * self._ffn
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + experts * feed_forward + router

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matrix products per token, with the output layer and active experts."""
        return self.layers * self._layer_matrices(self.top_k) + self.vocab * self.hidden

    @property
    def position_parameters(self) -> int:
        """Parameters of learned positions."""
        return self.sequence * self.hidden if self.positions else 0

    @property
    def parameters(self) -> int:
        """All parameters, including all experts."""
        biases = self.attention_width + 2 * self._kv_width + self.hidden
        biases += self.experts * (self._ffn * (1 + self.swiglu) + self.hidden)
        norm = self.hidden * (1 if self.rms else 2)
        layer = self._layer_matrices(self.experts) + self.bias * biases + 2 * norm
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + norm + embeddings + self.position_parameters


def _refuse_others(read: Callable[[str, None], Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError if no formula describes the family or a field of a configuration."""
    family = read("model_type", None)
    if family and family not in PROVEN:
        problem = "is a family of models for which no formula was proven: FLOPs are counted anyway"
        raise ConfigError("model_type", family, problem, '"llama"')
    width, hidden = read("word_embed_proj_dim", None), read("hidden_size", None)
    refused = {name: read(name, None) for name, instead in _REFUSED.items() if instead not in known}
    if width != hidden:
        refused["word_embed_proj_dim"] = width
    if unknown := {name: value for name, value in refused.items() if value}:
        problem = f"has {', '.join(unknown)}, which no formula describes"
        raise ConfigError("config", unknown, problem, str(_EXAMPLE))


def palm(config: TransformerConfig, passes: int = 3) -> int:
    """Return FLOPs per token by PaLM's formula, which equals counting the matrix products.

    With full attention these are ``6 N + 12 L H Q T`` for three passes: 1 pass is the forward, 3
    are with the backward, 4 with recomputation of the forward.

    Example:
        >>> gpt2 = TransformerConfig(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)
        >>> palm(gpt2)
        854438400
    """
    return passes * (2 * config.matmul_parameters + _attention(config))


def megatron(config: TransformerConfig, passes: int = 3) -> int:
    """Return FLOPs per token by Megatron-LM's formula: like PaLM's, but half the attention."""
    return passes * (2 * config.matmul_parameters + _attention(config) // 2)


def nanogpt(config: TransformerConfig, passes: int = 3) -> int:
    """Return FLOPs per token by nanoGPT's formula: all parameters except positions."""
    parameters = config.parameters - config.position_parameters
    return passes * (2 * parameters + _attention(config))


def _attention(config: TransformerConfig) -> int:
    return 4 * config.layers * config.attention_width * config.sequence


#: FLOPs of a batch.
BatchFormula = Callable[[Any], float]

_KINDS = {formula.__name__: formula for formula in (palm, megatron, nanogpt)}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def formula_for(spec: object, module: object = None) -> BatchFormula:
    """Return a function that computes the FLOPs of a batch by a formula.

    The function reads the token ids from ``input_ids``, or from the first tensor of whole numbers,
    ``[batch, sequence]``. The sequence length is that of the batch, if it has one. A batch without
    token ids raises ValueError at first, and counts as 0 after a batch with token ids.

    Args:
        spec: A function of the batch, which is returned unchanged; or ``palm``, ``megatron`` or
            ``nanogpt``; or a mapping with the name as ``kind`` and optionally ``config`` (as for
            `TransformerConfig.from_config`) and ``passes``: 1 for the forward, 3 with the backward,
            4 with recomputation of the forward (activation checkpointing).
        module: Provides the sizes if ``spec`` does not: in its ``config``, ``cfg`` or ``hparams``.

    Example:
        >>> sizes = dict(layers=2, hidden=64, heads=4, vocab=256)
        >>> formula = formula_for({"kind": "palm", "config": sizes})
        >>> formula(torch.zeros(8, 32, dtype=torch.long))
        188743680
    """
    checked = check_formula(spec)
    return checked if callable(checked) else _from_mapping(checked, module)


def check_formula(spec: object) -> BatchFormula | Mapping[str, Any]:
    """Return a function unchanged, and a name as a mapping; refuse what `formula_for` cannot use.

    The sizes are not checked, which may be those of a module.
    """
    if callable(spec):
        return spec
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        problem = "is not valid, expected a name, a mapping or a function"
        raise ConfigError("formula", spec, problem, "'palm'")
    if unknown := sorted(spec.keys() - {"kind", "config", "passes"}):
        problem = f"has unknown keys: {', '.join(map(str, unknown))}"
        raise ConfigError("formula", dict(spec), problem, "{'kind': 'palm', 'config': {...}}")
    kind, passes = spec.get("kind"), spec.get("passes", 3)
    if kind not in list(_KINDS):  # in a list also what has no hash
        problem = f"is not valid, expected one of {', '.join(_KINDS)}"
        raise ConfigError("formula", kind, problem, "'palm'")
    if passes not in (1, 3, 4):
        raise ConfigError("passes", passes, "is not valid, expected 1, 3 or 4", "3")
    return spec


def _from_mapping(spec: Mapping[str, Any], module: object) -> BatchFormula:
    kind, passes = spec["kind"], spec.get("passes", 3)
    sizes, known_length = _sizes(spec, module)
    seen_ids = False

    def flops(batch: Any) -> float:
        nonlocal seen_ids
        ids = _token_ids(batch)
        if ids is None:
            if seen_ids:  # with several loaders, some may have no token ids
                return 0.0
            raise ValueError("the batch has no tensor of token ids")
        seen_ids = True
        if ids.dim() < 2 and not known_length:
            raise ValueError("neither the batch nor the config has the sequence length")
        config = sizes if ids.dim() < 2 else replace(sizes, sequence=ids.shape[-1])
        # The parameters of learned positions belong to the maximum length; no formula uses them.
        return ids.numel() * _KINDS[kind](config, passes)

    return flops


def _sizes(spec: Mapping[str, Any], module: object) -> tuple[TransformerConfig, bool]:
    """Return the sizes, and whether they include the sequence length."""
    if (config := spec.get("config")) is None:
        configs = (getattr(module, name, None) for name in ("config", "cfg", "hparams"))
        config = next(filter(None, configs), None)
    if config is None:
        problem = "needs the sizes of the model: the module has no config and no hparams"
        raise ConfigError("formula", dict(spec), problem, "{'kind': 'palm', 'config': {...}}")
    if isinstance(config, TransformerConfig):
        return config, True
    try:
        return TransformerConfig.from_config(config), True
    except ConfigError:
        return TransformerConfig.from_config(config, sequence=1), False


def _token_ids(batch: Any) -> Tensor | None:
    found = [(name, each) for name, each in tensors(batch) if isinstance(each, Tensor)]
    named = [one for name, one in found if name == "input_ids"]
    return next(iter(named or [one for _, one in found if one.dtype in _WHOLE]), None)
