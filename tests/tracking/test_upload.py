"""`lightning-perf upload`: files that training could not upload are uploaded later."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.recordings import PATIENCE, record
from helpers.servers import free_port
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PyTorch, always_on
from lightning_perf.errors import PerfWarning
from lightning_perf.traces.uploads import PendingUpload, Target, append_pending
from lightning_perf.tracking.mlflow import MlflowRun


@pytest.fixture(scope="module")
def run_id(mlflow_database: str) -> str:
    """A run for the uploads."""
    client = MlflowClient(mlflow_database)
    return str(client.create_run(client.create_experiment("uploads")).info.run_id)


def artifacts(address: str, run_id: str, folder: str) -> list[str]:
    return [entry.path for entry in MlflowClient(address).list_artifacts(run_id, folder)]


def listed(folder: Path, remote: str, address: str, run_id: str) -> PendingUpload:
    """Create a file and return its entry, not yet written to a list."""
    path = folder / Path(remote).name
    path.write_text("a trace")
    return PendingUpload(
        str(path), remote, "run", "no route", {"tracking_uri": address, "run_id": run_id}
    )


def test_listed_files_are_uploaded_to_their_runs(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists of the folder and its subfolders are processed and then removed."""
    below = tmp_path / "runs" / "one"
    below.mkdir(parents=True)
    append_pending(tmp_path, listed(tmp_path, "sent/a.json", mlflow_database, run_id))
    append_pending(below, listed(below, "sent/b.json", mlflow_database, run_id))
    assert exit_code("upload", str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "sent") == ["sent/a.json", "sent/b.json"]
    assert not list(tmp_path.rglob("pending_uploads.jsonl"))
    assert "2 uploaded, 0 left" in capsys.readouterr().out
    assert (tmp_path / "a.json").exists()


def test_failed_uploads_stay_listed(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreachable server and a missing run keep their entries, with the error."""
    dead = f"http://me:secret@127.0.0.1:{free_port()}"
    entries = [
        listed(tmp_path, "dead/a.json", dead, run_id),
        listed(tmp_path, "dead/b.json", mlflow_database, run_id),
        listed(tmp_path, "dead/c.json", mlflow_database, "nosuchrun"),
    ]
    for entry in entries:
        append_pending(tmp_path, entry)
    assert exit_code("upload", str(tmp_path)) == 1
    first, last = read_pending(tmp_path)
    assert (first.remote, last.remote) == ("dead/a.json", "dead/c.json")
    assert "does not respond" in first.error
    assert "nosuchrun" in last.error
    printed = capsys.readouterr()
    assert "1 uploaded, 2 left" in printed.out
    assert "a.json: http://127.0.0.1" in printed.err
    assert "secret" not in printed.err + first.error


def test_tracking_uri_replaces_the_listed_address(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """Uploads go to the address of --tracking_uri instead of the listed one."""
    dead = f"http://127.0.0.1:{free_port()}"
    append_pending(tmp_path, listed(tmp_path, "moved/a.json", dead, run_id))
    assert exit_code("upload", str(tmp_path), "--tracking_uri", mlflow_database) == 0
    assert artifacts(mlflow_database, run_id, "moved") == ["moved/a.json"]


def test_missing_files_are_removed_on_request_only(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file is reported, and stays listed without --forget-missing."""
    entry = listed(tmp_path, "gone/a.json", mlflow_database, run_id)
    Path(entry.path).unlink()
    append_pending(tmp_path, entry)
    assert exit_code("upload", str(tmp_path)) == 1
    assert "--forget-missing" in capsys.readouterr().err
    assert [kept.path for kept in read_pending(tmp_path)] == [entry.path]
    assert exit_code("upload", str(tmp_path), "--forget-missing") == 0
    assert "a.json: the file is missing and was removed from the list" in capsys.readouterr().err
    assert read_pending(tmp_path) == []


def test_no_database_is_created(
    in_tmp: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative address is relative to the current folder, which is the default."""
    append_pending(in_tmp, listed(in_tmp, "a.json", "sqlite:///mlflow.db", run_id))
    assert exit_code("upload") == 1
    assert "there is no mlflow.db" in capsys.readouterr().err
    assert not (in_tmp / "mlflow.db").exists()


def test_an_entry_without_a_run_is_kept(tmp_path: Path) -> None:
    """It cannot be uploaded, but stays on the list."""
    (tmp_path / "a.json").touch()
    append_pending(tmp_path, PendingUpload(str(tmp_path / "a.json"), "a.json", "run", "why"))
    assert exit_code("upload", str(tmp_path)) == 1
    (kept,) = read_pending(tmp_path)
    assert "names no run" in kept.error


def test_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder gives exit code 2 and one line, not a report of success."""
    assert exit_code("upload", "nowhere") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lightning-perf upload: there is no folder nowhere."


def test_a_trace_is_listed_for_each_of_two_runs(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two MLflow loggers the command uploads the trace to both runs."""

    def gone(*args: object) -> None:
        raise ConnectionError("gone")

    loggers = [MLFlowLogger("two", tracking_uri=mlflow_database, run_name=name) for name in "ab"]
    run = trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=loggers)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowRun, "upload", gone)
        with pytest.warns(PerfWarning, match="lightning-perf upload"):
            run.fit(Small())
    ids = [str(logger.run_id) for logger in loggers]
    traces = [entry for entry in read_pending(tmp_path) if "torch_traces" in entry.remote]
    assert [entry.target["run_id"] for entry in traces] == ids
    assert exit_code("upload", str(tmp_path)) == 0
    for run_id in ids:
        (found,) = artifacts(mlflow_database, run_id, "a/torch_traces")
        assert found == "a/torch_traces/rank0.1.pt.trace.json.gz"
    assert read_pending(tmp_path) == []


def test_lists_of_earlier_versions_are_read(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """Two equal lines of an old list are one upload."""
    entry = listed(tmp_path, "old/a.json", mlflow_database, run_id)
    target = {"tracking_uri": mlflow_database, "run_id": run_id}
    line = {"path": entry.path, "remote": "old/a.json", "run_name": "run", "error": "no route"}
    text = json.dumps(line | {"target": target}) + "\n"
    (tmp_path / "pending_uploads.jsonl").write_text(text * 2)
    assert exit_code("upload", str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "old") == ["old/a.json"]


def test_an_upload_that_ends_late_is_repeated_without_harm(
    make_writer: Any, worker: Any, tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """It was listed when the wait ended; the file stays and is uploaded again."""
    target, reached, gate = MlflowRun(mlflow_database, run_id).target, Event(), Event()

    def late(path: Path, remote: str) -> None:
        reached.set()
        gate.wait(PATIENCE)
        target.send(path, remote)

    names = {"remote_file_name": "late/{batch}.json", "targets": [Target(late, target.address)]}
    writer = make_writer(num_traces_to_keep=0, **names)
    written = record(writer)
    assert reached.wait(PATIENCE)
    with pytest.warns(PerfWarning, match="the run ended first"):
        writer.close()
    gate.set()
    assert worker.drain(PATIENCE)
    assert artifacts(mlflow_database, run_id, "late") == ["late/5.json"]
    assert written.exists()
    assert exit_code("upload", str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "late") == ["late/5.json"]
    assert read_pending(tmp_path) == []


@pytest.mark.parametrize(
    ("status", "before", "after"),
    [
        ("finished", "RUNNING", "FINISHED"),
        ("stopped by an exception", "RUNNING", "FAILED"),
        ("running", "RUNNING", "RUNNING"),
        ("finished", "KILLED", "KILLED"),
    ],
)
def test_a_late_summary_ends_a_running_run(
    tmp_path: Path, mlflow_database: str, status: str, before: str, after: str
) -> None:
    """The run gets the status and the description that it could not get while it trained."""
    client = MlflowClient(mlflow_database)
    run_id = client.create_run("0").info.run_id
    client.update_run(run_id, before)
    trainer(tmp_path, always_on(show_summary=False), limit_train_batches=2).fit(Small())
    (summary,) = tmp_path.rglob("summary.json")
    changed = {"status": status, "ended": "2026-11-23T12:00:00+0100"}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | changed))
    address = {"tracking_uri": mlflow_database, "run_id": run_id}
    append_pending(tmp_path, PendingUpload(str(summary), "summary.json", "run", "", address))
    assert exit_code("upload", str(tmp_path)) == 0
    run = client.get_run(run_id)
    assert run.info.status == after
    assert (run.info.end_time == 1795431600000) == (after != before)
    assert ("mlflow.note.content" in run.data.tags) == (after != before)


def test_a_file_with_the_name_of_the_summary_is_uploaded(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """If it is no summary, it does not change the run."""
    append_pending(tmp_path, listed(tmp_path, "other/summary.json", mlflow_database, run_id))
    assert exit_code("upload", str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "other") == ["other/summary.json"]
    assert MlflowClient(mlflow_database).get_run(run_id).info.status == "RUNNING"
