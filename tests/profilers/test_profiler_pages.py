"""Pages of profilers work offline."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import loaded_from_elsewhere
from helpers.small import Records, Small, left_in, ours, trainer
from torch.cuda import _memory_viz

from lightning_perf import Memray, PerfWarning, Profiler, PyTorch
from lightning_perf.profilers.programs import history, of_history
from lightning_perf.profilers.tools import run_program

MIB = 1 << 20
MEMORY = {"with_stack": True, "record_shapes": True, "memory_filename": "rank{rank}.html"}


def frame(name: str, filename: str = "train.py") -> dict[str, Any]:
    return {"filename": filename, "line": 7, "name": name}


def event(action: str, addr: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": list(frames), "stream": 0}


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    frames = [frame("<odd> & name")]
    return {"address": address, "size": size, "requested_size": size, "state": state} | {
        "frames": frames
    }


#: One block from before the recording, one of a layer that stays, one of the loss that is freed.
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": 0x100,
            "total_size": 4 * MIB,
            "stream": 0,
            "blocks": [
                block(0x100, MIB),
                block(0x100 + MIB, 2 * MIB),
                block(0, MIB, "inactive"),
            ],
        }
    ],
    "device_traces": [
        [
            event("segment_alloc", 0x100, 4 * MIB),
            event("alloc", 0x100 + MIB, 2 * MIB, frame("linear", "/x/torch/nn.py"), frame("layer")),
            event("alloc", 0x900, 3 * MIB, frame("loss")),
            event("oom", 0, 9 * MIB) | {"device_free": 2 * MIB},
            event("free_completed", 0x900, 3 * MIB),
            event("free_completed", 0x700, MIB),
        ],
        [],
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "profiler",
    [
        pytest.param(lambda: PyTorch(schedule="first 2ba", **MEMORY), id="PyTorch"),
        pytest.param(lambda: Memray(schedule="first 2ba", flamegraph=True), id="Memray"),
    ],
)
def test_pages_load_nothing(tmp_path: Path, profiler: Any) -> None:
    """The page of a real window has no remote address."""
    made: Profiler = profiler()
    trainer(tmp_path, made, logger=Records(), limit_train_batches=3).fit(Small())
    (page,) = tmp_path.rglob("*.html")
    assert "<svg" in page.read_text() or "<script" in page.read_text()
    assert loaded_from_elsewhere(page.read_text()) == []


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (lambda: Memray(schedule="first 1ba"), ["rank0.1.bin", "rank0.1.txt"]),
        (
            lambda: Memray(schedule="first 1ba", flamegraph=True, summary=False),
            ["rank0.1.bin", "rank0.1.html"],
        ),
    ],
)
def test_a_page_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, files: list[str]
) -> None:
    """It has the message of the program, and the recording is kept."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho planted >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    recording, further = files
    with pytest.warns(PerfWarning, match="was not finished.*planted") as caught:
        trainer(tmp_path / "run", make(), logger=Records()).fit(Small())
    (message,) = ours(caught)
    assert further in message
    assert [path.name for path in left_in(tmp_path / "run")] == [recording]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("kill -SEGV $$", "exit -11"),
        ("printf '\\377 planted' >&2; exit 3", "\N{REPLACEMENT CHARACTER} planted"),
    ],
)
def test_a_program_that_crashes_is_an_error_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    """Readers written in C crash on damaged files without a message, or quote their bytes."""
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(OSError, match=f"^page: {message}$"):
        run_program("page")


def test_remote_addresses_are_detected() -> None:
    """PyTorch's own pages load their viewer from the web."""
    plot = _memory_viz.trace_plot({"segments": [], "device_traces": []})
    (address,) = loaded_from_elsewhere(plot)
    assert address.startswith("https://")


def test_the_page_about_a_snapshot_loads_nothing(tmp_path: Path) -> None:
    """The program writes a complete page, and escapes names."""
    source, target = tmp_path / "s.pickle", tmp_path / "page.html"
    source.write_bytes(pickle.dumps(SNAPSHOT))
    program = [sys.executable, "-m", "lightning_perf.profilers.programs"]
    subprocess.run([*program, "history", source, target], check=True)
    page = target.read_text()
    assert page.rstrip().endswith("</html>")
    assert loaded_from_elsewhere(page) == []
    assert "<odd>" not in page


def test_a_history_shows_memory_by_line_at_the_peak() -> None:
    """Blocks from before the recording count, and lines of libraries are skipped."""
    blocks = [b for b in SNAPSHOT["segments"][0]["blocks"] if b["state"] != "inactive"]
    line, stacks = of_history(SNAPSHOT["device_traces"][0], blocks)
    assert [sum(sizes) // MIB for sizes in line.sizes] == [2, 4, 7, 4, 3]
    at_peak = dict(zip(line.categories, line.sizes[line.peak], strict=True))
    assert at_peak == {
        "train.py:7 loss": 3 * MIB,
        "train.py:7 layer": 2 * MIB,
        "other lines": 0,
        "allocated before the recording": 2 * MIB,
    }
    assert sorted(stacks) == [
        (["allocated before the recording"], 2 * MIB),
        (["train.py:7 layer", "nn.py:7 linear"], 2 * MIB),
        (["train.py:7 loss"], 3 * MIB),
    ]


def test_a_failed_allocation_is_on_the_page() -> None:
    """The page shows the requested size and the free memory."""
    page = history(SNAPSHOT)
    assert "An allocation of 9.0 MiB failed; the device had 2.0 MiB free" in page
    assert "Device 1" not in page


def test_a_snapshot_without_history_says_so() -> None:
    """If no window was open, there is nothing to draw."""
    nothing = {**SNAPSHOT, "device_traces": [[]]}
    assert "No history was recorded" in history(nothing)
