"""Faults, traps and compounds: each plants a cause in a workload and names its verdict."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from planted.workloads import Workload
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import Sampler


@dataclass
class Run:
    """The parts of a run that a fault may change."""

    module: Workload
    #: Seconds that the fault costs per step, and the seconds of a step.
    extra: float
    step: float
    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    #: Whether the fault is planted, or the same run is made without it.
    active: bool = True

    def sleep(self, seconds: float) -> None:
        """Take some time, if the fault is planted."""
        if self.active:
            time.sleep(seconds)

    @property
    def often(self) -> int:
        """A period in steps, which depends on the seed."""
        return self.module.random.randint(12, 23)


@dataclass(frozen=True)
class Fault:
    """A planted cause and its expected verdict."""

    name: str
    plant: Callable[[Run], None]
    codes: tuple[str, ...]
    culprit: str | None = None
    steps: int = 100
    epochs: int = 2


FAULTS: list[Fault] = []
TRAPS: list[Fault] = []
#: The same of two ranks.
RANK_FAULTS: list[Fault] = []
RANK_TRAPS: list[Fault] = []


def fault(
    *codes: str, culprit: str | None = None, among: list[Fault] = FAULTS, **options: Any
) -> Any:
    def add(plant: Callable[[Run], None]) -> Callable[[Run], None]:
        among.append(Fault(plant.__name__, plant, codes, culprit, **options))
        return plant

    return add


def trap(among: list[Fault] = TRAPS, **options: Any) -> Any:
    return fault(among=among, **options)


def plots(hook: str, work: Callable[[int], None]) -> L.Callback:
    made = type(
        "Plots", (L.Callback,), {hook: lambda self, trainer, *a, **k: work(trainer.global_step)}
    )
    return made()


class SlowLogger(Logger):
    """Writes slowly."""

    def __init__(self, work: Callable[[], None], method: str) -> None:
        super().__init__()
        self.work, self.method = work, method

    @property
    def name(self) -> str:
        return "slow"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self.method == "log_metrics":
            self.work()

    def save(self) -> None:
        if self.method == "save":
            self.work()


def spin(seconds: float) -> None:
    """Use the CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


# -- input ----------------------------------------------------------------------------------------


@fault("input-bound", culprit="train_dataloader_next")
def slow_items(run: Run) -> None:
    each = run.extra / run.module.batch_size
    run.module.data.item = lambda index: run.sleep(each)


@fault("input-bound", culprit="train_dataloader_next")
def items_that_compute(run: Run) -> None:
    each = run.extra / run.module.batch_size
    run.module.data.item = lambda index: spin(each) if run.active else None


@fault("input-bound", culprit="train_dataloader_next")
def too_few_workers(run: Run) -> None:
    each = (run.step + run.extra) / run.module.batch_size if run.active else 0.0
    run.module.data.item = lambda index: time.sleep(each)
    run.module.loader = {"num_workers": 1, "persistent_workers": True}


@fault("input-bound", culprit="train_dataloader_next")
def a_worker_that_computes(run: Run) -> None:
    """Its CPU time competes with the threads of torch, and with more workers."""
    each = (run.step + run.extra) / run.module.batch_size if run.active else 0.0
    run.module.data.item = lambda index: spin(each)
    run.module.loader = {"num_workers": 1, "persistent_workers": True}


@fault("transfer-bound")
def slow_transfer(run: Run) -> None:
    run.module.places["transfer"] = lambda index: run.sleep(run.extra)


@fault("epoch-restart", culprit="first fetch", epochs=6)
def slow_epoch_start(run: Run) -> None:
    length = len(run.module.data)

    class Slow(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            run.sleep(run.extra * 16)
            return iter(range(length))

        def __len__(self) -> int:
            return length

    run.module.sampler = Slow()


# -- callbacks, loggers, checkpoints, validation --------------------------------------------------


@fault("callback-bound", culprit="Plots.on_train_batch_end")
def slow_callback(run: Run) -> None:
    run.callbacks.append(plots("on_train_batch_end", lambda step: run.sleep(run.extra)))


@fault("callback-bound", culprit="Plots.on_after_backward")
def slow_inner_hook(run: Run) -> None:
    run.callbacks.append(plots("on_after_backward", lambda step: run.sleep(run.extra)))


@fault("callback-bound", culprit="Plots.on_train_batch_end")
def rare_callback(run: Run) -> None:
    often = run.often

    def work(step: int) -> None:
        if step % often == 0:
            run.sleep(often * run.extra)

    run.callbacks.append(plots("on_train_batch_end", work))


@fault("callback-bound", culprit="Plots.on_train_epoch_end", epochs=6)
def slow_epoch_end(run: Run) -> None:
    run.callbacks.append(plots("on_train_epoch_end", lambda step: run.sleep(16 * run.extra)))


@fault("callback-bound", culprit="lr_scheduler_step")
def slow_scheduler(run: Run) -> None:
    def configure() -> Any:
        optimizer = Workload.configure_optimizers(run.module)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: run.sleep(run.extra) or 1.0)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]

    run.module.configure_optimizers = configure


@fault("logger-bound", culprit="SlowLogger.log_metrics")
def slow_logger(run: Run) -> None:
    run.options |= {"logger": SlowLogger(lambda: run.sleep(5 * run.extra), "log_metrics")}
    run.options["log_every_n_steps"] = 5


@fault("logger-bound", culprit="SlowLogger.save")
def slow_save(run: Run) -> None:
    run.options |= {"logger": SlowLogger(lambda: run.sleep(10 * run.extra), "save")}


@fault("checkpoint-bound", culprit="ModelCheckpoint.on_train_batch_end")
def slow_disk(run: Run) -> None:
    often = run.often

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            run.sleep(often * run.extra)
            super().save_checkpoint(*args, **kwargs)

    saves = ModelCheckpoint(run.folder, every_n_train_steps=often, save_top_k=1, monitor=None)
    run.callbacks.append(saves)
    run.options |= {"enable_checkpointing": True, "plugins": [Slow()]}


@fault("checkpoint-bound", culprit="ModelCheckpoint.on_train_epoch_end", epochs=6)
def slow_disk_at_epoch_ends(run: Run) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            run.sleep(16 * run.extra)
            super().save_checkpoint(*args, **kwargs)

    saves = ModelCheckpoint(run.folder, save_on_train_epoch_end=True)
    run.callbacks.append(saves)
    run.options |= {"enable_checkpointing": True, "plugins": [Slow()]}


@fault("validation-bound", culprit="validate.forward")
def slow_validation(run: Run) -> None:
    run.options["limit_val_batches"] = 8 if run.active else 0
    run.module.places["validation"] = lambda index: run.sleep(50 * run.extra / 8)


@fault("validation-bound", culprit="Plots.on_validation_batch_end")
def slow_callback_in_validation(run: Run) -> None:
    run.options["limit_val_batches"] = 8 if run.active else 0
    run.callbacks.append(
        plots("on_validation_batch_end", lambda step: run.sleep(50 * run.extra / 8))
    )


@fault("epoch-restart", culprit="iter", epochs=10)
def workers_of_short_epochs(run: Run) -> None:
    run.module.loader = {"num_workers": 2} if run.active else {}


# -- changes of step times -------------------------------------------------------------------------


@fault("warmup")
def slow_first_step(run: Run) -> None:
    first = [True]

    def work(step: int) -> None:
        if first:
            first.clear()
            run.sleep(100 * run.extra)

    run.module.places["forward"] = work


@fault("recompile", culprit="torch.compile")
def recompilation(run: Run) -> None:
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    compiled = torch.compile(lambda x: (x * 2 + 1).sum(), backend="eager", dynamic=False)
    every = max(round(0.06 / run.extra), 1)

    def work(step: int) -> None:
        compiled(torch.ones(2 + (step // every if run.active else 0)))

    run.module.places["forward"] = work


@fault("gc-pauses", culprit="training_step")
def collections(run: Run) -> None:
    gc.collect()
    gc.freeze()
    objects = [[] for _ in range(200_000)]
    start = time.perf_counter()
    gc.collect()
    every = (time.perf_counter() - start) / run.extra
    due = [0.0]

    def work(step: int) -> None:
        due[0] += 1
        while run.active and due[0] >= every and objects:
            due[0] -= every
            gc.collect()

    run.module.places["forward"] = work


@fault("periodic-stall")
def stalls_in_forward(run: Run) -> None:
    often = run.often
    run.module.places["forward"] = lambda step: (
        run.sleep(often * run.extra) if step % often == 7 else None
    )


@fault("periodic-stall")
def stalls_of_the_loader(run: Run) -> None:
    often, count = run.often, [0]

    def work(index: int) -> None:
        count[0] += 1
        if count[0] % (often * run.module.batch_size) == 0:
            run.sleep(often * run.extra)

    run.module.data.item = work


@fault("slowdown", steps=160)
def sudden_slowdown(run: Run) -> None:
    at = run.module.random.randint(65, 85)
    run.module.places["forward"] = lambda step: run.sleep(2 * run.extra) if step >= at else None


@fault("slowdown", steps=160)
def growing_slowdown(run: Run) -> None:
    run.module.places["forward"] = lambda step: run.sleep(2 * run.extra * step / 160)


@fault("host-memory-growth", steps=600)
def leak(run: Run) -> None:
    kept: list[bytearray] = []
    size = int(40e6 * run.extra / run.step) // 10

    def work(step: int) -> None:
        if run.active:
            kept.append(bytearray(b"x") * size)

    run.module.places["forward"] = work


# -- traps: nothing is wrong ----------------------------------------------------------------------


@trap()
def plain(run: Run) -> None:
    """Nothing is planted."""


@trap()
def hidden_by_prefetch(run: Run) -> None:
    each = 0.6 * run.step / run.module.batch_size
    run.module.data.item = lambda index: time.sleep(each)
    run.module.loader = {"num_workers": 2, "persistent_workers": True}


@trap()
def jitter(run: Run) -> None:
    run.module.places["forward"] = lambda step: time.sleep(
        run.step * run.module.random.uniform(0.0, 1.0)
    )


@trap(steps=600)
def memory_levels_off(run: Run) -> None:
    kept: list[bytearray] = []

    def work(step: int) -> None:
        if len(kept) < 150:
            kept.append(bytearray(b"x") * 2_000_000)

    run.module.places["forward"] = work


@trap()
def accumulation(run: Run) -> None:
    run.options["accumulate_grad_batches"] = 4


@trap()
def short_validation(run: Run) -> None:
    run.options["limit_val_batches"] = 2


@trap()
def one_pause(run: Run) -> None:
    run.module.places["forward"] = lambda step: time.sleep(0.3) if step == 40 else None


@trap(steps=200)
def slow_start_of_a_longer_run(run: Run) -> None:
    run.module.places["forward"] = lambda step: time.sleep(6 * run.step) if step == 0 else None


@trap()
def many_cheap_callbacks(run: Run) -> None:
    for name in range(8):
        made = plots("on_train_batch_end", lambda step: None)
        made.__class__.__name__ = f"Cheap{name}"
        run.callbacks.append(made)


@trap()
def cheap_checkpoints(run: Run) -> None:
    run.callbacks.append(ModelCheckpoint(run.folder, every_n_train_steps=50))
    run.options["enable_checkpointing"] = True


@trap(steps=160)
def longer_batches(run: Run) -> None:
    """In the second epoch batches are twice as large, so the model takes longer."""

    class Growing(Sampler[list[int]]):
        size = 0

        def __iter__(self) -> Iterator[list[int]]:
            self.size += run.module.batch_size
            return iter([list(range(self.size))] * 80)

        def __len__(self) -> int:
            return 80

    run.module.train_dataloader = lambda: torch.utils.data.DataLoader(  # type: ignore[method-assign]
        run.module.data, batch_sampler=Growing()
    )


#: Two faults at once, by their names.
COMPOUNDS = [
    ("slow_items", "slow_callback"),
    ("slow_callback", "slow_logger"),
    ("slow_disk", "slow_items"),
    ("slow_validation", "slow_callback"),
    ("collections", "slow_transfer"),
    ("stalls_in_forward", "slow_save"),
]


# -- two ranks: the faults are on rank 1 ----------------------------------------------------------


def on_rank_1(run: Run) -> None:
    """Cost the time of the fault on one of the ranks."""
    if run.module.global_rank == 1:
        run.sleep(run.extra)


straggler = fault("straggler", culprit="rank 1", among=RANK_FAULTS)


@straggler
def rank_with_slow_forward(run: Run) -> None:
    run.module.places["forward"] = lambda step: on_rank_1(run)


@straggler
def rank_with_slow_backward(run: Run) -> None:
    run.module.places["backward"] = lambda step: on_rank_1(run)


@straggler
def rank_with_slow_transfer(run: Run) -> None:
    run.module.places["transfer"] = lambda step: on_rank_1(run)


@straggler
def rank_with_slow_callback(run: Run) -> None:
    run.callbacks.append(plots("on_train_batch_end", lambda step: on_rank_1(run)))


@fault("communication-bound", among=RANK_FAULTS)
def slow_network(run: Run) -> None:
    def exchange(bucket: Any) -> Any:
        """Arrive late, on a thread; a rank whose gradients come last waits, too."""
        sent, arrived = allreduce_hook(None, bucket), torch.futures.Future[torch.Tensor]()

        def work() -> None:
            gradients = sent.wait()
            run.sleep(run.extra)
            arrived.set_result(gradients)

        threading.Thread(target=work).start()
        return arrived

    class Hooked(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()  # it registers hooks on GPUs only
            self.model.register_comm_hook(None, lambda _, bucket: exchange(bucket))

    run.options["strategy"] = Hooked(start_method="fork")


@trap(among=RANK_TRAPS)
def equal_ranks(run: Run) -> None:
    """Nothing is planted."""


@trap(among=RANK_TRAPS)
def equally_slow_ranks(run: Run) -> None:
    run.module.places["forward"] = lambda step: time.sleep(run.step)


@trap(among=RANK_TRAPS)
def ranks_that_take_turns(run: Run) -> None:
    def work(step: int) -> None:
        if step % 2 == run.module.global_rank:
            time.sleep(0.2 * run.step)

    run.module.places["forward"] = work
