"""Reading the JSON that torch.profiler writes, without torch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """The events of a trace in Chrome's format.

    Args:
        path: The trace, gzipped or not.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such trace.
    """
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError(f"{path} holds no traceEvents")
    return events


def nanoseconds(microseconds: float) -> int:
    """A trace's times are microseconds with three decimals, too large for sums of floats."""
    return round(microseconds * 1000)
