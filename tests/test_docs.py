"""What the documentation shows runs as it stands."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import lightning_perf

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(lightning_perf.__path__, "lightning_perf.")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    """Every example of a docstring gives what it says that it gives."""
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=options).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_pages_runs(page: Path) -> None:
    """The blocks of a page run one after the other."""
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_in_pages_is_yaml_of_ours(page: Path) -> None:
    """What a page shows as YAML names classes that are there, with arguments that they take."""
    for block in blocks(page, "yaml"):
        for node in nodes(yaml.safe_load(block)):
            home, name = node["class_path"].rsplit(".", 1)
            kind = getattr(importlib.import_module(home), name)
            if home == "lightning_perf" and not any(
                isinstance(value, dict | list) for value in node.get("init_args", {}).values()
            ):
                kind(**node.get("init_args", {}))


def nodes(tree: object) -> list[dict]:
    """All class_path nodes of a YAML tree."""
    if isinstance(tree, list):
        return [node for branch in tree for node in nodes(branch)]
    if not isinstance(tree, dict):
        return []
    here = [tree] if "class_path" in tree else []
    return here + [node for branch in tree.values() for node in nodes(branch)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """No page points to a file that is not there."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
