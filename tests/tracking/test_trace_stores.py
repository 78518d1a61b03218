"""Traces in stores that fsspec opens by URL, with or without MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.recordings import CONTENT, after, files, record
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PyTorch, VizTracer
from lightning_perf.errors import ConfigError, PerfWarning
from lightning_perf.traces.writer import distinct_name
from lightning_perf.tracking.tracker import store_target


class Unsteady(MemoryFileSystem):
    """A store that fails `failures` times."""

    protocol = "unsteady"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures = 0
    connections: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connections.append(options)

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        user, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
        return {"user": user} if at else {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        host, _, rest = path.partition("://")[2].partition("/")
        path = f"{host.rpartition('@')[2]}/{rest}" if "://" in path else path
        return "/" + path.strip("/")

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if Unsteady.failures:
            Unsteady.failures -= 1
            raise ConnectionError("unsteady://me:hunter2@host/x?signature=hunter2 is gone")
        super().put_file(lpath, rpath, **options)


@pytest.fixture
def unsteady() -> Iterator[type[Unsteady]]:
    """The store, empty and without failures."""
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    Unsteady.store, Unsteady.pseudo_dirs, Unsteady.failures = {}, [""], 0
    Unsteady.connections = []
    yield Unsteady
    _registry.pop("unsteady")


def memory(under: str) -> list[str]:
    """Names of the files in memory:// below a folder."""
    system = fsspec.filesystem("memory")
    return sorted(name.removeprefix(f"/{under}/") for name in system.find(f"/{under}"))


def test_traces_go_to_a_store_without_any_logger(tmp_path: Path) -> None:
    """All variables render in the path of the URL, and .gz is appended."""
    url = "memory://bucket/a/rank{rank}-{stage}.{batch}.json"
    profiler = PyTorch(schedule="every 4ba", remote_file_name=url)
    trainer(tmp_path, profiler).fit(Small())
    assert memory("bucket/a") == [f"rank0-train.{n}.json.gz" for n in (13, 5, 9)]
    assert not read_pending(tmp_path)


def test_a_file_url_is_a_folder_of_any_disk(tmp_path: Path) -> None:
    """Files are complete there, and those of other stages are in subfolders."""
    url = f"file://{tmp_path}/shared disk/traces/rank{{rank}}.{{batch}}.json"
    profiler = VizTracer(schedule="first 1ba", remote_file_name=url, num_traces_to_keep=0)
    trainer(tmp_path / "here", profiler, limit_val_batches=1).fit(Small())
    assert files(tmp_path / "shared disk") == [
        "traces/rank0.1.json.gz",
        "traces/validate/rank0.1.json.gz",
    ]
    assert not list((tmp_path / "here").rglob("*.gz"))


def test_mlflow_gets_metrics_and_the_store_the_traces(tmp_path: Path, mlflow_database: str) -> None:
    """In a store, the run's name is followed by a part of its id."""
    logger = MLFlowLogger("stores", tracking_uri=mlflow_database, run_name="owl-7")
    url = "memory://me:hunter2@both/{run_name}/rank{rank}.{batch}.json"
    profiler = PyTorch(schedule="first 1ba", remote_file_name=url)
    trainer(tmp_path, profiler, logger=logger).fit(Small())
    names = fsspec.filesystem("memory").find("/")
    (found,) = [name for name in names if "owl-7" in name and name.endswith(".gz")]
    name = distinct_name("owl-7", str(logger.run_id))
    assert found.endswith(f"/{name}/rank0.1.json.gz")
    client = MlflowClient(mlflow_database)
    files = client.list_artifacts(logger.run_id, "owl-7")
    assert [file.path for file in files] == ["owl-7/summary.json"]
    param = json.loads(client.get_run(logger.run_id).data.params["lightning_perf"])
    remote = param["callbacks"]["PyTorch"]["remote_file_name"]
    assert remote.startswith("memory://both/{run_name}")


def test_a_failed_store_is_retried(
    make_writer: Any, worker: Any, unsteady: type[Unsteady], tmp_path: Path
) -> None:
    """Each attempt opens a new connection with the credentials of the URL."""
    unsteady.failures = 3
    url = "unsteady://me:hunter2@host/{run_name}/{batch}.json"
    target = store_target(url)
    after(worker, record(make_writer(remote_file_name=url, targets=[target])))
    assert {name: bytes(file.getvalue()) for name, file in unsteady.store.items()} == {
        "/host/run/5.json": CONTENT
    }
    assert unsteady.connections == [{"user": "me:hunter2"}] * 4
    assert read_pending(tmp_path) == []


def test_a_failed_upload_to_a_store_is_listed_without_credentials(
    make_writer: Any, worker: Any, unsteady: type[Unsteady], tmp_path: Path
) -> None:
    """The file stays, and the command uploads it to the store."""
    unsteady.failures = 4
    url = "unsteady://me:hunter2@host/traces/{batch}.json"
    writer = make_writer(remote_file_name=url, targets=[store_target(url)], num_traces_to_keep=0)
    with pytest.warns(PerfWarning, match=r"5\.json; `lightning-perf upload`") as caught:
        after(worker, record(writer))
    assert "hunter2" not in str(caught[0].message)
    assert "hunter2" not in (tmp_path / "pending_uploads.jsonl").read_text()
    (entry,) = read_pending(tmp_path)
    assert (entry.remote, entry.target) == ("traces/5.json", {"store": "unsteady://host"})
    unsteady.failures = 1
    to = ("--to", "unsteady://me:hunter2@host")
    assert exit_code("upload", str(tmp_path), *to) == 1
    (entry,) = read_pending(tmp_path)
    assert entry.error == "ConnectionError: unsteady://host/x is gone"
    assert exit_code("upload", str(tmp_path), *to) == 0
    assert read_pending(tmp_path) == []
    assert list(unsteady.store) == ["/host/traces/5.json"]
    assert unsteady.connections[-1] == {"user": "me:hunter2"}


def test_uploads_to_another_disk_are_atomic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed copy keeps the old file and leaves no partial file."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.json").write_text("old")
    (tmp_path / "new").write_bytes(CONTENT)

    def full(source: Any, target: Any, *length: int) -> None:
        target.write(source.read(10))
        raise OSError(28, "No space left on device")

    target = store_target(f"file://{tmp_path}/x")
    assert target is not None
    remote = str(tmp_path / "there" / "a.json").lstrip("/")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):  # noqa: PT012
        patch.setattr("shutil.copyfileobj", full)
        target.send(tmp_path / "new", remote)
    assert files(tmp_path) == ["new", "there/a.json"]
    assert (tmp_path / "there" / "a.json").read_text() == "old"
    target.send(tmp_path / "new", remote)
    assert (tmp_path / "there" / "a.json").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket/{run_name}/a.json", "s3://bucket"),
        ("ftp://me:secret@host:21/a.json", "ftp://host:21"),
        ("sftp://token@host/a.json", "sftp://host"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net"),
        ("abfs://me:secret@account/a", "abfs://account"),
        ("file:///data/a.json", "file://"),
    ],
)
def test_addresses_are_listed_without_credentials(url: str, address: str) -> None:
    """Text before an @ is removed, except the container in URLs of Azure."""
    target = store_target(url)
    assert target is not None
    assert target.address == {"store": address}
    assert store_target("a/plain/name.json") is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nosuch://b/{batch}.json", "protocol nosuch://, which fsspec does not know.*'s3://bucket"),
        ("lacking://b/{batch}.json", r"not installed \(Needs nosuchclient\)\.$"),
        ("s3://{run_name}/{batch}.json", "has a variable in its host or bucket"),
        ("s3://me:hunter2@b/{btach}.json", "has {btach}"),
        ("s3://b/../{batch}.json", "leaves its folder"),
        ("s3://b/", "at least one character"),
        ("s3://b", "at least one character"),
        ("https://b/{batch}?signature=hunter2", "has a query"),
        ("zip://a.json::s3://b/a.zip", "chain of URLs"),
        ("simplecache::s3://b/{batch}.json", "neither a name nor the URL"),
        ("file://data/{batch}.json", "not absolute"),
    ],
)
def test_invalid_urls_are_refused_at_construction(
    url: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install, if that is the problem, and has no secrets."""
    known = {"class": "nosuchpackage.A", "err": "Needs nosuchclient"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    with pytest.raises(ConfigError, match=problem) as caught:
        PyTorch(remote_file_name=url)
    assert caught.value.field == "remote_file_name"
    assert "hunter2" not in str(caught.value) + repr(caught.value)


def test_a_prefix_with_an_unknown_protocol_is_refused() -> None:
    """As a remote_file_name is: a run would write its traces to another place."""
    with pytest.raises(ConfigError, match=r"nosuch://, which.*='s3://bucket/runs'") as caught:
        PyTorch(output_path_prefix="nosuch://bucket/runs")
    assert caught.value.field == "output_path_prefix"


def test_an_entry_of_an_unknown_store_stays_listed(
    make_writer: Any, worker: Any, unsteady: type[Unsteady], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On a machine without the package, the command says so and keeps the entry."""
    unsteady.failures = 1
    url = "unsteady://host/{batch}.json"
    writer = make_writer(remote_file_name=url, targets=[store_target(url)], backoff=())
    with pytest.warns(PerfWarning, match="not uploaded"):
        after(worker, record(writer))
    _registry.pop("unsteady")
    assert exit_code("upload", str(tmp_path)) == 1
    fsspec.register_implementation("unsteady", unsteady)
    assert len((tmp_path / "pending_uploads.jsonl").read_text().splitlines()) == 1
    assert "fsspec does not know" in capsys.readouterr().err
