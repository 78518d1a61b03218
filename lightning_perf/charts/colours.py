"""One colour a category, the same in every chart of every run.

Any two of them differ by 20 and more (CIE76) to normal sight and to deuteranopia, protanopia and
tritanopia alike (simulated after Machado et al. 2009), and none vanishes on white or black paper.
"""

from __future__ import annotations

from zlib import crc32

OTHER = "other"
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
#: For names that are not ours, which may share one.
_STRANGERS = ("#ff8fab", "#00796b", "#c9a66b", "#5e35b1", "#b0003a", "#7cb342")


def colour_of(name: str) -> str:
    """The colour of a category, as ``#rrggbb``.

    Args:
        name: The category's; any other name has a colour too, the same each time.

    Example:
        >>> colour_of("backward"), colour_of("my_phase") == colour_of("my_phase")
        ('#0061bc', True)
    """
    return COLOURS.get(name) or _STRANGERS[crc32(name.encode()) % len(_STRANGERS)]
