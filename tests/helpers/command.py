"""The command lightning-perf in this process, and waiting for another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_perf.cli import main


def exit_code(*args: str) -> int:
    """Run the command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0)


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run the command; return its exit code and what it prints to stdout and stderr."""
    code = exit_code(*args)
    out, err = capsys.readouterr()
    return code, out, err


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until a condition is true and return its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError
