"""lightning-perf upload: what did not reach the server in training reaches it later."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from conftest import free_port
from helpers.recordings import PATIENCE, record
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PyTorch
from lightning_perf.cli import main
from lightning_perf.errors import PerfWarning
from lightning_perf.traces import PendingUpload, Target, read_pending, rewrite_pending
from lightning_perf.tracking.mlflow import MlflowRun


@pytest.fixture(scope="module")
def run_id(mlflow_database: str) -> str:
    """A run that files belong to."""
    client = MlflowClient(mlflow_database)
    return str(client.create_run(client.create_experiment("uploads")).info.run_id)


def upload(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["upload", *args])
    return int(ended.value.code or 0)


def artifacts(address: str, run_id: str, folder: str) -> list[str]:
    return [entry.path for entry in MlflowClient(address).list_artifacts(run_id, folder)]


def listed(folder: Path, remote: str, address: str, run_id: str) -> PendingUpload:
    """A file with its entry, which is yet to be written into a list."""
    path = folder / Path(remote).name
    path.write_text("a trace")
    return PendingUpload(
        str(path), remote, "run", "no route", {"tracking_uri": address, "run_id": run_id}
    )


def test_what_is_listed_is_sent_to_its_run(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists of the folder and of those below it are sent, and then are gone."""
    below = tmp_path / "runs" / "one"
    below.mkdir(parents=True)
    rewrite_pending(tmp_path, [listed(tmp_path, "sent/a.json", mlflow_database, run_id)])
    rewrite_pending(below, [listed(below, "sent/b.json", mlflow_database, run_id)])
    assert upload(str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "sent") == ["sent/a.json", "sent/b.json"]
    assert not list(tmp_path.rglob("pending_uploads.jsonl"))
    assert "2 uploaded, 0 left" in capsys.readouterr().out
    assert (tmp_path / "a.json").exists()


def test_what_cannot_be_sent_stays_listed(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead address and a run that is not there keep their entries, with what went wrong."""
    dead = f"http://me:secret@127.0.0.1:{free_port()}"
    entries = [
        listed(tmp_path, "dead/a.json", dead, run_id),
        listed(tmp_path, "dead/b.json", mlflow_database, run_id),
        listed(tmp_path, "dead/c.json", mlflow_database, "nosuchrun"),
    ]
    rewrite_pending(tmp_path, entries)
    assert upload(str(tmp_path)) == 1
    first, last = read_pending(tmp_path)
    assert (first.remote, last.remote) == ("dead/a.json", "dead/c.json")
    assert "does not respond" in first.error
    assert "nosuchrun" in last.error
    told = capsys.readouterr()
    assert "1 uploaded, 2 left" in told.out
    assert "a.json: http://127.0.0.1" in told.err
    assert "secret" not in told.err + first.error


def test_another_address_may_be_given(tmp_path: Path, mlflow_database: str, run_id: str) -> None:
    """--tracking_uri stands in for the listed one, which has lost its password or has moved."""
    dead = f"http://127.0.0.1:{free_port()}"
    rewrite_pending(tmp_path, [listed(tmp_path, "moved/a.json", dead, run_id)])
    assert upload(str(tmp_path), "--tracking_uri", mlflow_database) == 0
    assert artifacts(mlflow_database, run_id, "moved") == ["moved/a.json"]


def test_a_file_that_is_gone_is_forgotten_on_request_only(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, and stays listed without --forget-missing."""
    entry = listed(tmp_path, "gone/a.json", mlflow_database, run_id)
    Path(entry.path).unlink()
    rewrite_pending(tmp_path, [entry])
    assert upload(str(tmp_path)) == 1
    assert "--forget-missing" in capsys.readouterr().err
    assert [kept.path for kept in read_pending(tmp_path)] == [entry.path]
    assert upload(str(tmp_path), "--forget-missing") == 0
    assert "a.json: the file is missing and was removed from the list" in capsys.readouterr().err
    assert read_pending(tmp_path) == []


def test_no_database_is_made_where_there_is_none(
    in_tmp: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative address is looked for from here, and the present folder is the default."""
    rewrite_pending(in_tmp, [listed(in_tmp, "a.json", "sqlite:///mlflow.db", run_id)])
    assert upload() == 1
    assert "there is no mlflow.db" in capsys.readouterr().err
    assert not (in_tmp / "mlflow.db").exists()


def test_an_entry_without_a_run_is_kept(tmp_path: Path) -> None:
    """It cannot be sent, but its file is not forgotten either."""
    (tmp_path / "a.json").touch()
    rewrite_pending(tmp_path, [PendingUpload(str(tmp_path / "a.json"), "a.json", "run", "why")])
    assert upload(str(tmp_path)) == 1
    (kept,) = read_pending(tmp_path)
    assert "names no run" in kept.error


def test_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder gives exit code 2 and one line, not a report of success."""
    assert upload("nowhere") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lightning-perf upload: there is no folder nowhere."


def test_a_trace_of_a_training_whose_server_was_gone_arrives_later(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training could not send and listed, the command sends under the same name."""

    def gone(*args: object) -> None:
        raise ConnectionError("gone")

    logger = MLFlowLogger("later", tracking_uri=mlflow_database, run_name="later")
    run = trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowRun, "upload", gone)
        with pytest.warns(PerfWarning, match="lightning-perf upload"):
            run.fit(Small())
    assert upload(str(tmp_path)) == 0
    found = artifacts(mlflow_database, str(logger.run_id), "later/torch_traces")
    assert found == ["later/torch_traces/rank0.1.pt.trace.json.gz"]


def test_of_two_runs_each_gets_what_it_has_not_got(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training with two MLflow loggers lists a trace for both, and the command sends both."""

    def gone(*args: object) -> None:
        raise ConnectionError("gone")

    loggers = [MLFlowLogger("two", tracking_uri=mlflow_database, run_name=name) for name in "ab"]
    run = trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=loggers)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowRun, "upload", gone)
        with pytest.warns(PerfWarning, match="lightning-perf upload"):
            run.fit(Small())
    ids = [str(logger.run_id) for logger in loggers]
    assert [entry.target["run_id"] for entry in read_pending(tmp_path)] == ids
    assert upload(str(tmp_path)) == 0
    for run_id in ids:
        (found,) = artifacts(mlflow_database, run_id, "a/torch_traces")
        assert found == "a/torch_traces/rank0.1.pt.trace.json.gz"
    assert read_pending(tmp_path) == []


def test_lists_of_earlier_versions_are_sent(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """One line named one run, as it does now; the same line twice is one upload."""
    entry = listed(tmp_path, "old/a.json", mlflow_database, run_id)
    target = {"tracking_uri": mlflow_database, "run_id": run_id}
    line = {"path": entry.path, "remote": "old/a.json", "run_name": "run", "error": "no route"}
    text = json.dumps(line | {"target": target}) + "\n"
    (tmp_path / "pending_uploads.jsonl").write_text(text * 2)
    assert upload(str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "old") == ["old/a.json"]


def test_an_upload_that_arrives_after_all_is_no_trouble(
    make_writer: Any, worker: Any, tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """It was listed when the wait was over: the file stays, and is sent again to no harm."""
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
    assert upload(str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "late") == ["late/5.json"]
    assert read_pending(tmp_path) == []
