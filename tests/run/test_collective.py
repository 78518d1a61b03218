"""Reports of several ranks: real processes on gloo, one of which is slow or dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.small import Small, ours, trainer

from lightning_perf import ConfigError, Window
from lightning_perf.run import collective
from lightning_perf.run.batches import BatchTotals
from lightning_perf.run.collective import LAST, WIDTH, Gatherer
from lightning_perf.run.context import RunContext
from lightning_perf.run.signals import (
    GPU_COLUMNS,
    MemorySignal,
    NodeSignal,
    ProgressSignal,
    SpanSignal,
    WaitSignal,
)
from lightning_perf.run.stages import Progress
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.run.windows import Windows

LATE = 500
RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}


class ReportsEveryBatch(WindowCallback):
    """Reports after every batch; records the windows and the most pending collectives."""

    columns = ("progress/batches", "memory/pid")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.received: list[list[float]] = []
        self.most = 0

    @property
    def state_key(self) -> str:
        return self.name

    def window_due(self, context: RunContext, at_end: bool) -> bool:
        under_way = [each for each in context.windows.gatherer.pending if each.work is not None]
        self.most = max(self.most, len(under_way))
        self.trigger.quiet_until = 0
        self.trigger.request()
        return not at_end

    def on_window(self, window: Window) -> dict[str, float]:
        pids = window["memory/pid"].tolist()
        self.received.append([window.last.batch, *window["progress/batches"], len(set(pids))])
        return {}

    def close(self, context: RunContext, reason: str) -> None:
        super().close(context, reason)
        context.on_close(lambda: self.dump(context))

    def dump(self, context: RunContext) -> None:
        found = {"received": self.received, "most": self.most}
        path = Path(context.trainer.default_root_dir) / f"{self.name}.{context.ranks.global_rank}"
        path.write_text(json.dumps(found))


class Lagging(Small):
    """The ranks do not synchronize; rank 1 is slow at first."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if self.global_rank == 1 and self.current_epoch == 0 and batch_idx == 1:
            time.sleep(3)


@pytest.mark.slow
def test_a_late_rank_loses_no_report(tmp_path: Path) -> None:
    """Three callbacks report every batch while rank 0 is up to hundreds of batches ahead."""
    parts = [ReportsEveryBatch(name) for name in "abc"]
    run = trainer(
        tmp_path, *parts, max_epochs=LATE // 16 + 1, use_distributed_sampler=False, **RANKS
    )
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about steps without a loss
        run.fit(Lagging())
    batches = (LATE // 16 + 1) * 16
    expected = [[batch + 1, 1.0, 1.0, 2] for batch in range(batches)]
    for name in "abc":
        for rank in (0, 1):
            found = json.loads((tmp_path / f"{name}.{rank}").read_text())
            assert found["received"] == expected
            assert found["most"] <= collective._ON_THEIR_WAY


def ranks_of(world_size: int) -> Any:
    """What a Gatherer reads of a Trainer whose ranks have a process group."""

    def broadcast(value: object, src: int) -> object:
        dist.broadcast_object_list(values := [value], src)
        return values[0]

    return SimpleNamespace(world_size=world_size, strategy=SimpleNamespace(broadcast=broadcast))


def process(rank: int, folder: Path, work: Callable[[Gatherer, int], object]) -> None:
    """One of two ranks. Writes its result and our warnings to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = work(Gatherer(ranks_of(2)), rank)
    (folder / f"{rank}.json").write_text(json.dumps({"found": found, "warnings": ours(caught)}))
    os._exit(0)


def two(folder: Path, work: Callable[[Gatherer, int], object]) -> list[dict[str, Any] | None]:
    """Run two processes; the result is None for one that left no file."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=process, args=(rank, folder, work)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        assert not each.is_alive(), "it hangs"
    paths = [folder / f"{rank}.json" for rank in (0, 1)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def both(folder: Path, work: Callable[[Gatherer, int], object]) -> list[Any]:
    """The results of two processes that both ended well, without warnings."""
    ranks = [each for each in two(folder, work) if each]
    assert [each["warnings"] for each in ranks] == [[], []]
    return [each["found"] for each in ranks]


@pytest.mark.slow
def test_a_rank_that_lags_by_hundreds_of_reports_shifts_none(tmp_path: Path) -> None:
    """One rank queues 1,500 reports before the other sends any; both still match."""

    def work(gatherer: Gatherer, rank: int) -> object:
        found: list[Any] = []
        if rank == 1:
            while not (tmp_path / "ahead").exists():
                time.sleep(0.01)
        for number in range(1500):
            gatherer.gather(
                (number % 3, number), [rank, number], lambda r: found.append(r.tolist())
            )
            gatherer.poll()
        waited = len(gatherer.pending)
        (tmp_path / "ahead").touch()
        gatherer.finish(30)
        return {"all": found == [[[0, n], [1, n]] for n in range(1500)], "waited": waited}

    first, second = both(tmp_path, work)
    assert first == {"all": True, "waited": 1500}
    assert second["all"]


def test_ranks_exchange_numbers_at_set_up(tmp_path: Path) -> None:
    """Each rank gets those of all, such as the number of GPUs per node, which sets the columns."""
    found = both(tmp_path, lambda gatherer, rank: gatherer.exchange([rank, 3]))
    assert found == 2 * [[[0, 3], [1, 3]]]


def start(rank: int, port: int, attempt: int, found: Any) -> None:
    """One of two ranks of an attempt, with torch's store of the attempts before."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # The default group finds no old addresses, so that the outcome does not depend on timing.
    own = dist.PrefixStore(f"{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
    world: Any = dist.distributed_c10d._world
    world.pg_map[dist.group.WORLD] = "gloo", store
    time.sleep(rank)  # rank 0 would find rank 1's old address
    found.put(Gatherer(ranks_of(2)).exchange([rank]))
    found.close()
    found.join_thread()
    os._exit(0)


def test_a_restarted_job_finds_no_addresses_of_ended_processes() -> None:
    """torchrun keeps torch's store when it restarts a job: the ranks find each other nevertheless.

    https://github.com/pytorch/pytorch/issues/135712
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    for attempt in range(3):
        found = context.Queue()
        ranks = [
            context.Process(target=start, args=(rank, store.port, attempt, found))
            for rank in (0, 1)
        ]
        for each in ranks:
            each.start()
        assert [found.get(timeout=30) for _ in ranks] == [[[0], [1]], [[0], [1]]]
        for each in ranks:
            each.join(30)


def test_a_message_holds_all_columns() -> None:
    """All signals fit, on ranks with GPUs and two callbacks with rolling metrics."""
    recorder: Any = SimpleNamespace(device=True)
    signals = [
        BatchTotals(), *[BatchTotals().rolling(size) for size in (20, 50)],
        ProgressSignal(Progress()), SpanSignal(recorder), WaitSignal(recorder, 0),
        MemorySignal(torch.device("cuda"), None, 0), NodeSignal(None, 8),
    ]  # fmt: skip
    assert sum(len(each.columns) for each in signals) <= WIDTH + 8 * GPU_COLUMNS


def test_more_columns_than_a_message_holds_are_refused() -> None:
    """All ranks raise the error at set-up if a user's own signal has too many columns."""
    trainer: Any = SimpleNamespace(global_rank=0, world_size=2)
    anything: Any = None
    windows = Windows(trainer, anything, anything, anything, anything)
    signal = MemorySignal(torch.device("cpu"), None, 0)
    signal.columns = tuple(f"own/{number}" for number in range(WIDTH + 1))
    windows.sources["own"] = lambda: signal
    callback: Any = None
    with pytest.raises(ConfigError, match=f"makes {WIDTH + 1} columns over all signals"):
        windows.subscribe(callback, ("own/0",))


@pytest.mark.parametrize("width", [3, WIDTH])
def test_a_rank_that_has_ended_answers_the_others(tmp_path: Path, width: int) -> None:
    """It sends its last values again; then all ranks have the last values of both."""
    ends = (4, 30)

    def work(gatherer: Gatherer, rank: int) -> object:
        found: list[Any] = []
        for number in range(ends[rank] + 1):
            values = [100.0 * rank + number + column for column in range(width)]
            tag = (3, LAST) if number == ends[rank] else (2, number)
            gatherer.gather(tag, values, lambda r: found.append(r[:, :2].tolist()))
            gatherer.poll()
        gatherer.finish(30)
        both = [[[n, n + 1], [n + 100, n + 101]] for n in range(ends[0])]
        alone = [[[4, 5], [n + 100, n + 101]] for n in range(*ends)]
        return found == [*both, *(alone if rank else []), [[4, 5], [130, 131]]]

    assert both(tmp_path, work) == [True, True]


def test_a_rank_that_does_not_end_is_waited_for_once(tmp_path: Path) -> None:
    """The end of a run gives up after its timeout, with one warning."""

    def work(gatherer: Gatherer, rank: int) -> object:
        if rank == 0:
            gatherer.gather((3, LAST), [1.0], list)
            for _ in range(3):
                gatherer.finish(0.2)
            (tmp_path / "over").touch()
        while not (tmp_path / "over").exists():
            time.sleep(0.01)
        return len(gatherer.pending)

    first, second = two(tmp_path, work)
    assert first
    assert second
    (warning,) = first["warnings"]
    assert "did not answer at the end of the run" in warning
    assert second["warnings"] == []


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_reports_with_one_warning(tmp_path: Path) -> None:
    """The other rank continues without waiting and logs no wrong value."""

    def work(gatherer: Gatherer, rank: int) -> object:
        found: list[Any] = []
        for number in range(200):
            if rank == 1 and number == 20:
                os._exit(1)
            gatherer.gather((0, number), [rank, number], lambda r: found.append(r.tolist()))
            time.sleep(0.005)
            gatherer.poll()
        gatherer.finish(10)
        gatherer.close()
        return found == [[[0, n], [1, n]] for n in range(len(found))] and len(found) <= 20

    survivor, dead = two(tmp_path, work)
    assert dead is None
    assert survivor
    assert survivor["found"] is True
    (warning,) = survivor["warnings"]
    assert "another rank has ended" in warning


def test_a_rank_that_never_answers_ends_the_reports(tmp_path: Path) -> None:
    """The other rank keeps a bounded number of reports, warns once and does not wait."""

    def work(gatherer: Gatherer, rank: int) -> object:
        if rank == 1:
            while not (tmp_path / "over").exists():
                time.sleep(0.01)
            return None
        for number in range(6000):
            gatherer.gather((0, number), [number], lambda rows: None)
            gatherer.poll()
        began = time.monotonic()
        gatherer.finish(50)
        gatherer.close()
        (tmp_path / "over").touch()
        return [len(gatherer.pending), time.monotonic() - began < 30]

    alive, _ = two(tmp_path, work)
    assert alive
    assert alive["found"] == [0, True]
    (warning,) = alive["warnings"]
    assert "another rank does not answer" in warning


def test_ranks_leave_a_run_together(tmp_path: Path) -> None:
    """A rank waits until the slowest one has finished what it does at the end of the run."""

    def work(gatherer: Gatherer, rank: int) -> object:
        if rank == 0:
            time.sleep(0.5)
            (tmp_path / "finished").touch()
        gatherer.leave_together(30)
        finished = (tmp_path / "finished").exists()
        gatherer.close()
        return finished

    assert both(tmp_path, work) == [True, True]


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    """It has waited for the other's last report in vain, and its process continues."""

    def work(gatherer: Gatherer, rank: int) -> object:
        left, over = tmp_path / "left", tmp_path / "over"
        gave_up = []
        while rank == 1 and not left.exists():
            time.sleep(0.01)
        for number in range(1 + rank):
            gatherer.gather((3, number if rank > number else LAST), [1.0], list)
        gatherer.finish(30 if rank else 0.2)
        gave_up.append(gatherer.lost)
        began = time.monotonic()
        gatherer.leave_together(1000)
        (over if rank else left).touch()
        while not over.exists():
            time.sleep(0.01)
        return [*gave_up, time.monotonic() - began < 60]

    first, second = two(tmp_path, work)
    assert first
    assert second
    assert first["found"] == second["found"] == [True, True]
    (warning,) = second["warnings"]
    assert "another rank has ended" in warning


def test_a_rank_that_ends_without_a_message_is_not_waited_for(tmp_path: Path) -> None:
    """As after an exception."""

    def work(gatherer: Gatherer, rank: int) -> object:
        if rank == 0:
            gatherer.leave_together(1000)
        return len(gatherer.pending)

    assert both(tmp_path, work) == [1, 0]
