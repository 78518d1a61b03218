"""Flame graphs as SVG: in a page, or as files that any browser opens without a network."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_ROW, _TOP = 17, 28
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

    def svg(self, style: str = "", script: str = "") -> str:
        """The picture; ``STYLE`` and ``SCRIPT`` belong to it, or into the page that shows it."""
        frames, depths = [], [0]
        for name, value, depth, left in _walk(self.root):
            share = value / max(self.root.value, 1)
            frames.append(_frame(name, f"{self.text(value)}, {share:.1%}", depth, left, share))
            depths.append(depth)
        height = _TOP + (max(depths) + 1) * _ROW + 6
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="flame" width="1200" '
            f'height="{height}">{style}\n'
            f'<text class="title" x="3" y="18">{escape(self.title)}: '
            f"{escape(self.text(self.root.value))}</text>\n"
            + "\n".join(frames)
            + f"\n{script}</svg>\n"
        )

    def document(self) -> str:
        """The picture as a file of its own."""
        return self.svg(f"<style>{STYLE}</style>", f"<script><![CDATA[{SCRIPT}]]></script>\n")


def _walk(root: Frame) -> Iterator[tuple[str, int, int, float]]:
    """Name, value, depth and left edge of each visible frame, callers first."""
    waiting = [("all", root, 0, 0.0)]
    while waiting:
        name, node, depth, left = waiting.pop()
        yield name, node.value, depth, left
        for called, frame in sorted(node.calls.items(), key=lambda item: (-item[1].value, item[0])):
            share = frame.value / max(root.value, 1)
            if share >= _SMALLEST_SHARE:
                waiting.append((called, frame, depth + 1, left))
            left += share


def _frame(name: str, value: str, depth: int, left: float, share: float) -> str:
    # An inner SVG clips the name at its edge, at any width of the picture.
    name, hue = escape(name), zlib.crc32(name.encode()) % 55
    return (
        f'<svg x="{left:.4%}" y="{_TOP + depth * _ROW}" width="{share:.4%}" height="{_ROW - 1}" '
        f'data-x="{left:.6f}" data-w="{share:.6f}"><title>{name} ({escape(value)})</title>'
        f'<rect width="100%" height="100%" fill="hsl({hue},75%,68%)"/>'
        f'<text x="3" y="12">{name}</text></svg>\n'
    )


STYLE = """\
.flame { color-scheme: light dark; max-width: 100%; font: 11px ui-monospace, monospace }
.flame svg { cursor: pointer }
.flame text { fill: #1c2128; white-space: pre; pointer-events: none }
.flame rect { stroke: #0002 }
.flame .other rect { fill-opacity: .2 }
.flame .title { font: 600 13px system-ui, sans-serif; fill: #1c2128 }
svg.flame:root { background: #ffffff }
@media (prefers-color-scheme: dark) {
  .flame .title { fill: #e6edf3 }
  svg.flame:root { background: #15191f }
}
"""

#: A click on a frame gives it and its callers the whole width. A page has a field that makes frames
#: with other names pale.
SCRIPT = """\
for (const find of document.querySelectorAll("input.find")) find.addEventListener("input", () => {
  for (const frame of document.querySelectorAll("svg.flame svg")) {
    const name = frame.querySelector("text").textContent.toLowerCase();
    frame.classList.toggle("other", !name.includes(find.value.toLowerCase()));
  }
});
for (const flame of document.querySelectorAll("svg.flame")) {
  const frames = [...flame.querySelectorAll("svg")];
  frames.forEach(clicked => clicked.addEventListener("click", () => {
    const left = +clicked.dataset.x, width = +clicked.dataset.w;
    frames.forEach(frame => {
      const x = (frame.dataset.x - left) / width, end = x + frame.dataset.w / width;
      frame.style.display = end <= 1e-6 || x >= 1 - 1e-6 ? "none" : "";
      const from = Math.max(x, 0), to = Math.min(end, 1);
      frame.setAttribute("x", `${100 * from}%`);
      frame.setAttribute("width", `${100 * Math.max(to - from, 0)}%`);
    });
  }));
}
"""
