"""Trainings that hang: real processes, each reported while it hangs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import platform
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import psutil
import pytest
import torch
from helpers import hanging
from helpers.command import exit_code, until
from helpers.fake_nvml import FakeGpu, install
from helpers.hanging import (
    FewerOnRank0,
    Hangs,
    HangsElsewhere,
    Samples,
    TrainsAnother,
    line,
    training,
)
from helpers.small import RANKS, WIDTH, Records, Small, trainer
from helpers.users import process_of_another_user
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_perf import ConfigError, Hang, PerfWarning, SystemMetrics, Timings
from lightning_perf.cli.runs import ranks_beside
from lightning_perf.diagnosis.hang import LEFT, RankState
from lightning_perf.run import hang_files, watchdog
from lightning_perf.run.context import current_run
from lightning_perf.run.hang_files import HangFiles
from lightning_perf.run.watchdog import _entry_of, _is_rare, _Watch
from lightning_perf.system import stacks
from lightning_perf.system.frames import Frame, compiles
from lightning_perf.system.stacks import PROC, Dump, children_of, dump_of, stacks_of
from lightning_perf.tracking.summary import read_summary

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs signals of Linux")


def reported(folder: Path) -> str:
    """The report of a training that hangs."""
    (path,) = until(lambda: [*folder.glob("*/hang/report.md")])
    return path.read_text()


class EndsLate(Small):
    """One rank has a phase with a longer limit than that in which the other one waits."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            hanging.sleep()


class LogsValidation(Small):
    """Averages a metric over all ranks in each batch of validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), on_step=True, sync_dist=True)


#: Trainings that hang: the module, options, and what the report says.
PLANTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "worker": (
        Small, {"samples": Samples(hanging.sleep), "workers": 2},
        f"in dataloader_next (worker 0 waits in {line('sleep')})",
    ),
    "pipe": (
        Small, {"samples": Samples(hanging.read_pipe)}, f"in dataloader_next ({line('pipe')})"
    ),
    "locks": (partial(Hangs, hanging.deadlock), {}, f"in forward ({line('deadlock')})"),
    "logger": (Small, {"logger": hanging.BlockedLogger()}, f"({line('socket')})"),
    "collective": (
        partial(Hangs, hanging.barrier), RANKS,
        f"rank 0 waits for it in forward (barrier, {line('barrier')}); rank 1 did not join",
    ),
    "rank": (
        partial(Hangs, hanging.sleep, 1), RANKS,
        f"rank 1 has been in forward ({line('sleep')}) for ",
    ),
    "end of an epoch": (
        EndsLate, RANKS | {"max_epochs": 2},
        f"rank 1 has been in other EndsLate.on_train_epoch_end ({line('sleep')}) for ",
    ),
    "fewer batches on a rank": (
        LogsValidation, RANKS | {"samples": FewerOnRank0()},
        "rank 0 has ended its epoch after 6 batches of training, and the others have not",
    ),
    "GIL of a rank": (
        partial(Hangs, hanging.hold_gil, 1), RANKS,
        f"rank 1 runs no Python: C code holds the GIL, in {line('gil')}; rank 0 waits for it in",
    ),
    "stopped rank": (
        partial(Hangs, hanging.stop, 1), RANKS,
        "rank 1 is stopped (SIGSTOP); rank 0 waits for it in backward",
    ),
    "stopped rank 0": (
        partial(Hangs, hanging.stop, 0), RANKS,
        "rank 0 is stopped (SIGSTOP); rank 1 waits for it in backward",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_hang_is_reported_with_rank_phase_and_line(tmp_path: Path, kind: str) -> None:
    """While it hangs; each rank that runs leaves the stacks of its threads and its workers."""
    module, options, expected = PLANTED[kind]
    with training(tmp_path, module(), **options):
        assert expected in reported(tmp_path)
        (stacks, *_) = until(lambda: [*tmp_path.glob("*/hang/rank?.stacks.txt")])
        assert "MainThread" in stacks.read_text() or "GIL" in kind
        output = tmp_path / "output"
        until(lambda: "lightning_perf: the training hangs: " in output.read_text())


def test_the_entry_has_the_stage_and_batch_of_the_rank_that_others_wait_for() -> None:
    """Not of the rank that reports; but that one's if the other rank did not answer."""
    run: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=2))
    own = RankState(0, stage="train", batch=8, category="backward", collective="barrier")
    loads = RankState(1, stage="validate", batch=3, category="dataloader_next")
    entry = _entry_of(run, own, [own, loads], 2.0)
    assert [entry[key] for key in ("stage", "batch", "ranks")] == ["validate", 3, [1]]
    entry = _entry_of(run, own, [own, RankState(1, "has ended")], 2.0)
    assert [entry[key] for key in ("stage", "batch", "ranks")] == ["train", 8, [1]]


def test_the_workers_of_other_ranks_are_left_out(
    monkeypatch: pytest.MonkeyPatch, watched: Callable[[Any], _Watch]
) -> None:
    """Rank 0 of Lightning's launcher has started the other ranks."""
    own = os.getpid()
    children = {own: [1, 2, 3, 4], 2: [3]}
    monkeypatch.setattr(watchdog, "children_of", lambda pid: children.get(pid, []))
    monkeypatch.setattr(watchdog, "dump_of", lambda pid: Dump(pid, "stopped", ""))
    run: Any = SimpleNamespace(processes={0: own, 1: 2}, require_times=lambda: Mock())
    watch = watched(run)
    roles = {1: "worker 0", 3: "worker 0 of rank 1"}
    assert [*watch._workers(run, roles)] == ["worker 0 is stopped"]
    assert re.findall("process (.), stopped", watch._text) == ["1", "4"]


@pytest.mark.slow
def test_summary_and_page_say_so_while_it_hangs(tmp_path: Path) -> None:
    """The entry has no end, and grows; the page has a section; nothing says that the run ended."""
    with training(tmp_path, Hangs(hanging.sleep), log_every_n_steps=1):
        (page,) = until(lambda: [*tmp_path.glob("*/report.html")])
        summary = read_summary(page.with_name("summary.json"))
        (hang,) = summary["hangs"]
        until(lambda: read_summary(page.with_name("summary.json"))["hangs"][0]["seconds"] > 2)
        (later,) = read_summary(page.with_name("summary.json"))["hangs"]
        assert later["text"] in reported(tmp_path)
    assert later["seconds"] >= 2 * hang["seconds"]
    assert later["text"] == hang["text"].replace(
        f" for {hang['seconds']:.0f} s", f" for {later['seconds']:.0f} s"
    )
    assert later["began"] == hang["began"]
    assert summary["status"] == "running"
    assert hang.keys() == {"began", "seconds", "stage", "batch", "ranks", "phase", "text"}
    assert (hang["stage"], hang["batch"], hang["phase"]) == ("train", hanging.BATCH, "forward")
    assert "hangs, for" in page.read_text()


@pytest.mark.slow
def test_one_report_per_hang_and_one_more_elsewhere(tmp_path: Path) -> None:
    """A training that goes on says how long it stood; the report of its end has both hangs."""

    class Twice(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx in (5, 9):
                expected = f"# The training hangs\n.*, at batch {batch_idx}"
                until(lambda: re.search(expected, reported(tmp_path), re.DOTALL))
            return super().training_step(batch, batch_idx)

    with training(tmp_path, Twice()) as process:
        process.join()
        assert process.exitcode == 0
    (path,) = tmp_path.glob("*/summary.json")
    first, second = read_summary(path)["hangs"]
    assert (first["batch"], second["batch"]) == (5, 9)
    assert first["seconds"] >= 1
    assert second["seconds"] >= 2.5 * first["seconds"]  # three times the first is expected
    assert first["ended"] <= second["began"] < second["ended"]
    assert [each.name for each in path.parent.glob("report*.html")] == ["report.html"]
    assert re.findall("# The training stood|, at batch \\d+", reported(tmp_path)) == [
        "# The training stood", ", at batch 9", "# The training stood", ", at batch 5",
    ]  # fmt: skip
    assert (path.parent / "hang/rank0.stacks.txt").read_text().count("MainThread") == 2


@pytest.mark.slow
def test_a_hook_that_trains_with_a_trainer_of_its_own_does_not_hang(tmp_path: Path) -> None:
    """Also longer than the limit, while its batches go on."""
    with training(tmp_path, TrainsAnother(tmp_path)) as process:
        process.join()
        assert process.exitcode == 0
    (path,) = tmp_path.glob("*/summary.json")
    assert "hangs" not in read_summary(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, RANKS], ids=["alone", "ranks"])
def test_a_second_run_of_one_name_keeps_what_the_first_has_left(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its files are in a folder with a number, as its summary has one."""
    left: dict[Path, str] = {}
    for number in ("", "-2"):
        report = tmp_path / f"records-version_0/hang{number}/report.md"
        module = Hangs(partial(until, report.exists))
        with training(tmp_path, module, logger=Records(), **options) as process:
            process.join()
            assert process.exitcode == 0
        assert "# The training stood" in report.read_text()
        assert (report.parent / "rank0.stacks.txt").exists()
        assert left == {path: path.read_text() for path in left}
        left = {path: path.read_text() for path in report.parent.iterdir()}
    names = {path.name for path in report.parent.parent.iterdir()}
    assert {"hang", "hang-2", "summary.json", "summary-2.json"} <= names
    assert "hang-3" not in names


@pytest.mark.slow
def test_a_hang_that_is_interrupted_did_not_go_on(tmp_path: Path) -> None:
    """As by Ctrl-C: its entry has no end, and the report does not say that it has one."""
    with training(tmp_path, Hangs(hanging.sleep)) as process:
        reported(tmp_path)
        until(partial(_has_warned, tmp_path))
        os.kill(process.pid, signal.SIGINT)
        process.join()
    assert reported(tmp_path).startswith("# The training hangs")
    assert "goes on" not in (tmp_path / "output").read_text()
    (path,) = tmp_path.glob("*/summary.json")
    summary = read_summary(path)
    assert summary["status"] == "stopped by an exception"
    assert "ended" not in summary["hangs"][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "link", "report"])
def test_files_of_the_user_with_our_names_are_left_alone(tmp_path: Path, kind: str) -> None:
    """A report that nobody has marked, a file, and a link, which may point anywhere."""
    (theirs := tmp_path / "records-version_0/hang").parent.mkdir()
    (other := tmp_path / "other").mkdir()
    if kind == "file":
        theirs.write_text("mine")
    elif kind == "link":
        theirs.symlink_to(other)
    else:
        theirs.mkdir()
        (theirs / "report.md").write_text("mine")
    with training(tmp_path, Hangs(hanging.sleep), logger=Records()):
        until((theirs.parent / "hang-2/report.md").exists)
    assert not [*other.iterdir()]
    assert kind != "report" or (theirs / "report.md").read_text() == "mine"


@contextmanager
def two_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Small, nodes: int = 1, **options: Any
) -> Iterator[list[Any]]:
    """Two processes without a common folder, which a launcher would have started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    set_up = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    devices = 2 // nodes
    options |= {"strategy": "ddp", "devices": devices, "num_nodes": nodes}
    processes = list[Any]()
    with ExitStack() as stack:
        for rank in (0, 1):
            (folder / str(rank)).mkdir()
            its = {"NODE_RANK": str(rank // devices), "LOCAL_RANK": str(rank % devices)}
            for name, value in (set_up | its).items():
                monkeypatch.setenv(name, value)
            its_folder = folder / str(rank)
            processes.append(stack.enter_context(training(its_folder, module, **options)))
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_without_a_shared_folder_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Rank 0 names the rank that does not join, its phase and line; each keeps its own stacks."""
    with two_ranks(tmp_path, monkeypatch, Hangs(hanging.sleep, 1), nodes):
        text = reported(tmp_path / "0")
        assert f"rank 1 has been in forward ({line('sleep')}) for " in text
        assert "; rank 0 waits for it in backward" in text
        (stacks,) = until(lambda: [*tmp_path.glob("1/*/hang/rank1.stacks.txt")])
        assert "in sleep" in stacks.read_text()
    assert not [*tmp_path.glob("1/*/hang/report.md")]


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_backward_is_named(tmp_path: Path) -> None:
    """After the gradients of all ranks were reduced: it no longer waits for the others."""

    class OwnBackward(Small):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)
            if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == hanging.BATCH:
                hanging.sleep()

    with training(tmp_path, OwnBackward(), **RANKS):
        text = reported(tmp_path)
    assert f"**rank 1 has been in backward ({line('sleep')}) for " in text
    assert "; rank 0 waits for it in other Trainer.broadcast_sigterm" in text


@pytest.mark.slow
def test_a_rank_that_has_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process still runs, as while a logger sends what it has; the others wait for it."""

    class Sends(Records):
        def finalize(self, status: str) -> None:
            hanging.sleep()

    with two_ranks(tmp_path, monkeypatch, Hangs(hanging.fail, 1), logger=Sends()):
        text = reported(tmp_path / "0")
    assert "**rank 1 has ended its training by an exception; rank 0 waits for it in back" in text


@pytest.mark.slow
def test_a_rank_that_is_the_last_to_end_is_named(tmp_path: Path) -> None:
    """The others have ended as they should, and do not wait for it."""

    class SlowEnd(Small):
        def on_fit_end(self) -> None:
            if self.global_rank == 0:
                hanging.sleep()

    with training(tmp_path, SlowEnd(), **RANKS):
        text = reported(tmp_path)
    assert f"**rank 0 has been in other SlowEnd.on_fit_end ({line('sleep')}) for " in text
    assert "s.**" in text
    assert "| 1 | has ended its training |" in text


@pytest.mark.slow
def test_a_training_that_ran_no_python_says_afterwards_where_it_stood(tmp_path: Path) -> None:
    """In which stage, batch and phase, though the watch had last looked in another stage."""
    options: dict[str, Any] = {"limit_val_batches": 3, "num_sanity_val_steps": 0}
    with training(tmp_path, hanging.FreezesInValidation(), **options) as process:
        process.join()
        assert process.exitcode == 0
    (path,) = tmp_path.glob("*/summary.json")
    (hang,) = read_summary(path)["hangs"]
    assert (hang["stage"], hang["batch"], hang["phase"]) == ("validate", 1, "forward")
    assert f"the training has been in validate, forward ({line('gil')}) for " in hang["text"]
    assert "s and ran no Python meanwhile: C code held the GIL, or the process" in hang["text"]
    assert "the training hangs: " in (tmp_path / "output").read_text()
    assert "in hold_gil" in (path.parent / "hang/rank0.stacks.txt").read_text()


def test_a_training_that_goes_on_before_the_watch_looks_is_reported_where_it_stood(
    tmp_path: Path,
) -> None:
    """Its thread may get the GIL some milliseconds late."""
    found: list[dict[str, Any]] = []
    own = stacks.Stacks()

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            run: Any = current_run(trainer)
            if index == 0:
                clock = run.require_times().clock
                self.watch = _Watch(own, clock, 0.3, 0.03, threading.Event(), found.append)
            if index in (0, hanging.BATCH + 1):
                self.watch.look(run)

    module = Hangs(partial(time.sleep, 2.0))
    with pytest.warns(PerfWarning, match="the training hangs"):
        trainer(tmp_path, Timings(), Looks()).fit(module)
    own.close()
    (hang,) = found
    assert (hang["stage"], hang["batch"], hang["phase"]) == ("train", hanging.BATCH, "")


@pytest.mark.slow
def test_a_rank_0_that_ran_no_python_does_not_replace_the_report(tmp_path: Path) -> None:
    """Another rank has reported it meanwhile: one warning, and one entry with batch and line."""
    os.mkfifo(fifo := tmp_path / "fifo")
    began = time.monotonic()
    with training(tmp_path, Hangs(partial(hanging.hold_gil_until, fifo)), **RANKS) as process:
        reported(tmp_path)
        time.sleep(time.monotonic() - began)  # rank 0 may have a longer limit
        fifo.write_text("goes on")
        process.join()
        assert process.exitcode == 0
    text = reported(tmp_path)
    expected = f"rank 0 runs no Python: C code holds the GIL, in {line('gil until')}; rank 1 waits"
    assert expected in text
    assert "# The training stood" in text
    assert (tmp_path / "output").read_text().count("the training hangs: ") == 1
    (path,) = tmp_path.glob("*/summary.json")
    (hang,) = read_summary(path)["hangs"]
    assert (hang["batch"], hang["ranks"], hang["phase"]) == (hanging.BATCH, [0], "forward")
    assert f"rank 0 has been in forward ({line('gil until')}) for " in hang["text"]
    assert hang["ended"]


#: What a py-spy may do.
PY_SPY = {
    "never ends": "#!/bin/sh\nexec sleep 1000\n",
    "shows": "#!/bin/sh\necho native stacks $*\n",
    "may not": "#!/bin/sh\necho no permission >&2; exit 1\n",
    "no text": "#!/bin/sh\nprintf '\\377'\n",
}


@pytest.mark.slow
def test_a_report_does_not_wait_for_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written first; what py-spy shows follows, also of a child without our handler."""
    monkeypatch.setattr(stacks, "_PY_SPY_PATIENCE", 3.0)
    path, running = os.environ["PATH"], {}
    with ExitStack() as stack:
        for kind, text in PY_SPY.items():
            (folder := tmp_path / kind).mkdir()
            (program := folder / "py-spy").write_text(text)
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{folder}:{path}")
            hangs = training(folder, Hangs(hanging.sleep_with_child))
            running[kind] = stack.enter_context(hangs).pid
        expected = {
            "shows": f"native stacks dump --native --pid {running['shows']}\n",
            "never ends": "it took too long",
            "may not": "py-spy failed: no permission",
            "no text": "\N{REPLACEMENT CHARACTER}",
        }
        for kind, pid in running.items():
            report = Path(until(lambda: [*(tmp_path / kind).glob("*/hang/report.md")])[0])  # noqa: B023
            assert "in forward" in report.read_text()
            its = report.with_name("rank0.stacks.txt")
            assert kind != "never ends" or "py-spy" not in its.read_text()
            until(lambda: expected[kind] in its.read_text())  # noqa: B023
            if kind == "shows":
                (child,) = psutil.Process(pid).children()
                assert f"--pid {child.pid}\n" in its.read_text()


@pytest.mark.slow
def test_a_py_spy_that_does_not_end_delays_neither_the_watch_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next hang is reported meanwhile; after the end, neither it nor a thread is left."""
    (program := tmp_path / "py-spy").write_text(PY_SPY["never ends"])
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "_PY_SPY_PATIENCE", 1000.0)

    class Waits(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index in (5, 9):
                until(lambda: len(hang.hangs) == (1 if index == 5 else 2))

    before, hang = state_of_process(), Hang(after="1s")
    with pytest.warns(PerfWarning, match="the training hangs"):
        trainer(tmp_path, Timings(), hang, Waits()).fit(Small())
    assert state_of_process() == before
    until(lambda: not psutil.Process().children())


def test_py_spy_has_no_terminal_for_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of sudo, which would wait for it; the process has a terminal."""
    (program := tmp_path / "py-spy").write_text("#!/bin/sh\nread it < /dev/tty || exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "_PY_SPY_PATIENCE", 30.0)
    pid, terminal = pty.fork()
    if not pid:
        found = stacks.native_stacks(os.getppid())
        (tmp_path / "found").write_text(found)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(terminal)
    found = (tmp_path / "found").read_text()
    assert found.startswith("py-spy failed: ")
    assert "timed out" not in found


@pytest.mark.slow
def test_gpus_and_the_flight_recorder_are_in_the_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest samples of NVML, and torch's record of collectives, if it is on."""
    install(monkeypatch, FakeGpu("GPU-a", util=100))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(
        c10d, "_dump_nccl_trace_json", lambda: b'{"entries": ["all"]}', raising=False
    )
    with training(tmp_path, Hangs(hanging.sleep), also=[SystemMetrics(0.1)]):
        (path,) = until(lambda: [*tmp_path.glob("*/hang/rank0.stacks.txt")])
        until(lambda: '{"entries": ["all"]}' in path.read_text())
        assert "gpu_0/gpu_util: 100\n" in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_hang_in_another_stage_is_reported(tmp_path: Path, stage: str) -> None:
    """In a short one, too, which has no summary yet; a warning names the report."""
    with training(tmp_path, HangsElsewhere(), stage=stage, limit_val_batches=10):
        text = reported(tmp_path)
        assert f"in {stage}, " in text
        assert line("sleep") in text
        (report,) = tmp_path.glob("*/hang/report.md")
        until(lambda: f"are in {report.parent}" in (tmp_path / "output").read_text())


#: Hooks that are not called per batch, from the set-up to the end.
PHASES = (
    "setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_end",
    "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown",
)  # fmt: skip


class HangsInSanityCheck(Small):
    """In a batch of the validation before training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hanging.sleep()


class EndlessLogger(Records):
    """Sends what it has for good."""

    def finalize(self, status: str) -> None:
        hanging.sleep()


@pytest.mark.slow
def test_a_hang_outside_of_batches_is_reported(tmp_path: Path) -> None:
    """In the set-up, hooks, checkpoints and the end, with its line; and of a logger's end."""
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "sanity check": (HangsInSanityCheck(), {"num_sanity_val_steps": 1, "limit_val_batches": 1}),
        "logger": (Small(), {"logger": EndlessLogger()}),
    }
    for name in PHASES:
        hangs = type("HangsInHook", (Small,), {name: lambda *_, **__: hanging.sleep()})
        cases[name] = hangs(), {"enable_checkpointing": True}
    with ExitStack() as stack:
        for name, (module, options) in cases.items():
            (tmp_path / name).mkdir()
            stack.enter_context(training(tmp_path / name, module, **options))
        for name in cases:
            assert f"({line('sleep')}) for " in reported(tmp_path / name), name
            until(partial(_has_warned, tmp_path / name))


def _has_warned(folder: Path) -> bool:
    return "lightning_perf: the training hangs: " in (folder / "output").read_text()


@pytest.mark.slow
def test_a_hang_at_the_end_keeps_the_report_of_an_earlier_one(tmp_path: Path) -> None:
    """Its files are in the next folder."""
    report = tmp_path / "records-version_0/hang/report.md"
    module = Hangs(partial(until, report.exists))
    with training(tmp_path, module, logger=EndlessLogger()):
        until((report.parents[1] / "hang-2/report.md").exists)
    assert report.read_text().startswith("# The training stood")


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_a_training_that_ends_is_no_hang(tmp_path: Path, raises: bool) -> None:
    """Nor one whose module raises at its end: the process may do something else then."""

    class Ends(Small):
        def teardown(self, stage: str) -> None:
            if raises:
                raise RuntimeError("planted")

    hang = Hang(after="1s")
    run = trainer(tmp_path, hang)
    with pytest.raises(RuntimeError, match="planted") if raises else nullcontext():
        run.fit(Ends())
    until(lambda: "lightning_perf end" not in {each.name for each in threading.enumerate()})
    assert "describe" not in vars(run.profiler)
    assert not hang.hangs
    assert not [*tmp_path.glob("*/hang")]


PAUSE = 1.5


class Pausing(Small):
    """Pauses for half of the limit in a step, a sample, a validation, and a checkpoint."""

    def pause(self) -> None:
        time.sleep(PAUSE)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.pause()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pause()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.pause()


def test_no_thread_is_left_when_fit_returns(tmp_path: Path) -> None:
    """Test suites look for threads right after it."""
    trainer(tmp_path, Hang(), logger=Records()).fit(Small())
    left = [each.name for each in threading.enumerate() if each.name.startswith("lightning_perf")]
    assert not left


def test_a_hang_is_passed_on_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``notify`` gets the run, the text and the entry of `summary.json`."""
    events: list[dict[str, Any]] = []

    class Waits(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 5:
                until(lambda: events)

    hang = Hang(after="1s", notify=events.append)
    trainer(tmp_path, hang, Waits(), logger=Records()).fit(Small())
    (event,) = events
    assert event["event"] == "hang"
    assert hang.hangs[0]["text"].rpartition(" for ")[0] in event["text"]
    assert event["run"] in event["text"]
    assert event["batch"] == 5
    caplog.clear()  # the warning


def test_a_hang_that_another_rank_has_passed_on_is_not_sent_again() -> None:
    """Rank 0, which ran no Python meanwhile, learns of it when it is over."""
    events: list[dict[str, Any]] = []
    hang = Hang(notify=events.append)
    over = {"text": "rank 0 runs no Python", "began": "now", "ended": "later"}
    for entry in (over, {"text": "rank 1 has been in forward", "began": "later"}):
        hang._found(entry)
    until(lambda: events)
    assert [event["began"] for event in events] == ["later"]
    assert [entry["began"] for entry in hang.hangs] == ["now", "later"]


def test_a_validation_leaves_the_limit_of_the_batches_after_it(tmp_path: Path) -> None:
    """Only after the last hook of the stage itself, where checkpoints are written, it is longer."""
    ended: list[bool] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            run = current_run(trainer)
            assert run is not None
            ended.append(run.stages.ended)

    options = {"val_check_interval": 2, "limit_train_batches": 6, "limit_val_batches": 1}
    trainer(tmp_path, Hang(), Looks(), logger=Records(), **options).fit(Small())
    assert ended == [False] * 6


def test_hooks_that_every_batch_calls_have_the_limit_of_batches(tmp_path: Path) -> None:
    """Those that a training calls less often have a longer one, as they may do more."""
    calls: Counter[str] = Counter()

    def counts(name: str) -> Any:
        return lambda *_, **__: calls.update([name])

    names = [name for name in dir(L.Callback) if name.startswith("on_")]
    counting = type("Counting", (L.Callback,), {name: counts(name) for name in names})()
    trainer(tmp_path, counting, max_epochs=2, limit_val_batches=8, logger=Records()).fit(Small())
    often = {name for name, count in calls.items() if count >= 16}
    assert {"on_before_optimizer_step", "on_validation_batch_end"} <= often
    assert {name for name in calls if not _is_rare(f"[Callback]Counting.{name}")} == often


class Computes(Metric):
    """Calls a function when it is computed."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function
        self.add_state("count", torch.tensor(0.0))

    def update(self, *_: Any) -> None:
        self.count += 1

    def compute(self) -> Any:
        self.function()
        return self.count


@pytest.fixture
def watched() -> Iterator[Callable[[Any], _Watch]]:
    """Makes the checks of a run with a limit of 100 s, as its callback's thread does."""
    own = stacks.Stacks()

    def watch(run: Any) -> _Watch:
        clock = run.require_times().clock
        return _Watch(own, clock, 100.0, 10.0, threading.Event(), lambda entry: None)

    yield watch
    own.close()


def test_work_for_an_epoch_has_the_limit_of_hooks_outside_of_batches(
    tmp_path: Path, watched: Callable[[Any], _Watch]
) -> None:
    """Also metrics that are computed, values that are logged, and code within such a hook."""
    limits: dict[str, set[float]] = {}

    def look(what: str) -> None:
        run = current_run(fitted)
        assert run is not None
        limits.setdefault(f"{run.stage} {what}", set()).add(watched(run)._limit(run, []))

    class Logs(Records):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if current_run(fitted) and "logged" in metrics:
                look("log")
            if "of a batch" in metrics:
                run = current_run(fitted)
                look("log of a batch" if run and run.counters.batches > 1 else "log of the first")

    class Evaluates(Small):
        def __init__(self) -> None:
            super().__init__()
            self.logged, self.own = (Computes(partial(look, "compute")) for _ in "12")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx:
                look("batch")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.logged.update(batch)
            self.own.update(batch)
            self.log("logged", self.logged, on_epoch=True)
            self.log("of a batch", 1.0, on_step=True, on_epoch=False)

        def on_validation_epoch_end(self) -> None:
            self.own.compute()
            with self.trainer.profiler.profile("[LightningModule]Evaluates.training_step"):
                look("span in a hook")

    fitted = trainer(
        tmp_path, Timings(), logger=Logs(), limit_val_batches=2, num_sanity_val_steps=0
    )
    fitted.fit(Evaluates())
    assert limits == {
        "train batch": {100.0}, "validate compute": {500.0}, "validate span in a hook": {500.0},
        "validate log": {500.0}, "validate log of a batch": {100.0},
        "validate log of the first": {500.0},
    }  # fmt: skip


def test_the_first_fetch_of_each_loader_has_a_longer_limit(
    tmp_path: Path, watched: Callable[[Any], _Watch]
) -> None:
    """As has the start of training's iterator in each epoch; other fetches have that of batches."""
    limits: list[float] = []

    def look() -> None:
        run = current_run(fitted)
        if run is not None and run.stage:
            limits.append(watched(run)._limit(run, []))

    class Looks(Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            look()
            return torch.ones(WIDTH)

    class Starts(DataLoader[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            look()
            return super().__iter__()

    class Evaluates(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    options = {"num_sanity_val_steps": 0, "max_epochs": 2, "limit_val_batches": 3}
    fitted = trainer(tmp_path, Timings(), **options)
    loaders = Starts(Samples(), 4), [DataLoader(Looks()) for _ in range(2)]
    fitted.fit(Evaluates(), *loaders)
    evaluated = [500.0, 100.0, 100.0] * 2
    assert limits[-13:] == [*evaluated, 500.0, *evaluated]


def test_schedulers_of_epochs_have_the_limit_of_hooks_outside_of_batches(
    tmp_path: Path, watched: Callable[[Any], _Watch]
) -> None:
    limits: dict[str, list[float]] = {"step": [], "epoch": []}

    class Schedules(Small):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            return [made], [
                {"scheduler": LambdaLR(made, lambda _: 1.0), "interval": each} for each in limits
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            configs = self.trainer.lr_scheduler_configs
            (interval,) = (each.interval for each in configs if each.scheduler is scheduler)
            run = current_run(self.trainer)
            limits[interval].append(watched(run)._limit(run, []))  # type: ignore[arg-type]
            super().lr_scheduler_step(scheduler, metric)

    trainer(tmp_path, Timings(), limit_train_batches=3).fit(Schedules())
    # Those of each step have it after the last batch, too.
    assert limits == {"step": [500.0, 100.0, 500.0], "epoch": [500.0]}


@pytest.mark.parametrize("moves", [False, True])
def test_a_phase_that_ends_while_it_is_judged_is_no_hang(
    tmp_path: Path, watched: Callable[[Any], _Watch], moves: bool
) -> None:
    """Its limit may be that of the next phase, which is shorter."""
    suspected: list[bool] = []

    class Steps(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            run: Any = current_run(self.trainer)
            if batch_idx == 3:
                watch = watched(run)
                watch.look(run)
                watch._moved -= 250.0

                def limit(*_: object) -> float:
                    if moves:
                        run.require_times().clock.run("other", "next")
                    return 100.0

                watch._limit = limit  # type: ignore[method-assign]
                watch._suspect = lambda *_: suspected.append(True)  # type: ignore[method-assign]
                watch.look(run)
            return super().training_step(batch, batch_idx)

    trainer(tmp_path, Timings()).fit(Steps())
    assert suspected == [True] * (not moves)


def test_the_first_batch_is_no_measure_of_others(
    tmp_path: Path, watched: Callable[[Any], _Watch]
) -> None:
    """It may compile or wait for workers, and hooks after ours are a part of it."""
    limits: list[float] = []

    class Steps(Small):
        def training_step(self, *arguments: Any) -> Any:
            if arguments[1]:
                limits.append(looks.watch._limit(looks.run, []))
            return super().training_step(*arguments)

    class Looks(L.Callback):
        run: Any
        watch: _Watch

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            self.run = run = current_run(trainer)
            number = run.counters.batches
            if number == 1:
                self.watch = watched(run)
            run.counters.last_seconds = {1: 1000.0, 2: 5.0}.get(number, 10.0)
            self.watch.look(run)
            limits.append(self.watch._limit(run, []))

    looks = Looks()
    trainer(tmp_path, Timings(), looks, limit_train_batches=4).fit(Steps())
    at_ends, in_steps = limits[::2], limits[1::2]
    assert at_ends == [500.0, 150.0, 150.0, 300.0]
    assert in_steps == [100.0, 150.0, 150.0]


def test_only_compiling_has_the_limit_of_compilations() -> None:
    """Compiled modules, checkpointing and custom operators run within torch's compiler, too."""
    seen: dict[str, bool] = {}

    def look(name: str) -> None:
        frames = (frame for frame, _ in walk_stack(None))
        seen[name] = compiles([Frame(f.f_code.co_filename, 0, f.f_code.co_name) for f in frames])

    def backend(graph: Any, inputs: Any) -> Any:
        look("backend")
        return graph

    @torch.compiler.disable
    def disabled(x: torch.Tensor) -> torch.Tensor:
        look("compiled")
        return x * 2

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        look("checkpointed")
        return x * 2

    @torch.library.custom_op("lightning_perf_tests::looks", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        look("custom")
        return x * 2

    torch.compile(lambda x: disabled(x + 1) + 1, backend=backend)(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    checkpoint(checkpointed, x, use_reentrant=False).sum().backward()
    custom(torch.ones(2))
    assert seen == {"backend": True, "compiled": False, "checkpointed": False, "custom": False}


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_waits_for_others_does_not_answer_that_it_moves(
    tmp_path: Path, watched: Callable[[Any], _Watch], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """In a phase with a longer limit, too: one that works there answers that it does."""
    answers = list[bool]()

    class Ends(Small):
        def on_fit_end(self) -> None:
            run = current_run(self.trainer)
            assert run is not None
            watch = watched(run)
            watch.look(run)
            watch._moved -= 200.0  # of a limit of 500
            frame = Frame("/lightning_perf/run/collective.py", 1, "finish")
            monkeypatch.setattr(watch, "_frames", lambda text: [frame] * waits)
            monkeypatch.setattr(run, "ranks", replace(run.ranks, world_size=2))
            monkeypatch.setattr(watch._files, "is_asked", lambda run: True)
            monkeypatch.setattr(watch._files, "answer", lambda _, its: answers.append(its.moves))
            monkeypatch.setattr(watch._files, "ask", lambda *_: None)
            watch.look(run)
            monkeypatch.undo()

    trainer(tmp_path, Timings()).fit(Ends())
    assert answers == [not waits]


@pytest.mark.slow
def test_pauses_of_half_the_limit_are_no_hang(tmp_path: Path) -> None:
    """Eight trainings with slow steps, samples, validations and checkpoints: no alarm."""
    options: dict[str, Any] = {
        "after": f"{2 * PAUSE:.0f}s", "limit_val_batches": 2, "enable_checkpointing": True,
        "num_sanity_val_steps": 1,
    }  # fmt: skip
    with ExitStack() as stack:
        running = []
        for number in range(8):
            (folder := tmp_path / str(number)).mkdir()
            samples = Samples(partial(time.sleep, PAUSE))
            running.append(stack.enter_context(training(folder, Pausing(), samples, **options)))
        for process in running:
            process.join()
        assert [process.exitcode for process in running] == [0] * 8
    assert not [*tmp_path.rglob("hang")]
    assert not any("hangs" in read_summary(path) for path in tmp_path.rglob("summary.json"))


@pytest.mark.slow
def test_a_rank_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    """Others wait for it longer than the limit; there is no alarm, and no file is left."""

    class Late(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5 and self.global_rank == 1:
                for _ in range(8):
                    time.sleep(0.5)
                    with self.trainer.profiler.profile("[Strategy]Late.training_step"):
                        pass
            return super().training_step(batch, batch_idx)

    with training(tmp_path, Late(), **RANKS) as process:
        process.join()
        assert process.exitcode == 0
    assert "hangs" not in (tmp_path / "output").read_text()
    assert not [*tmp_path.glob("*/hang")]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["report", "abort"])
def test_a_process_that_was_stopped_goes_on_as_one_that_was_not(
    tmp_path: Path, action: str
) -> None:
    """As by the suspension of a job: one warning, one entry that has an end, and no abort."""
    module = Hangs(partial(hanging.work, tmp_path))
    with training(tmp_path, module, after="2s", action=action) as process:
        until((tmp_path / "works").exists)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "output").read_text().count("the training hangs: ") == 1
    (path,) = tmp_path.glob("*/summary.json")
    (hang,) = read_summary(path)["hangs"]
    assert hang["ended"]
    assert hang["seconds"] > 3
    assert "# The training stood" in reported(tmp_path)


@pytest.mark.slow
def test_the_time_in_a_debugger_is_no_part_of_a_pause(tmp_path: Path) -> None:
    """While the user looks, and after they have gone on, there is no report."""
    with training(tmp_path, Hangs(hanging.debug), action="abort") as process:
        process.join()
        assert process.exitcode == 0
    assert "hangs" not in (tmp_path / "output").read_text()
    assert not [*tmp_path.glob("*/hang")]


@pytest.mark.slow
def test_a_hang_that_an_exception_ends_did_not_go_on(tmp_path: Path) -> None:
    """Also where a callback before ours takes its time for the exception."""

    class Slow(L.Callback):
        def on_exception(self, *_: object) -> None:
            time.sleep(1.0)

    def fail() -> None:
        until(lambda: hang.hangs)
        hanging.fail()

    hang = Hang(after="1s")
    fitted = trainer(tmp_path, Slow(), Timings(), hang)
    with (
        pytest.warns(PerfWarning, match="the training hangs"),
        pytest.raises(RuntimeError, match="planted"),
    ):
        fitted.fit(Hangs(fail))
    assert "ended" not in hang.hangs[0]
    assert reported(tmp_path).startswith("# The training hangs")


@pytest.mark.slow
def test_abort_ends_the_process_with_its_exit_code(tmp_path: Path) -> None:
    """After the report, so that a scheduler starts the job again."""
    with training(tmp_path, Hangs(hanging.deadlock), action="abort") as process:
        process.join()
        assert process.exitcode == 75
    assert "in forward" in reported(tmp_path)
    assert [*tmp_path.glob("*/report.html")]


@pytest.mark.slow
def test_abort_ends_data_loader_workers_that_hang(tmp_path: Path) -> None:
    """Otherwise they hold the pipe of ``python train.py | tee log``, which never ends."""

    def running() -> bool:
        for each in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    options: dict[str, Any] = {"samples": Samples(hanging.sleep), "workers": 2}
    with training(tmp_path, Small(), action="abort", **options) as process:
        process.join()
        assert process.exitcode == 75
        until(lambda: not running())


#: Rank 0 starts rank 1, which hangs, and makes a file for some seconds.
LAUNCHES = """
import sys
import time
from pathlib import Path

from helpers import hanging
from lightning_perf.run.context import current_run


class SlowFile(hanging.Hangs):
    def on_train_start(self):
        if self.global_rank == 0:
            current_run(self.trainer).file_worker.submit(lambda: time.sleep(6), "a slow file")


module, options = SlowFile(hanging.sleep, 1), {"strategy": "ddp", "devices": 2}
hanging.fit(Path(sys.argv[1]), module, action="abort", **options)
"""


def _run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a group of processes of its own, which Lightning may kill."""
    (path := folder / "train.py").write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, str(path), str(folder), *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True,
        check=False, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_abort_ends_a_process_that_has_started_other_ranks_with_its_exit_code(
    tmp_path: Path,
) -> None:
    """Though Lightning would kill it when one of these ends first."""
    done = _run(LAUNCHES, tmp_path)
    assert done.returncode == 75, done.stderr[-2000:]


#: Rank 0 starts the other ranks. One of them holds the GIL in C code, and would do so for longer.
HOLDS_GIL = """
import sys
from pathlib import Path

from helpers import hanging
from helpers.command import until
from lightning_perf.run import attempts

attempts.FIRST, folder = 0.05, Path(sys.argv[1])


def hold():
    until(lambda: [*folder.glob("*/summary.json")])
    hanging.hold_gil(100)


module = hanging.Hangs(hold, int(sys.argv[2]))
hanging.fit(folder, module, action="abort", strategy="ddp", devices=3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "code"), [(0, -signal.SIGKILL), (1, 75)])
def test_abort_ends_a_rank_that_does_not_answer(tmp_path: Path, rank: int, code: int) -> None:
    """Under Lightning's launcher; none of the ranks stays, which would keep the output open.

    The summary has the hang, also if it is that of a rank 0 that cannot write it.
    """
    began = time.monotonic()
    done = _run(HOLDS_GIL, tmp_path, str(rank))
    assert done.returncode == code, done.stderr[-2000:]
    assert time.monotonic() - began < 70
    (path,) = tmp_path.glob("*/summary.json")
    summary = read_summary(path)
    assert summary["status"] == "running"
    assert [hang["ranks"] for hang in summary["hangs"]] == [[rank]]
    assert f"rank {rank} runs no Python: C code holds the GIL" in summary["hangs"][0]["text"]


#: Rank 1 hangs after the training of rank 0, whose process has work to do for longer than that.
WORKS_ON = """
import sys
import time
from pathlib import Path

from helpers import hanging
from lightning_perf.run import context

context.LEAVE_TIMEOUT = 1.0  # as after 10 seconds


class HangsAtEnd(hanging.Small):
    def on_train_end(self):
        if self.global_rank == 1:
            hanging.sleep()


module = HangsAtEnd()
hanging.fit(Path(sys.argv[1]), module, action="abort", strategy="ddp", devices=2)
time.sleep(12)
print("rank", module.global_rank, "has worked")
"""


@pytest.mark.slow
def test_abort_does_not_end_a_rank_that_has_left_training(tmp_path: Path) -> None:
    """The exit code is that of its script."""
    done = _run(WORKS_ON, tmp_path)
    assert "rank 1 has been in other HangsAtEnd.on_train_end" in reported(tmp_path)
    assert (done.returncode, done.stdout.count("has worked")) == (0, 1), done.stderr[-2000:]


def test_only_ranks_in_training_that_do_not_answer_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that has answered or left, nor one without our handler, as after its training."""
    dumps = {1: "in gil", 2: "in gil", 3: "in gil", 4: "", 5: ""}
    states = dict.fromkeys(dumps, "running") | {5: "stopped"}
    monkeypatch.setattr(hang_files, "dump_of", lambda pid: Dump(pid, states[pid], dumps[pid]))
    files, run = HangFiles(1.0), SimpleNamespace(processes={n: n for n in dumps})
    files._left[2] = RankState(2, LEFT)
    answers = {3: RankState(3)}
    monkeypatch.setattr(files, "state_of", lambda _, rank: answers.get(rank))
    assert [*files.silent(run, dumps)] == [1, 5]  # type: ignore[arg-type]
    assert [*files.silent(run, [2, 3, 5, 6])] == [5]  # type: ignore[arg-type]


#: Rank 0 starts rank 1, which waits for it in Lightning's own broadcast; the connections of rank 0
#: end some seconds before it does, as when it has much memory to free. All exit codes are printed.
LEAVES = """
import ctypes
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

if sys.argv[-1] == "reap":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: rank 1 outlives its parent
    subprocess.Popen([sys.executable, *sys.argv[:-1]])
    with suppress(ChildProcessError):
        while True:
            print("ended with", os.waitstatus_to_exitcode(os.wait()[1]))
    sys.exit()

from helpers import hanging


class HangsInHook(hanging.Small):
    def on_train_batch_end(self, *args):
        if self.global_rank == 0 and self.global_step == hanging.BATCH:
            os._exit = self.end_slowly
            hanging.sleep()

    def on_exception(self, exception):
        print("an exception")

    def end_slowly(self, code, end=os._exit):
        for number in range(3, 1024):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # OSError: not one that listens
                connection.shutdown(socket.SHUT_RDWR)
        time.sleep(3)
        end(code)


hanging.fit(Path(sys.argv[1]), HangsInHook(), action="abort", strategy="ddp", devices=2)
"""


@pytest.mark.slow
def test_an_abort_that_ranks_have_agreed_on_is_not_called_off(tmp_path: Path) -> None:
    """Lightning ignores the error in rank 1, where training seems to go on."""
    done = _run(LEAVES, tmp_path, "reap")
    assert done.stdout.count("ended with 75") == 2, done.stdout + done.stderr[-2000:]
    assert "an exception" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [0, 1])
def test_abort_ends_all_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: int
) -> None:
    """The end of one is an exception in the other, which may still make its files."""

    class SlowFile(Hangs):
        def on_train_start(self) -> None:
            if self.global_rank != hangs:
                current_run(self.trainer).file_worker.submit(partial(time.sleep, 6.0), "slow")

        def on_exception(self, exception: BaseException) -> None:
            (tmp_path / "exception").touch()

    with two_ranks(tmp_path, monkeypatch, SlowFile(hanging.sleep, hangs), action="abort") as ranks:
        for each in ranks:
            each.join()
        assert [each.exitcode for each in ranks] == [75, 75]
    assert not (tmp_path / "exception").exists()


@pytest.mark.slow
def test_a_hang_does_not_end_when_rank_0_ends(tmp_path: Path) -> None:
    """It waits for the other ranks' last metrics, up to 10 seconds, and then ends alone."""

    class SlowTest(Small):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if self.global_rank == 1 and batch_idx == 7:
                hanging.sleep()

    with training(tmp_path, SlowTest(), stage="test", **RANKS):
        assert "rank 0 waits for it in set-up or the end (the last metrics of" in reported(tmp_path)
        until(lambda: "did not answer at the end" in (tmp_path / "output").read_text())
        until(lambda: [*tmp_path.glob("*/summary.json")])  # written after the warning
        (summary,) = tmp_path.glob("*/summary.json")
        until(lambda: read_summary(summary)["status"] == "finished")
        until(lambda: read_summary(summary)["hangs"])
        (hang,) = read_summary(summary)["hangs"]
        assert "ended" not in hang
        assert hang["seconds"] > 5
        assert reported(tmp_path).startswith("# The training hangs")


@pytest.mark.slow
def test_a_training_that_goes_on_is_not_aborted(tmp_path: Path) -> None:
    """An abort waits for files: what goes on meanwhile ends as it would without it."""

    def wait() -> None:
        run.file_worker.submit(partial(time.sleep, 6.0), "a slow file")
        time.sleep(3.0)

    class Waits(Hangs):
        def on_train_start(self) -> None:
            nonlocal run
            run = current_run(self.trainer)

    run: Any = None
    with training(tmp_path, Waits(wait), action="abort") as process:
        process.join()
        assert process.exitcode == 0
    assert "goes on, and is not aborted" in (tmp_path / "output").read_text()


@pytest.mark.slow
def test_the_report_is_uploaded_while_it_hangs(tmp_path: Path) -> None:
    """Into a store; an MLflow run gets it in the same way."""
    store = tmp_path / "store"
    with training(tmp_path, Hangs(hanging.sleep), default_root_dir=f"file://{store}"):
        until(lambda: {"report.md", "rank0.stacks.txt"} <= {p.name for p in store.rglob("hang/*")})


def state_of_process() -> tuple[Any, ...]:
    """Signals, files and threads of this process."""
    status = (PROC / "self/status").read_text().splitlines()
    # Of real-time signals: Lightning resets others that Python does not know, such as pytest's.
    masks = [int(x.split()[1], 16) >> 33 for x in status if x[:6] in ("SigBlk", "SigIgn", "SigCgt")]
    stacks = []
    for link in (PROC / "self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this loop
            stacks += [name for name in [str(link.readlink())] if "lightning_perf:stacks" in name]
    names = [each.name for each in threading.enumerate() if "watchdog" in each.name]
    return masks, stacks, names


class Failing(L.Callback):
    """Raises in the middle, and looks at the process."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.seen = raises, ()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen = state_of_process()
        if self.raises and trainer.global_step == 3:
            raise RuntimeError("planted")


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("thread", [False, True])
def test_nothing_stays_behind(tmp_path: Path, raises: bool, thread: bool) -> None:
    """Handlers, files and threads are as before, also after an error and off the main thread."""
    before, watch = state_of_process(), Failing(raises)

    def run() -> None:
        with pytest.raises(RuntimeError, match="planted") if raises else nullcontext():
            trainer(tmp_path, Hang(), watch, logger=Records()).fit(Small())

    if thread:
        other = threading.Thread(target=run)
        other.start()
        other.join()
    else:
        run()
    masks, stacks, names = watch.seen
    assert masks != before[0]
    assert (len(stacks), names) == (1, ["lightning_perf watchdog"])
    assert state_of_process() == before
    assert not [*tmp_path.glob("*/hang")]


@pytest.mark.parametrize("name", ["lightning_perf watchdog", "lightning_perf requests"])
def test_a_limit_of_threads_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A training under a limit of threads goes on without it, and its handlers are as before."""
    before, start = state_of_process(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    watched = "watchdog" in name  # reports still have stacks of this process without the other one
    with pytest.warns(PerfWarning, match="can't start new thread") if watched else nullcontext():
        trainer(tmp_path, Hang(), logger=Records()).fit(Small())
    assert state_of_process() == before


def test_a_nested_training_has_a_signal_of_its_own(tmp_path: Path) -> None:
    """As within a callback; the outer one's handler stays."""
    seen = []

    class Nested(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            inner = Failing(False)
            trainer(tmp_path / "inner", Hang(), inner).fit(Small())
            seen.extend([inner.seen, state_of_process()])

    trainer(tmp_path, Hang(), Nested()).fit(Small())
    (inner, _, _), (outer, files, _) = seen
    assert inner != outer
    assert len(files) == 1


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
def test_a_nested_training_leaves_the_stacks_of_the_outer_one(
    tmp_path: Path, watched: bool
) -> None:
    """`stacks` shows them again soon after it has ended, though it has set all handlers."""

    class Nested(Small):
        def on_train_start(self) -> None:
            trainer(tmp_path / "inner", *[Hang()] * watched).fit(Small())
            go_on = tmp_path / "go on"
            (tmp_path / "inner has ended").touch()
            until(go_on.exists)

    with training(tmp_path, Nested()) as process:
        until((tmp_path / "inner has ended").exists)
        until(lambda: _in(process.pid, "on_train_start"))
        (tmp_path / "go on").touch()
        process.join()
        assert process.exitcode == 0


def test_it_can_be_copied_in_a_run(tmp_path: Path) -> None:
    """The copy has the arguments, and no thread."""

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            again = pickle.loads(pickle.dumps(hang))
            assert (again.after, again.action) == (copy.deepcopy(hang).after, "report")

    hang = Hang(after="5m")
    trainer(tmp_path, hang, Copies()).fit(Small())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"after": "10ba"}, "after='10ba' has a wrong unit"),
        ({"after": "0s"}, "after='0sec' is not positive"),
        ({"after": "soon"}, "after='soon' is not a valid time"),
        ({"action": "kill"}, "action='kill' is neither 'report' nor 'abort'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], problem: str) -> None:
    """At construction, with what is allowed."""
    with pytest.raises(ConfigError, match=problem):
        Hang(**options)


# -- lightning-perf stacks ------------------------------------------------------------------------


def test_ranks_of_a_launcher_are_found_by_the_job_that_it_names() -> None:
    """Of the processes that it has started, those with another job are left out."""
    job, other = {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"}
    with ExitStack() as stack:
        started = []
        for each in (job, job, other, {}):
            process = subprocess.Popen(["sleep", "60"], env=os.environ | each)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process.pid)
        assert ranks_beside(started[0]) == started[1:2]
        assert ranks_beside(started[3]) == []


@pytest.mark.slow
def test_stacks_of_a_training_are_shown_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By process id and by run; the training goes on."""
    waits, go_on = tmp_path / "waits", tmp_path / "go on"
    module = Hangs(lambda: waits.touch() or until(go_on.exists))
    with training(tmp_path, module, Samples(), 1, after="120s", log_every_n_steps=1) as process:
        until(waits.exists)
        until(lambda: _in(process.pid, "training_step"))
        capsys.readouterr()
        assert exit_code("stacks", str(process.pid), "--json") == 0
        first, *children = json.loads(capsys.readouterr().out)
        assert first["pid"] == process.pid
        assert "in training_step" in first["text"]
        assert any("_worker_loop" in child["text"] for child in children)
        its = {"host": platform.node(), "pid": process.pid}
        summary = {"version": 2, "run": "r", "status": "running", "process": its, "stages": {}}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert exit_code("stacks", str(tmp_path)) == 0
        assert "in training_step" in capsys.readouterr().out
        (tmp_path / "summary.json").write_text(json.dumps(summary | {"process": {"host": "far"}}))
        assert exit_code("stacks", str(tmp_path)) == 1
        assert "runs on far" in capsys.readouterr().err
        later = its | {"started": 1.0}
        (tmp_path / "summary.json").write_text(json.dumps(summary | {"process": later}))
        assert exit_code("stacks", str(tmp_path)) == 1
        assert "is another one" in capsys.readouterr().err
        assert exit_code("stacks", str(tmp_path / "no-run")) == 2
        go_on.touch()
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow
def test_stacks_of_processes_that_run_python_can_be_shown_at_any_time(tmp_path: Path) -> None:
    """Frames change meanwhile: C code that read them without the GIL would crash the process."""
    module = Hangs(partial(hanging.run_python, tmp_path))
    samples = Samples(partial(hanging.run_python, tmp_path))
    with training(tmp_path, module, samples, 1, after="120s") as process:
        until(lambda: _in(process.pid, "run_python"))
        (worker,) = children_of(process.pid)
        for _ in range(30):
            assert "in run_python" in stacks_of(process.pid)
            assert "_worker_loop" in stacks_of(worker)
        (tmp_path / "go on").touch()
        process.join()
        assert process.exitcode == 0


def _in(pid: int, function: str) -> bool:
    try:
        return f"in {function}" in stacks_of(pid)
    except (LookupError, TimeoutError):
        return False


@pytest.mark.parametrize(
    "script",
    [
        ["sleep", "30"],
        ["bash", "-c", "trap 'echo cleanup' EXIT; echo ready; sleep 60; true"],
        [
            sys.executable, "-c",
            "import faulthandler, signal, time\n"
            "for n in range(signal.SIGRTMIN, signal.SIGRTMAX): faulthandler.register(n)\n"
            "time.sleep(60)",
        ],
    ],
    ids=["no handler", "shell", "another handler"],
)  # fmt: skip
def test_a_process_without_our_handler_is_not_signalled(
    script: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal would end it."""
    process = subprocess.Popen(script, stdout=subprocess.DEVNULL)
    try:
        with pytest.raises(LookupError):
            stacks_of(process.pid)
        assert exit_code("stacks", str(process.pid)) == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert "with Hang()" in capsys.readouterr().err


def test_a_program_that_a_training_starts_is_not_signalled(tmp_path: Path) -> None:
    """It inherits neither the handler nor the file, as a spawned worker."""
    found = []

    class Starts(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            with subprocess.Popen(["sleep", "60"], close_fds=False) as process:
                found.append(dump_of(process.pid))
                assert process.poll() is None
                process.kill()

    trainer(tmp_path, Hang(), Starts()).fit(Small())
    (dump,) = found
    assert dump.text == ""


def test_programs_that_a_training_is_starting_are_not_signalled(tmp_path: Path) -> None:
    """Until they execute, they have the files and handlers of the training."""

    class Starts(Small):
        def on_train_start(self) -> None:
            ended = [subprocess.call(["/bin/true"]) for _ in range(300)]
            ended += [os.system("true") for _ in range(100)]
            assert not any(ended)

    with training(tmp_path, Starts()) as process:
        while process.exitcode is None:
            for pid in children_of(process.pid):
                dump_of(pid)
        assert process.exitcode == 0


def test_only_data_loader_workers_have_a_thread_of_ours(tmp_path: Path) -> None:
    """Other children end with the thread that has forked them, and keep their files."""
    threads = dict[str, int]()

    def count(*_: Any) -> int:
        return len(list((PROC / "self/task").iterdir()))

    def child() -> int:
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(count())

    class Counts(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([count(), child()])

    class Forks(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            threads["worker"], threads["child of a worker"] = batch[0].tolist()
            threads["child"] = child()

    class Uses(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(4, WIDTH)).mean()

    loader = DataLoader(Counts(), 4, num_workers=1)
    trainer(tmp_path, Hang(), Forks(), max_epochs=1).fit(Uses(), loader)
    assert threads.pop("worker") >= 2  # that of its queue may have begun
    assert threads == {"child of a worker": 1, "child": 1}


@pytest.mark.slow
def test_no_call_of_c_in_a_worker_is_interrupted_by_its_report(tmp_path: Path) -> None:
    """Not all code calls again what a signal has interrupted."""
    samples = Samples(partial(hanging.sleep_in_c, tmp_path / "seconds"))
    with training(tmp_path, Small(), samples, 1) as process:
        assert f"worker 0 waits in {line('in C')}" in reported(tmp_path)
        process.join()
        assert process.exitcode == 0
    assert float((tmp_path / "seconds").read_text()) >= 4


def test_a_handler_that_the_user_sets_stays(tmp_path: Path) -> None:
    """Also on a signal that nobody used when the training began."""
    real_time = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    before = {number: signal.getsignal(number) for number in real_time}
    received = []

    class Handles(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            for number in real_time:
                signal.signal(number, lambda number, _: received.append(number))
            time.sleep(0.5)  # the watch looks
            for number in real_time:
                signal.raise_signal(number)

    try:
        trainer(tmp_path, Hang(after="1s"), Handles()).fit(Small())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    assert received == [*real_time]


@pytest.mark.slow
def test_stacks_of_a_training_off_the_main_thread_are_shown(tmp_path: Path) -> None:
    """As in Ray Train; with those of its workers."""
    waits, go_on = tmp_path / "waits", tmp_path / "go on"

    class Waits(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            waits.touch()
            until(go_on.exists)

    with training(tmp_path, Waits(), Samples(), 1, thread=True) as process:
        until(lambda: waits.exists() and _in(process.pid, "on_train_batch_start"))
        (worker,) = children_of(process.pid)
        assert "_worker_loop" in stacks_of(worker)
        go_on.touch()
        process.join()
        assert process.exitcode == 0


def test_a_process_of_another_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is it signalled; and neither is one that does not exist."""
    with process_of_another_user() as pid:
        assert exit_code("stacks", str(pid)) == 1
        assert "another user" in capsys.readouterr().err
    assert exit_code("stacks", "999999999") == 1
    assert "there is no process" in capsys.readouterr().err
