"""Charts: stacked areas, flame graphs and tables as HTML pages and SVG.

All pages share one template, colours and number formats, load nothing, also in MLflow's sandboxed
frame, and follow the browser's light or dark mode. jinja2 is imported when something is
drawn.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from lightning_perf.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from jinja2 import Template

OTHER = "other"
#: Colours of the categories of time, distinct for the colour-blind, and on light and dark pages.
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
#: For layers that have no fixed colour.
PALETTE = tuple(
    COLOURS[name]
    for name in ("backward", "to_device", "callbacks", "forward", "dataloader_next", "validation",
                 "logging", "optimizer_step")
)  # fmt: skip


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from one end of an axis to the other.

    Example:
        >>> ticks(0, 47)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    rough = (high - low) / about
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    count = range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    return [float(f"{n * step:.12g}") for n in count]


#: Drawing units along each axis; the browser stretches them to the width of the page.
_SIZE = 1000


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
class Finding:
    """A cause of lost time: how serious it is, its name, what it costs, what to do, and why."""

    #: ``critical``, ``warning``, ``info`` or ``healthy``.
    severity: str
    name: str
    cost: str
    advice: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Links:
    """Files, each with its path relative to the page."""

    files: Sequence[tuple[str, str]]


# -- flame graphs: in a page, or as files that any browser opens without a network ----------------

#: Frames with a smaller share of the picture are left out.
_SMALLEST_SHARE = 0.0003


@dataclass(slots=True)
class Frame:
    """A function on a stack: its value includes those of the functions that it calls."""

    value: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)


def fold(stacks: Iterable[tuple[list[str], int]]) -> Frame:
    """Merge stacks (function names from the outermost on, and a value) into one tree."""
    root = Frame()
    for names, value in stacks:
        node = root
        node.value += value
        for name in names:
            node = node.calls.setdefault(name, Frame())
            node.value += value
    return root


def read_folded(text: str) -> Iterator[tuple[list[str], int]]:
    """Parse stacks in the folded format: one per line, ``outer;inner 42``."""
    for line in text.splitlines():
        names, _, value = line.rpartition(" ")
        yield names.split(";"), int(value)


@dataclass(frozen=True, slots=True)
class FlameGraph:
    """A tree of frames, drawn with widths proportional to values; a click zooms in on a frame."""

    root: Frame
    title: str
    #: Formats a value with its unit.
    text: Callable[[int], str] = str

    def svg(self, alone: bool = False) -> str:
        """The picture, as part of a page or as a file of its own."""
        return template("flame.svg.jinja").render(
            title=f"{self.title}: {self.text(self.root.value)}",
            frames=list(self._boxes()),
            alone=alone,
            style=_asset("flame.css"),
            script=_asset("flame.js"),
        )

    def _boxes(self) -> Iterator[dict[str, Any]]:
        """The frames that are large enough to see, callers first.

        The left edge and the share of a frame are shares of the picture's width.
        """
        whole = max(self.root.value, 1)
        waiting = [("all", self.root, 0, 0.0)]
        while waiting:
            name, node, depth, left = waiting.pop()
            yield {
                "name": name,
                "value": self.text(node.value),
                "depth": depth,
                "left": left,
                "share": node.value / whole,
                "hue": crc32(name.encode(errors="replace")) % 55,
            }
            calls = sorted(node.calls.items(), key=lambda item: (-item[1].value, item[0]))
            for called, frame in calls:
                share = frame.value / whole
                if share >= _SMALLEST_SHARE:
                    waiting.append((called, frame, depth + 1, left))
                left += share


# -- pages ----------------------------------------------------------------------------------------

Part: TypeAlias = "str | Heading | Finding | Areas | Table | FlameGraph | Links"


def page(title: str, parts: Iterable[Part], tab: str = "") -> str:
    """A page with a headline and its parts from top to bottom; a string is a paragraph.

    ``tab`` is the title of the browser's tab.
    """
    named = [(type(part).__name__, part) for part in parts]
    script = _asset("page.js") + _asset("flame.js")
    # The page's policy allows this script alone: no text on the page can run as code.
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return template().render(
        title=title,
        tab=tab or title,
        parts=named,
        flame_style=_asset("flame.css"),
        script=script,
        script_hash=f"sha256-{digest}",
    )


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def template(name: str = "page.html.jinja") -> Template:
    """A template of this package; the first call imports jinja2, which takes some 50 ms."""
    from jinja2 import Environment

    def finalize(value: Any) -> Any:
        return printable(value) if type(value) is str else value  # others are HTML of ours

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=finalize
    )
    environment.filters["percent"] = lambda share, digits=1: f"{share:.{digits}%}"
    return environment.from_string(_asset(name))
