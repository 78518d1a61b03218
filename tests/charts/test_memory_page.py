"""Pages about memory over time: which allocations they show, and what they say about the peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_perf.profilers.programs import (
    CATEGORIES,
    Timeline,
    memory_areas,
    memory_page,
    of_points,
)


def test_the_program_imports_nothing_large() -> None:
    """``python -m lightning_perf.profilers.programs`` starts in milliseconds."""
    code = "import sys, lightning_perf.profilers.programs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "matplotlib", "numpy"} & set(done.stdout.split())


def test_the_categories_are_those_of_torch() -> None:
    """Names and order are those of torch's columns."""
    from torch.profiler import _memory_profiler as theirs

    order = [(category.name if category else "UNKNOWN") for category in theirs._CATEGORY_TO_INDEX]
    assert [name.upper().replace(" ", "_") for name in CATEGORIES] == order


def test_a_page_shows_the_peak_by_category() -> None:
    """The size of the peak, its time, and the share of each category."""
    sizes = [[0, 512, 0, 0, 0, 0, 0, 0, 0], [0, 512, 0, 0, 0, 1_536, 0, 0, 0]]
    text = memory_page(of_points([1_000, 3_000, 5_000], [*sizes, sizes[0]]), "cuda:1")
    assert "Peak 2.0 KiB, 2.00 ms after the first of 3 changes." in text
    assert "Activation</td><td>1.5 KiB</td><td>75.0%</td>" in text
    assert "Parameter</td><td>512 B</td><td>25.0%</td>" in text
    assert "Memory timeline of cuda:1" in text


@pytest.mark.slow
def test_a_short_peak_is_visible_among_many_changes() -> None:
    """A window shows its largest size, and the page has a bounded size."""
    times = list(range(100_000))
    sizes = [[10_000_000 if time == 54_321 else 1_000] for time in times]
    timeline = Timeline(times, sizes, ["Allocated"])
    assert max(memory_areas(timeline).layers[0].values) == 10_000_000
    assert len(memory_page(timeline, "cpu")) < 40_000


def test_a_single_allocation_fills_the_chart() -> None:
    """A timeline of one moment has a width."""
    (path,) = memory_areas(Timeline([3], [[7]], ["Allocated"])).paths()
    assert path.startswith("M0.0,38.5 1000.0,38.5 ")


def test_a_page_without_allocations_says_so() -> None:
    """There is no chart, and names are escaped."""
    text = memory_page(of_points([], []), "<b>")
    assert "No allocation was recorded." in text
    assert "<b>" not in text


def test_a_page_is_made_of_points(tmp_path: Path) -> None:
    """The program reads what torch exports."""
    (tmp_path / "points").write_text(json.dumps([[1], [[0, 7, 0, 0, 0, 0, 0, 0, 0]]]))
    command = [sys.executable, "-P", "-m", "lightning_perf.profilers.programs"]
    files = [tmp_path / "points", tmp_path / "points.html"]
    subprocess.run([*command, "timeline", *files, "cpu"], check=True)
    assert "Peak 7 B" in (tmp_path / "points.html").read_text()
