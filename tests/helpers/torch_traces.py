"""Reading the traces written by the PyTorch profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """All finished traces below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): json.loads(gzip.decompress(path.read_bytes()))
        for path in sorted(folder.rglob("*.pt.trace.json.gz"))
    }


def steps(trace: dict[str, Any]) -> list[int]:
    """The batches in a trace, by their number in the run."""
    names = {event.get("name", "") for event in trace["traceEvents"]}
    return sorted(int(n.split("#")[1]) for n in names if n.startswith("ProfilerStep#"))
