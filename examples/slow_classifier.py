"""Train a classifier that waits for its data: each image is enlarged and rotated when it is read.

The story in ``docs/why_slow.md``: train it, read the verdict, change something, compare::

    python examples/slow_classifier.py
    python examples/slow_classifier.py --num-workers 1
    lightning-perf compare runs/workers-1-version_0 runs/workers-0-version_0

``--batched`` enlarges and rotates whole batches instead. No download: the images are scikit-learn's
digits.
"""

from __future__ import annotations

import argparse
import math

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from scipy.ndimage import rotate, zoom
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_perf import always_on

SIZE = 32
MOST_DEGREES = 20.0


class Digits(Dataset[tuple[Tensor, int]]):
    """Images as ``[1, 8, 8]`` in 0 to 1, or each enlarged and rotated, as ``[1, 32, 32]``.

    Args:
        augment: Whether to enlarge and rotate.
    """

    def __init__(self, augment: bool) -> None:
        self.data, self.augment = load_digits(), augment

    def __len__(self) -> int:
        return len(self.data.target)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.data.images[index] / 16
        if self.augment:
            degrees = MOST_DEGREES * (2 * torch.rand(()).item() - 1)
            image = rotate(zoom(image, SIZE // 8), degrees, reshape=False)
        return torch.tensor(image, dtype=torch.float32)[None], int(self.data.target[index])


class Classifier(L.LightningModule):
    """Two convolutions and a matrix.

    Args:
        augment: Whether to enlarge and rotate the batches.
    """

    def __init__(self, augment: bool) -> None:
        super().__init__()
        self.augment = augment
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy, in nats."""
        images, labels = batch
        return F.cross_entropy(self.net(turned(images) if self.augment else images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def turned(images: Tensor) -> Tensor:
    """Return a batch of images enlarged, and each rotated at random."""
    angles = math.radians(MOST_DEGREES) * (2 * torch.rand(len(images)) - 1)
    cos, sin, none = angles.cos(), angles.sin(), torch.zeros(len(images))
    turns = torch.stack([cos, -sin, none, sin, cos, none], 1).view(-1, 2, 3)
    grid = F.affine_grid(turns, [len(images), 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", align_corners=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--batched", action="store_true")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    L.seed_everything(1)
    torch.set_num_threads(1)  # leaves the other CPUs to the workers
    name = "batched" if options.batched else f"workers-{options.num_workers}"
    trainer = L.Trainer(
        max_epochs=options.epochs,
        log_every_n_steps=10,
        callbacks=[always_on()],
        logger=CSVLogger("runs", name),
        default_root_dir="runs",
        enable_checkpointing=False,
    )
    loader = DataLoader(
        Digits(augment=not options.batched),
        batch_size=32,
        shuffle=True,
        num_workers=options.num_workers,
        persistent_workers=options.num_workers > 0,
    )
    trainer.fit(Classifier(augment=options.batched), loader)
