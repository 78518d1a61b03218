"""lightning-perf report: shares of the whole run, and runs that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from helpers.clocks import Planned
from helpers.command import call
from helpers.servers import free_port
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

import lightning_perf.tracking.runs
from lightning_perf import PyTorch, Timings
from lightning_perf.cli.runs import _show_run
from lightning_perf.terminal import new_console
from lightning_perf.tracking.mlflow import MlflowRun, use_for_artifacts
from lightning_perf.tracking.runs import Run


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    settings = {"log_every_n_steps": 4, "limit_val_batches": 1, "val_check_interval": 8}
    trainer(tmp_path, Timings(), **{**settings, **options}).fit(Planned(monkeypatch))


def report(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str], str]:
    """The exit code, the table's lines without borders, and stderr."""
    code, out, err = call(capsys, "report", *args)
    lines = [line.strip("│ ") for line in out.splitlines() if line.startswith("│")]
    return code, [" ".join(line.split()) for line in lines], err


def test_shares_are_of_the_whole_run(
    tmp_path: Path,
    mlflow_database: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two validations of 4 s beside 16 batches of 1 s are a third."""
    monkeypatch.setenv("COLUMNS", "200")
    logger = MLFlowLogger("shares", tracking_uri=mlflow_database, run_name="owl")
    planned(tmp_path, monkeypatch, logger=logger)
    code, lines, _ = report(capsys, str(logger.run_id), "--tracking_uri", mlflow_database)
    assert code == 0
    assert lines[2:] == [
        "whole run │ last window",
        "steps 0 to 15 │ steps 12 to 15",
        "all time, with │ 1.50 s per batch │ 1.00 s per batch",
        "start and end",
        "forward │ 66.7% 1.00 s per batch │ 100.0% 1.00 s per batch",
        "validation │ 33.3% 500 ms per batch │ 0.0% 0 µs per batch",
    ]


def test_a_step_has_one_point_and_validation_counts_once(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds from the first validation on; the files contain the time after the last step."""
    planned(tmp_path, monkeypatch, logger=records)
    assert records.of("timings/validation") == [(11, 1.0), (15, 0.0)]
    (path,) = tmp_path.glob("records-version_0/summary.json")
    summary = json.loads(path.read_text())
    whole, last = (summary["stages"]["train"][name] for name in ("whole_run", "last_window"))
    assert (whole["first"], whole["last"], whole["batches"]) == (0, 15, 16)
    assert {name: value for name, value in whole["timings"].items() if value} == {
        "forward": 16.0, "validation": 8.0,
    }  # fmt: skip
    assert (last["first"], last["last"], last["timings"]["validation"]) == (12, 15, 0.0)


def test_a_run_without_a_summary_is_read_from_its_metrics(
    mlflow_database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last report is shown."""
    monkeypatch.setenv("COLUMNS", "200")
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("cut off")).info.run_id
    for step, validation in ((9, 0.0), (19, 1.0), (24, 4.0)):
        client.log_metric(run, "timings/forward", 1.0, step=step)
        client.log_metric(run, "timings/validation", validation, step=step)
    _, lines, _ = report(capsys, run, "--tracking_uri", mlflow_database)
    assert lines[-6:] == [
        "last window",
        "step 24",
        "all time, with │ 5.00 s per batch",
        "start and end",
        "validation │ 80.0% 4.00 s per batch",
        "forward │ 20.0% 1.00 s per batch",
    ]


def test_mfu_of_a_run_without_a_summary_may_be_that_of_speed_monitor(
    mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `Flops` its key is the only one of MFU."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("monitored")).info.run_id
    client.log_metric(run, "throughput/device/mfu", 0.25, step=9)
    _, lines, _ = report(capsys, run, "--tracking_uri", mlflow_database)
    assert any("MFU" in line and "25%" in line for line in lines)


def test_database_options_are_not_part_of_its_path(
    mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In SQLAlchemy they follow a question mark."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("options")).info.run_id
    code, _, err = report(capsys, run, "--tracking_uri", f"{mlflow_database}?timeout=30")
    assert (code, err) == (0, "")


def test_a_quote_in_a_name_is_part_of_it(
    mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run named "its" is not found as "it's"."""
    client = MlflowClient(mlflow_database)
    experiment = client.create_experiment("quotes")
    wanted = client.create_run(experiment, run_name="it's").info.run_id
    client.create_run(experiment, run_name="its")
    assert call(capsys, "report", "it's", "--tracking_uri", mlflow_database)[1].startswith(
        f"it's ({wanted})"
    )


def test_a_run_is_found_among_many_experiments(
    mlflow_database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow returns experiments in pages of 1,000: here of two, with the run on the last page."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("first"), run_name="owl").info.run_id
    for number in range(4):
        client.create_experiment(f"later {number}")
    paged = partialmethod(MlflowClient.search_experiments, max_results=2)
    monkeypatch.setattr(MlflowClient, "search_experiments", paged)
    code, out, _ = call(capsys, "report", "owl", "--tracking_uri", mlflow_database)
    assert code == 0
    assert run in out


def test_a_run_with_the_rates_of_another_tool_is_read(
    mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tokens per second but no batches per second, the step is computed from the tokens."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("other tool")).info.run_id
    client.log_metric(run, "throughput/tokens_per_sec", 500.0, step=7)
    code, lines, _ = report(capsys, run, "--tracking_uri", mlflow_database)
    assert (code, lines[-3:]) == (0, ["last window", "step 7", "tokens/s │ 500"])


def test_the_report_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    """The address of a database is printed without its password, like that of a server."""
    summary = {"version": 1, "run": "owl", "status": "finished", "stages": {}}
    for uri in ("mysql://me:secret@host/db", "https://me:secret@host"):
        _show_run(Run("owl", summary, (), uri), new_console(soft_wrap=True))
        out = capsys.readouterr().out
        assert "//host" in out
        assert "secret" not in out


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "sqlite:///none.db",
        "http://127.0.0.1:{port}",
        "nowhere://x",
        "http://127.0.0.1:x",
        "http://",
    ],
)
def test_an_unreadable_address_gives_a_one_line_error(
    uri: str, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder, or a missing database or server: exit code 2, and no file is written."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    args = ["--tracking_uri", uri.format(port=free_port())] if uri else []
    code, lines, said = report(capsys, *args)
    assert (code, lines) == (2, [])
    assert said.startswith("lightning-perf report: ")
    assert said.count("\n") == 1
    assert list(in_tmp.iterdir()) == []


def test_a_run_that_only_recorded_names_no_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a profiler alone has no figures: its report has no empty row for a stage."""
    trainer(tmp_path, PyTorch(schedule="first 1ba")).fit(Small())
    code, lines, err = report(capsys, str(tmp_path))
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == ["devices"]


@pytest.mark.parametrize("run", ["no-such-run", "0" * 32])
def test_a_missing_run_gives_a_one_line_error(
    run: str, mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the run id."""
    MlflowClient(mlflow_database).search_experiments()
    capsys.readouterr()  # MLflow may say that it creates its database
    code, _, said = report(capsys, run, "--tracking_uri", mlflow_database)
    assert code == 2
    assert run in said
    assert said.count("\n") == 1


def test_a_run_behind_a_server_is_read_from_there(
    mlflow_server: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its artifacts are read too, although the process's tracking address is another one."""
    client = MlflowClient(mlflow_server)
    run = client.create_run(client.create_experiment("behind")).info.run_id
    whole = {"first": 0, "last": 9, "batches": 10, "timings": {"forward": 5.0}}
    stages = {"train": {"whole_run": whole}}
    summary = {"version": 1, "run": "owl", "status": "finished", "stages": stages}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    use_for_artifacts(mlflow_server)
    MlflowRun(mlflow_server, run).upload(tmp_path / "summary.json", "owl/summary.json")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///another.db")
    use_for_artifacts("sqlite:///another.db")
    code, lines, _ = report(capsys, run, "--tracking_uri", mlflow_server)
    assert code == 0
    assert lines[-1] == "forward │ 100.0% 500 ms per batch"


@pytest.fixture
def default_database(mlflow_database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the place of ./mlflow.db, which MLflow finds in the folder of an earlier test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(
        lightning_perf.tracking.runs, "default_tracking_uri", lambda: mlflow_database
    )
    return mlflow_database


def written(folder: Path, run: str = "owl", **more: Any) -> Path:
    """A folder with a summary."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"version": 1, "run": run, "status": "finished", "stages": {"train": {}}, **more}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def measured(run: str, seconds: float) -> str:
    """A summary with the time per batch."""
    windows = {
        "whole_run": {"first": 0, "last": 9, "batches": 10, "timings": {"forward": 10 * seconds}}
    }
    return json.dumps(
        {"version": 1, "run": run, "status": "finished", "stages": {"train": windows}}
    )


def test_files_that_the_user_adds_in_mlflow_do_not_replace_the_summary(
    mlflow_database: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline's summary and another tool's file of that name, also after the run is renamed."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment("added"), run_name="change").info.run_id
    client.set_terminated(run)  # `watch` waits for the end
    file = in_tmp / "summary.json"

    def add(content: str, folder: str | None) -> None:
        file.write_text(content)
        client.log_artifact(run, str(file), folder)

    def shown(name: str) -> bool:
        outputs = [
            call(capsys, command, name, "--tracking-uri", mlflow_database)[1]
            for command in ("report", "watch")
        ]
        return ["20.0 ms" in outputs[0], "forward 100%" in outputs[1]] == [True, True]

    add(measured("other", 0.5), "other")
    assert not shown("change")  # we have uploaded none
    file.write_text(measured("change", 0.02))
    MlflowRun(mlflow_database, run).upload(file, "change/summary.json")
    add(measured("main-1", 0.5), "main-1")
    add('{"rouge": 1}', "metrics")
    add('{"rouge": 1}', None)
    add(measured("main-1", 0.5), "change/main-1")
    assert shown("change")
    client.update_run(run, name="renamed")
    assert shown("renamed")
    client.delete_tag(run, "lightning_perf_summary")
    assert not shown("renamed")


def test_files_that_the_user_adds_to_a_folder_do_not_replace_the_summary(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline's summary in the run's folder, and another tool's file in the current one."""
    folder = written(in_tmp / "runs" / "change", "change")
    (folder / "summary.json").rename(folder / "summary-2.json")  # the user's file was first
    (folder / "summary.json").write_text('{"rouge": 1}')
    (folder / "summary-1.json").write_text(measured("main-1", 0.5))
    written(folder / "main-1", "main-1")
    (in_tmp / "summary.json").write_text('{"rouge": 1}')
    os.utime(folder / "summary-2.json", (1e9, 1e9))
    for what in ("change", "./runs/change"):
        assert call(capsys, "report", what)[1].startswith("change (runs/change/summary-2.json)")
    assert " change finished" in call(capsys, "watch", "change")[1]
    for path in folder.glob("main-1/*"):
        os.utime(path, (1e8, 1e8))
    assert call(capsys, "report", ".")[1].startswith("change (")
    assert " change finished" in call(capsys, "watch")[1]


@pytest.mark.slow
def test_a_file_of_another_tool_is_not_a_run(
    in_tmp: Path, mlflow_tables: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A newer summary.json of something else hides neither a folder nor a run in MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it in other tests
    shutil.copy(mlflow_tables, in_tmp / "own.db")
    address = f"sqlite:///{in_tmp}/own.db"  # without the runs of other tests, which may be later
    monkeypatch.setattr(lightning_perf.tracking.runs, "default_tracking_uri", lambda: address)
    client = MlflowClient(address)
    run = client.create_run(client.create_experiment("another tool"), run_name="mine").info.run_id
    client.set_terminated(run)
    (in_tmp / "results").mkdir()
    (in_tmp / "results" / "summary.json").write_text('{"accuracy": 0.9}')
    assert call(capsys, "report")[1].startswith(f"mine ({run})")
    (in_tmp / "mine").mkdir()
    for args in (["mine"], ["mine", "--tracking-uri", address]):
        assert run in call(capsys, "report", *args)[1]
    os.utime(written(in_tmp / "elk", "elk") / "summary.json", (2e9, 2e9))
    assert call(capsys, "report")[1].startswith("elk (elk)")


def test_a_name_of_several_runs_gives_the_latest_and_says_so(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], default_database: str
) -> None:
    """In folders and in MLflow. A path means one folder, and an address MLflow."""
    client = MlflowClient(default_database)
    experiment = client.create_experiment("several")
    runs = [client.create_run(experiment, run_name="bat", start_time=n) for n in (1, 2, 3)]
    for number, name in enumerate(("bat", "bat-1f")):
        path = written(in_tmp / name, "bat") / "summary.json"
        os.utime(path, (1e9 + number, 1e9 + number))
    for what, title, note in (
        ("bat", "bat (bat-1f)", "2 runs have this name: this is the latest one."),
        ("./bat", "bat (bat)", ""),
        ("bat-1f", "bat (bat-1f)", ""),
    ):
        out = call(capsys, "report", what)[1]
        assert out.startswith(title)
        assert (note or "runs have") in out if note else "runs have" not in out
    out = call(capsys, "report", "bat", "--tracking-uri", default_database)[1]
    assert out.startswith(f"bat ({runs[-1].info.run_id})")
    assert "3 runs have this name" in out
    code, _, err = call(capsys, "report", "bat", "--tracking-uri", "sqlite:///none.db")
    assert (code, "none.db" in err) == (2, True)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("/no/such", "/no/such does not exist."),
        ("./no", "./no does not exist."),
        ("mlflow.db", "mlflow.db is a database. Try --tracking-uri sqlite:///mlflow.db."),
        ("gnu/torch_traces", "there is no summary.json below gnu/torch_traces. Try "),
        ("gnuu", "Did you mean gnu?"),
    ],
)
def test_a_run_that_is_not_found_gives_the_next_step(
    what: str, why: str, in_tmp: Path, capsys: pytest.CaptureFixture[str], default_database: str
) -> None:
    """The message names what to write instead."""
    if what == "mlflow.db":  # MLflow would open it for the other cases, and keep it open
        (in_tmp / what).write_bytes(b"SQLite format 3\0")
    (written(in_tmp / "gnu") / "torch_traces").mkdir()
    code, _, err = call(capsys, "report", what)
    assert (code, err.count("\n")) == (2, 1), err
    assert why in err


def test_a_database_that_cannot_be_read_is_named(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is that of the latest folder, and says why a later run may be missing."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    database = in_tmp / "damaged.db"
    address = f"sqlite:///{database}"
    monkeypatch.setattr(lightning_perf.tracking.runs, "default_tracking_uri", lambda: address)
    written(in_tmp / "owl")
    assert "There may be a later run" not in call(capsys, "report")[1]  # there is no database
    database.write_bytes(b"SQLite format 3\0" + b"damaged " * 100)
    code, out, _ = call(capsys, "report")
    assert code == 0
    assert "owl (owl)" in out
    assert f"There may be a later run: {address} could not be read (" in out


@pytest.mark.parametrize(
    ("address", "lines"),
    [
        (
            "sqlite:///mlflow.db",
            [
                "  mlflow ui --backend-store-uri sqlite:///mlflow.db",
                "and open:",
                "  http://127.0.0.1:5000/#/experiments/1/runs/ab",
            ],
        ),
        ("http://me:secret@mlflow:5000", ["  http://mlflow:5000/#/experiments/1/runs/ab"]),
    ],
)
def test_the_report_says_how_to_see_the_charts(
    address: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own page is opened; a database is served first."""
    summary = {"version": 1, "run": "owl", "status": "finished", "stages": {}}
    run = Run("owl", summary, (), address, "#/experiments/1/runs/ab")
    _show_run(run, new_console(soft_wrap=True))
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines
