"""A whole training, measured by one line: ``python examples/ten_lines.py``."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import always_on


class Digits(L.LightningModule):
    """Classifies images of 8 x 8 pixels with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the cross-entropy."""
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))
    trainer = L.Trainer(max_epochs=5, callbacks=[always_on()], logger=False)
    trainer.fit(Digits(), DataLoader(digits, batch_size=32, shuffle=True))
