"""Use without Python code: YAML through LightningCLI, and the lightning-perf command."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import call
from helpers.configuration import parse
from helpers.faults import ForkServer
from helpers.small import Small, trainer
from helpers.versions import before
from lightning.pytorch.cli import LightningCLI
from mlflow import MlflowClient

import lightning_perf.cli
import lightning_perf.tracking
from lightning_perf import (
    All,
    AnyOf,
    ConfigError,
    Cyclic,
    Every,
    Fixed,
    Flops,
    GlobalRank,
    Not,
    PyTorch,
    SpeedMonitor,
    Suite,
)
from lightning_perf.cli import main
from lightning_perf.tracking.mlflow import MlflowRun

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def ours(cli: LightningCLI) -> list[Any]:
    kinds = (SpeedMonitor, Flops, PyTorch, Suite)
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, kinds)]


NESTED = """
class_path: lightning_perf.All
init_args:
  schedules:
  - {class_path: lightning_perf.Cyclic, init_args: {wait: 2}}
  - class_path: lightning_perf.Not
    init_args:
      schedule:
        class_path: lightning_perf.AnyOf
        init_args:
          schedules:
          - first 10ba
          - {class_path: lightning_perf.GlobalRank, init_args: {ranks: [0]}}
"""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("every 100ba for 3ba", Every("100ba", lasting="3ba")),
        (
            "{class_path: lightning_perf.Fixed, init_args: {warmup_steps: 5, active_steps: 2}}",
            Fixed(warmup_steps=5, active_steps=2),
        ),
        (NESTED, All([Cyclic(wait=2), Not(AnyOf(["first 10ba", GlobalRank([0])]))])),
    ],
    ids=["string", "class", "nested"],
)
def test_schedules_in_yaml(tmp_path: Path, written: str, expected: Any) -> None:
    """Strings, classes and nested combinations are parsed to the same schedules."""
    schedule = yaml.safe_load(written)
    node = {"class_path": "lightning_perf.PyTorch", "init_args": {"schedule": schedule}}
    (profiler,) = ours(parse(tmp_path, callbacks=[node]))
    assert profiler.schedule == expected


def run_cli(*args: str) -> None:
    """A script with LightningCLI, called with these arguments."""
    sys.argv = ["train.py", *args]
    warnings.simplefilter("ignore")
    LightningCLI(Small, run=False, save_config_callback=None)


def test_always_on_is_a_class_path(tmp_path: Path) -> None:
    """LightningCLI calls the function, without and with arguments."""
    for options in ({}, {"init_args": {"show_summary": False}}):
        node = {"class_path": "lightning_perf.always_on", **options}
        (suite,) = ours(parse(tmp_path, callbacks=[node]))
        assert [type(part) for part in suite.callbacks][:2] == [SpeedMonitor, Flops]
        assert suite.show_summary is not bool(options)


WRITTEN = """
trainer:
  logger: false
  callbacks:
  - {class_path: lightning_perf.PyTorch, init_args: {schedule: first 2ba}}
  - class_path: lightning_perf.Suite
    init_args:
      callbacks:
      - {class_path: lightning_perf.SpeedMonitor, init_args: {window_size: 7}}
      - {class_path: lightning_perf.Flops}
"""


def test_a_printed_configuration_can_be_read_back(fork_server: ForkServer, tmp_path: Path) -> None:
    """--print_config writes all settings, and its output builds the same callbacks."""
    path = tmp_path / "first.yaml"
    path.write_text(WRITTEN)
    ended = fork_server.run(tmp_path, run_cli, "--config", str(path), "--print_config")
    assert ended.code == 0, ended.stderr
    printed = (tmp_path / "stdout").read_text()
    again = parse(tmp_path, callbacks=yaml.safe_load(printed)["trainer"]["callbacks"])
    profiler, both = ours(again)
    assert profiler.schedule == PyTorch(schedule="first 2ba").schedule
    assert [type(part) for part in both.callbacks] == [SpeedMonitor, Flops]
    assert both.callbacks[0].window_size == 7


def run_report() -> None:
    """`lightning-perf report` about the latest run, in a process of its own.

    In this one, MLflow keeps the relative address of the database that an earlier test has used.
    """
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    main(["report"])


def run_example(*args: str) -> None:
    """The example as a script, called with these arguments."""
    example = CONFIGS.parent / "examples" / "train_gpt.py"
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # MLflow stores the address of another run there
    sys.argv = [str(example), *args]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_trains(
    fork_server: ForkServer, path: Path, in_tmp: Path, mlflow_tables: Path
) -> None:
    """Each file in configs/ runs for a few steps with the example, and its run can be reported."""
    if "flamegraph: true" in path.read_text() and before("1.19.1", "memray"):
        pytest.skip("memray's earlier flame graphs need a network")
    args = [
        "fit", "--config", str(path), "--trainer.max_steps", "12", "--trainer.accelerator", "cpu",
        "--data.megabytes", "0.2", "--model.layers", "1",
    ]  # fmt: skip
    if path.stem == "demo":
        shutil.copy(mlflow_tables, in_tmp)
        args += ["--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "6"]
    ended = fork_server.run(in_tmp, run_example, *args)
    assert ended.code == 0, ended.stderr
    assert "PerfWarning" not in ended.stderr
    ended = fork_server.run(in_tmp, run_report)
    assert ended.code == 0, ended.stderr
    report = (in_tmp / "stdout").read_text()
    assert "steps 0 to 11" in report
    assert "/report.html" in report
    if path.stem == "demo":
        assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in report
        assert "tokens/s" in report


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_works_in_the_environment_variable(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LIGHTNING_PERF accepts each file in configs/."""
    if path.stem == "memory_leak_hunt" and before("1.19.1", "memray"):
        pytest.skip("flamegraph=True needs memray 1.19.1")
    monkeypatch.setenv("LIGHTNING_PERF", str(path))
    (suite,) = [each for each in trainer(tmp_path).callbacks if isinstance(each, Suite)]
    named = re.findall(r"class_path: lightning_perf\.(\w+)", path.read_text())
    kinds = [type(part).__name__ for part in suite.parts]
    assert kinds == [name for name in named if name in kinds]
    assert kinds


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_the_report_wraps_no_path(
    mlflow_database: str,
    tmp_path: Path,
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any width, traces are one per line, in the order of batches; a failure is shown."""
    monkeypatch.setenv("COLUMNS", columns)
    client = MlflowClient(mlflow_database)
    experiment = client.create_experiment(f"wide-{columns}")
    run = client.create_run(experiment, run_name="[red]owl[/] :smile:").info
    names = [f"rank{rank}.{batch}.json" for rank in (0, 10) for batch in (9, 53, 103)]
    for name in reversed(names):
        (tmp_path / name).touch()
        client.log_artifact(run.run_id, str(tmp_path / name), f"{'deep/' * 9}torch_traces")
    client.set_terminated(run.run_id, "FAILED")
    _, out, _ = call(capsys, "report", run.run_id, "--tracking_uri", mlflow_database)
    printed = out.splitlines()
    assert printed[0] == f"[red]owl[/] :smile: ({run.run_id})"
    assert [line.rpartition("/")[2] for line in printed if "torch_traces" in line] == names[1:]
    assert any("status" in line and "failed" in line for line in printed)
    assert any(
        line.endswith(f"mlflow ui --backend-store-uri {mlflow_database}") for line in printed
    )


def test_the_report_lists_traces_and_pages(
    mlflow_database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latest traces of both tracers, and pages with the run's chart; no other file."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("opened"), run_name="owl").info
    files = {
        "torch_traces": [*(f"rank0.{n}.pt.trace.json.gz" for n in range(8, 13)), "notes.md"],
        "viztracer": ["rank0.1.json", "rank0.2.json.gz", "notes.md"],
        "memray": ["rank0.1.html"],
        "torch_memory_traces": [f"rank0.{n}.pt.trace.memory.html" for n in range(6)],
    }
    for folder, names in files.items():
        for name in names:
            (tmp_path / name).touch()
            client.log_artifact(run.run_id, str(tmp_path / name), f"owl/{folder}")
    stages = {"version": 1, "run": "owl", "status": "finished", "stages": {}}
    (tmp_path / "summary.json").write_text(json.dumps(stages))
    MlflowRun(mlflow_database, run.run_id).upload(tmp_path / "summary.json", "owl/summary.json")
    (tmp_path / "report.html").touch()
    client.log_artifact(run.run_id, str(tmp_path / "report.html"), "zoo")
    for name in ("report.html", "other.png"):
        (tmp_path / name).touch()
        client.log_artifact(run.run_id, str(tmp_path / name), "owl")
    _, out, _ = call(capsys, "report", run.run_id, "--tracking_uri", mlflow_database)
    printed = out.splitlines()
    traces = next(n for n, line in enumerate(printed) if line.startswith("Traces"))
    pages = next(n for n, line in enumerate(printed) if line.startswith("Pages"))
    assert [line.rpartition("/")[2] for line in printed[traces + 1 : pages]] == [
        *(f"rank0.{n}.pt.trace.json.gz" for n in range(10, 13)),
        "rank0.1.json",
        "rank0.2.json.gz",
        "  and 2 more",
    ]
    assert printed[pages + 5].endswith("/owl/report.html")
    assert printed[pages + 6] == "  and 4 more"
    assert not any(".md" in line for line in printed)


def test_the_report_shows_the_time_by_category(
    tmp_path: Path, mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The five largest categories with their shares; no table without `Timings`."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("times"), run_name="owl").info
    spent = {"forward": 0.2, "backward": 0.5, "logging": 0.1, "checkpoint": 0.09, "other": 0.06}
    for name, seconds in {**spent, "callbacks": 0.05, "train_batch": 9.0}.items():
        client.log_metric(run.run_id, f"timings/{name}", seconds)
    _, out, _ = call(capsys, "report", run.run_id, "--tracking_uri", mlflow_database)
    printed = out
    rows = [line for line in printed.splitlines() if "%" in line and "per batch" in line]
    shares = [row.split("%")[0].split()[-1] for row in rows]
    assert shares == ["50.0", "20.0", "10.0", "9.0", "6.0"]
    assert re.search(r"backward +│ +50.0%  500 ms per batch", printed)
    assert "train_batch" not in printed


EVERY = {"class_path": "lightning_perf.Every", "init_args": {"interval": "100ms"}}


@pytest.mark.parametrize(
    ("callbacks", "setting"),
    [
        (
            [{"class_path": "lightning_perf.SpeedMonitor", "init_args": {"window_size": 0}}],
            "window_size",
        ),
        ({"class_path": "lightning_perf.Flops", "init_args": {"schedule": "10bat"}}, "schedule"),
        ([{"class_path": "lightning_perf.Flops", "init_args": {"schedule": EVERY}}], "interval"),
    ],
    ids=["in a list", "alone", "in a schedule"],
)
def test_a_failed_cli_shows_our_message(
    fork_server: ForkServer, tmp_path: Path, callbacks: Any, setting: str
) -> None:
    """LightningCLI shows it as a line of its own, as one of the reasons; no hook is installed."""
    config = {"trainer": {"logger": False, "accelerator": "cpu", "callbacks": callbacks}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ended = fork_server.run(tmp_path, run_cli, "--config", "config.yaml")
    assert ended.code == 1
    assert re.search(rf"^\W*{setting}=.*\. Try \w+=.+\.$", ended.stderr, re.MULTILINE)
    hook = sys.excepthook
    ConfigError("size", 1, "is too small", "2")
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("module", "command", "install"),
    [
        ("rich.console", ["devices"], "rich"),
        ("rich.console", ["measure"], "rich"),
        ("rich.console", ["report"], "rich"),
        ("mlflow", ["report"], '"lightning_perf[mlflow]"'),
    ],
)
def test_a_missing_package_gives_a_one_line_error(
    module: str,
    command: list[str],
    install: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message says what to install."""
    for name in [name for name in sys.modules if name.startswith("lightning_perf.cli.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(lightning_perf.cli, name.rpartition(".")[2])
    if module == "mlflow":
        monkeypatch.delitem(sys.modules, "lightning_perf.tracking.runs", raising=False)
        # Otherwise later tests would change the module that is imported here.
        monkeypatch.delattr(lightning_perf.tracking, "runs", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    package, called = module.partition(".")[0], f"lightning-perf {command[0]}"
    expected = f"{called}: the package {package} is missing. Try pip install {install}.\n"
    assert capsys.readouterr().err == expected
