"""`lightning-perf upload`: files that training could not upload are uploaded later."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest
from fsspec import available_protocols
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.recordings import PATIENCE, record
from helpers.servers import free_port, start_mlflow, stop_mlflow
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PyTorch, always_on
from lightning_perf.errors import PerfWarning
from lightning_perf.traces.uploads import PendingUpload, Target, append_pending, taken_pending
from lightning_perf.tracking.mlflow import MlflowRun, job_of


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


@pytest.fixture(autouse=True)
def _own_server(mlflow_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the database of these tests, whatever address MLflow was given by earlier ones."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database)


def test_listed_files_are_uploaded_to_their_runs(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists of the folder and its subfolders are processed and then removed."""
    below = tmp_path / "runs" / "one"
    below.mkdir(parents=True)
    append_pending(tmp_path, listed(tmp_path, "sent/a.json", mlflow_database, run_id))
    append_pending(below, listed(below, "sent/b.json", mlflow_database, run_id))
    assert exit_code("upload", str(tmp_path), "--tracking-uri", mlflow_database) == 0
    assert artifacts(mlflow_database, run_id, "sent") == ["sent/a.json", "sent/b.json"]
    assert not list(tmp_path.rglob("pending_uploads.jsonl"))
    assert "2 uploaded, 0 left" in capsys.readouterr().out
    assert (tmp_path / "a.json").exists()


def test_failed_uploads_stay_listed(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An unreachable server and a missing run keep their entries, and the error is printed."""
    dead = f"http://me:secret@127.0.0.1:{free_port()}"
    append_pending(tmp_path, listed(tmp_path, "dead/b.json", mlflow_database, run_id))
    append_pending(tmp_path, listed(tmp_path, "dead/c.json", mlflow_database, "nosuchrun"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database)
    assert exit_code("upload", str(tmp_path)) == 1
    (last,) = read_pending(tmp_path)
    assert last.remote == "dead/c.json"
    append_pending(tmp_path, listed(tmp_path, "dead/a.json", dead, run_id))
    printed = capsys.readouterr()
    assert "1 uploaded, 1 left" in printed.out
    assert "nosuchrun" in printed.err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead)
    assert exit_code("upload", str(tmp_path)) == 1
    assert len(read_pending(tmp_path)) == 2
    printed = capsys.readouterr()
    assert "0 uploaded, 2 left" in printed.out
    assert "a.json: http://127.0.0.1" in printed.err
    assert "does not respond" in printed.err
    assert "secret" not in printed.err


def test_a_list_does_not_grow_by_uploads_that_fail(tmp_path: Path) -> None:
    """It could become larger than what is read."""
    for number in range(3):
        entry = PendingUpload(str(tmp_path / f"{number}"), "remote", "run", "")
        append_pending(tmp_path, entry)
    before = (tmp_path / "pending_uploads.jsonl").read_bytes()
    assert exit_code("upload", str(tmp_path)) == 1
    assert (tmp_path / "pending_uploads.jsonl").read_bytes() == before


def test_tracking_uri_replaces_the_listed_address(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """Uploads go to the address of --tracking_uri instead of the listed one."""
    dead = f"http://127.0.0.1:{free_port()}"
    append_pending(tmp_path, listed(tmp_path, "moved/a.json", dead, run_id))
    assert exit_code("upload", str(tmp_path), "--tracking_uri", mlflow_database) == 0
    assert artifacts(mlflow_database, run_id, "moved") == ["moved/a.json"]


def test_missing_files_stay_listed(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file is reported: its disk may be away."""
    entry = listed(tmp_path, "gone/a.json", mlflow_database, run_id)
    Path(entry.path).unlink()
    append_pending(tmp_path, entry)
    assert exit_code("upload", str(tmp_path)) == 1
    assert "a.json: the file is missing; delete its line" in capsys.readouterr().err
    assert [kept.path for kept in read_pending(tmp_path)] == [entry.path]


def test_no_database_is_created(
    in_tmp: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative address is relative to the current folder, which is the default."""
    append_pending(in_tmp, listed(in_tmp, "a.json", "sqlite:///mlflow.db", run_id))
    assert exit_code("upload") == 1
    assert "there is no mlflow.db" in capsys.readouterr().err
    assert not (in_tmp / "mlflow.db").exists()


def test_an_entry_without_a_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be uploaded, but stays on the list."""
    (tmp_path / "a.json").touch()
    append_pending(tmp_path, PendingUpload(str(tmp_path / "a.json"), "a.json", "run", "why"))
    assert exit_code("upload", str(tmp_path)) == 1
    assert len(read_pending(tmp_path)) == 1
    assert "names no run" in capsys.readouterr().err


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
    tmp_path: Path,
    mlflow_database: str,
    status: str,
    before: str,
    after: str,
) -> None:
    """The run gets the status that it could not get while it trained, and any the description."""
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
    assert "mlflow.note.content" in run.data.tags


@pytest.mark.parametrize(
    ("tag", "held"),
    [
        (None, 60.0),
        ({"job": "own", "seen": 50.0, "held_seconds": 9.0}, 60.0),
        ({"job": "own", "seen": 50.0, "held_seconds": 9.0, "before": [5.0, 1.0]}, 65.0),
        # Of another machine, which does not see the files of this one: an earlier one, a later one.
        ({"job": "other", "seen": 50.0, "held_seconds": 9.0}, 69.0),
        ({"job": "other", "seen": 2e9, "held_seconds": 9.0}, 9.0),
    ],
)
def test_a_late_summary_has_the_run_s_time(
    tmp_path: Path, mlflow_database: str, tag: dict[str, Any] | None, held: float
) -> None:
    """`lightning-perf runs` reads the tag, which is not renewed while no server responds."""
    client = MlflowClient(mlflow_database)
    run_id = client.create_run("0").info.run_id
    if tag is not None:
        tag |= {"kept_seconds": 2.0, "goodput": 0.1, "process": {}}
        client.set_tag(run_id, "lightning_perf_job", json.dumps(tag))
    trainer(tmp_path, always_on(show_summary=False), limit_train_batches=2).fit(Small())
    (summary,) = tmp_path.rglob("summary.json")
    content = json.loads(summary.read_text())
    content["goodput"] |= {"job": "own", "held_seconds": 60.0, "kept_seconds": 45.0}
    summary.write_text(json.dumps(content))
    address = {"tracking_uri": mlflow_database, "run_id": run_id}
    append_pending(tmp_path, PendingUpload(str(summary), "summary.json", "run", "", address))
    assert exit_code("upload", str(tmp_path)) == 0
    found = job_of(client.get_run(run_id).data.tags)
    assert found["held_seconds"] == held
    assert (found["process"] == content["process"]) == (held != 9.0)


def test_a_file_with_the_name_of_the_summary_is_uploaded(
    tmp_path: Path, mlflow_database: str, run_id: str
) -> None:
    """If it is no summary, it does not change the run."""
    append_pending(tmp_path, listed(tmp_path, "other/summary.json", mlflow_database, run_id))
    assert exit_code("upload", str(tmp_path)) == 0
    assert artifacts(mlflow_database, run_id, "other") == ["other/summary.json"]
    assert MlflowClient(mlflow_database).get_run(run_id).info.status == "RUNNING"


# -- lists of strangers ---------------------------------------------------------------------------


class Received(BaseHTTPRequestHandler):
    """Keeps the headers of all requests, and refuses them."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(str(self.headers))
        self.send_error(404)

    do_POST = do_PUT = do_PATCH = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of a server that keeps what it gets."""
    Received.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Received)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_credentials_go_only_to_a_server_that_the_user_names(
    tmp_path: Path, stranger: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A list's own server gets no request; the message says what to add, and that is enough."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "alice")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    append_pending(tmp_path, listed(tmp_path, "a.json", stranger, "x"))
    assert exit_code("upload", str(tmp_path)) == 1
    assert f"try --tracking-uri {stranger}" in capsys.readouterr().err
    assert not Received.seen
    assert exit_code("upload", str(tmp_path), "--to", stranger) == 1  # only for stores
    assert not Received.seen
    assert exit_code("upload", str(tmp_path), "--tracking-uri", stranger) == 1
    assert "Authorization: Basic" in Received.seen[0]


@pytest.mark.parametrize("place", ["file:///", "local:///", "file://", "memory://x"])
def test_a_list_writes_into_no_store_that_the_user_does_not_name(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file of the user is replaced; --to names one folder, and nothing above it."""
    if place.partition(":")[0] not in available_protocols():
        pytest.skip("this release of fsspec has no local://")
    (home := tmp_path / "home").mkdir()
    (home / ".bashrc").write_text("mine")
    (runs := tmp_path / "runs").mkdir()
    (runs / "evil").write_text("theirs")
    (runs / "link").symlink_to(home)
    for remote in (f"{home}/.bashrc".lstrip("/"), f"{runs}/link/.bashrc".lstrip("/")):
        entry = PendingUpload(str(runs / "evil"), remote, "r", "e", {"store": place})
        append_pending(runs, entry)
    assert exit_code("upload", str(runs)) == 1
    shown = capsys.readouterr().err
    named = place if place == "memory://x" else f"file://{home}"
    assert f"--to {named}" in shown
    assert exit_code("upload", str(runs), "--to", f"file://{runs}", "--to", "s3://x") == 1
    assert (home / ".bashrc").read_text() == "mine"
    assert exit_code("upload", str(runs), "--to", "s3://y", "--to", named) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_database_of_a_stranger_chooses_no_folder(
    in_tmp: Path, mlflow_tables: Path, inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of the default database keep their files in the current folder, also through links."""
    (home := in_tmp / "home").mkdir()
    (folder := in_tmp / "work").mkdir()
    os.chdir(folder)
    (folder / "mlruns").symlink_to(home)
    shutil.copy(mlflow_tables, folder)
    database = f"sqlite:///{folder}/mlflow.db"  # MLflow keeps connections by their addresses
    client = MlflowClient(database)
    place = folder / "mine" if inside else folder / "mlruns"
    made = client.create_experiment("e", artifact_location=str(place))
    run_id = client.create_run(made).info.run_id
    append_pending(folder, listed(folder, "a.json", database, run_id))
    assert exit_code("upload") == (0 if inside else 1)
    assert [path.name for path in home.rglob("*.json")] == []
    if not inside:
        assert f"try --to file://{home}" in capsys.readouterr().err
        assert exit_code("upload", "--tracking-uri", database) == 0
        assert [path.name for path in home.rglob("*.json")] == ["a.json"]
    # A database elsewhere is not read at all.
    (folder / "below").mkdir()
    append_pending(folder, listed(folder, "b.json", "sqlite:///below/evil.db", run_id))
    assert exit_code("upload") == 1
    assert "--tracking-uri sqlite:///below/evil.db" in capsys.readouterr().err
    assert not list((folder / "below").iterdir())


@pytest.mark.parametrize("place", ["{}/%2e%2e/home", "FILE://{}/#/..", "file://{}/%2e%2e/home"])
def test_an_odd_address_of_artifacts_chooses_no_folder(
    in_tmp: Path, mlflow_tables: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is read as MLflow reads it, which decodes percent signs and knows no other schemes."""
    (home := in_tmp / "home").mkdir()
    (folder := in_tmp / "work").mkdir()
    os.chdir(folder)
    run_id = run_with_artifacts(mlflow_tables, folder, place.format(folder))
    append_pending(folder, listed(folder, "a.json", f"sqlite:///{folder}/mlflow.db", run_id))
    code = exit_code("upload")
    assert list(home.rglob("*")) == []
    assert code == 1 or place.startswith("FILE")  # a folder of that name below this one


def run_with_artifacts(tables: Path, folder: Path, artifact_uri: str) -> str:
    """A run in the default database whose artifacts are anywhere, as a stranger may write it."""
    database = shutil.copy(tables, folder)
    client = MlflowClient(f"sqlite:///{database}")
    run_id = client.create_run(client.create_experiment("e"), run_name="owl").info.run_id
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("update runs set artifact_uri = ?", (artifact_uri,))
    return run_id


def test_reports_request_no_artifacts_of_other_servers(
    in_tmp: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They would get the password of the environment: the report shows the run without files."""
    port = free_port()  # a request fails, and the command with it
    address = f"http://127.0.0.1:{port}/api/2.0/mlflow-artifacts/artifacts/x"
    run_with_artifacts(mlflow_tables, in_tmp, address)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    database = f"--tracking-uri=sqlite:///{in_tmp}/mlflow.db"
    assert exit_code("report", "owl", database) == 0
    assert f"{port}" not in capsys.readouterr().out


def test_a_list_on_a_full_disk_keeps_its_entries(tmp_path: Path) -> None:
    """What cannot be written whole stays in the list before, and spoils no later line."""
    for name in ("a", "b", "c"):
        append_pending(tmp_path, listed(tmp_path, name, "http://host", "1"))
    size = (tmp_path / "pending_uploads.jsonl").stat().st_size - 20
    code = f"""
import resource, signal, sys
from pathlib import Path
from lightning_perf.traces.uploads import taken_pending
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
with taken_pending(Path(sys.argv[1])):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, check=False)
    assert b"OSError" in done.stderr
    append_pending(tmp_path, listed(tmp_path, "d", "http://host", "1"))
    with pytest.warns(PerfWarning, match="damaged"), taken_pending(tmp_path) as entries:
        assert {Path(each.path).name for each in entries.values()} == {"a", "b", "c", "d"}


@pytest.mark.slow
def test_a_run_of_a_server_chooses_no_folder_of_this_machine(
    tmp_path: Path, stranger: str, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Files of a usual run are sent; others name a folder or another server, and are refused.

    No password is printed.
    """
    (server_folder := tmp_path / "server").mkdir()
    (runs := tmp_path / "runs").mkdir()
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = start_mlflow(server_folder, port, mlflow_tables)
    try:
        client = MlflowClient(address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        home = tmp_path / "home"
        strange = stranger.replace("http:", "mlflow-artifacts:")
        ids = [client.create_run("0").info.run_id]
        for number, place in enumerate((str(home), strange)):
            # As an earlier version of the server, which allowed more, has kept it.
            database = MlflowClient(f"sqlite:///{server_folder}/server.db")
            made = database.create_experiment(f"e{number}", artifact_location=place)
            ids.append(client.create_run(made).info.run_id)
        for number, run_id in enumerate(ids):
            append_pending(runs, listed(runs, f"{number}.json", address, run_id))
        assert exit_code("upload", str(runs)) == 1
        shown = capsys.readouterr()
        assert "1 uploaded, 2 left" in shown.out
        assert f"--to file://{home}" in shown.err
        assert f"--to {strange}" in shown.err
        assert artifacts(address, ids[0], "") == ["0.json"]
        assert not home.exists()
        assert not Received.seen
        assert exit_code("upload", str(runs), "--to", f"file://{home}") == 1
        assert (home / ids[1] / "artifacts" / "1.json").exists()

        # MLflow prints the address of a run that it ends.
        trainer(tmp_path, always_on(show_summary=False), limit_train_batches=2).fit(Small())
        (summary,) = tmp_path.rglob("summary.json")
        entry = {"tracking_uri": address, "run_id": ids[0]}
        append_pending(tmp_path, PendingUpload(str(summary), "summary.json", "run", "", entry))
        own = address.replace("://", "://bob:hunter2@")
        assert exit_code("upload", str(tmp_path), "--tracking-uri", own) == 1  # the runs above
        shown = capsys.readouterr()
        assert client.get_run(ids[0]).info.status == "FINISHED"
        assert "hunter2" not in shown.out + shown.err
    finally:
        stop_mlflow(server)


def test_a_list_that_cannot_be_read_stops_no_other(
    tmp_path: Path, mlflow_database: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links and pipes are reported and stay, and the exit code is 1."""
    for name in "abc":
        (tmp_path / name).mkdir()
    (tmp_path / "secret").write_text("not to be copied")
    (tmp_path / "a" / "pending_uploads.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "b" / "pending_uploads.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "c" / "pending_uploads.jsonl")
    (last := tmp_path / "d").mkdir()
    append_pending(last, listed(last, "strange/d.json", mlflow_database, run_id))
    assert exit_code("upload", str(tmp_path), "--tracking-uri", mlflow_database) == 1
    shown = capsys.readouterr()
    assert "1 uploaded, 3 left" in shown.out
    assert shown.err.count("Not a regular file") == 3
    assert artifacts(mlflow_database, run_id, "strange") == ["strange/d.json"]
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"pending_uploads.jsonl"}


@pytest.mark.slow
def test_a_server_that_hangs_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of all its runs fail with the first one; MLflow waits for minutes each time."""
    asked, ended = list[str](), Event()

    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            ended.wait(PATIENCE)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads, server.block_on_close = True, False
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name, run in (("1", "a"), ("2", "a"), ("3", "b")):
        append_pending(tmp_path, listed(tmp_path, f"{name}.json", address, run * 32))
    assert exit_code("upload", str(tmp_path)) == 1
    ended.set()
    server.shutdown()
    server.server_close()
    assert len(asked) == 1
    assert "0 uploaded, 3 left" in capsys.readouterr().out
    assert len(read_pending(tmp_path)) == 3
