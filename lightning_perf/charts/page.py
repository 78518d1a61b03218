"""A stacked chart as a page that opens without a network, in MLflow's frame as well."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.charts.stacked import (
    Row,
    Stack,
    TableRow,
    duration,
    stack,
    three_digits,
    ticks,
    unit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

    from lightning_perf.charts.stacked import Numbers

#: Of the drawing, in its own units: as a whole, and around the axes.
_WIDTH, _HEIGHT = 860, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 44


def stacked_html(
    path: str | Path,
    rows: Sequence[Row],
    title: str = "Where the time of a batch went",
    table: Sequence[TableRow] = (),
    first: int = 0,
) -> None:
    """Write a page of what a batch's time was spent on, over the steps of a run.

    Args:
        path: The file to write.
        rows: The steps, with the seconds a batch by category.
        title: The headline.
        table: Callbacks and loggers: name, seconds and calls in all, share of the run (0 to 1).
        first: The step that the first row begins with; each row is flat since the one before.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "time.html"
        >>> stacked_html(path, [(10, {"forward": 0.01})], table=[("MyCallback", 2.5, 100, 0.12)])
        >>> "MyCallback" in path.read_text()
        True
    """
    shown = stack(rows, first)
    page = _template().render(
        title=title,
        shown=shown,
        drawing=_drawing(shown) if shown.bands else None,
        table=_callbacks(table),
    )
    Path(path).write_text(page, encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration, "percent": "{:.1%}".format, "px": "{:.1f}".format}
    source = files(__package__).joinpath("stacked.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _drawing(shown: Stack) -> dict[str, Any]:
    """What stands in the SVG, in the drawing's units, and the numbers that its tooltip tells."""
    scale, name = unit(shown.top)
    steps, edges = shown.outline
    first, last = float(steps[0]), float(steps[-1])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(step: Any) -> Any:
        return _LEFT + width * (step - first) / ((last - first) or 1.0)

    def up(seconds: Any) -> Any:
        return _TOP + height * (1 - seconds / shown.top)

    x, y = across(steps), up(edges)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "unit": name,
        "paths": [_area(x, low, high) for low, high in pairwise(y)],
        "x_ticks": [(across(t), f"{t:,.0f}") for t in ticks(first, last) if t == int(t)],
        "y_ticks": [(up(t / scale), f"{t:,.10g}") for t in ticks(0, shown.top * scale)],
        "data": {
            "edges": [round(float(each), 1) for each in across(shown.edges)],
            "windows": shown.windows,
            "unit": name,
            "values": [
                [float(f"{seconds * scale:.4g}") for seconds in band.seconds]
                for band in shown.bands
            ],
        },
    }


def _area(x: Numbers, low: Numbers, high: Numbers) -> str:
    """The path around a band: along its upper edge, and back along its lower one."""
    there = [f"{a:.1f},{b:.1f}" for a, b in zip(x, high, strict=True)]
    back = [f"{a:.1f},{b:.1f}" for a, b in zip(x, low, strict=True)]
    return f"M{' '.join(there + back[::-1])}Z"


def _callbacks(table: Sequence[TableRow]) -> list[dict[str, Any]]:
    """The table's cells, the costliest first."""
    rows = [(name, _time(seconds), calls, _time(share)) for name, seconds, calls, share in table]
    largest = max((share for *_, share in rows), default=0.0) or 1.0
    return [
        {
            "name": name,
            "seconds": three_digits(seconds),
            "calls": f"{calls:,}",
            "each": duration(seconds / calls) if calls else "",
            "share": share,
            "bar": share / largest,
        }
        for name, seconds, calls, share in sorted(rows, key=lambda row: -row[1])
    ]


def _time(value: float) -> float:
    return value if isfinite(value) and value > 0 else 0.0
