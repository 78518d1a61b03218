"""Reads and patches Lightning's Trainer, with fallbacks where a private name is missing."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    import pytorch_lightning as pl  # type: ignore[no-redef]  # installed alone

from lightning_perf.cgroup import usable_cpus
from lightning_perf.core.progress import Limits, Ranks
from lightning_perf.flops import device_name, is_compiled
from lightning_perf.flops.batch import attributes
from lightning_perf.patches import MethodPatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from types import FrameType

    from lightning.pytorch import Trainer


# These work with a Trainer of either package.
Callback = pl.Callback
PassThroughProfiler = pl.profilers.PassThroughProfiler
rank_zero_info = pl.utilities.rank_zero_info
_SAVE = getattr(unwrap(pl.Trainer.save_checkpoint), "__code__", None)
#: Whether writing a checkpoint has a span, as since Lightning 2.5.
_SAVES_IN_SPAN = _SAVE is None or "profiler" in _SAVE.co_names
#: The beginning of the names of Lightning's modules.
PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")
_LOOPS = tuple(f"{each}loops." for each in PACKAGES)
#: Hooks of modules and of data modules around the transfer of a batch.
_TRANSFERS = "on_after_batch_transfer", "transfer_batch_to_device", "on_before_batch_transfer"
#: The closure that Lightning gives to an optimizer if the user has given none.
NO_CLOSURE = getattr(pl.core.optimizer, "do_nothing_closure", None)
#: The function of Lightning that runs the loops of a Trainer.
_RUN = "_run_stage"
#: The function of Lightning that ends a run: its own callbacks, then the module and loggers.
TEARDOWN = "_call_teardown_hook"
#: Environment variables: of torch's flight recorder, and restart counters of SLURM and torchrun.
_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def callback_class() -> type:
    """Lightning's Callback, also that of the package pytorch_lightning if it is imported.

    The LightningCLI of each package accepts subclasses of its own class only.
    """
    other = getattr(sys.modules.get("pytorch_lightning"), "Callback", pl.Callback)
    return pl.Callback if other is pl.Callback else type("Callback", (pl.Callback, other), {})


class TrainingLoop:
    """Counters of Lightning's training loop, looked up once and read after every batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = getattr(trainer.fit_loop, "epoch_loop", None)
        self._accumulates = getattr(self._loop, "_should_accumulate", None)
        module = trainer.lightning_module
        self._manual = module is not None and not module.automatic_optimization

    @property
    def counts(self) -> tuple[int, int, bool]:
        """``step``, ``Trainer.global_step``, and whether the current batch ends its epoch.

        Reads the attributes directly, because Lightning's properties take several times as long.
        """
        try:
            loop = self._loop
            done = (
                loop.manual_optimization.optim_step_progress
                if self._manual
                else loop.automatic_optimization.optim_progress.optimizer.step
            )
            last: bool = loop.batch_progress.is_last_batch
            return loop._batches_that_stepped, done.total.completed, last
        except AttributeError:
            steps = self._trainer.global_step
            step: int = getattr(self._loop, "_batches_that_stepped", steps)
            return step, steps, self._trainer.is_last_batch

    @property
    def step(self) -> int:
        """The step at which Lightning logs its own metrics of the current batch.

        It counts batches with an optimizer step; ``global_step`` counts every optimizer.
        """
        return self.counts[0]

    @property
    def accumulating(self) -> bool:
        """Whether the current batch only accumulates gradients."""
        if self._accumulates is not None:
            return bool(self._accumulates())
        done = self._trainer.fit_loop.batch_idx + 1
        every = self._trainer.accumulate_grad_batches
        return done % every != 0 and not self._trainer.is_last_batch


class StepArguments(MethodPatch):
    """Replaces ``_build_kwargs`` of the loop of training, which makes the arguments of a step.

    Lightning inspects the signature of the step in each batch, which takes 12 us. This repeats the
    inspection only when the module has another function.

    Raises:
        TypeError: The method is not Lightning's, or has other parameters.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        names = " ".join(signature(original).parameters)
        if not original.__module__.startswith(PACKAGES) or names != "kwargs batch batch_idx":
            raise TypeError(f"unknown method {original!r}")
        super().__init__(original)
        self._trainer: Trainer = original.__self__.trainer  # type: ignore[attr-defined]
        # The function that was inspected last, and whether it takes the batch's number.
        self._step: object = None
        self._numbered = False

    @override
    def __call__(self, kwargs: Any, batch: Any, batch_idx: int) -> Any:
        step: Any = self._trainer.lightning_module.training_step
        before, self._step = self._step, getattr(step, "__func__", step)
        if before is not self._step:
            kwargs = self.original(kwargs, batch, batch_idx)
            self._numbered = "batch_idx" in kwargs
            if kwargs.keys() - {"batch", "batch_idx"}:
                self._step = None  # another version of Lightning adds more
            return kwargs
        kwargs["batch"] = batch
        if self._numbered:
            kwargs["batch_idx"] = batch_idx
        return kwargs


def data_parallel_size(trainer: Trainer) -> int:
    """Return how many different batches the ranks train on at a time.

    Lightning distributes samples over as many replicas; with tensor parallelism there are fewer
    than ranks.
    """
    strategy: Any = trainer.strategy
    try:
        size = int(strategy.distributed_sampler_kwargs["num_replicas"])
    except Exception:  # one device, or a device mesh without Lightning's names
        return trainer.world_size
    return size if size > 0 and trainer.world_size % size == 0 else trainer.world_size


def batches_seen(trainer: Trainer) -> tuple[int, int]:
    """Return the number of processed training batches: in total and in this epoch."""
    loop = trainer.fit_loop.epoch_loop
    progress = getattr(loop, "batch_progress", None)
    if progress is None:
        return 0, 0
    # Not "completed", which is one batch behind in a checkpoint written at the end of a batch.
    total, in_epoch = progress.total.processed, progress.current.processed
    # A fit after one that failed within an epoch begins the epoch again.
    continues = getattr(loop, "restarting", True) and in_epoch < trainer.num_training_batches
    return total, in_epoch if continues else 0


def skips_backward(trainer: Trainer) -> bool:
    """Whether training runs no backward now, as in the last epoch of StochasticWeightAveraging."""
    return bool(getattr(trainer.fit_loop, "_skip_backward", False))


def max_seconds(trainer: Trainer) -> float | None:
    """Return ``max_time`` in seconds, or None if it is not set."""
    timers = (each for each in getattr(trainer, "callbacks", ()) if type(each).__name__ == "Timer")
    durations = (getattr(timer, "_duration", None) for timer in timers)
    return next((float(each) for each in durations if each is not None), None)


def unspanned(trainer: Trainer) -> Iterator[tuple[object, str, str, str]]:
    """Yield the methods that Lightning's spans do not cover: owner, method, category, name."""
    fit = getattr(trainer, "fit_loop", None)
    if not _SAVES_IN_SPAN:
        yield trainer, "save_checkpoint", "checkpoint", "save_checkpoint"
    if trainer.world_size > 1:
        yield (
            training_epoch_loop(trainer),
            "_broadcast_sigterm_tensor",
            "other",
            "Trainer.broadcast_sigterm",
        )
        if not is_compiled(trainer.lightning_module):  # it is called in the module's code
            gather = f"{type(trainer.strategy).__name__}.all_gather"
            yield trainer.strategy, "all_gather", "reduce_metrics", gather
    # These create the iterators and, in the first epoch, fetch the first batches of unsized data.
    yield fit, "setup_data", "dataloader_next", "iter"
    for loop, _, _ in evaluation_loops(trainer):
        yield loop, "setup_data", "dataloader_next", "iter"
        yield loop, "reset", "dataloader_next", "iter"
    # The first four copy logged values to the host, and log them; the others reduce them.
    connector = getattr(trainer, "_logger_connector", None)
    yield connector, "on_batch_end", "from_device", "Trainer.logged_values"
    yield connector, "log_metrics", "from_device", "Trainer.logged_values"
    yield connector, "log_eval_end_metrics", "from_device", "Trainer.epoch_values"
    yield connector, "update_train_epoch_metrics", "from_device", "Trainer.epoch_values"
    yield connector, "on_epoch_end", "reduce_metrics", "Trainer.epoch_values"
    yield connector, "update_eval_epoch_metrics", "reduce_metrics", "Trainer.epoch_values"


_MFU = "mfu %"
#: Metrics that callbacks of Lightning can monitor, and their names on the progress bar.
_SHOWN = {
    "mfu": _MFU,
    "throughput/device/mfu": _MFU,
    "throughput/batches_per_sec": "",
    "throughput/samples_per_sec": "samples/s",
    "throughput/tokens_per_sec": "tokens/s",
}


def monitored(trainer: Trainer) -> set[str]:
    """The keys of our metrics that callbacks or learning rate schedulers monitor.

    A file name of `ModelCheckpoint` may contain others.
    """
    callbacks = [each for each in getattr(trainer, "callbacks", ()) if hasattr(each, "monitor")]
    keys = {each.monitor for each in callbacks}
    strategy = getattr(trainer, "strategy", None)
    keys |= {each.monitor for each in getattr(strategy, "lr_scheduler_configs", ())}
    names = " ".join(str(getattr(each, "filename", None)) for each in callbacks)
    return {key for key in _SHOWN if key in keys or "{" + key in names}


def complete_monitored(trainer: Trainer) -> None:
    """Set monitored metrics of ours that nothing is known of yet to 0.

    Without a value `EarlyStopping` raises, and with NaN it stops the training.
    """
    watched = getattr(getattr(trainer, "_logger_connector", None), "_callback_metrics", None)
    if isinstance(watched, dict):
        for key in monitored(trainer):
            watched.setdefault(key, torch.tensor(0.0))


def show_metrics(trainer: Trainer, metrics: Mapping[str, float], bound: bool = False) -> None:
    """Put MFU and throughput on progress bars, and what is monitored into ``callback_metrics``.

    Not those that the module logs under the same key. MFU may be a lower bound.
    """
    connector = getattr(trainer, "_logger_connector", None)
    watched = getattr(connector, "_callback_metrics", None)
    on_bar = getattr(connector, "_progress_bar_metrics", None)
    if not (isinstance(watched, dict) and isinstance(on_bar, dict)):
        return
    results = getattr(trainer, "_results", None) or {}
    theirs = {getattr(getattr(each, "meta", None), "name", None) for each in results.values()}
    shown = {key: metrics[key] for key in _SHOWN if key in metrics and key not in theirs}
    # No others: histories of all keys would get keys that not each epoch has.
    for key in shown.keys() & monitored(trainer):
        watched[key] = torch.tensor(shown[key])
    for key, value in shown.items():
        if label := _SHOWN[key]:
            is_mfu = label == _MFU
            label = f"{label} at least" if is_mfu and bound else label
            on_bar[label] = float(f"{100 * value if is_mfu else value:.3g}")


def validation_loop(trainer: Trainer) -> Any:
    """Return the loop of validation inside fit, or None."""
    return getattr(training_epoch_loop(trainer), "val_loop", None)


def training_epoch_loop(trainer: Trainer) -> Any:
    """Return the loop whose call is the batches of one epoch of training, or None."""
    return getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)


def signal_connector(trainer: Trainer) -> Any:
    """Return what handles signals while the trainer runs, or None."""
    return getattr(trainer, "_signal_connector", None)


def handlers_before(trainer: Trainer) -> dict[int, Any]:
    """The signal handlers that Lightning restores at the end of a run."""
    return getattr(signal_connector(trainer), "_original_handlers", {})


def evaluation_ends(trainer: Trainer, stage: str, nested: bool) -> bool:
    """Whether the current batch is the last one of a stage other than training."""
    loop = _loop_of(trainer, stage, nested)
    return bool(getattr(getattr(loop, "batch_progress", None), "is_last_batch", False))


def validates_next(trainer: Trainer) -> bool:
    """Whether validation follows the current batch of training."""
    try:
        loop: Any = trainer.fit_loop.epoch_loop
        due = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        skipped = getattr(loop, "_skip_next_val", False)  # since Lightning 2.5
        return bool(due and not (skipped or loop.val_loop.skip))
    except (AssertionError, AttributeError, TypeError):  # Lightning has other private names
        return False


def evaluation_loops(trainer: Trainer) -> Iterator[tuple[Any, str, str]]:
    """Yield the loops of other stages than training: the loop, its stage, the one around it."""
    yield validation_loop(trainer), "validate", "train"
    for stage in ("validate", "test", "predict"):
        yield getattr(trainer, f"{stage}_loop", None), stage, ""


def ranks_of(trainer: Trainer) -> Ranks:
    """The rank of this process in the run."""
    return Ranks(
        trainer.global_rank,
        trainer.local_rank,
        trainer.node_rank,
        trainer.world_size,
        trainer.world_size // max(trainer.num_nodes, 1),
    )


def limits_of(trainer: Trainer, owners: Iterable[object] = (), sharing: int = 1) -> Limits:
    """The limits of the training, where ``sharing`` ranks train on each batch.

    An owner may define ``num_samples``, the samples of an epoch on all ranks.
    """
    given = (getattr(owner, "num_samples", None) for owner in owners)
    samples = next((value for value in given if isinstance(value, int) and value > 0), None)
    return Limits(
        _positive(trainer.max_steps),
        _positive(trainer.max_epochs),
        max_seconds(trainer),
        _positive(trainer.num_training_batches),
        samples * sharing // trainer.world_size if samples else None,
        _batches_per_step(trainer),
    )


def _batches_per_step(trainer: Trainer) -> int:
    """Return the batches per optimizer step of this epoch."""
    for each in getattr(trainer, "callbacks", ()):
        if type(each).__name__ == "GradientAccumulationScheduler":
            # Its hook, which sets the Trainer's number, may run after ours.
            steps: int = each.scheduling[
                max(n for n in each.scheduling if n <= trainer.current_epoch)
            ]
            return steps
    return trainer.accumulate_grad_batches


def resumes(trainer: Trainer) -> bool:
    """Whether the run continues an earlier one, which may have written later files.

    A job that was preempted before its first checkpoint starts over, and is still the same run.
    """
    counts = (os.environ.get(name, "") for name in RESTARTS)
    return trainer.ckpt_path is not None or any(count not in ("", "0") for count in counts)


def setup_of(trainer: Trainer) -> dict[str, object]:
    """Device, precision and strategy, for the run's params."""
    return {
        "device": device_name(trainer.strategy.root_device),
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
    }


#: Devices whose hours are GPU hours.
GPUS = ("cuda",)


def devices_of(trainer: Trainer) -> tuple[str, int]:
    """What the run occupies: ``GPU``, or ``core`` for the CPUs that it may use, and how many."""
    kind = trainer.strategy.root_device.type
    if kind in GPUS:
        return "GPU", trainer.world_size
    return (
        ("core", usable_cpus() * trainer.num_nodes) if kind == "cpu" else (kind, trainer.world_size)
    )


def training_loaders(trainer: Trainer) -> Sequence[Any]:
    """The training's DataLoaders, or other sources of batches."""
    return _loaders(getattr(trainer, "fit_loop", None))


def validation_loaders(trainer: Trainer) -> Sequence[Any]:
    """The DataLoaders of validation inside of fit; empty before the first validation."""
    return _loaders(validation_loop(trainer))


#: Modules of classes whose length runs no code of the user.
_SIZED = (
    "builtins", "torch.utils.data.sampler", "torch.utils.data.distributed",
    "torch.utils.data.dataset", *PACKAGES,
)  # fmt: skip


def batch_size(trainer: Trainer, stage: str, nested: bool) -> tuple[int | None, bool, bool]:
    """Return the samples of a batch, if all data loaders of a stage give as many.

    And whether the current batch certainly has so many, as the last one of an epoch may have fewer,
    and whether there are several loaders.
    """
    loop = _loop_of(trainer, stage, nested)
    loaders = _loaders(loop)
    sizes = {_first_batch_size(loader) for loader in loaders}
    progress = getattr(getattr(loop, "epoch_loop", loop), "batch_progress", None)
    full = len(loaders) == 1 and not getattr(progress, "is_last_batch", True)
    return sizes.pop() if len(sizes) == 1 else None, full, len(loaders) > 1


def _first_batch_size(loader: Any) -> int | None:
    size = loader_batch_size(loader)
    sampler: Any = attributes(loader).get("sampler")
    # The length of another class is the user's code, which may draw random numbers.
    counted = sampler, attributes(sampler).get("data_source", ())
    known = sampler is not None and all(type(one).__module__.startswith(_SIZED) for one in counted)
    return min(size, len(sampler)) if size and known else size


def loader_batch_size(loader: Any) -> int | None:
    """Return the batch size of a DataLoader or of its batch sampler."""
    own = attributes(loader)
    sizes = (each.get("batch_size") for each in (own, attributes(own.get("batch_sampler"))))
    return next((size for size in sizes if type(size) is int), None)


def frames_of(thread: int) -> Iterator[FrameType]:
    """The frames that a thread runs, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def nested_progress(thread: int) -> tuple[int, ...]:
    """How far a Trainer is that a thread runs within another one: the batches of each loop.

    Empty without such a Trainer: reading a frame's variables keeps them alive for a while.
    """
    frames = [*frames_of(thread)]
    outer = [at for at, each in enumerate(frames) if each.f_code.co_name == _RUN]
    found = list[int]()
    for each in frames[: outer[-2] if outer[1:] else 0]:
        if each.f_globals.get("__name__", "").startswith(_LOOPS):
            progress = getattr(each.f_locals.get("self"), "batch_progress", None)
            if (counts := getattr(progress, "total", None)) is not None:
                found += [id(progress), counts.ready, counts.completed]
    return tuple(found)


def _loop_of(trainer: Trainer, stage: str, nested: bool) -> Any:
    name = "fit_loop" if stage == "train" else f"{stage}_loop"
    return validation_loop(trainer) if nested else getattr(trainer, name, None)


def _loaders(loop: Any) -> Sequence[Any]:
    return getattr(getattr(loop, "_combined_loader", None), "flattened", None) or ()


def _iterators(loop: Any) -> Sequence[Any]:
    """The iterators of a loop's loaders, while it uses them."""
    return getattr(_iterator(loop), "iterators", ())


def _iterator(loop: Any) -> Any:
    """The iterator over all loaders of a loop; None before the first use."""
    return getattr(getattr(loop, "_combined_loader", None), "_iterator", None)


def own_transfer(trainer: Trainer, module: object) -> str:
    """The user's own method that transfers batches, or changes them there; empty without one."""
    for owner in (module, getattr(trainer, "datamodule", None)):
        for name in _TRANSFERS:
            method = getattr(type(owner), name, None)
            if not getattr(method, "__module__", PACKAGES[0]).startswith(PACKAGES):
                return f"{type(owner).__name__}.{name}"
    return ""


class Queue(NamedTuple):
    """The batches that the workers of a DataLoader load ahead."""

    workers: int
    #: Batches that it has at most.
    size: int
    #: Whether the next batch is not loaded yet.
    is_empty: bool
    #: Whether workers keep up: none has a batch to load besides the one that it loads now.
    is_full: bool


def begins_loader(trainer: Trainer) -> bool:
    """Whether an evaluation waits for the first batch of one of its DataLoaders.

    For any thread: the iterator may be gone the next moment.
    """
    iterators = (_iterator(loop) for loop, *_ in evaluation_loops(trainer))
    return any(
        getattr(each, "_idx", None) == 0 and getattr(each, "iterators", ()) for each in iterators
    )


def is_profiled() -> bool:
    """Whether torch.profiler records."""
    return bool(getattr(torch.autograd, "_profiler_enabled", bool)())


def training_queues(trainer: Trainer) -> list[Queue]:
    """The queues of the training's DataLoaders that have workers; those that are found."""
    found = []
    for iterator in _iterators(getattr(trainer, "fit_loop", None)):
        with suppress(AttributeError):
            workers, tasks = iterator._num_workers, iterator._task_info
            size = workers * iterator._prefetch_factor
            # The first one is before the thread that pins memory; without it both are the same.
            queues = {iterator._worker_result_queue, iterator._data_queue}
            waiting = 0
            with suppress(NotImplementedError):  # macOS does not count
                waiting = sum(each.qsize() for each in queues)
            # Batches that arrived before their turn are no longer in a queue.
            loaded = waiting + sum(len(each) > 1 for each in tasks.values())
            is_empty = not waiting and len(tasks.get(iterator._rcvd_idx, ())) < 2
            found.append(Queue(workers, size, is_empty, loaded >= size - workers))
    return found


def loader_workers(trainer: Trainer) -> dict[int, str]:
    """The process ids of data loader workers, with their names; those that are found."""
    found = {}
    loops = [getattr(trainer, "fit_loop", None), *(loop for loop, *_ in evaluation_loops(trainer))]
    for loop in loops:
        for loader in _iterators(loop):
            for number, worker in enumerate(getattr(loader, "_workers", ())):
                found[worker.pid] = f"worker {number}"
    return found


def wrap_samplers(trainer: Trainer, wrap: Callable[[Any, str], object]) -> None:
    """Wrap what the iterators of the training's DataLoaders draw the indices of batches from.

    ``wrap`` is called with it and the name of the sampler's class, if that is the user's: torch's
    own take no time after the first batch. Iterators of other libraries are left alone, as they may
    save the state of theirs in checkpoints.
    """
    for iterator in _iterators(getattr(trainer, "fit_loop", None)):
        own = attributes(iterator) if type(iterator).__module__ == DataLoader.__module__ else {}
        name = sampler_name(own.get("_index_sampler"))
        if name and "_sampler_iter" in own:
            iterator._sampler_iter = wrap(own["_sampler_iter"], name)


def sampler_name(sampler: Any) -> str:
    """The class of a sampler, or of that in a BatchSampler; empty if it is torch's, or a list."""
    kind = type(sampler.sampler if type(sampler) is BatchSampler else sampler)
    return "" if kind.__module__.startswith(("torch.", "builtins")) else kind.__name__


def flight_recorder() -> str:
    """The collectives that torch has recorded of this rank, as JSON; empty if it records none.

    It does with ``TORCH_FR_BUFFER_SIZE``, or ``TORCH_NCCL_TRACE_BUFFER_SIZE`` in older versions.
    """
    if not any(os.environ.get(name, "0") != "0" for name in _RECORDERS):
        return ""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with suppress(Exception):
            if text := getattr(c10d, name)():
                return text.decode() if isinstance(text, bytes) else str(text)
    return ""


def gloo_group(prefix: str, timeout: timedelta) -> Any:
    """A gloo group of all ranks, with a prefix of its own in torch's store; None without gloo."""
    c10d: Any = torch.distributed.distributed_c10d
    try:
        store, group = c10d.PrefixStore(prefix, c10d._get_default_store()), c10d.ProcessGroupGloo
    except AttributeError:
        return None
    return group(store, c10d.get_rank(), c10d.get_world_size(), timeout)


def _positive(value: float | None) -> int | None:
    return int(value) if value is not None and 0 < value < float("inf") else None


def before_torch_profilers(call: Callable[[Any], object]) -> Callable[[], None]:
    """Call a function before any torch profiler begins to warm up or record; returns the undo."""
    owner: Any = torch.autograd.profiler.profile
    if (original := getattr(owner, "_prepare_trace", None)) is None:
        return lambda: None

    def prepare(profiler: Any, *args: Any, **kwargs: Any) -> Any:
        call(profiler)
        return original(profiler, *args, **kwargs)

    def undo() -> None:
        if owner._prepare_trace is prepare:
            owner._prepare_trace = original

    owner._prepare_trace = prepare
    return undo
