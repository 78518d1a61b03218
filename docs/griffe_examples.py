"""An extension of griffe: our docstrings say ``Example:``, its parser knows ``Examples:`` alone."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section, so that examples are shown as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of each object as it is collected."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
