"""Lets a forked process leave without freeing what its parent has imported: half a second each.

Import it first: functions of `atexit` run in reverse order, so that this one is the last.
"""

from __future__ import annotations

import atexit
import os
import sys

#: Whether the process has done its work without an error. Others end as any interpreter.
done = False


def _leave() -> None:
    if done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


atexit.register(_leave)
