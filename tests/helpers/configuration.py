"""Callbacks built from a YAML configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from helpers.small import Small


def parse(tmp_path: Path, callbacks: Any) -> LightningCLI:
    """Build what a configuration describes, without training."""
    config = {"trainer": {"logger": False, "accelerator": "cpu", "callbacks": callbacks}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--config", str(path)])
        return LightningCLI(
            Small, run=False, save_config_callback=None, seed_everything_default=False
        )
