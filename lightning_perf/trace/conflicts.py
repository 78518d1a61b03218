"""Which traces of an earlier run a new one must not run into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.trace.names import IN_EPOCH, TOTALS, NameFormat, Value, time_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lightning_perf.timestamp import Timestamp


def conflicts(
    pattern: NameFormat, values: Mapping[str, Value], folder: Path, now: Timestamp
) -> Path | None:
    """A file of this pattern that lies after the present moment, if there is one.

    It lies after it if a total in its name is greater than now, or a count within the epoch is
    while the epoch is the same. Both are compared as the name writes them. A file of this very
    moment is none, because a checkpoint and a trace often fall on one batch and a resume must
    work. A name without time conflicts by being there. Hidden files are ignored.

    Args:
        pattern: The file names' format.
        values: The values of all variables but those of time.
        folder: Where to look; it need not exist.
        now: The time to compare with.

    Returns:
        The first such file in the order of names, or None.
    """
    present = pattern.read(pattern.render({**values, **time_values(now)}), values) or {}
    for path in sorted(folder.glob("/".join(["*"] * (pattern.depth + 1)))):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            found = pattern.read(name.as_posix(), values)
            if found is not None and _is_after(found, present):
                return path
    return None


def _is_after(found: Mapping[str, float], present: Mapping[str, float]) -> bool:
    comparable: tuple[str, ...] = TOTALS
    if found.get("epoch") == present.get("epoch"):
        comparable += IN_EPOCH
    return not found or any(found[name] > present[name] for name in comparable if name in found)
