"""A training for ``lightning-perf try``, run as a script: ``python tried.py CASE``.

In the case "ranks" the second one begins earlier, and the dataset is changed in each epoch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_perf.extend import CHANGES, Change
from lightning_perf.trials.changes import Seen, Workers

#: Seconds of an item of the case "slow", and by which rank 1 is earlier.
ITEM, EARLIER = 0.01, 3.0


class FourWorkers(Workers):
    """One trial instead of those of several numbers."""

    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        yield cls({"num_workers": 4, "persistent_workers": True})


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Items that are made in one of several ways."""

    def __init__(self, case: str) -> None:
        self.case, self.read, self.level = case, 0, 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        x = torch.full((4,), index / 4000)
        if self.case == "slow":
            time.sleep(ITEM)
        elif self.case == "stateful":
            x = x + self.read / 4000
        elif self.case == "random":
            x = x + torch.rand(()) / 100
        return x, x.sum(0, keepdim=True)


class Model(L.LightningModule):
    """Two layers; nothing is seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class Elsewhere(Logger):
    """A logger of the user's own, which writes a file."""

    name, version = "elsewhere", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        Path("elsewhere.txt").write_text(str(metrics))

    def log_hyperparams(self, *args: Any) -> None:
        self.log_metrics(args)


def train(case: str) -> None:
    """Train as scripts do, which leaves files."""
    torch.set_num_threads(1)
    data = Items(case)
    kept = ModelCheckpoint("kept", "last", monitor="val_loss", enable_version_counter=False)
    ranks, options = int(os.environ.get("WORLD_SIZE", "1")), {}
    if case == "slow":
        CHANGES[:] = [FourWorkers]
    if case == "spawn":
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    if case == "ranks" and os.environ["RANK"] == "0":
        Model.on_fit_start = lambda self: time.sleep(EARLIER)
        Model.on_train_epoch_start = lambda self: setattr(data, "level", self.current_epoch)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=100,
        limit_train_batches=20,
        limit_val_batches=2,
        log_every_n_steps=2,
        logger=[CSVLogger("logs"), Elsewhere()],
        callbacks=[kept, EarlyStopping("val_loss", patience=1000)],
        enable_model_summary=False,
    )
    model = Model()
    loaders = DataLoader(data, 4, shuffle=True, **options), DataLoader(Items(case), 4)
    if ranks == 1:
        trainer.validate(model, loaders[1])
    trainer.fit(model, *loaders)
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    train(sys.argv[1])
