"""URLs in the place of remote names: which store, and what stands below it."""

from __future__ import annotations

import re

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)


def split_url(name: str) -> tuple[str, str, str]:
    """Take a URL apart.

    Args:
        name: A URL, or any other name.

    Returns:
        The protocol, the host or bucket, and the path below it without slashes in front; of a name
        that is no URL, the name as it is in the third place.

    Example:
        >>> split_url("s3://bucket/traces/{run_name}.json")
        ('s3', 'bucket', 'traces/{run_name}.json')
        >>> split_url("/a/long/path")
        ('', '', '/a/long/path')
    """
    found = _URL.fullmatch(name)
    return ("", "", name) if found is None else (found[1], found[2], found[3])


def url_problem(name: str) -> str | None:
    """What is wrong with a remote name as a URL, if it is meant for one.

    Args:
        name: A format string.

    Returns:
        A clause, or None.
    """
    protocol, host, path = split_url(name)
    if not protocol:
        return "is neither a name nor the URL of a store" if "://" in name else None
    if "{" in host:
        return "has a variable in its host or bucket"
    if "::" in name or "://" in path:
        return "is a chain of URLs"
    if "?" in name:
        return "has a query, which may hold a secret: give that in fsspec's own settings"
    if protocol in ("file", "local") and host:
        return f"is not absolute: after {protocol}:// comes a third slash"
    return None
