"""What a page would fetch from elsewhere when a browser opens it."""

from __future__ import annotations

import re

_REMOTE = r"(?:https?:)?//[^\"'\s>)]+"
_LOADS = (
    rf"<(?:script|link|img|iframe|object|embed|source|video|audio|use|image)\b[^>]*?"
    rf"\b(?:src|href|data)\s*=\s*[\"']?({_REMOTE})",
    rf"\b(?:from|import)\s*\(?\s*[\"']({_REMOTE})",
    rf"\burl\(\s*[\"']?({_REMOTE})",
    rf"\b(?:fetch|importScripts)\(\s*[\"'`]({_REMOTE})",
)


def loaded_from_elsewhere(page: str) -> list[str]:
    """The addresses that a page or a picture loads; links that are only followed are none."""
    return [address for load in _LOADS for address in re.findall(load, page)]
