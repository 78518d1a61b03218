"""How late each rank is over the steps of a run, as a page."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.charts.page import HeatMap, page
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_TITLE = "Which ranks the others wait for"
_COLOUR = (219, 78, 16)
#: Rows of the picture; more ranks share a row, which shows the latest of them.
_MOST_ROWS = 512


def heatmap_html(
    path: str | Path,
    steps: Sequence[int],
    lateness: Sequence[NDArray[np.float64]],
    title: str = _TITLE,
) -> None:
    """Write a page that shows for each rank, over the steps, how much longer its own work takes.

    For each window, ``steps`` has its last step, and ``lateness`` one value per rank: seconds per
    batch above the median rank.
    """
    table = np.stack(lateness, axis=1).clip(min=0.0)
    ranks, _ = table.shape
    top = float(table.max())
    latest = int(table.mean(axis=1).argmax())
    each = -(-ranks // _MOST_ROWS)
    shown = np.maximum.reduceat(table, np.arange(0, ranks, each), axis=0)
    alpha = (255 * shown / (top or 1.0)).round().astype(np.uint8)
    mean = duration(float(table[latest].mean()))
    part = HeatMap(
        image="data:image/png;base64," + b64encode(_png(alpha)).decode(),
        y_ticks=[(0.0, "rank 0"), (1.0, f"rank {ranks - 1:,}")],
        x_ticks=[(0.0, f"{steps[0]:,}"), (1.0, f"{steps[-1]:,}")],
        x_label="step",
        summary=(
            f"Own work per batch, without waiting, above the median rank: from nothing (blank) to "
            f"{duration(top)} (full colour). The latest on average is rank {latest} ({mean})."
        ),
        notes=(f"Each row is the latest of {each} ranks.",) if each > 1 else (),
    )
    Path(path).write_text(page(title, [part]), encoding="utf-8")


def _png(alpha: NDArray[np.uint8]) -> bytes:
    """A picture in one colour, with an opacity per pixel."""
    height, width = alpha.shape
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = _COLOUR, alpha
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
