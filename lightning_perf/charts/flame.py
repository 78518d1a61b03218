"""Flame graphs as pictures that open in any browser, without a network."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_WIDTH, _ROW, _MARGIN, _LETTER = 1200.0, 17, 34, 6.6
#: Frames narrower than this share of the picture are left out: nobody could see them.
_THINNEST = 0.0003


@dataclass(slots=True)
class Frame:
    """A function on a stack, with all that was below it there."""

    value: int = 0
    below: dict[str, Frame] = field(default_factory=dict)


def fold(stacks: Iterable[tuple[list[str], int]]) -> Frame:
    """Merge stacks into one tree, whose root holds their sum.

    Args:
        stacks: Function names from the outermost to the innermost, and what they count for.

    Example:
        >>> fold([(["main", "load"], 3), (["main"], 1)]).below["main"].value
        4
    """
    root = Frame()
    for names, value in stacks:
        node = root
        node.value += value
        for name in names:
            node = node.below.setdefault(name, Frame())
            node.value += value
    return root


def read_folded(text: str) -> Iterator[tuple[list[str], int]]:
    """Stacks in their usual notation: one a line, ``outer;inner 42``."""
    for line in text.splitlines():
        names, _, value = line.rpartition(" ")
        yield names.split(";"), int(value)


def flame_graph(root: Frame, title: str, unit: Callable[[int], str] = str) -> str:
    """Draw a tree as SVG: widths are proportional to values, and a click magnifies a frame.

    Args:
        root: From ``fold``.
        title: What the picture shows.
        unit: Writes a value for people.

    Returns:
        The same text for the same tree.
    """
    boxes, deepest = [], 0
    for name, value, depth, left in _walk(root, title):
        share, deepest = value / max(root.value, 1), max(deepest, depth)
        boxes.append(_box(name, f"{unit(value)}, {share:.1%}", depth, left, share))
    height = _MARGIN + (deepest + 1) * _ROW + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height}" style="max-width:100%;height:auto" '
        f'font-family="monospace" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="6" y="20" font-size="14">{escape(title)}: {escape(unit(root.value))}</text>\n'
        + "\n".join(boxes)
        + f"\n<script><![CDATA[{_ZOOM}]]></script>\n</svg>\n"
    )


def bytes_text(value: int) -> str:
    """Bytes for people.

    Example:
        >>> bytes_text(3 * 2**20)
        '3.0 MiB'
    """
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _walk(root: Frame, title: str) -> Iterator[tuple[str, int, int, float]]:
    """Name, value, depth and left edge of each frame that can be seen, parents first."""
    waiting = [("all", root, 0, 0.0)]
    while waiting:
        name, node, depth, left = waiting.pop()
        yield name, node.value, depth, left
        for inner, below in sorted(node.below.items(), key=lambda item: (-item[1].value, item[0])):
            share = below.value / max(root.value, 1)
            if share >= _THINNEST:
                waiting.append((inner, below, depth + 1, left))
            left += share


def _box(name: str, told: str, depth: int, left: float, share: float) -> str:
    x, y, width = left * _WIDTH, _MARGIN + depth * _ROW, share * _WIDTH
    hue = zlib.crc32(name.encode()) % 55
    letters = int(width / _LETTER) - 1
    seen = escape(name[:letters]) if letters > 2 else ""
    return (
        f'<g data-x="{left:.6f}" data-w="{share:.6f}" data-name="{escape(name)}">'
        f"<title>{escape(name)} ({escape(told)})</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" '
        f'fill="hsl({hue},75%,68%)"/>'
        f'<text x="{x + 3:.2f}" y="{y + 12}">{seen}</text></g>'
    )


#: What a click does: the frame fills the width, with all above and below it.
_ZOOM = f"""
(function () {{
  var svg = document.currentScript.parentNode, frames = svg.querySelectorAll("g");
  frames.forEach(function (clicked) {{
    clicked.addEventListener("click", function () {{
      var left = +clicked.dataset.x, wide = +clicked.dataset.w;
      frames.forEach(function (g) {{
        var x = (g.dataset.x - left) / wide, end = x + g.dataset.w / wide;
        g.style.display = end <= 1e-9 || x >= 1 - 1e-9 ? "none" : "";
        x = Math.max(x, 0) * {_WIDTH}; var w = Math.min(end, 1) * {_WIDTH} - x;
        var rect = g.querySelector("rect"), text = g.querySelector("text");
        rect.setAttribute("x", x); rect.setAttribute("width", Math.max(w, 0));
        text.setAttribute("x", x + 3);
        var letters = Math.floor(w / {_LETTER}) - 1;
        text.textContent = letters > 2 ? g.dataset.name.slice(0, letters) : "";
      }});
    }});
  }});
}})();
"""
