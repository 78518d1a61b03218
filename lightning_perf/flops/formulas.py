"""FLOPs of a transformer in closed form, for one token.

Multiply by the tokens of a batch to hold them against what was counted. ``passes`` says what is
counted: 1 the forward, 3 forward and backward, 4 those and the whole forward again (activation
checkpointing). The formulas differ in two points only: which parameters they take for matrix
products, and whether a causal mask halves attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_perf.errors import ConfigError

# What others call our fields, in the order in which they are looked for.
_ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "n_query_groups", "num_query_groups"),
    "head_dim": ("head_dim", "head_size", "kv_channels"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "sequence": ("block_size", "n_positions", "max_position_embeddings", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "n_expert"),
    "top_k": ("num_experts_per_tok", "n_expert_per_token", "moe_top_k"),
    "tied": ("tie_word_embeddings",),
}


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
    #: Tokens in a sequence.
    sequence: int
    #: Heads of keys and values; None for as many as query heads.
    kv_heads: int | None = None
    #: Features of a head; None for ``hidden / heads``.
    head_dim: int | None = None
    #: Features between the two feed-forward layers; None for ``4 * hidden``.
    ffn: int | None = None
    #: Whether the feed-forward part is gated: three matrices instead of two.
    swiglu: bool = False
    #: Whether norms have a scale only.
    rms: bool = False
    bias: bool = True
    #: Whether positions are learned.
    positions: bool = True
    #: Whether the output layer shares the embedding's matrix.
    tied: bool = True
    #: Feed-forward parts in a layer, and how many of them a token goes through.
    experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocab", "sequence", "experts", "top_k"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(field, value, "is not a positive whole number", "12")

    @classmethod
    def from_config(cls, config: object, **known: Any) -> TransformerConfig:
        """Read the sizes from a configuration with the names of others.

        Args:
            config: A mapping, or an object with attributes, such as a Hugging Face or nanoGPT
                configuration, or a module's hyperparameters.
            known: Fields that the configuration lacks, or that shall be taken instead: a model's
                ``sequence`` is often shorter in training than what it could take.

        Raises:
            ConfigError: If a size is missing.

        Example:
            >>> sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 32}
            >>> TransformerConfig.from_config(sizes, vocab=256).parameters
            118528
        """
        read = config if isinstance(config, Mapping) else _Attributes(config)
        # Since LLaMA these go together; what came before has neither.
        modern = read.get("rms_norm_eps") is not None
        values = {"swiglu": modern, "rms": modern, "bias": not modern, "positions": not modern}
        values["tied"] = not modern
        for field in (one.name for one in fields(cls)):
            for name in (field, *_ALIASES.get(field, ())):
                if (value := read.get(name)) is not None:
                    values[field] = value
                    break
        values |= known
        needed = ("layers", "hidden", "heads", "vocab", "sequence")
        if missing := [field for field in needed if field not in values]:
            found = {field: values[field] for field in needed if field in values}
            example = str({**found, **dict.fromkeys(missing, 12)})
            raise ConfigError("config", found, f"lacks {', '.join(missing)}", example)
        return cls(**values)

    @property
    def attention_width(self) -> int:
        """Features of all query heads together."""
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
        """Parameters that a token is multiplied with: the output layer and active experts too."""
        return self.layers * self._layer_matrices(self.top_k) + self.vocab * self.hidden

    @property
    def position_parameters(self) -> int:
        """Parameters of learned positions."""
        return self.sequence * self.hidden if self.positions else 0

    @property
    def parameters(self) -> int:
        """All parameters, every expert among them."""
        biases = self.attention_width + 2 * self._kv_width + self.hidden
        biases += self.experts * (self._ffn * (1 + self.swiglu) + self.hidden)
        norm = self.hidden * (1 if self.rms else 2)
        layer = self._layer_matrices(self.experts) + self.bias * biases + 2 * norm
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + norm + embeddings + self.position_parameters


class _Attributes:
    def __init__(self, config: object) -> None:
        self._config = config

    def get(self, name: str) -> Any:
        return getattr(self._config, name, None)


def palm(config: TransformerConfig, passes: int = 3) -> int:
    """The formula of PaLM with the parameters of matrix products: a counter finds the same.

    Args:
        config: The model.
        passes: 1 forward, 3 with the backward, 4 with the forward again.

    Returns:
        FLOPs of one token, with attention in full: ``6 N + 12 L H Q T`` for three passes.

    Example:
        >>> gpt2 = TransformerConfig(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)
        >>> palm(gpt2)
        854438400
    """
    return passes * (2 * config.matmul_parameters + _attention(config))


def megatron(config: TransformerConfig, passes: int = 3) -> int:
    """The formula of Megatron-LM: as PaLM's, with attention halved by the causal mask."""
    return passes * (2 * config.matmul_parameters + _attention(config) // 2)


def nanogpt(config: TransformerConfig, passes: int = 3) -> int:
    """The formula of nanoGPT: as PaLM's, with all parameters but those of positions."""
    parameters = config.parameters - config.position_parameters
    return passes * (2 * parameters + _attention(config))


def _attention(config: TransformerConfig) -> int:
    return 4 * config.layers * config.attention_width * config.sequence
