"""HTML pages that open without a network, also in MLflow's sandboxed frame."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import groupby
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from lightning_perf.charts.flame import SCRIPT, STYLE, FlameGraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

OTHER = "other"
#: Distinguishable for the colour-blind, and on light and dark pages.
COLOURS = {
    "dataloader_next": "#db4e10",
    "to_device": "#f3bc00",
    "forward": "#79dff7",
    "backward": "#0061bc",
    "optimizer_step": "#3b3d6a",
    "step_lr_schedulers": "#95a7f8",
    "from_device": "#d8e074",
    "reduce_metrics": "#655428",
    "callbacks": "#00b062",
    "logging": "#a4eeab",
    "checkpoint": "#6a2d3f",
    "validation": "#a86cac",
    OTHER: "#9a9a9a",
}
#: For categories of the user, two of which may share a colour.
_CUSTOM = ("#ff8fab", "#00796b", "#c9a66b", "#5e35b1", "#b0003a", "#7cb342")
#: For layers that have no fixed colour.
PALETTE = tuple(
    COLOURS[name]
    for name in ("backward", "to_device", "callbacks", "forward", "dataloader_next", "validation",
                 "logging", "optimizer_step")
)  # fmt: skip


def colour_of(name: str) -> str:
    """The colour of a timing category, as ``#rrggbb``; a custom name always has the same one.

    Example:
        >>> colour_of("backward"), colour_of("my_phase") == colour_of("my_phase")
        ('#0061bc', True)
    """
    return COLOURS.get(name) or _CUSTOM[crc32(name.encode()) % len(_CUSTOM)]


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from one end of an axis to the other.

    Example:
        >>> ticks(0, 47)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    count = range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    return [float(f"{n * step:.12g}") for n in count]


#: Drawing units along each axis; the browser stretches them to the width of the page.
_SIZE = 1000
#: Of more ticks on the x axis, every other one is hidden on narrow screens.
_FEW_TICKS = 5


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stacked chart."""

    name: str
    #: ``#rrggbb``.
    colour: str
    #: One per window.
    values: Sequence[float]
    #: Value and share (0 to 1) in the legend.
    amount: float
    share: float


@dataclass(frozen=True, slots=True)
class Areas:
    """A stacked chart: layers from the bottom to the top, each constant within a window."""

    #: Bounds of the windows on the x axis, one more than windows.
    edges: Sequence[float]
    #: Names of the windows.
    windows: Sequence[str]
    layers: Sequence[Layer]
    #: End of the y axis; values above are cut off.
    top: float
    #: Unit for the y axis, and how many of it are 1.
    unit: Callable[[float], tuple[float, str]]
    #: Formats a value with its unit.
    text: Callable[[float], str]
    #: Positions and labels.
    x_ticks: Sequence[tuple[float, str]]
    x_label: str
    #: Follows the unit on the y axis.
    y_label: str
    #: Headings of the legend.
    legend: tuple[str, str, str]
    summary: str = ""
    notes: tuple[str, ...] = ()

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels."""
        scale, _ = self.unit(self.top)
        return [(tick / scale, f"{tick:,.10g}") for tick in ticks(0, self.top * scale, 6)]

    def x_share(self, position: float) -> float:
        """A position on the x axis as a share of its length."""
        first, last = self.edges[0], self.edges[-1]
        return (position - first) / ((last - first) or 1.0)

    def paths(self) -> list[str]:
        """The outline of each layer, in drawing units."""
        across = [_SIZE * self.x_share(edge) for edge in self.edges]
        floor, found = [0.0] * len(self.windows), []
        for layer in self.layers:
            ceiling = [low + value for low, value in zip(floor, layer.values, strict=True)]
            there, back = self._steps(across, ceiling), self._steps(across, floor)
            found.append(f"M{' '.join(there + back[::-1])}Z")
            floor = ceiling
        return found

    def _steps(self, across: list[float], heights: list[float]) -> list[str]:
        points: list[str] = []
        for height, run in groupby(range(len(heights)), key=heights.__getitem__):
            windows, y = list(run), _SIZE * (1 - height / self.top)
            points += [f"{across[x]:.1f},{y:.1f}" for x in (windows[0], windows[-1] + 1)]
        return points

    def tooltips(self) -> dict[str, Any]:
        """What the page's script shows for a window."""
        scale, unit = self.unit(self.top)
        return {
            "edges": [round(self.x_share(float(edge)), 4) for edge in self.edges],
            "windows": list(self.windows),
            "unit": unit,
            "values": [[float(f"{v * scale:.4g}") for v in layer.values] for layer in self.layers],
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """A table cell with a bar: shares of its whole length, with their colour and tooltip."""

    parts: Sequence[tuple[float, str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Names in the first column, numbers in the others."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading between the parts of a page."""

    text: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A picture with a value per row and column, from the top left."""

    #: A ``data:`` URL, so that the page loads nothing.
    image: str
    #: Positions as shares of the axis, and labels.
    y_ticks: Sequence[tuple[float, str]]
    x_ticks: Sequence[tuple[float, str]]
    x_label: str
    summary: str
    notes: tuple[str, ...] = ()


Part: TypeAlias = "str | Heading | Areas | Table | FlameGraph | HeatMap"


def page(title: str, parts: Iterable[Part]) -> str:
    """A whole page.

    Args:
        title: The headline.
        parts: From top to bottom; a string is a paragraph.

    Example:
        >>> "1 &lt; 2" in page("Title", ["1 < 2"])
        True
    """
    body = Safe("\n").join(_DRAWN[type(part)](part) for part in parts)
    script = _file("page.js") + SCRIPT
    # The page's policy allows this script alone: no text on the page can run as code.
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{_tag("title", title)}
<style>
{_file("page.css")}{STYLE}
</style>
</head>
<body>
{_tag("h1", title)}
{body}
<script>{script}</script>
</body>
</html>
"""


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


# -- markup: every other text is escaped. Importing and compiling a template takes 50 ms at the end
# -- of a run.


class Safe(str):
    """Text that is HTML already."""

    __slots__ = ()

    def join(self, parts: Iterable[str]) -> Safe:
        """Join parts, escaped where they are plain text."""
        return Safe(super().join(p if isinstance(p, Safe) else escape(p) for p in parts))


def _tag(name: str, *content: str, **attributes: object) -> Safe:
    """An element; ``class_`` is the attribute ``class``, ``data_x`` is ``data-x``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Safe(f"<{name}{given}>{Safe().join(content)}</{name}>")


def _at(side: str, share: float, text: str, kind: str) -> Safe:
    return _tag("span", text, class_=kind, style=f"{side}: {share:.1%}")


def _rows(head: Sequence[str], rows: Iterable[Safe], **attributes: object) -> Safe:
    return _tag(
        "table",
        _tag("thead", _tag("tr", *head)), "\n",
        _tag("tbody", Safe("\n").join(rows)),
        **attributes,
    )  # fmt: skip


def _table(part: Table) -> Safe:
    first = part.rows[0] if part.rows else part.headings
    head = [
        _tag("th", heading, **({"class_": "bar"} if isinstance(cell, Bar) else {}))
        for heading, cell in zip(part.headings, first, strict=True)
    ]
    rows = (_tag("tr", *map(_cell, row)) for row in part.rows)
    return _tag("div", _rows(head, rows), class_="wide")


def _cell(cell: str | Bar) -> Safe:
    if isinstance(cell, str):
        return _tag("td", cell)
    parts = (
        _tag("i", style=f"width: {share:.3%}; background: {colour}", title=what)
        for share, colour, what in cell.parts
    )
    return _tag("td", _tag("div", *parts), class_="bar")


def _heat_map(part: HeatMap) -> Safe:
    image = Safe(f'<img src="{escape(part.image)}" alt="{escape(part.summary)}">')
    canvas = [
        image,
        *(_at("bottom", 1 - y, text, "y") for y, text in part.y_ticks),
        *(_at("left", x, text, "x") for x, text in part.x_ticks),
        _tag("span", part.x_label, class_="x label"),
    ]
    plot = _tag("div", _tag("div", *canvas, class_="canvas"), class_="plot heat")
    return Safe("\n").join([_tag("p", part.summary), plot, *_notes(part.notes)])


def _notes(notes: Iterable[str]) -> list[Safe]:
    return [_tag("p", note) for note in notes]


def _areas(part: Areas) -> Safe:
    summary = _notes([part.summary] if part.summary else [])
    if not part.layers:
        return Safe("\n").join(summary)
    tooltips = part.tooltips()
    layers = ", ".join(f"{layer.name} {layer.share:.1%}" for layer in part.layers)
    heights = [(y / part.top, text) for y, text in part.y_ticks]
    lines = (f"{_SIZE * (1 - y):.1f}" for y, _ in heights)
    svg = [
        *(_tag("path", class_="band", fill=layer.colour, stroke=layer.colour, d=path)
          for layer, path in zip(part.layers, part.paths(), strict=True)),
        *(_tag("line", x1=0, x2=_SIZE, y1=y, y2=y) for y in lines),
    ]  # fmt: skip
    crowded = len(part.x_ticks) > _FEW_TICKS
    canvas = [
        _tag("svg", *svg, viewBox=f"0 0 {_SIZE} {_SIZE}", preserveAspectRatio="none"),
        _tag("span", tooltips["unit"] + part.y_label, class_="y label"),
        *(_at("bottom", y, text, "y") for y, text in heights),
        *(_at("left", part.x_share(x), text, "x odd" if crowded and number % 2 else "x")
          for number, (x, text) in enumerate(part.x_ticks)),
        _tag("span", part.x_label, class_="x label"),
        Safe('<div class="at" hidden></div><div class="tip" hidden></div>'),
    ]  # fmt: skip
    chart = _tag(
        "div", *canvas, class_="canvas", tabindex=0, role="img",
        aria_label=f"{part.summary}: {layers}.", data_chart=json.dumps(tooltips),
    )  # fmt: skip
    swatches = (
        _tag("span", class_="swatch", style=f"background: {layer.colour}") for layer in part.layers
    )
    legend = (
        _tag("tr", _tag("td", swatch, layer.name), _tag("td", part.text(layer.amount)),
             _tag("td", f"{layer.share:.1%}"), data_layer=number)
        for number, (swatch, layer) in enumerate(zip(swatches, part.layers, strict=True))
    )  # fmt: skip
    table = _rows([_tag("th", each) for each in part.legend], legend, class_="legend")
    drawn = _tag("div", _tag("div", chart, class_="plot"), table, class_="chart")
    return Safe("\n").join([*summary, drawn, *_notes(part.notes)])


_DRAWN: Mapping[type, Callable[[Any], Safe]] = {
    str: lambda part: _tag("p", part),
    Heading: lambda part: _tag("h2", part.text),
    FlameGraph: lambda part: Safe(part.svg()),
    Table: _table,
    HeatMap: _heat_map,
    Areas: _areas,
}
