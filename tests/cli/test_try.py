"""``lightning-perf try``: what it refuses, shows and writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers import tried
from helpers.command import call


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ([], 2, "there is no command"),
        (["--minutes", "0", "true"], 2, "--minutes 0.0 is not a positive number"),
        (["--seconds", "nan", "true"], 2, "--seconds nan is not a positive number"),
        (["--only", "inputs", "true"], 2, "--only inputs is not a group of changes: batch,"),
        (["no-such-program"], 127, "no-such-program is not a program"),
        (["true"], 1, "the training fails before any change: the command ended without Trainer"),
    ],
)
def test_what_cannot_be_tried(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, why: str
) -> None:
    found, _, err = call(capsys, "try", *args)
    assert (found, why in err) == (code, True), err


def test_no_file_of_others_is_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    theirs = tmp_path / "base.yaml"
    theirs.write_text("trainer: {}")
    assert call(capsys, "try", "-o", str(theirs), "true")[0] == 2
    assert theirs.read_text() == "trainer: {}"


@pytest.mark.slow
def test_slow_items_get_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it: the change is found, proven equal, and written; the script is unchanged."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = Path(shutil.copy(tried.__file__, folder / "train.py"))
    before = script.read_bytes(), sorted(folder.rglob("*"))
    page, target = tmp_path / "page.html", tmp_path / "fast.yaml"
    code, out, err = call(
        capsys, "try", "--minutes", "6", "--seconds", "2", "--only", "input", "--json",
        "--html", str(page), "-o", str(target), "--", sys.executable, "train.py", "slow",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    best = found["best"]
    assert best["setting"].startswith("num_workers=")
    assert best["speedup"]["low"] > 1.02
    assert best["same"] == "equal"
    workers = best["setting"].removeprefix("num_workers=")
    assert found["lines"] == [f"DataLoader(..., num_workers={workers}, persistent_workers=True)"]
    assert f"num_workers={workers}" in target.read_text()
    assert "num_workers" in page.read_text()
    assert (script.read_bytes(), sorted(folder.rglob("*"))) == before
