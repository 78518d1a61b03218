"""Where files are sent to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One place that files are sent to: a run in MLflow, or a store."""

    #: Sends a file by a remote name, and raises if it cannot. For the worker thread.
    send: Callable[[Path, str], None]
    #: What a later upload needs to know of the place, without user names and passwords.
    address: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A folder of a store that is to hold what a local folder holds, under the same names."""

    #: Gives a file a number where its name is taken.
    adding: Target
    #: Replaces a file whose name is taken.
    replacing: Target
    #: The folder, below the host or bucket.
    folder: str
