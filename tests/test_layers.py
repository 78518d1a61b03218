"""Imports point downward, and heavy libraries stay in their layers."""

from __future__ import annotations

import ast
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PACKAGE = Path(__file__).parent.parent / "lightning_perf"
#: From top to bottom. A package may import from packages below it, and from itself.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"callbacks", "extend"},
    {"profilers", "trials"},
    {"run"},
    {"tracking"},
    {"diagnosis"},
    {"charts"},
    {"traces"},
    {"flops", "schedule", "system", "timing"},
    {"background"},
    {"checks"},
    {"cgroup", "core", "files", "patches", "terminal"},
    {"errors", "units", "__init__"},
]
#: Libraries that may be imported in some packages only.
RESERVED = {
    "torch": {"flops", "timing", "run", "callbacks", "profilers", "trials"},
    "lightning": {"run", "callbacks", "profilers", "trials"},
    "mlflow": {"tracking"},
    "psutil": {"cli", "system", "trials"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("test_*.py"))


def package(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(level for level, packages in enumerate(LAYERS) if name in packages)


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
    """No package imports from a layer above its own, nor from another package of its layer."""
    if module == PACKAGE / "__init__.py":
        return  # names of all layers, resolved lazily
    here = package(module)
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "lightning_perf":
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        allowed = there == here or layer(there) > layer(here)
        assert allowed, f"{here} must not import {name}"


#: The names to install of packages that are imported under another name.
DISTRIBUTIONS = {
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
#: Used only if the user has them.
OF_THE_USER = {"pytorch_lightning"}


def test_what_is_imported_is_declared() -> None:
    """A package that another one brings may be gone with its next release."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [Requirement(each) for each in chain(project["dependencies"], *extras)]
    declared = {requirement.name for requirement in needed} | {"lightning_perf"}
    found = {name.partition(".")[0] for module in MODULES for name in imports(module)}
    ours = found - sys.stdlib_module_names - OF_THE_USER
    assert {DISTRIBUTIONS.get(name, name) for name in ours} <= declared


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_libraries_stay_in_their_layers(module: Path) -> None:
    """torch, lightning and mlflow are imported only in the packages that the table allows."""
    for name in imports(module):
        packages = RESERVED.get(name.split(".")[0])
        assert packages is None or package(module) in packages, f"{module} must not import {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_locks_may_be_taken_again(module: Path) -> None:
    """The handler of a signal, which may end the run, interrupts a thread that holds one."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    assert "Lock" not in names, f"{module}: use RLock"


def test_every_package_has_a_layer() -> None:
    """A new package must be added to the table."""
    for module in MODULES:
        layer(package(module))


def test_test_modules_import_no_other_test_module() -> None:
    """Each test file runs alone: shared code is in tests/helpers."""
    names = {module.stem for module in TESTS} | {"conftest"}
    for module in TESTS:
        assert not imports(module) & names, f"{module} imports another test module"
