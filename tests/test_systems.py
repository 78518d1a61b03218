"""Systems other than Linux, simulated: what is missing there is left out, and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TESTS
from helpers.command import call
from helpers.small import Small, trainer

from lightning_perf import always_on, files
from lightning_perf.cli import runs
from lightning_perf.terminal import new_console, say

ON_WINDOWS = """
import sys
from pathlib import Path
from helpers.other_system import become_windows
become_windows()
import lightning_perf
from helpers.small import Small, trainer
"""

TRAINING = """
from lightning_perf import OnSignal, PyTorch, VizTracer, always_on

class Interrupted(Small):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            signal.raise_signal(signal.Signals["SIGBREAK"])
        return super().training_step(batch, batch_idx)

import signal, warnings
warnings.simplefilter("always", lightning_perf.PerfWarning)
for name in lightning_perf.__all__:
    if name != "Memray":
        getattr(lightning_perf, name)
profilers = [PyTorch(schedule=OnSignal(lasting="2ba")), VizTracer(schedule="at 12ba")]
trainer(Path(sys.argv[1]), always_on(), *profilers, max_epochs=2).fit(Interrupted())
"""


def on_windows(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", ON_WINDOWS + code, *map(str, args)]
    env = os.environ | {"PYTHONIOENCODING": "cp1252"}
    return subprocess.run(command, cwd=TESTS, env=env, capture_output=True, encoding="cp1252")


@pytest.mark.slow
def test_windows_trains_with_everything_but_memray(tmp_path: Path) -> None:
    """All names are there, a training gives a summary and traces, and Ctrl+Break starts one."""
    done = on_windows(TRAINING, tmp_path)
    assert done.returncode == 0, done.stderr
    notices = [line for line in done.stderr.splitlines() if "lightning_perf: " in line]
    assert all(" files are in " in line for line in notices)
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"
    assert "MFU" in done.stdout
    found = sorted(path.parent.name for path in tmp_path.rglob("rank0*.json.gz"))
    assert found == ["torch_traces", "torch_traces", "viztracer"]


@pytest.mark.slow
def test_the_doctor_says_what_windows_lacks() -> None:
    """Each line names what is missing, and which feature ends without it."""
    done = on_windows("from lightning_perf.cli import main; main(['doctor', '--json'])")
    found = {each["name"]: each for each in json.loads(done.stdout)}
    for name in ("SIGUSR2", "SIGURG", "/proc", "resource"):
        assert found[name]["state"] == "missing"
    assert "OnSignal() records after Ctrl+Break" in found["SIGUSR2"]["value"]


@pytest.mark.slow
def test_messages_name_what_windows_has() -> None:
    """The suggested signal exists, and Memray names the systems that have it."""
    code = """
from lightning_perf import Memray, OnSignal
from lightning_perf.cli import main
for attempt in (lambda: OnSignal("SIGUSR2"), Memray, lambda: main(["capture", "1"])):
    try:
        attempt()
    except (ValueError, ImportError) as error:
        print(error)
"""
    done = on_windows(code)
    wrong, memray = done.stdout.splitlines()
    assert 'Try signal="SIGBREAK"' in wrong
    assert memray == "Memray needs the package memray. Try Linux or macOS."
    assert "Ctrl+Break in its console" in done.stderr


@pytest.mark.slow
def test_run_waits_for_the_training_on_windows() -> None:
    """A program that replaces another one there returns at once, without its exit code."""
    code = "from lightning_perf.cli import main; main(['run', sys.executable, '-c', 'exit(7)'])"
    assert on_windows(code).returncode == 7


def test_a_process_is_watched_without_the_files_of_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is found below the working folder of its process, and not that of another one."""
    monkeypatch.setattr(runs, "PROC", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    assert runs._file_of(os.getpid()) is None
    trainer(tmp_path, always_on(show_summary=False), max_epochs=1).fit(Small())
    (summary,) = tmp_path.rglob("summary.json")
    assert runs._file_of(os.getpid()) == summary
    content = json.loads(summary.read_text())
    summary.write_text(json.dumps(content | {"process": {**content["process"], "pid": 1}}))
    assert runs._file_of(os.getpid()) is None


def test_capture_names_the_plain_signal_without_the_files_of_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sends no signal that might end the process."""
    monkeypatch.setattr(runs, "PROC", tmp_path / "none")
    code, _, err = call(capsys, "capture", str(os.getpid()))
    assert code == 1
    assert f"try kill -USR2 {os.getpid()}" in err


def test_a_file_is_renamed_once_nobody_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to rename a file that another process has open."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    plain, refusals = Path.replace, iter([True, True, False])

    def refuse(self: Path, other: Path) -> Path:
        if next(refusals):
            raise PermissionError(13, "in use", str(self))
        return plain(self, other)

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    files.replace_file(source, target)
    assert target.read_text() == "new"
    monkeypatch.setattr(sys, "platform", "linux")
    refusals = iter([True])
    with pytest.raises(PermissionError):
        files.replace_file(target, source)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_names_are_escaped_where_the_terminal_lacks_their_characters(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consoles of Windows may have a code page; an error would leave out the rest."""
    with (tmp_path / "output").open("w", encoding=encoding) as file:
        monkeypatch.setattr(sys, "stdout", file)
        new_console().print("käse \u65e5")
        say("käse \u65e5")
    lines = (tmp_path / "output").read_text(encoding=encoding).splitlines()
    expected = "käse \\u65e5" if encoding == "cp1252" else "k\\xe4se \\u65e5"
    assert [line.strip() for line in lines] == [expected] * 2
