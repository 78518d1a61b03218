"""A stacked chart as a PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_perf.charts.page import Areas

_INK, _FAINT, _PAPER = "#1c2128", "#59636e", "#ffffff"
_FONT = "DejaVu Sans"  # part of matplotlib
_SIZE, _DPI = (10.0, 5.0), 150


def write_png(path: Path, shown: Areas, title: str) -> None:
    """Draw a stacked chart, independent of pyplot and the user's settings of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor=_PAPER, frameon=True)
    figure.set_layout_engine("none")
    canvas = FigureCanvasAgg(figure)
    figure.text(0.025, 0.93, _shorten(title, 80), size=14, color=_INK)
    figure.text(0.025, 0.875, shown.summary, size=10, color=_FAINT)
    figure.text(0.975, 0.025, "  ".join(shown.notes), size=8, color=_FAINT, ha="right")
    if shown.layers:
        _draw(figure.add_axes((0.075, 0.125, 0.60, 0.69), facecolor=_PAPER), shown)
        _legend(figure, shown)
    _override_settings(figure)
    canvas.print_png(path)  # type: ignore[no-untyped-call]


def _draw(axes: Axes, shown: Areas) -> None:
    # Two points per window, since each value is constant within its window.
    across = [edge for edge in shown.edges for _ in range(2)][1:-1]
    floor = [0.0] * len(shown.windows)
    for layer in shown.layers:
        ceiling = [low + value for low, value in zip(floor, layer.values, strict=True)]
        low, high = ([y for y in each for _ in range(2)] for each in (floor, ceiling))
        # A stroke of its own colour keeps a layer visible where it is thin or steep.
        axes.fill_between(across, low, high, color=layer.colour, lw=0.3, joinstyle="round")
        floor = ceiling
    axes.set(xlim=(across[0], across[-1]), ylim=(0, shown.top), autoscale_on=False)
    axes.set_xticks([x for x, _ in shown.x_ticks], [text for _, text in shown.x_ticks])
    axes.set_yticks([y for y, _ in shown.y_ticks], [text for _, text in shown.y_ticks])
    axes.set_xlabel(shown.x_label, size=10, color=_FAINT, labelpad=5)
    axes.set_ylabel(f"{shown.unit(shown.top)[1]}{shown.y_label}", size=10, color=_FAINT, labelpad=5)
    axes.minorticks_off()
    axes.tick_params(
        direction="out", length=3, width=0.8, pad=4, color=_FAINT, labelcolor=_FAINT, labelsize=9,
        left=True, bottom=True, right=False, top=False,
        labelleft=True, labelbottom=True, labelright=False, labeltop=False,
    )  # fmt: skip
    axes.grid(False)
    axes.grid(True, axis="y", color=_INK, alpha=0.14, lw=0.6, ls="-")
    axes.set_axisbelow(False)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=_FAINT, lw=0.8)


def _legend(figure: Figure, shown: Areas) -> None:
    """A table of the layers beside the chart."""
    from matplotlib.patches import Rectangle

    height = min(0.056, 0.69 / len(shown.layers))
    for number, layer in enumerate(shown.layers):
        y = 0.815 - (number + 0.6) * height
        figure.add_artist(
            Rectangle((0.70, y - 0.013), 0.013, 0.026, color=layer.colour, lw=0, fill=True)
        )
        style: dict[str, Any] = {"va": "center", "size": 9}
        figure.text(0.722, y, _shorten(layer.name, 20), color=_INK, **style)
        figure.text(0.917, y, shown.text(layer.amount), color=_FAINT, ha="right", **style)
        figure.text(0.975, y, f"{layer.share:.1%}", color=_INK, ha="right", **style)


def _shorten(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _override_settings(figure: Figure) -> None:
    """Replace what artists take from rcParams: fonts, TeX, formulas, effects."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.text import Text

    faces = {
        weight: FontProperties(
            family=[_FONT], style="normal", variant="normal", weight=weight, stretch="normal"
        )
        for weight in ("normal", "bold")
    }
    glyphs = get_font(findfont(faces["normal"]))
    headline = figure.texts[0]
    for artist in figure.findobj():
        artist.set(sketch_params=None, path_effects=[])
        if isinstance(artist, Text):
            face = faces["bold" if artist is headline else "normal"].copy()
            face.set_size(artist.get_fontsize())
            # Each character that the font lacks would be a warning.
            known = (c if glyphs.get_char_index(ord(c)) else "?" for c in artist.get_text())
            artist.set(text="".join(known), fontproperties=face, usetex=False, parse_math=False)
