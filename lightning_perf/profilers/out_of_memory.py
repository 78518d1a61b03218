"""What was allocated at the moment when CUDA's memory ran out."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

import torch


class LastMoment:
    """Keeps the allocator's state of the last failed allocation, while somebody watches.

    When the error has become an exception that ends the run, much of what filled the memory is
    free again.
    """

    def __init__(self) -> None:
        #: What ``torch.cuda.memory._snapshot()`` told then.
        self.snapshot: dict[str, Any] | None = None

    def watch(self) -> None:
        """From now on."""
        _watching.add(self)
        _attach()

    def forget(self) -> None:
        """No longer, and let the memory of the snapshot go."""
        _watching.discard(self)
        self.snapshot = None


_watching: WeakSet[LastMoment] = WeakSet()


@cache
def _attach() -> None:
    """Ask PyTorch to be told; once a process, since there is no way back."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_observe)


def _observe(device: int, asked: int, allowed: int, free: int) -> None:
    """Runs within the failing allocation: what is raised here would replace its error."""
    with suppress(Exception):
        snapshot = torch.cuda.memory._snapshot() if _watching else None
        for moment in _watching:
            moment.snapshot = snapshot
