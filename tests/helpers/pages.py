"""Addresses that a page would load in a browser."""

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
    """The addresses that a page or a picture loads; links for the user to follow do not count."""
    return [address for load in _LOADS for address in re.findall(load, page)]
