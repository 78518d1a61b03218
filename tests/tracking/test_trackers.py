"""Uploads to the runs of trackers of other packages, such as the example for Weights & Biases."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.small import Records, Small, trainer

from lightning_perf import PerfWarning, PyTorch, Tracker
from lightning_perf.traces.uploads import NotHere
from lightning_perf.tracking import installed as kinds

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACE = "torch_traces/rank0.2.pt.trace.json.gz"


class Shelf(Records):
    """A logger of another package, with a folder per run."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place


class ShelfRun(Tracker):
    """The tracker of its runs."""

    def __init__(self, place: str) -> None:
        self.place = place

    @classmethod
    def of(cls, logger: Any) -> ShelfRun | None:
        return cls(str(logger.place)) if isinstance(logger, Shelf) else None

    @classmethod
    def at(cls, address: Mapping[str, str]) -> ShelfRun | None:
        return cls(address["shelf"]) if "shelf" in address else None

    @property
    def address(self) -> dict[str, str]:
        return {"shelf": self.place}

    def upload(self, path: Path, remote: str) -> None:
        if not Path(self.place).is_dir():
            raise NotHere("the shelf is gone")
        Path(self.place, remote.replace("/", "-")).write_bytes(path.read_bytes())


def install(folder: Path, trackers: dict[str, str]) -> str:
    """Install a package with trackers into a folder, and return the folder."""
    info = folder / "shelf-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    lines = [f"{name} = {place}\n" for name, place in trackers.items()]
    (info / "entry_points.txt").write_text("".join(["[lightning_perf.trackers]\n", *lines]))
    return str(folder)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package is installed with the tracker above and one that cannot be imported."""
    trackers = {"shelf": f"{__name__}:ShelfRun", "gone": "no_such_module:Run"}
    monkeypatch.syspath_prepend(install(tmp_path / "site", trackers))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[ShelfRun.__module__])
    kinds.installed.cache_clear()
    yield
    kinds.installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_tracker_of_another_package_receives_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its class has 25 lines; files that failed are sent by `lightning-perf upload`."""
    run = trainer(tmp_path / "run", PyTorch("first 2ba"), logger=Shelf(tmp_path / "shelf"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerfWarning)
        run.fit(Small())
    said = " ".join(str(each.message) for each in caught)
    assert "the shelf is gone" in said
    assert "no_such_module" in said
    (tmp_path / "shelf").mkdir()
    to = ("--to", f"shelf://{tmp_path}/shelf")
    assert exit_code("upload", str(tmp_path / "run"), *to) == 0
    assert "2 uploaded, 0 left" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "shelf").iterdir()}
    files = (TRACE, "summary.json")
    assert names == {f"records-version_0-{file}".replace("/", "-") for file in files}


def test_a_failing_tracker_does_not_affect_the_others(tmp_path: Path) -> None:
    """One package's tracker raises for a logger of another; the run keeps its other trackers."""

    class Broken(ShelfRun):
        @classmethod
        def of(cls, logger: Any) -> Any:
            raise AttributeError("no api")

    with pytest.warns(PerfWarning, match="Broken cannot store files of this run"):
        (found,) = kinds.trackers_of([Shelf(tmp_path)], (Broken, ShelfRun))
    assert type(found) is ShelfRun


#: Trains with W&B offline, then again as on a rank whose process does not own the run.
TRAINING = """
import sys
import wandb
from helpers.small import Records, Small, trainer
from lightning.pytorch.loggers import WandbLogger
from lightning_perf import PyTorch, SpeedMonitor
from lightning_perf.run import destination
from wandb_tracker import WandbRun

def train(folder, logger):
    long = "{run_name}/" + 150 * "n" + "/rank{rank}.{batch}.json"
    other = PyTorch("at 3ba for 2ba", folder="other", remote_file_name=long)
    callbacks = SpeedMonitor(window_size=4), PyTorch("first 2ba"), other
    trainer(folder, *callbacks, logger=logger).fit(Small())

if __name__ == "__main__":
    logger = WandbLogger(project="perf", save_dir=sys.argv[1], offline=True)
    train(sys.argv[1] + "/rank0", logger)
    found = WandbRun.of(logger)
    wandb.finish()
    elsewhere = WandbRun(*found.__reduce__()[1])
    destination.trackers_of = lambda loggers: [elsewhere]
    train(sys.argv[1] + "/rank1", Records())
    print(found.address["wandb"])
"""


@pytest.mark.slow
def test_files_become_artifacts_of_the_w_and_b_run(tmp_path: Path) -> None:
    """Metrics and traces are in the records of the offline run; `upload` resumes it for ranks > 0.

    A long name is cut.
    It runs in separate processes, because W&B patches ``sys.exit`` and the standard streams.
    """
    names = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    offline = dict.fromkeys(names, str(tmp_path)) | {"WANDB_MODE": "offline"}
    site = install(tmp_path / "site", {"wandb": "wandb_tracker:WandbRun"})
    path = os.pathsep.join([site, str(EXAMPLES), *filter(None, sys.path)])

    def python(*args: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | offline | {"PYTHONPATH": path}
        command = [sys.executable, *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    (tmp_path / "training.py").write_text(TRAINING)
    trained = python(str(tmp_path / "training.py"), str(tmp_path))
    written = records(tmp_path)
    assert b"throughput/batches_per_sec" in written
    project, run_id = trained.stdout.split()[-1].split("/")[1:]
    assert project == "perf"
    assert f"{run_id}-perf-{run_id}-{TRACE}".replace("/", "-").encode() in written
    assert f"{run_id}-perf-{run_id}-nnn".encode() in written  # W&B takes 128 characters
    assert not (tmp_path / "rank0" / "pending_uploads.jsonl").exists()
    assert "belongs to rank 0's process" in trained.stderr
    listed = read_pending(tmp_path / "rank1")
    assert {entry.target["wandb"] for entry in listed} == {trained.stdout.split()[-1]}
    sent = python(
        "-m", "lightning_perf", "upload", str(tmp_path / "rank1"), "--to", "wandb:///perf"
    )
    assert f"{len(listed)} uploaded, 0 left" in sent.stdout
    assert f"{run_id}-records-version_0-{TRACE}".replace("/", "-").encode() in records(tmp_path)


def records(folder: Path) -> bytes:
    """The records of all offline W&B runs below a folder."""
    return b"".join(path.read_bytes() for path in folder.rglob("offline-run-*/run-*.wandb"))
