"""Changes that may make a training faster: when they are worth a trial, and how they are made.

`CHANGES` lists those that ``lightning-perf try`` knows. Authors append their own, in a package that
the training imports.
"""

from __future__ import annotations

import gc
from functools import wraps
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from lightning_perf.flops import is_compiled
from lightning_perf.trials import compat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_perf.diagnosis import Verdict

#: Codes of a training whose time is its own computing. `Seen.codes` has the last one if nothing
#: else takes most of the time.
_COMPUTING = ("compute-bound", "launch-bound", "low-gpu-utilization", "healthy")
#: Verdicts that do not say what the time is spent on.
_ANYWHERE = {*_COMPUTING, "cpu-saturated", "warmup", "slow-precision"}

#: Workers that are tried first, at most, if the diagnosis does not advise a number.
_USUAL_WORKERS = 8
#: Arguments that a DataLoader refuses without workers, as they are then; defaults that are others.
_OF_WORKERS = {
    "persistent_workers": False, "prefetch_factor": None, "timeout": 0,
    "multiprocessing_context": None,
}  # fmt: skip
_DEFAULTS = {"prefetch_factor": 2}
#: The share of the time that is most of it.
_MOST = 0.5
#: Of so many validations per epoch, one more or less does not matter.
_MANY = 10


class Seen(NamedTuple):
    """What a first run has shown of a training: it decides which changes are tried."""

    trainer: Any
    module: Any
    #: The training's DataLoader; None if it has another source of batches, or several.
    loader: Any
    #: By code, the most costly of each.
    verdicts: Mapping[str, Verdict]
    #: That the process may use.
    cpus: int
    #: Whether the run had the start of a second epoch.
    restarts: bool = False

    @property
    def device(self) -> str:
        """The type of the device, such as ``cpu``."""
        return str(self.trainer.strategy.root_device.type)

    @property
    def codes(self) -> set[str]:
        """The codes of the verdicts, and ``healthy`` if most of the time is the training's own."""
        elsewhere = sum(each.share for each in self.verdicts.values() if each.code not in _ANYWHERE)
        return {*self.verdicts, *(["healthy"] if elsewhere < _MOST else [])}

    @property
    def may_keep_workers(self) -> bool:
        """Whether workers could stay between epochs, and do not yet."""
        reloads = getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0)
        return self.restarts and not reloads and not self.loader.persistent_workers

    def evidence(self, code: str, name: str) -> int | None:
        """A number of a verdict's evidence, if the training has this verdict."""
        verdict = self.verdicts.get(code)
        value = None if verdict is None else verdict.evidence.get(name)
        return int(value) if value else None


class Change:
    """One change to a training, with at most one value.

    Subclasses say when a trial is worth it (`proposed`), and what changes: arguments of the
    DataLoader (`loader`) and of the Trainer (`trainer`), which are also what users then write, or
    anything else (`apply`, `begin`, `line`).

    Args:
        value: What is set, a value of JSON.

    Example:
        >>> change = Prefetch(8)
        >>> change.name, change.loader
        ('prefetch_factor=8', {'prefetch_factor': 8})
    """

    #: The name for ``--only``. Of the changes of one group, the best one is kept.
    group: ClassVar[str] = ""
    #: Codes of the verdicts that it may resolve.
    codes: ClassVar[tuple[str, ...]] = ()
    #: Whether batches and losses must stay equal, bit by bit.
    exact: ClassVar[bool] = True
    #: What its trials do besides training: ``validation`` and ``checkpoint``.
    keeps: ClassVar[tuple[str, ...]] = ()
    #: What the value is: ``loader`` or ``trainer``, and the name of an argument; with an empty name
    #: the value has several of them.
    sets: ClassVar[tuple[str, str]] = ("", "")
    #: The code to write, with braces for the value.
    line: ClassVar[str] = ""
    #: The name of a change that sets no argument; by default the code.
    title: ClassVar[str] = ""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:  # noqa: ARG003
        """The changes of this kind that are worth a trial; none by default."""
        return iter(())

    @property
    def name(self) -> str:
        """The change in few words."""
        arguments = (self.loader or self.trainer).items()
        return self.title or ", ".join(f"{key}={value}" for key, value in arguments) or self.code

    @property
    def loader(self) -> dict[str, Any]:
        """Arguments of the DataLoader."""
        return self._arguments("loader")

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        return self._arguments("trainer")

    def _arguments(self, owner: str) -> dict[str, Any]:
        kind, name = self.sets
        if kind != owner:
            return {}
        return {name: self.value} if name else dict(self.value)

    @property
    def code(self) -> str:
        """Lines to write besides."""
        return self.line.format(self.value)

    def predicted(self, seen: Seen) -> float | None:
        """The speed-up that the diagnosis promises; None if it does not."""
        found = [seen.verdicts[code] for code in self.codes if code in seen.verdicts]
        promised = found and "advised_step_seconds" in found[0].evidence
        return found[0].predicted_speedup if promised else None

    def period(self, seen: Seen) -> float:  # noqa: ARG002
        """Batches after which the training does the same again; trials have whole periods."""
        return 1

    def apply(self, trainer: Any, module: Any) -> Any:
        """Make the change before a fit; returns the module to fit. Loaders are changed later."""
        for name, value in self.trainer.items():
            setattr(trainer, name, value)
        return module

    def begin(self, trainer: Any) -> None:
        """The first batch follows: the optimizers exist."""


class Workers(Change):
    """Load batches in processes of their own."""

    sets = "loader", ""
    group, codes = "input", ("input-bound",)

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if seen.loader is None:
            return
        advised, now = seen.evidence("input-bound", "advised_workers"), seen.loader.num_workers
        # Where the advice is not certain, trials decide: loading may wait, or need the CPUs.
        first = advised or max(2 * now, min(max(seen.cpus, 2), _USUAL_WORKERS))
        # A script that has workers has chosen whether they stay.
        stay = seen.may_keep_workers and (not now or "epoch-restart" in seen.verdicts)
        more = {"persistent_workers": True} if stay else {}
        yield cls({"num_workers": first, **more})
        if 2 * first <= max(2 * seen.cpus, _USUAL_WORKERS // 2):
            yield cls({"num_workers": 2 * first, **more})

    @override
    def predicted(self, seen: Seen) -> float | None:
        advised = seen.evidence("input-bound", "advised_workers")
        return super().predicted(seen) if advised == self.value["num_workers"] else None


class PersistentWorkers(Change):
    """Keep workers between epochs."""

    sets = "loader", "persistent_workers"
    group, codes = "input", ("epoch-restart",)

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if seen.loader is not None and seen.loader.num_workers and seen.may_keep_workers:
            yield cls(True)


class NoWorkers(Change):
    """Load in the training's own process what costs less than its transfer from a worker."""

    sets = "loader", ""
    group, codes = "input", ("epoch-restart", "cpu-saturated", "input-bound")

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        more, loader = seen.evidence("input-bound", "advised_workers"), seen.loader
        if loader is not None and loader.num_workers and not more:
            given = {name: getattr(loader, name) for name in _OF_WORKERS}
            unset = {k: v for k, v in _OF_WORKERS.items() if given[k] not in (v, _DEFAULTS.get(k))}
            yield cls({"num_workers": 0, **unset})


class Prefetch(Change):
    """Load further ahead, for items that take unequal times."""

    sets = "loader", "prefetch_factor"
    group, codes = "prefetch", ("input-bound", "periodic-stall")

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if seen.loader is not None and seen.loader.num_workers:
            yield cls(4 * (seen.loader.prefetch_factor or 2))


class PinMemory(Change):
    """Copy batches from memory that a GPU reads directly."""

    sets = "loader", "pin_memory"
    group, codes = "transfer", ("transfer-bound", *_COMPUTING)

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if seen.device == "cuda" and seen.loader is not None and not seen.loader.pin_memory:
            yield cls(True)


class LargerBatch(Change):
    """Compute at once what is accumulated now: an optimizer step has the same samples."""

    group, codes, exact = "batch", (*_COMPUTING, "callback-bound"), False

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        size, steps = getattr(seen.loader, "batch_size", None), seen.trainer.accumulate_grad_batches
        # Intervals in batches would have more samples, and the callback accumulates in any case.
        counted = isinstance(seen.trainer.val_check_interval, int) or isinstance(
            seen.trainer.limit_train_batches, int
        )
        scheduled = any(
            compat.is_a(each, "GradientAccumulationScheduler") for each in seen.trainer.callbacks
        )
        fits = seen.module.automatic_optimization and not (counted or scheduled)
        if size and steps > 1 and fits:
            yield cls({"batch_size": size * steps, "accumulate_grad_batches": 1})

    @property
    @override
    def loader(self) -> dict[str, Any]:
        return {"batch_size": self.value["batch_size"]}

    @property
    @override
    def trainer(self) -> dict[str, Any]:
        return {"accumulate_grad_batches": self.value["accumulate_grad_batches"]}


class Compile(Change):
    """Compile the layers of the module, or its steps as a whole."""

    group, codes, exact = "compile", _COMPUTING, False

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if not is_compiled(seen.module):
            if names := list(_layers(seen.module)):
                yield cls(names)
            yield cls("steps")

    @property
    @override
    def name(self) -> str:
        return f"torch.compile of {'steps' if self.value == 'steps' else 'layers'}"

    @property
    @override
    def code(self) -> str:
        if self.value == "steps":
            return "trainer.fit(torch.compile(model), ...)"
        return (
            f"for name in {self.value}:\n"
            "    layer = model.get_submodule(name)\n"
            "    layer.forward = torch.compile(layer.forward)"
        )

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        if self.value == "steps":
            return torch.compile(module)
        for name in self.value:
            layer = module.get_submodule(name)
            # Not layer.compile(): it leaves modules of torch, such as nn.Sequential, as they are.
            layer.forward = torch.compile(layer.forward)
        return module


def _layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of the modules within a module that are called, and have weights."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _layers(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name


class MixedPrecision(Change):
    """Compute products in bfloat16."""

    sets = "trainer", "precision"
    group, codes, exact = "precision", _COMPUTING, False

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        single = str(seen.trainer.precision) == "32-true"
        if single and compat.computes_bfloat16(seen.trainer.strategy.root_device):
            yield cls("bf16-mixed")

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        compat.use_mixed_precision(trainer, self.value)
        return module


class MatmulPrecision(Change):
    """Compute float32 products in TensorFloat-32."""

    group, codes, exact = "matmul", ("compute-bound", "healthy"), False
    line = 'torch.set_float32_matmul_precision("{}")'

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        device = seen.trainer.strategy.root_device
        exact = torch.get_float32_matmul_precision() == "highest"
        if device.type == "cuda" and exact and compat.computes_bfloat16(device):
            yield cls("high")

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        torch.set_float32_matmul_precision(self.value)
        return module


class FusedOptimizer(Change):
    """Update all weights in one kernel."""

    group, codes, exact = "optimizer", _COMPUTING, False
    title = "fused=True"

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        groups = [group for each in seen.trainer.optimizers for group in each.param_groups]
        if groups and all("fused" in group and not group["fused"] for group in groups):
            yield cls([type(each).__name__ for each in seen.trainer.optimizers])

    @property
    @override
    def code(self) -> str:
        return "\n".join(f"{name}(..., fused=True)" for name in dict.fromkeys(self.value))

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        # The constructor sets more than the groups, and refuses some arguments.
        for kind in _subclasses(torch.optim.Optimizer):
            if kind.__name__ in self.value:
                kind.__init__ = _fused(kind.__init__)
        return module

    @override
    def begin(self, trainer: Any) -> None:
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if not all(group.get("fused") for group in groups):
            why = "constructed before Trainer.fit, or restored from a checkpoint"
            raise RuntimeError(f"the optimizers are not fused: {why}")


def _subclasses(kind: type[Any]) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _fused(construct: Any) -> Any:
    @wraps(construct)
    def fused(optimizer: Any, *args: Any, **options: Any) -> None:
        construct(optimizer, *args, **options | {"fused": True})

    return fused


class ChannelsLast(Change):
    """Keep images with their channels last, as convolutions read them."""

    group, codes, exact = "memory-format", _COMPUTING, False
    title = "channels_last"
    line = "model = model.to(memory_format=torch.channels_last)"

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if any(isinstance(each, nn.Conv2d) for each in seen.module.modules()):
            yield cls()

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        return module.to(memory_format=torch.channels_last)


class FreezeGc(Change):
    """Leave what lives during the whole training out of garbage collections."""

    group, codes = "gc", ("gc-pauses",)
    title = "gc.freeze()"
    line = "gc.collect(); gc.freeze(); gc.set_threshold(50_000, 20, 100)  # before trainer.fit"

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        yield cls()

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        return module


class Threads(Change):
    """Let torch use fewer threads, which leaves CPUs to workers and other programs."""

    group, codes, exact = "threads", ("cpu-saturated", "input-bound"), False
    line = "torch.set_num_threads({})"

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        threads = torch.get_num_threads()
        if seen.device == "cpu" and threads > 1:
            yield cls(max(threads // 2, 1))

    @override
    def apply(self, trainer: Any, module: Any) -> Any:
        torch.set_num_threads(self.value)
        return module


class LogInterval(Change):
    """Log less often."""

    sets = "trainer", "log_every_n_steps"
    group, codes = "logging", ("logger-bound",)

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if every := seen.evidence("logger-bound", "advised_log_every_n_steps"):
            yield cls(every)


class ValidationInterval(Change):
    """Validate half as often."""

    sets = "trainer", ""
    group, codes, keeps = "validation", ("validation-bound",), ("validation",)
    line = "# Halve the patience of EarlyStopping, which counts validations."

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        trainer = seen.trainer
        every, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
        # A scheduler that reads the metric fails in an epoch without it.
        reads = any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs)
        if reads or not isinstance(every, int | float):  # a time
            return
        share = every if isinstance(every, float) else every / trainer.num_training_batches
        once = epochs is not None and share > _MOST  # per epoch
        yield cls(
            {"check_val_every_n_epoch": 2 * epochs} if once else {"val_check_interval": 2 * every}
        )

    @override
    def period(self, seen: Seen) -> float:
        batches, epochs = seen.trainer.num_training_batches, seen.trainer.check_val_every_n_epoch
        if rarer := self.value.get("check_val_every_n_epoch"):
            return float(rarer * batches)
        every = self.value["val_check_interval"]
        between = every if isinstance(every, int) else int(every * batches)
        if epochs is None or batches == inf:
            return between
        # In each epoch the batches are counted anew: 3 validations become 1.
        count = batches // (between / 2)
        halves = epochs == 1 and (count % 2 == 0 or count >= _MANY)
        return between if halves else float(epochs * batches)


class CheckpointInterval(Change):
    """Write checkpoints less often."""

    # ModelCheckpoint may monitor a metric of validation, and writes nothing without it.
    group, codes, keeps = "checkpoint", ("checkpoint-bound",), ("checkpoint", "validation")
    line = "ModelCheckpoint(every_n_train_steps={})"

    @override
    @classmethod
    def proposed(cls, seen: Seen) -> Iterator[Change]:
        if steps := seen.evidence("checkpoint-bound", "advised_every_n_train_steps"):
            yield cls(steps)

    @override
    def begin(self, trainer: Any) -> None:
        for each in trainer.checkpoint_callbacks:  # those of the module are attached now
            compat.set_checkpoint_interval(each, self.value)


#: The kinds of changes that are tried.
CHANGES: list[type[Change]] = [
    Workers, PersistentWorkers, NoWorkers, Prefetch, PinMemory, LargerBatch, Compile,
    MixedPrecision, MatmulPrecision, FusedOptimizer, ChannelsLast, FreezeGc, Threads, LogInterval,
    ValidationInterval, CheckpointInterval,
]  # fmt: skip


def proposals(seen: Seen, only: tuple[str, ...] = ()) -> Iterator[Change]:
    """The changes that the verdicts of a training suggest, of some groups or of all.

    First those that may gain most: there may be no time for all.
    """

    def gain(kind: type[Change]) -> float:
        codes = seen.verdicts.keys() & set(kind.codes) - _ANYWHERE
        return max((seen.verdicts[code].predicted_speedup for code in codes), default=1.0)

    for kind in sorted(CHANGES, key=gain, reverse=True):
        if (not only or kind.group in only) and seen.codes & set(kind.codes):
            yield from kind.proposed(seen)


def change_of(kind: str, value: Any) -> Change:
    """The change that `Change` was described as."""
    return next(each for each in CHANGES if each.__name__ == kind)(value)
