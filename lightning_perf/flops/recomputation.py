"""Whether what runs is the forward of a checkpoint once more, which is no work of the model's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import CheckpointFunction

if TYPE_CHECKING:
    from types import FrameType

_CHECKPOINT_FILE = CheckpointFunction.backward.__code__.co_filename
_RECOMPUTING = frozenset(["backward", "recompute_fn", "unpack_hook"])
_AUTOGRAD_BACKWARD = torch.autograd.backward.__code__


def is_recomputation() -> bool:
    """Whether activation checkpointing is running a part of the forward again, in a backward."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe()
    callee = None
    while frame is not None:
        code = frame.f_code
        # A reentrant checkpoint first runs the forward again, then the backward of what it got.
        if (
            code.co_name in _RECOMPUTING
            and code.co_filename == _CHECKPOINT_FILE
            and callee is not _AUTOGRAD_BACKWARD
        ):
            return True
        frame, callee = frame.f_back, code
    return False
