"""Data whose samples take a worker some time to compute."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Work(Dataset[list[torch.Tensor]]):
    """Eighty samples, each with an allocation of ten megabytes."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.work(index)

    def work(self, index: int) -> list[torch.Tensor]:
        waste = len(bytearray(10_000_000))
        return [torch.full((8,), index / waste), torch.ones(1)]
