"""Trainings by other packages; ``nox -s ecosystem`` installs and runs them."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("comparison")


def pytest_configure(config: pytest.Config) -> None:
    """Allow deprecations in other packages; our warnings stay errors."""
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", "error::lightning_perf.PerfWarning")
