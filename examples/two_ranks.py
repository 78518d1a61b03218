"""Train on two ranks, one of which is slow: the summary names it and its phase.

``python examples/two_ranks.py`` needs two CPU cores and no GPU. On GPUs, remove ``accelerator``.
"""

from __future__ import annotations

import time

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_perf import always_on


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The images of scikit-learn; reading one takes a while on the slow rank.

    Args:
        seconds: How long that takes.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        data = load_digits()
        self.images = torch.tensor(data.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return self.images[index], self.labels[index]


class Classifier(L.LightningModule):
    """Two matrices, and a slow loader on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the digits: each rank gets half of them."""
        return DataLoader(Digits(seconds=1e-3 * (self.global_rank == 1)), batch_size=16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",  # "ddp" starts the script again, as it is usual on GPUs
        max_epochs=3,
        log_every_n_steps=10,
        callbacks=[always_on()],
        logger=False,
        default_root_dir="runs",
    )
    trainer.fit(Classifier())
