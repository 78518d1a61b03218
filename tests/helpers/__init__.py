"""Code that several test modules share."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
