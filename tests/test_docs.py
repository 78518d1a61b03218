"""The code in the documentation runs as shown."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_perf
from lightning_perf import cli
from lightning_perf.callbacks.suite import _LEFT_OUT

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(lightning_perf.__path__, "lightning_perf.")
)
PAGES = sorted(
    page
    for pages in ("*.md", "docs/**/*.md", "tests/*.md", "benchmarks/results/*.md")
    for page in ROOT.glob(pages)
)


def blocks(language: str) -> list[Any]:
    """All blocks of a language, each with the page and line as its id."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in pattern.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(page, block[1], id=f"{page.stem}:{line}"))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    """Every docstring example gives the shown output."""
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=options).failed == 0


# Of a Trainer without a logger argument, if TensorBoard is not installed.
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
# Of a busy machine whose peak is measured.
@pytest.mark.filterwarnings("ignore:lightning_perf. (the peak of|mfu is)")
@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_python_in_pages_runs(page: Path, block: str) -> None:
    """Each block runs alone, as if copied into a file; scripts train."""
    names = {"__name__": "__main__" if "__main__" in block else page.stem}
    exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize(("page", "block"), blocks("yaml"))
def test_yaml_in_pages_is_valid(page: Path, block: str) -> None:
    """The YAML of pages names existing classes with valid arguments."""
    for node in nodes(yaml.safe_load(block)):
        home, name = node["class_path"].rsplit(".", 1)
        kind = getattr(importlib.import_module(home), name)
        arguments = node.get("init_args", {})
        if home == "lightning_perf" and not any(
            isinstance(value, dict | list) for value in arguments.values()
        ):
            kind(**arguments, **node.get("dict_kwargs", {}))


#: Names in prose that are not Python objects: a group of entry points, and a tag.
NOT_OBJECTS = {"lightning_perf.trackers", "lightning_perf.warnings"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_prose_exist(page: Path) -> None:
    """Each dotted name of this package in inline code is a module or in one."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"`(lightning_perf(?:\.\w+)+)", prose)) - NOT_OBJECTS
    missing = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert not missing


def nodes(tree: object) -> list[dict]:
    """All class_path nodes of a YAML tree."""
    if isinstance(tree, list):
        return [node for branch in tree for node in nodes(branch)]
    if not isinstance(tree, dict):
        return []
    here = [tree] if "class_path" in tree else []
    return here + [node for branch in tree.values() for node in nodes(branch)]


def commands() -> list[Any]:
    """Each line with our command in the blocks for a terminal."""
    found = []
    for param in [*blocks("console"), *blocks("bash")]:
        page, block = param.values
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["lightning-perf"]:
                found.append(pytest.param(words[1:], id=f"{page.stem}: {' '.join(words[1:])}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_in_pages_are_valid(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line parses: the command and its options exist."""
    called = []

    def recorded(command: Callable[..., int]) -> Callable[..., int]:
        return wraps(command)(lambda **settings: called.append(settings) or 0)

    commands = {name: recorded(command) for name, command in cli.all_commands().items()}
    monkeypatch.setattr(cli, "all_commands", lambda: commands)
    # A number in place of a process id, which a page cannot know.
    with pytest.raises(SystemExit) as ended:
        cli.main(["1" if word == "PID" else word for word in words])
    assert (ended.value.code, len(called)) == (0, 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_are_valid(page: Path) -> None:
    """No page links to a file or heading that does not exist."""
    for target, anchor in re.findall(
        r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()
    ):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md" and not anchor.startswith("lightning_perf."):
            assert anchor in anchors(path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and mkdocs link them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_keys_that_a_suite_leaves_out_are_marked() -> None:
    """Each is followed by a star on the page of all keys, and no other key is."""
    marked = re.findall(r"`([\w/]+)` \*(?!\*)", (ROOT / "docs" / "keys.md").read_text())
    left_out = [key for keys in _LEFT_OUT.values() for key in keys] + ["throughput/device/mfu"]
    assert sorted(key.rpartition("/")[2] for key in marked) == sorted(
        key.rpartition("/")[2] for key in left_out
    )


def test_every_public_name_is_in_the_reference() -> None:
    """Each name is in it once, so that a new name is not forgotten."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    named = re.findall(
        r"^::: lightning_perf\.(\w+)$", "\n".join(p.read_text() for p in pages), re.M
    )
    assert sorted(named) == lightning_perf.__all__


@pytest.mark.parametrize("name", lightning_perf.__all__)
def test_public_names_are_documented_in_full(name: str) -> None:
    """Each has a description of its arguments, and an example, which another test runs."""
    public = getattr(lightning_perf, name)
    assert ">>>" in public.__doc__
    if is_dataclass(public) or issubclass_of(public, (Enum, Warning)):
        return
    described = public.__doc__
    if issubclass_of(public, lightning_perf.Profiler):
        described += lightning_perf.Profiler.__doc__  # the arguments that all profilers share
    arguments = set(inspect.signature(public).parameters) - {"args", "kwargs"}
    assert [each for each in arguments if f"    {each}: " not in described] == []


def issubclass_of(public: Any, kind: Any) -> bool:
    return isinstance(public, type) and issubclass(public, kind)


def test_promises_name_tests_that_exist() -> None:
    """Each file::test of tests/promises.md is a test."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "tests/promises.md").read_text())
    assert len(named) > 40
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{file}::{test}"
