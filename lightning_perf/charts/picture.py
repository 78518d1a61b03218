"""A stacked chart as a PNG."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.charts.stacked import Row, Stack, duration, stack, ticks, unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _PAPER = "#1c2128", "#59636e", "#ffffff"
_FONT = "DejaVu Sans"  # comes with matplotlib
_SIZE, _DPI = (10.0, 5.0), 150


def stacked_png(
    path: str | Path,
    rows: Sequence[Row],
    title: str = "Where the time of a batch went",
    first: int = 0,
) -> None:
    """Draw what a batch's time was spent on, over the steps of a run.

    Neither pyplot nor the user's settings of matplotlib are used or changed, so that it may be
    called from any thread.

    Args:
        path: The file to write.
        rows: The steps, with the seconds a batch by category.
        title: The headline.
        first: The step that the first row begins with; each row is flat since the one before.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "time.png"
        >>> stacked_png(path, [(10, {"forward": 0.01}), (20, {"forward": 0.02})])
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = stack(rows, first)
    figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor=_PAPER, frameon=True)
    figure.set_layout_engine("none")
    canvas = FigureCanvasAgg(figure)
    figure.text(0.025, 0.93, _short(title, 80), size=14, color=_INK)
    figure.text(0.025, 0.875, shown.summary, size=10, color=_FAINT)
    figure.text(0.975, 0.025, "  ".join(shown.notes), size=8, color=_FAINT, ha="right")
    if shown.bands:
        _draw(figure.add_axes((0.075, 0.125, 0.60, 0.69), facecolor=_PAPER), shown)
        _legend(figure, shown)
    _independent_of_settings(figure)
    canvas.print_png(Path(path))  # type: ignore[no-untyped-call]


def _draw(axes: Axes, shown: Stack) -> None:
    scale, name = unit(shown.top)
    steps, edges = shown.outline
    for band, (low, high) in zip(shown.bands, pairwise(edges * scale), strict=True):
        # A stroke of its own colour keeps a band visible where it is thin or steep.
        axes.fill_between(steps, low, high, color=band.colour, lw=0.3, joinstyle="round")
    axes.set(xlim=(steps[0], steps[-1]), ylim=(0, shown.top * scale), autoscale_on=False)
    across = [x for x in ticks(steps[0], steps[-1]) if x == int(x)]
    axes.set_xticks(across, [f"{x:,.0f}" for x in across])
    up = ticks(0, shown.top * scale)
    axes.set_yticks(up, [f"{y:,.10g}" for y in up])
    axes.set_xlabel("step", size=10, color=_FAINT, labelpad=5)
    axes.set_ylabel(f"{name} a batch", size=10, color=_FAINT, labelpad=5)
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


def _legend(figure: Figure, shown: Stack) -> None:
    """The categories as a table beside the chart, the costliest first."""
    from matplotlib.patches import Rectangle

    height = min(0.056, 0.69 / len(shown.bands))
    for number, band in enumerate(shown.bands):
        y = 0.815 - (number + 0.6) * height
        figure.add_artist(
            Rectangle((0.70, y - 0.013), 0.013, 0.026, color=band.colour, lw=0, fill=True)
        )
        style: dict[str, Any] = {"va": "center", "size": 9}
        figure.text(0.722, y, _short(band.name, 20), color=_INK, **style)
        figure.text(0.917, y, duration(band.mean), color=_FAINT, ha="right", **style)
        figure.text(0.975, y, f"{band.share:.1%}", color=_INK, ha="right", **style)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _independent_of_settings(figure: Figure) -> None:
    """Undo what artists take from rcParams by themselves: fonts, TeX, formulas, effects."""
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
