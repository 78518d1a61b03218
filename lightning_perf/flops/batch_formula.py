"""The FLOPs of a batch by a closed formula, chosen by name or given by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_perf.errors import ConfigError
from lightning_perf.flops.formulas import TransformerConfig, megatron, nanogpt, palm

#: FLOPs of a batch.
BatchFormula = Callable[[Any], float]

_KINDS: dict[str, Callable[[TransformerConfig, int], int]] = {
    "palm": palm,
    "megatron": megatron,
    "nanogpt": nanogpt,
}
_EXAMPLE = "'palm'"


def formula_for(spec: object, module: object = None, passes: int | None = None) -> BatchFormula:
    """The formula that a user asks for.

    It is called with a batch, whose token ids are its ``input_ids`` or its first tensor of whole
    numbers, ``[batch, sequence]``. The length of its sequences is the batch's, if it has one.
    A batch without any is an error at first, and 0 once others had some.

    Args:
        spec: A function of the batch, which is taken as it is; or one of the names ``palm``,
            ``megatron`` and ``nanogpt``; or a mapping with the name as ``kind`` and perhaps the
            sizes as ``config`` (a mapping or an object, as for `TransformerConfig.from_config`)
            and ``passes``.
        module: Where the sizes are looked for if ``spec`` has none: in its ``config``, then in its
            ``hparams``.
        passes: 1 forward, 3 with the backward, 4 with the forward again (activation
            checkpointing). By default what ``spec`` says, or 3.

    Raises:
        ConfigError: No such formula is known, or a size that it needs.

    Example:
        >>> sizes = dict(layers=2, hidden=64, heads=4, vocab=256)
        >>> formula = formula_for({"kind": "palm", "config": sizes})
        >>> formula(torch.zeros(8, 32, dtype=torch.long))
        188743680
    """
    if isinstance(spec, str):
        spec = {"kind": spec}
    if isinstance(spec, Mapping):
        return _from_mapping(spec, module, passes)
    if callable(spec):
        return spec
    raise ConfigError("formula", spec, "is neither a name, nor a mapping, nor callable", _EXAMPLE)


def _from_mapping(spec: Mapping[str, Any], module: object, passes: int | None) -> BatchFormula:
    if unknown := sorted(spec.keys() - {"kind", "config", "passes"}):
        problem = f"has no use for {', '.join(map(str, unknown))}"
        raise ConfigError("formula", dict(spec), problem, "{'kind': 'palm', 'config': {...}}")
    kind = spec.get("kind")
    if kind not in _KINDS:
        raise ConfigError("formula", kind, f"is none of {', '.join(_KINDS)}", _EXAMPLE)
    chosen = spec.get("passes", 3) if passes is None else passes
    if chosen not in (1, 3, 4):
        raise ConfigError("passes", chosen, "is none of 1, 3 and 4", "3")
    sizes, known_length = _sizes(spec.get("config"), module)
    found = False

    def flops(batch: Any) -> float:
        nonlocal found
        ids = _token_ids(batch)
        if ids is None:
            if found:  # of several loaders that take turns, some may have none
                return 0.0
            raise ValueError("no tensor of token ids is in the batch: its tokens are not known")
        found = True
        if ids.dim() < 2 and not known_length:
            raise ValueError("the sequences' length is neither in the batch nor in the config")
        config = sizes if ids.dim() < 2 else replace(sizes, sequence=ids.shape[-1])
        # Positions that are learned are parameters of the longest sequence; no formula has them.
        return ids.numel() * _KINDS[kind](config, chosen)

    return flops


def _sizes(config: object, module: object) -> tuple[TransformerConfig, bool]:
    """The sizes, and whether the length of a sequence is among them."""
    if config is None:
        found = (getattr(module, name, None) for name in ("config", "hparams"))
        config = next((one for one in found if one), None)
    if config is None:
        raise ConfigError(
            "formula", config, "finds no sizes: the module has no config and no hparams",
            "{'kind': 'palm', 'config': {...}}",
        )  # fmt: skip
    if isinstance(config, TransformerConfig):
        return config, True
    try:
        return TransformerConfig.from_config(config), True
    except ConfigError:
        return TransformerConfig.from_config(config, sequence=1), False


def _token_ids(batch: Any) -> Tensor | None:
    ids = next((one for name, one in _tensors(batch) if name == "input_ids"), None)
    if ids is None:
        ids = next((one for _, one in _tensors(batch) if _is_whole(one)), None)
    return ids


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _tensors(batch: Any, name: object = "") -> Iterator[tuple[object, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, key)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name), field.name)
