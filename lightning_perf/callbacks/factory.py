"""Entry points at which Lightning asks for callbacks. They import nothing unless they are used."""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """The callbacks that the environment variable LIGHTNING_PERF selects; none without it.

    Raises:
        ConfigError: It names a file that cannot be used.
    """
    value = os.environ.get("LIGHTNING_PERF", "").strip()
    if value.lower() in ("", "0", "false", "no", "off"):
        return []
    from lightning_perf.callbacks.suite import from_environment

    return [*from_environment(value)]


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The same for the package pytorch_lightning, which pip may install in any version."""
    found = callbacks()
    if found:
        from importlib.metadata import version

        from lightning_perf.errors import warn

        installed = version("pytorch-lightning")
        # Before 2.6 they raise "Expected a parent" for callbacks of the package lightning.
        if [int(part) for part in installed.split(".")[:2]] < [2, 6]:
            warn(f"LIGHTNING_PERF is ignored: pytorch_lightning is {installed}, not 2.6 or later")
            return []
    return found
