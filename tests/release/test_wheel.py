"""The contents of the installed wheel, and its commands; ``nox -s build`` runs this."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import lightning_perf

HOME = Path(lightning_perf.__file__).parent
SOURCE = Path(__file__).parent.parent.parent / "lightning_perf"


def test_it_is_the_installed_package() -> None:
    """It is not the source folder; the version is that of its metadata."""
    assert HOME.is_relative_to(sys.prefix)
    assert lightning_perf.__version__ == distribution("lightning_perf").version


def test_the_wheel_has_all_files_and_no_others() -> None:
    """It has data files and py.typed, but no tests, examples or benchmarks."""

    def files(folder: Path) -> set[str]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path.as_posix() for path in found if "__pycache__" not in path.parts}

    assert files(HOME) == files(SOURCE)
    assert "py.typed" in files(HOME)
    installed = {path.parts[0] for path in distribution("lightning_perf").files or ()}
    packages = {name for name in installed if not name.endswith(".dist-info") and name != ".."}
    assert packages == {"lightning_perf"}


def test_links_of_the_description_are_absolute() -> None:
    """PyPI shows the README without the repository beside it."""
    text = distribution("lightning_perf").metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links)


def test_every_public_name_can_be_imported() -> None:
    """This works without MLflow, Memray and VizTracer."""
    for name in lightning_perf.__all__:
        getattr(lightning_perf, name)


def test_the_command_starts() -> None:
    """It starts as a script and as a module."""
    for command in ([f"{sys.prefix}/bin/lightning-perf"], [sys.executable, "-m", "lightning_perf"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["lightning-perf", lightning_perf.__version__]
