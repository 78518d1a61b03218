"""What a shadow of a LightningModule sees where its trainer was: values to read, nothing to touch.

Lightning is known by its attributes only, so that this needs nothing but torch.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

_READABLE = (bool, int, float, str, Enum, torch.device, type(None))
_SILENT = ("log", "log_dict", "print", "clip_gradients")


class Sink:
    """Takes whatever is done to it and does nothing: a logger or a learning-rate scheduler.

    Example:
        >>> Sink().experiment.add_scalar("loss", 1.0)[0] is not None
        True
    """

    def __getattr__(self, name: str) -> Sink:
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> Sink:  # noqa: D102 (magic)
        return self

    def __getitem__(self, _key: object) -> Sink:
        return self


class IdleOptimizer:
    """An optimizer's settings over the parameters of the shadow; it changes none of them.

    Args:
        original: The optimizer of the real module.
        shadow: The shadow, which may be told to compute this optimizer's gradients only.
        copies: What the originals became, by their ids.
    """

    def __init__(self, original: Any, shadow: nn.Module, copies: Mapping[int, Any]) -> None:
        self._shadow: Any = shadow
        self.param_groups = [
            {**group, "params": [copies[id(one)] for one in group["params"] if id(one) in copies]}
            for group in original.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None, **_: object) -> Any:
        """Run the closure, which may do all the work of a step."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing, as the shadow makes one step only."""

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:  # noqa: ARG002 (Lightning's)
        """Inside, the parameters of other optimizers have no gradients."""
        self._shadow.toggle_optimizer(self)
        yield
        self._shadow.untoggle_optimizer(self)


class DetachedTrainer:
    """The numbers, strings and flags of a trainer. What could change it is out of reach."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.optimizers: list[IdleOptimizer] = []
        self.logger, self.loggers = Sink(), [Sink()]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if isinstance(value, _READABLE):
            return value
        raise AttributeError(f"trainer.{name} is out of reach while FLOPs are counted")


def detach(shadow: nn.Module, module: nn.Module, copies: dict[int, Any]) -> None:
    """Cut a shadow and its parts off what they were attached to.

    Args:
        shadow: The copy.
        module: The original.
        copies: What the originals became, by their ids.
    """
    original = vars(module).get("_trainer")
    trainer = None if original is None else DetachedTrainer(original)
    if trainer is not None:
        found = getattr(original, "optimizers", [])
        trainer.optimizers = [IdleOptimizer(one, shadow, copies) for one in found]
    for part in shadow.modules():
        if "_trainer" in vars(part):
            vars(part).update(_stubs(module, trainer))


def _stubs(module: Any, trainer: DetachedTrainer | None) -> dict[str, Any]:
    optimizers = trainer.optimizers if trainer else []
    stubs: dict[str, Any] = dict.fromkeys(_SILENT, Sink())
    stubs["_trainer"], stubs["_fabric"] = trainer, None
    stubs["optimizers"] = lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers
    stubs["lr_schedulers"] = lambda: _idle(module.lr_schedulers())
    stubs["manual_backward"] = _manual_backward
    return stubs


def _idle(schedulers: object) -> Any:
    if isinstance(schedulers, list):
        return [Sink() for _ in schedulers]
    return None if schedulers is None else Sink()


def _manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
