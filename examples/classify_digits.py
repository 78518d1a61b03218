"""Train a small convolutional network on scikit-learn's digits, with torchmetrics.

No download: the 1,797 images come with scikit-learn. ``python examples/classify_digits.py`` prints
the summary at the end, ``lightning-perf report runs`` shows it again. Metrics are CSV in ``runs``.
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_perf import Diagnosis, Flops, SpeedMonitor, Suite, Timings

CLASSES = 10


class Classifier(L.LightningModule):
    """Two convolutions and a matrix.

    Args:
        width: Channels of the first convolution.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, CLASSES),
        )
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy, in nats."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy on held-out images."""
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("validate/accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def loaders(batch_size: int = 32) -> tuple[DataLoader, DataLoader]:
    """Return the images for training and for validation, as ``[batch, 1, 8, 8]`` in 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = TensorDataset(images, torch.tensor(data.target))
    train, validate = random_split(digits, [0.8, 0.2], torch.Generator().manual_seed(1))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(validate, batch_size)


if __name__ == "__main__":
    L.seed_everything(1)
    callbacks = [SpeedMonitor(window_size=20), Flops(schedule="every 20ba"), Timings(), Diagnosis()]
    trainer = L.Trainer(
        max_epochs=5,
        log_every_n_steps=20,
        callbacks=[Suite(callbacks)],
        logger=CSVLogger("runs", "digits"),
        default_root_dir="runs",
    )
    trainer.fit(Classifier(), *loaders())
    print(f"accuracy {trainer.callback_metrics['validate/accuracy']:.1%}")
