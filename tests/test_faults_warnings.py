"""Warnings that the user has turned into errors stop no training, and lose nothing.

| what we would warn of | cases |
|---|---|
| nothing, a folder that cannot be made, a quota | 3 |
| a logger that does not tell its run, a server that is gone | 2 |
| two recorders at one time | 1 |
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import free_port
from faults import Nursery, Planted, Setting, fit, profilers, whole
from lightning.pytorch.loggers import MLFlowLogger
from small import Records

from lightning_perf import Always, PerfWarning, PyTorch
from lightning_perf.profilers.profiler import Profiler

pytestmark = pytest.mark.slow
Make = Callable[[Path], Setting]


def strict(make: Make, folder: Path) -> Setting:
    warnings.filterwarnings("error", category=PerfWarning)
    return make(folder)


def nothing(folder: Path) -> Setting:
    return Setting()


def occupied(folder: Path) -> Setting:
    folder.mkdir()
    (folder / "records-version_0").write_text("not a folder")
    return Setting()


def bounded(folder: Path) -> Setting:
    act = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))
    return Setting(before=[Planted("on_train_batch_start", act, 8)])


class Secretive(Records):
    @property
    def version(self) -> int:
        raise RuntimeError("no version is told")


def secretive(folder: Path) -> Setting:
    return Setting(logger=Secretive())


class Elsewhere(MLFlowLogger):
    """Has its run in a database, and tells ours an address at which nothing listens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            "elsewhere", tracking_uri=f"sqlite:///{folder}/.mlflow.db", run_name="gone"
        )
        _ = self.experiment
        self._tracking_uri = f"http://127.0.0.1:{free_port()}"


def gone(folder: Path) -> Setting:
    return Setting(logger=Elsewhere(folder))


@pytest.mark.parametrize(
    ("make", "ours", "files"),
    [
        (nothing, profilers("PyTorch"), 5),
        (occupied, profilers("PyTorch"), None),
        (bounded, profilers("VizTracer"), 3),
        (secretive, profilers("PyTorch"), 5),
        (gone, profilers("PyTorch"), 6),  # and the list of what is to be uploaded
        (nothing, [PyTorch(schedule=Always()), PyTorch(schedule=Always(), folder="second")], 1),
    ],
    ids=["nothing", "folder", "quota", "logger", "server", "busy"],
)
def test_our_warnings_as_errors_stop_nothing(
    nursery: Nursery, tmp_path: Path, make: Make, ours: list[Profiler], files: int | None
) -> None:
    """Training ends as without us, what could be recorded is whole, and the warning is logged."""
    ended, without = (
        nursery.run(folder, fit, folder / "out", strict, make, folder / "out", ours=mine)
        for folder, mine in ((tmp_path / "ours", ours), (tmp_path / "without", []))
    )
    assert ended.ended == without.ended, ended.stderr
    assert ended.code == 0
    assert "Traceback" not in ended.stderr
    assert ("lightning_perf:" in ended.stderr) == (make is not nothing or len(ours) == 2)
    if files is not None:
        found = whole(tmp_path / "ours" / "out")
        assert len(found) == files, (found, ended.stderr)
