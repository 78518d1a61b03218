"""The outcome of a training with every source of randomness, to compare with and without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from helpers.small import Small, trainer


class Random(Small):
    """Dropout, noise and shuffling: every source of randomness in a training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.5), nn.SiLU(), nn.Mish(), nn.Unflatten(1, (4, 4)),
            nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(8, 1),
        )  # fmt: skip
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noisy = batch[0] + 0.1 * torch.randn_like(batch[0])
        loss = nn.functional.mse_loss(self.net(noisy), batch[1])
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            super().train_dataloader().dataset, batch_size=4, shuffle=True
        )


class Wrapped(nn.Module):
    """Code of torch itself is not compiled, so it is wrapped in a module of ours."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def outcome(
    folder: Path, *callbacks: L.Callback, compiled: bool = False, **options: Any
) -> dict[str, Any]:
    L.seed_everything(7)
    model = Random()
    if compiled:
        torch._dynamo.reset()
        model.net = torch.compile(Wrapped(model.net), backend="aot_eager")
    run = trainer(folder, *callbacks, max_epochs=3, limit_val_batches=2, **options)
    run.fit(model)
    return {
        "losses": model.losses,
        "weights": [p.detach().clone() for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "steps": run.global_step,
    }
