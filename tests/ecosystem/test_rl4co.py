"""rl4co: its batches are tensordicts with their own operators and iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparison import compare
from torch import nn

pytest.importorskip("rl4co")

BATCH, NODES, WIDTH = 8, 8, 16
#: Omitted by torch's counter on a CPU: the two products of attention, forward and twice that for
#: backward, of all nodes in the encoder, and node by node in the decoder.
ATTENTION_FLOPS = 2 * 3 * 2 * (2 * BATCH * NODES * NODES * WIDTH)


def test_policies_train_as_without_us(tmp_path: Path) -> None:
    """Same weights; FLOPs are torch's plus those of attention."""
    from rl4co.envs import TSPEnv
    from rl4co.models import REINFORCE, AttentionModelPolicy
    from rl4co.utils import RL4COTrainer

    def train(**options: Any) -> nn.Module:
        env = TSPEnv(generator_params={"num_loc": NODES})
        policy = AttentionModelPolicy(
            env_name=env.name, embed_dim=WIDTH, num_encoder_layers=1, num_heads=2
        )
        module = REINFORCE(
            env, policy, baseline="no", batch_size=BATCH, train_data_size=48, val_data_size=8
        )
        RL4COTrainer(max_epochs=1, precision="32-true", **options).fit(module)
        return policy

    ours, torchs = compare(train, tmp_path)
    assert ours - torchs == ATTENTION_FLOPS
