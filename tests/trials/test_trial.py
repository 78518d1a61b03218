"""Trials in processes of their own: what they leave behind, and what they compare."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import tried
from helpers.processes import has_ended
from torch.utils.data import DataLoader

from lightning_perf.trials import trial
from lightning_perf.trials.experiment import Candidate, Experiment, Setting
from lightning_perf.trials.process import RESULT, TRAINER, VARIABLE, Outcome
from lightning_perf.trials.proof import same_training

WORKERS = Candidate(
    "Workers", {"num_workers": 2}, "num_workers=2", "input", True, [], None, 1, {},
    {"num_workers": 2}, "", [],
)  # fmt: skip
FIRST = Setting(keeps=("checkpoint", "validation"))
#: Two ranks on this machine.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files and folders below a folder, with their content and time."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def run(
    folder: Path, arguments: Sequence[str], *settings: Setting, batches: int | None = None
) -> list[Outcome]:
    """Trials of Python with these arguments, in a folder that must stay as it is."""
    before = contents(folder)
    trials = Experiment([sys.executable, *arguments], minutes=5, seconds=0.5, only=[], tell=print)
    trials.batches = batches
    try:
        found = []
        for setting in settings:
            found.append(trials.run(setting))
            trials.batches = batches or 12
    finally:
        trials.close()
    assert contents(folder) == before
    return found


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The results of a first run and of one with workers, where a checkpoint must stay."""
    folder = tmp_path_factory.mktemp("stateful")
    (folder / "kept").mkdir()
    (folder / "kept" / "last.ckpt").write_text("of another run")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("OMP_NUM_THREADS", "1")
        outcomes = run(folder, [tried.__file__, "stateful"], FIRST, Setting((WORKERS,)))
        assert [each.error for each in outcomes] == [None, None]
        yield [dict(each.result) for each in outcomes]


@pytest.mark.slow
def test_the_first_run_diagnoses_and_leaves_nothing(stateful: list[dict[str, Any]]) -> None:
    """Nor checkpoints, logs and files of the lines after fit of a script that writes all."""
    result, _ = stateful
    assert result["timed"] >= 60
    assert result["epoch"] == 20
    assert result["dataset"] == "stateful"
    assert not result["dataset_changes"]  # but by its items
    assert result["verdicts"]
    assert "Elsewhere writes nothing in trials" in result["notes"]


@pytest.mark.slow
def test_items_that_depend_on_earlier_ones_are_found(stateful: list[dict[str, Any]]) -> None:
    """In workers each copy of the dataset counts for itself."""
    base, ours = stateful
    assert same_training(ours, [base], [], True, "stateful") == "not equal: batch 1 differs"


@pytest.mark.slow
def test_two_ranks_of_a_launcher(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides when the first run ends, although rank 1 has trained for longer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (found,) = run(in_tmp, [*TORCHRUN, tried.__file__, "ranks"], FIRST)
    assert found.error is None
    assert found.result["world_size"] == 2
    assert found.result["timed"] >= 60
    assert found.result["dataset_changes"]


@pytest.mark.slow
def test_a_module_whose_workers_are_spawned(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import the module again, with the trial's environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    package = in_tmp / "package"
    package.mkdir()
    shutil.copy(tried.__file__, package / "train.py")
    (found,) = run(in_tmp, ["-m", "package.train", "spawn"], Setting(), batches=10)
    assert found.error is None
    assert found.result["timed"] == 10
    assert len(found.result["samples"]) == 10


HANGS = """
import subprocess, sys, time
code = "import os, time; open(f'{os.getpid()}.pid', 'w'); time.sleep(1e6)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
time.sleep(1e6)
"""


@pytest.mark.slow
def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has started, sessions of their own included."""
    monkeypatch.chdir(tmp_path)
    trials = Experiment([sys.executable, "-c", HANGS], 1, 1, [], print)
    trials.allowed = 3.0
    outcome = trials.run(Setting())
    trials.close()
    assert outcome.error is not None
    assert outcome.error.startswith("stopped after 3.")
    assert has_ended(tmp_path)


ORPHAN = HANGS.replace("time.sleep(1e6)\n", "time.sleep(2)\n")


@pytest.mark.slow
def test_what_outlives_its_launcher_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure(ORPHAN)
    assert has_ended(tmp_path)


#: As a trial ends: the result is there, and the process waits.
ENDS = f"""
import json, os, pathlib, time
spec = pathlib.Path(os.environ["{VARIABLE}"])
spec.with_name("{RESULT}").write_text(json.dumps(dict(timed=1, seconds=1.0)))
time.sleep(1e6)
"""


@pytest.mark.slow
def test_a_shell_script_does_not_go_on_after_a_trial(in_tmp: Path) -> None:
    """Such as one that moves the checkpoint, also without ``set -e``."""
    (in_tmp / "train.py").write_text(ENDS)
    (in_tmp / "train.sh").write_text(f"'{sys.executable}' train.py\ntouch moved\n")
    trials = Experiment(["sh", "train.sh"], 1, 1, [], print)
    outcome = trials.run(Setting())
    trials.close()
    assert outcome.error is None
    assert outcome.wall_seconds < 60
    assert sorted(each.name for each in in_tmp.iterdir()) == ["train.py", "train.sh"]


#: Has shared memory, a file of a batch and a semaphore.
SHARES = f"""
import multiprocessing as mp, multiprocessing.shared_memory, torch
memory = mp.shared_memory.SharedMemory(create=True, size=1000)
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.ones(10).share_memory_()
name = tensor.untyped_storage()._share_filename_cpu_()[1].decode().strip("/")
lock = mp.get_context("spawn").Lock()
open("names", "w").write(f"{{memory.name}} {{name}} sem.{{lock._semlock.name.strip('/')}}")
open(f"{{mp.resource_tracker._resource_tracker._pid}}.pid", "w")
{ENDS}"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is no folder")
def test_shared_memory_is_freed(in_tmp: Path) -> None:
    """By processes that outlive its users, and end then."""
    trials = Experiment([sys.executable, "-c", SHARES], 1, 1, [], print)
    assert trials.run(Setting()).error is None
    trials.close()
    assert has_ended(in_tmp)
    files = [Path("/dev/shm", each) for each in (in_tmp / "names").read_text().split()]
    end = time.monotonic() + 10
    while any(each.exists() for each in files) and time.monotonic() < end:
        time.sleep(0.05)
    assert [each.exists() for each in files] == [False] * 3


def failure(code: str, *script: str) -> str:
    """Why a trial of Python code, or of a script, has no result."""
    trials = Experiment([sys.executable, *(script or ("-c", code))], 1, 1, [], print)
    try:
        return str(trials.run(Setting()).error)
    finally:
        trials.close()


#: What torchrun writes after the error of a rank.
TABLE = "print('ChildFailedError: '); print('traceback : To enable'); print('=' * 60)"

#: As the first Trainer does.
SEEN = f"""
import os, pathlib
seen = pathlib.Path(os.environ["{VARIABLE}"]).with_name("{TRAINER}")
seen.touch()
seen"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('done')", "no Trainer was seen. If another program starts the training"),
        ("raise OSError('no data')", "OSError: no data"),
        (f"print('[rank0]: OSError: no data'); {TABLE}; exit(1)", "OSError: no data"),
        ("print('out of luck'); exit(1)", "out of luck"),
        ("exit(3)", "exit code 3"),
        (SEEN, "there is nothing to try: a Trainer was constructed, but Trainer.fit is not"),
        (f"{SEEN}.write_text('in Trainer.fit'); os._exit(0)",
         "the process ended in Trainer.fit (exit code 0; the last line: exit code 0)"),
        (f"{SEEN}; print('Tip: try it'); exit(3)",
         "the process ended before Trainer.fit (exit code 3; the last line: Tip: try it)"),
        ("import os; print('x', flush=True); os.kill(os.getpid(), 9)",
         "the process ended before Trainer.fit (signal 9, 9 where memory runs out; the last"),
        ("input()", "EOFError: EOF when reading a line: trials have no standard input, so"),
    ],
)  # fmt: skip
def test_why_there_is_no_result(code: str, why: str) -> None:
    assert failure(code).startswith(why)


def test_an_error_before_fit_names_the_line_of_the_script(in_tmp: Path) -> None:
    """Also one that the script cannot be read for, and one within a library."""
    for text, why in (
        ("x = 1\nif x\n", "SyntaxError: expected ':' (train.py, line 2)"),
        ("import json\n\njson.loads('')", "char 0) (train.py, line 3)"),
    ):
        (in_tmp / "train.py").write_text(text)
        assert failure("", "train.py").endswith(why)


def test_the_first_trainer_leaves_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which `SEEN` is known: there was one in a process with the environment."""
    spec = {
        "folder": str(tmp_path), "shared": str(tmp_path), "changes": [], "keeps": [],
        "warm_up": 1, "batches": 1,
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    monkeypatch.setattr(trial.Trial, "attach", lambda self: None)
    trial.joined(str(tmp_path / "spec.json"))
    assert (tmp_path / TRAINER).exists()


@pytest.mark.parametrize("count", [1, 2])
def test_only_one_loader_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Of several, none is proposed a change: one value would be for all."""
    loaders = [DataLoader([1, 2], batch_size=size) for size in range(1, count + 1)]
    monkeypatch.setattr(trial.Trial, "_record_samples", lambda *_: None)
    tried_here = trial.Trial(trial.Spec(str(tmp_path), str(tmp_path), [], [], 1, 1))

    class Strategy:
        def process_dataloader(self, loader: Any) -> Any:
            return loader

    class Loop:
        def setup_data(self) -> None:
            for each in loaders:
                tried_here._process_loader(Strategy(), each)

    tried_here._set_up_data(Loop())
    assert tried_here._loader is (loaders[0] if count == 1 else None)
