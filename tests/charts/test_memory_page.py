"""Pages about memory over time: which allocations they show, and what they say about the peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_perf.charts.memory import (
    CATEGORIES,
    Timeline,
    memory_areas,
    memory_page,
    of_events,
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


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", [1, 3]), ("cuda:0", [2]), ("cuda:1", [4]), ("cuda", [2])],
)
def test_a_page_is_about_one_device(device: str, expected: list[int]) -> None:
    """Allocations of other devices are left out."""
    devices = [(0, -1), (1, 0), (0, -1), (1, 1)]
    events = [
        {
            "name": "[memory]",
            "ts": float(number),
            "args": {"Device Type": kind, "Device Id": index, "Total Allocated": number},
        }
        for number, (kind, index) in enumerate(devices, 1)
    ]
    assert [size for (size,) in of_events(events, device).sizes] == expected


def test_a_page_without_allocations_says_so() -> None:
    """There is no chart, and names are escaped."""
    text = memory_page(of_events([], "<b>"), "<b>")
    assert "No allocation was recorded." in text
    assert "<b>" not in text


def test_a_page_is_made_of_points_or_of_a_trace(tmp_path: Path) -> None:
    """The program reads both formats."""
    trace = {"name": "[memory]", "ts": 1.0, "args": {"Device Type": 0, "Total Allocated": 7}}
    row = [0, 7, 0, 0, 0, 0, 0, 0, 0]
    for name, content in (("trace", {"traceEvents": [trace]}), ("points", [[1], [row]])):
        (tmp_path / name).write_text(json.dumps(content))
        command = [sys.executable, "-P", "-m", "lightning_perf.profilers.programs"]
        files = [tmp_path / name, tmp_path / f"{name}.html"]
        subprocess.run([*command, "timeline", *files, "cpu"], check=True)
        assert "Peak 7 B" in (tmp_path / f"{name}.html").read_text()
