"""Train a GAN on scikit-learn's digits: manual optimization with two optimizers.

Throughput, FLOPs and times of both networks are measured as in any other training. A batch has
two optimizer steps, which Lightning's ``global_step`` counts; metrics are logged by batch.
``python examples/manual_optimization.py`` prints the summary at its end.
"""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import always_on

PIXELS, NOISE = 64, 16


class GAN(L.LightningModule):
    """A generator of digits and a discriminator that tells them from real ones.

    Args:
        width: Size of the hidden layers.
    """

    automatic_optimization = False

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, PIXELS), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Take one step with each optimizer."""
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))
        self._step(for_generator, self._loss(fake, real=True))
        loss = self._loss(real, real=True) + self._loss(fake.detach(), real=False)
        self._step(for_discriminator, loss)
        self.log("discriminator/loss", loss, prog_bar=True)

    def _loss(self, images: Tensor, *, real: bool) -> Tensor:
        """Return the discriminator's loss for one label, real or generated, of all images."""
        found = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one Adam for each network."""
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=2e-4) for network in networks]


if __name__ == "__main__":
    L.seed_everything(1)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        max_epochs=5,
        callbacks=[always_on()],
        logger=False,
        log_every_n_steps=20,
        default_root_dir="runs",
    )
    trainer.fit(GAN(), loader)
