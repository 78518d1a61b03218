"""Trainings by real packages; ``nox -s ecosystem`` installs those and runs them."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("comparison")


def pytest_configure(config: pytest.Config) -> None:
    """Let other packages use what is deprecated; warnings of ours stay errors."""
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", "error::lightning_perf.PerfWarning")
