"""The entry point at which Lightning asks for callbacks. It imports nothing unless it is used."""

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
