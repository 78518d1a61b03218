"""The command as a whole: options, JSON, exit codes, pipes, the doctor, and `run`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import call, exit_code
from helpers.faults import ForkServer
from helpers.servers import free_port

from lightning_perf import __version__
from lightning_perf.cli import main

COMMANDS = [
    "capture", "compare", "devices", "doctor", "measure", "report", "run", "trace", "upload",
    "watch",
]  # fmt: skip


def test_the_version_is_that_of_pip(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the version of the installed package."""
    assert call(capsys, "--version")[:2] == (0, f"lightning-perf {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It describes the command and each option."""
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert len(out.splitlines()) > 5
    assert command in call(capsys, "--help")[1]


@pytest.mark.parametrize("option", ["--tracking-uri", "--tracking_uri"])
@pytest.mark.parametrize("form", ["{}=sqlite:///none.db", "{} sqlite:///none.db"])
def test_options_accept_dashes_and_underscores(
    option: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both spellings work, also with an equals sign."""
    code, _, err = call(capsys, "report", *form.format(option).split())
    assert (code, "there is no none.db" in err) == (2, True)


@pytest.mark.parametrize("args", [["no-such"], ["report", "--nonsense"], ["measure", "--", "x"]])
def test_invalid_arguments_give_exit_code_2(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback is shown."""
    code, _, err = call(capsys, *args)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["report"], "there is no summary.json below the current folder, and there is no"),
        (["report", "x"], "there is no summary.json in a folder x below the current folder, and"),
        (["compare", "x", "y"], "in a folder x below the current folder"),
        (["trace", "x.json"], "trace: x.json: No such file or directory."),
        (["trace", "--combine", "x"], "x has no traces of ranks, such as rank0.12.json.gz."),
        (["compare", "x"], "the following arguments are required: baselines"),
        (["reprot"], "invalid choice: 'reprot' (choose from"),
        (["report", "--jsn"], "unrecognized arguments: --jsn. Try lightning-perf --help"),
        (["capture", "abc"], "invalid int value: 'abc'. Try lightning-perf capture --help"),
        (["trace", "."], "trace: .: Is a directory."),
        (["capture"], "the following arguments are required: pid"),
    ],
)
def test_a_missing_target_names_the_searched_places(
    args: list[str], why: str, in_tmp: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A missing run, file or command gives one line with the places."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, _, err = call(capsys, *args)
    assert (code, why in err) == (2, True), err


def test_tables_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--json prints data only, in FLOP/s."""
    (h100,) = json.loads(call(capsys, "devices", "H100 SXM", "--json")[1])
    assert h100["bf16"] == pytest.approx(9.9e14, rel=0.01)
    measured = json.loads(call(capsys, "measure", "--json")[1])
    assert measured["measured"] > 1e9
    assert measured["dtype"] == "float32"
    short = json.loads(call(capsys, "measure", "--dtype", "bf16", "--json")[1])
    assert short["dtype"] == "bfloat16"
    assert json.loads(call(capsys, "upload", str(tmp_path), "--json")[1]) == {
        "uploaded": 0, "left": [],
    }  # fmt: skip


def test_uploads_say_what_they_did_not_find(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a list there is nothing to upload; a damaged line is left, and the code is 1."""
    code, out, _ = call(capsys, "upload")
    assert (code, out) == (0, "nothing to upload: there is no pending_uploads.jsonl below .\n")
    (in_tmp / "pending_uploads.jsonl").write_text("not JSON\n")
    command = [sys.executable, "-m", "lightning_perf", "upload"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "0 uploaded, 1 left\n")
    warned, left = done.stderr.splitlines()
    assert warned.startswith("lightning_perf: pending_uploads.jsonl has damaged lines")
    assert left == "pending_uploads.jsonl: a damaged line"


def findings(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    code, out, _ = call(capsys, "doctor", "--json")
    return code, {each["name"]: (each["value"], each["state"]) for each in json.loads(out)}


def test_the_doctor_of_a_valid_setup(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows versions, devices and the setup, and writes no file."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    code, found = findings(capsys)
    assert code == 0
    assert found["lightning_perf"] == (__version__, "ok")
    assert found["LIGHTNING_PERF"][0].startswith("SpeedMonitor, ")
    assert found["lightning.pytorch.callbacks_factory"] == ("installed", "ok")
    assert not list(in_tmp.iterdir())
    assert "torch is built for" in call(capsys, "doctor")[1]


def test_the_doctor_names_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a missing package with its pip command, a wrong variable, and a failing server."""
    from lightning_perf.cli import machine

    monkeypatch.setattr(machine, "PACKAGES", {"no-such-package": "nothing", "mlflow": "reports"})
    monkeypatch.setenv("LIGHTNING_PERF", "none.yaml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{free_port()}")
    code, found = findings(capsys)
    assert code == 1
    value, state = found["no-such-package"]
    assert state == "missing"
    assert value.endswith("pip install no-such-package")
    assert found["LIGHTNING_PERF"][1] == "error"
    assert "does not respond" in found["MLflow"][0]
    assert "secret" not in found["MLflow"][0]


def test_the_doctor_names_releases_that_do_not_work_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip installs MLflow 2 or 3.1 beside SQLAlchemy 2.1, beside which it does not import."""
    from lightning_perf.cli import machine

    releases = {"mlflow": "2.22.0", "sqlalchemy": "2.1.9"}
    monkeypatch.setattr(machine, "PACKAGES", {"mlflow": "reports"})
    monkeypatch.setattr(machine, "version", releases.__getitem__)
    problem = 'does not import beside SQLAlchemy 2.1.9: pip install "sqlalchemy<2.1"'
    assert findings(capsys)[1]["mlflow"] == (f"2.22.0 {problem}", "error")
    for package, release in (("sqlalchemy", "2.0.43"), ("mlflow", "3.14.0")):
        monkeypatch.setitem(releases, "sqlalchemy", "2.1.9")
        monkeypatch.setitem(releases, package, release)
        assert findings(capsys)[1]["mlflow"][0] == releases["mlflow"]


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ([], 2, "there is no command"),
        (["--"], 2, "there is no command"),
        (["--config", "none.yaml", "--", "true"], 2, "there is no file none.yaml"),
        (["--", "no-such-program"], 127, "no-such-program is not a program"),
        (
            ["no.py", "--lr", "1"],
            127,
            "no.py is not a program. Try lightning-perf run python no.py --lr 1.",
        ),
    ],
)
def test_a_script_that_cannot_start_gives_a_shell_s_exit_code(
    args: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one line of output."""
    found, _, err = call(capsys, "run", *args)
    assert (found, err) == (code, f"lightning-perf run: {err.partition(': ')[2].rstrip()}\n")
    assert why in err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "- class_path: lightning_perf.SpedMonitor",
            "no attribute 'SpedMonitor'. Did you mean SpeedMonitor?",
        ),
        (
            "- {class_path: lightning_perf.Suite, init_args: {callbacks: "
            "[class_path: lightning_perf.Timigns]}}",
            "no attribute 'Timigns'",
        ),
        ("- class_path: lightning_perf.qqqqq", "no attribute 'qqqqq'"),
        (
            "- {class_path: lightning_perf.SpeedMonitor, init_args: {window_sze: 3}}",
            r"Option 'window_sze' is not accepted|Key 'window_sze' is not expected",
        ),
        (
            "- {class_path: lightning_perf.Suite, init_args: {callbacks: "
            "[{class_path: lightning_perf.PyTorch, init_args: {shedule: always}}]}}",
            r"Option 'shedule' is not accepted|Key 'shedule' is not expected",
        ),
        (
            "- {class_path: lightning_perf.PyTorch, init_args: {schedule: evry 10ba}}",
            "schedule='evry 10ba' is not a valid schedule",
        ),
        (
            "- class_path: torch.nn.Linear",
            r"does not correspond to a subclass of .*PerfCallback\b.*\.",
        ),
        (
            "[{class_path: lightning_perf.Flops}, {class_path: lightning_perf.Flops}]",
            "one callback",
        ),
        ("callbacks: {class_path: lightning_perf.Flops}", "is a file without a list of callbacks."),
        ("trainer: [", "cannot be used: while parsing"),
    ],
)
def test_callbacks_that_cannot_be_constructed_start_no_training(
    text: str, why: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the training would end before the user sees that nothing was measured."""
    (in_tmp / "bad.yaml").write_text(text)
    code, _, err = call(capsys, "run", "--config", "bad.yaml", "--", "no-such-program")
    assert code == 127
    code, _, err = call(capsys, "run", "--config", "bad.yaml", "--", "true")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("lightning-perf run: bad.yaml ")
    assert re.search(why, err)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["of_the_program_s_own_python", "jsonargparse"])
def test_what_cannot_be_imported_is_left_to_the_program(missing: str, in_tmp: Path) -> None:
    """Its Python may be another one: there the module may exist."""
    (in_tmp / "my.yaml").write_text(f"- class_path: {missing}.Mine")
    block = f"import sys; sys.modules[{missing!r}] = None; from lightning_perf.cli import main; "
    code = f"{block}main(['run', '--config', 'my.yaml', '--', 'echo', 'trains'])"
    command = [sys.executable, "-W", "ignore", "-c", code]  # Lightning 2.2 has deprecations
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trains\n", "")


SHOW = "import os, sys; print(os.environ['LIGHTNING_PERF'], sys.argv[1:]); sys.exit(7)"


def test_run_passes_all_arguments_to_the_script(fork_server: ForkServer, in_tmp: Path) -> None:
    """The script gets an absolute path and options like ours, and its exit code is returned."""
    (in_tmp / "my.yaml").write_text("- class_path: lightning_perf.Flops")
    ours = ["run", "--config", "my.yaml", "--"]
    theirs = [sys.executable, "-c", SHOW, "--config", "x", "--", "--tracking_uri"]
    expected = f"{in_tmp.resolve() / 'my.yaml'} ['--config', 'x', '--', '--tracking_uri']\n"
    for command in ([*ours, *theirs], [*ours[:-1], *theirs]):  # with and without our dashes
        (in_tmp / "stdout").unlink(missing_ok=True)
        ended = fork_server.run(in_tmp, main, command)
        assert (ended.code, (in_tmp / "stdout").read_text()) == (7, expected)


#: Each command that prints, in a fork of a process that has all imports.
PIPES = """
import os, sys
import lightning_perf.callbacks.factory, lightning_perf.flops, rich.console
import lightning_perf.traces.combine, lightning_perf.tracking.mlflow, lightning_perf.tracking.runs
from lightning_perf.cli import main, all_commands
all_commands()
for args in sys.argv[1:]:
    if not os.fork():
        try:
            main(args.split())
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    assert code == 0 or (code == 1 and "doctor" in args), (args, code)
"""
PRINTING = [
    "--help", "--version", "report --help", "devices", "devices --json", "doctor --json", "measure",
    "report .", "report . --json", "upload", "upload --json",
    "watch", "watch --json", "trace --combine . -o all.json.gz",
]  # fmt: skip


@pytest.mark.slow
def test_a_broken_pipe_gives_no_traceback() -> None:
    """As with `| head -1`: stderr is empty, and the code is 0."""
    summary = {"version": 1, "run": "owl", "status": "finished", "stages": {}}
    Path("summary.json").write_text(json.dumps(summary))
    for rank in (0, 1):
        events = [{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]
        trace = {"traceEvents": events, "rank": rank, "distributedInfo": {"rank": rank}}
        Path(f"rank{rank}.1.pt.trace.json").write_text(json.dumps(trace))
    command = [sys.executable, "-c", PIPES, *PRINTING]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_output_gives_no_traceback(
    stream: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `>&-`, where Python has no such stream."""
    monkeypatch.setattr(sys, stream, None)
    assert exit_code("devices", "H100 SXM") == 0
    assert exit_code("devices", "no-such-device") == 2
    getattr(sys, stream).close()


@pytest.mark.slow
def test_an_ascii_output_gives_no_traceback(tmp_path: Path) -> None:
    """What it cannot show is written as an escape."""
    summary = {"version": 1, "run": "\xb5\u2192", "status": "finished", "stages": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for command in ("report", "watch"):
        done = subprocess.run(
            [sys.executable, "-m", "lightning_perf", command, str(tmp_path)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "\\xb5\\u2192" in done.stdout


@pytest.mark.slow
def test_no_color_disables_colours() -> None:
    """NO_COLOR applies even if colours are forced."""
    command = [sys.executable, "-m", "lightning_perf", "devices", "H100 SXM"]
    environment = os.environ | {"NO_COLOR": "1", "FORCE_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not re.search(r"\x1b\[[0-9;]*(3|4|9)[0-7]m", done.stdout)
