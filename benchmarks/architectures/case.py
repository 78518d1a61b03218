"""What the cases of ``architectures`` are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Task(L.LightningModule):
    """A model that trains on one batch, with a loss of its output."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.batch, self.loss = model, batch, loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss of a batch."""
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        """Weights stay as they are, so that all batches route alike."""
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its batch."""

    name: str
    make: Callable[[], L.LightningModule]
    #: FLOPs of a step in closed form; None to count the calls of torch's functions.
    by_hand: int | None = None
    #: FLOPs that torch's counter misses (or counts too much), by reason, in closed form.
    reasons: dict[str, int] = field(default_factory=dict)
    #: Options of the Trainer.
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
