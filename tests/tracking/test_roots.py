"""The root folder of a run: fast_dev_run, runs without a name, and remote roots."""

from __future__ import annotations

import os
import tempfile
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.small import Records, Small, left_in, ours, trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_perf import PerfWarning, PyTorch, Timings, VizTracer
from lightning_perf.background import Worker
from lightning_perf.run import destination
from lightning_perf.traces.uploads import TraceRun

# A warning of Matplotlib, which `pytest.warns` re-emits.
pytestmark = pytest.mark.filterwarnings("ignore:Passing individual properties")


class Named(CSVLogger):
    """A logger of any name and version."""

    def __init__(self, folder: Path, name: Any, version: Any) -> None:
        super().__init__(folder)
        self.given = name, version

    @property
    def name(self) -> str:
        return str(self.given[0])

    @property
    def version(self) -> Any:
        return self.given[1]

    def save(self) -> None:
        """Write nothing, so that the logger may be created twice."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the system's folder for temporary files."""
    folder = tmp_path / "system"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fit(root: Any, *more: Any, **options: Any) -> PyTorch:
    profiler = PyTorch(schedule="first 1ba", **options.pop("profiler", {}))
    options = {"log_every_n_steps": 4, "limit_train_batches": 4, **options}
    trainer(root, profiler, Timings(), *more, **options).fit(Small())
    return profiler


def destination_of(logger: Any) -> tuple[Any, str, str]:
    run = trainer(None, logger=logger)
    return destination._destination(run, Worker("test"))


def stored(under: str) -> list[str]:
    """Names of the files in memory:// below a folder."""
    found = fsspec.filesystem("memory").find(f"/{under}")
    return sorted(name.removeprefix(f"/{under}/") for name in found)


# fast_dev_run


def test_a_relative_folder_is_that_of_the_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training may change the current folder: all files are where the run began."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Leaving(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            os.chdir(tmp_path / "elsewhere")
            return super().training_step(batch, batch_idx)

    profilers = [
        PyTorch(schedule="first 2ba"),
        VizTracer(schedule="at 4ba", output_path_prefix="other"),
    ]
    trainer(Path("runs"), *profilers, Timings(), logger=Records()).fit(Leaving())
    assert not list((tmp_path / "elsewhere").rglob("*"))
    assert {path.relative_to(tmp_path).as_posix() for path in left_in(tmp_path)} >= {
        "runs/records-version_0/torch_traces/rank0.2.pt.trace.json.gz",
        "runs/records-version_0/report.html",
        "other/records-version_0/viztracer/rank0.5.json.gz",
    }
    assert all(path.exists() for each in profilers for path in each.saved_in_run)


def test_a_fast_dev_run_leaves_no_file_and_may_be_repeated(
    tmp_path: Path, in_tmp: Path, temporary: Path
) -> None:
    """Two runs in one folder give no error and leave no file in any folder."""
    for _ in range(2):
        fit(tmp_path / "runs", fast_dev_run=True, logger=CSVLogger(tmp_path))
    assert left_in(tmp_path) == left_in(in_tmp) == []
    assert list(temporary.iterdir()) == []


def test_a_fast_dev_run_writes_to_output_path_prefix(tmp_path: Path, temporary: Path) -> None:
    """With `output_path_prefix` traces stay, and two runs have different folders."""
    for _ in range(2):
        fit(
            tmp_path,
            fast_dev_run=2,
            logger=CSVLogger(tmp_path),
            profiler={"output_path_prefix": str(tmp_path / "given")},
        )
    found = [path.relative_to(tmp_path).parts for path in left_in(tmp_path / "given")]
    traces = [parts for parts in found if parts[2:] == ("torch_traces", "rank0.1.pt.trace.json.gz")]
    assert len({parts[1] for parts in traces}) == len(traces) == 2
    assert all(parts[1].startswith("run-") for parts in traces)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "version", "folder"),
    [("", "", "run-*"), ("", 3, "version_3"), ("", "v", "v"), ("exp", "", "run-*")],
)
def test_a_run_is_named_after_its_logger(
    tmp_path: Path, name: str, version: Any, folder: str
) -> None:
    """Without a name the version is used; without a version the name is generated."""
    assert fnmatch(destination_of(Named(tmp_path, name, version))[1], folder)


def test_runs_of_one_name_in_two_folders_are_distinguished(tmp_path: Path) -> None:
    """The store holds the runs of all machines."""
    found = {destination_of(Named(tmp_path / logs, "exp", 0))[2] for logs in "ab"}
    assert len(found) == 2


# Remote roots


def test_files_go_to_a_remote_root(tmp_path: Path, in_tmp: Path, temporary: Path) -> None:
    """Traces, pages and texts are in the store under the run's name, and not on this machine."""
    fit("memory://roots/a", logger=CSVLogger("memory://roots/a", version=0))
    names = stored("roots/a")
    (run,) = {name.split("/")[0] for name in names} - {"lightning_logs"}
    assert run.startswith("lightning_logs-version_0-")
    for name in ("torch_traces/rank0.1.pt.trace.json.gz", "report.html"):
        assert f"{run}/{name}" in names
    assert left_in(in_tmp) == left_in(tmp_path) == []
    assert list(temporary.iterdir()) == []


def test_a_second_run_in_a_remote_root_replaces_nothing(tmp_path: Path) -> None:
    """A restart of a run adds numbers to names; with `overwrite` it replaces files."""
    for overwrite in (False, False, True):
        fit(
            "memory://roots/b",
            logger=Named(tmp_path, "runs", 0),
            profiler={"overwrite": overwrite},
        )
    names = [name.split("/", 1)[1] for name in stored("roots/b")]
    assert [name for name in names if "traces/" in name] == [
        "torch_traces/rank0-2.1.pt.trace.json.gz",
        "torch_traces/rank0.1.pt.trace.json.gz",
    ]


def test_files_that_a_remote_root_refuses_stay_local(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are listed, and `lightning-perf upload` sends them to the same place."""
    memory = type(fsspec.filesystem("memory"))
    put = memory.put_file
    monkeypatch.setattr(destination, "TraceRun", partial(TraceRun, backoff=(0.0,)))

    def gone(*args: Any, **options: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(memory, "put_file", gone)
    with pytest.warns(PerfWarning, match="not uploaded") as caught:
        fit("memory://roots/c", logger=False)
    assert len(ours(caught)) == 2  # the first failure, and the count of the others
    (root,) = temporary.iterdir()
    listed = read_pending(root)
    assert {Path(entry.path).is_file() for entry in listed} == {True}
    monkeypatch.setattr(memory, "put_file", put)
    assert exit_code("upload", str(root)) == 1  # not without a word of the user
    assert exit_code("upload", str(root), "--to", "memory://roots/c") == 0
    names = [name.split("/", 1)[1] for name in stored("roots/c")]
    assert {"torch_traces/rank0.1.pt.trace.json.gz", "report.html"} <= set(names)


def test_an_unusable_store_is_one_warning(in_tmp: Path) -> None:
    """The warning has the URL, the reason and the folder that is used instead."""
    with pytest.warns(PerfWarning, match=r"nowhere://x has the protocol .* files are written to"):
        fit("nowhere://x", logger=False, enable_checkpointing=False)
    assert list(in_tmp.glob("run-*/torch_traces/rank0.1.pt.trace.json.gz"))


def test_a_file_url_is_the_local_folder(tmp_path: Path, in_tmp: Path) -> None:
    """file:// writes to the folder and creates no other."""
    fit(f"file://{tmp_path}/local", logger=False)
    assert list((tmp_path / "local").glob("run-*/torch_traces/rank0.1.pt.trace.json.gz"))
    assert left_in(in_tmp) == []
