"""The house's rule: imports point downward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_perf"
#: From the top down. A room may import from rooms below it, and from itself.
FLOORS = [
    {"cli"},
    {"callbacks", "profilers"},
    {"trainer"},
    {"tracking"},
    {"charts", "diagnosis", "flops", "schedule", "system", "trace"},
    {
        "time",
        "timestamp",
        "moment",
        "batch",
        "throughput",
        "timings",
        "remaining",
        "errors",
        "__init__",
    },
]
#: Libraries that may enter on some floors only.
RESERVED = {
    "torch": {"flops", "trainer", "callbacks", "profilers"},
    "lightning": {"trainer", "callbacks", "profilers"},
    "mlflow": {"tracking"},
    "matplotlib": {"charts"},
    "psutil": {"cli", "system"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def imports(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_point_downward(module: Path) -> None:
    """No room imports from a floor above its own, nor from its neighbours."""
    if module == PACKAGE / "__init__.py":
        return  # the front door names rooms on all floors, lazily
    here = room(module)
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "lightning_perf":
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        allowed = there == here or floor(there) > floor(here) or floor(there) == len(FLOORS) - 1
        assert allowed, f"{here} must not import {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_libraries_stay_on_their_floors(module: Path) -> None:
    """torch, lightning and mlflow are imported only where the design lets them in."""
    for name in imports(module):
        rooms = RESERVED.get(name.split(".")[0])
        assert rooms is None or room(module) in rooms, f"{module} must not import {name}"


def test_every_room_has_a_floor() -> None:
    """A new room is placed by a decision, not by accident."""
    for module in MODULES:
        floor(room(module))
