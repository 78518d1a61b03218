"""The FLOPs of each batch: declared by the module, or counted while the batch runs."""

from __future__ import annotations

import inspect
import logging
import math
import signal
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_perf.core.window import LEAST_KNOWN
from lightning_perf.errors import describe, handled_signals, let_through, warn
from lightning_perf.flops.cache import (
    MIN_COUNTED,
    MORE_RECOUNTS,
    MOST_COUNTED,
    FlopCache,
    Kind,
    of_kind,
)
from lightning_perf.flops.child import can_fork, in_child
from lightning_perf.flops.compat import next_node
from lightning_perf.flops.counter import Counts, FlopCounter, weighted
from lightning_perf.flops.external import COMPILED
from lightning_perf.flops.peaks import BatchCost, PeakResolver
from lightning_perf.flops.shadow import count_on_shadow, is_compiled
from lightning_perf.flops.signature import Signature, signature
from lightning_perf.patches import MethodPatch, PatchSet
from lightning_perf.run import compat
from lightning_perf.run.termination import signals_held
from lightning_perf.timing.clock import NOTHING, waited_for_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

_log = logging.getLogger("lightning_perf")

#: The strategy's method that processes a batch, by stage.
_STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
#: Training batches without FLOPs, or that were skipped, that are counted before the first others.
_TRIES = 8
#: Seconds that counting takes at least and at most, with torch's calls of the counter, by those of
#: the counter itself (measured: 4 to 11).
_WITH_CALLS = 3, 15
#: The name of the time in which a shadow is counted.
COUNTING = "lightning_perf.count_flops"
#: Part of the signature of batches whose step returned None.
_SKIPPED = "skipped"
#: Counting on a shadow may take these seconds, plus this share of the training time. The shapes
#: from which others are predicted are counted in any case. For shapes that are known, the seconds
#: are spread over the first ones of the training, or none would be left after its first batches.
FREE_SECONDS, _SHARE, _SPREAD_OVER = 0.5, 0.02, 5.0
#: Seconds more that it may take when the step time has changed.
_RESERVE = 0.25
#: CPU time of a forked count, and more per submodule: ten times what blocks of transformers take.
_SECONDS, _SECONDS_PER_PART = 5.0, 0.05
#: Batches of a stage in whose transfer FLOPs are looked for.
_WATCHED_TRANSFERS = 2
_UNTRACKED = (
    "lightning_perf: the FLOPs of %s are not counted: MFU is a lower bound. Register them with "
    "lightning_perf.extend.flop_formula."
)
#: The relative error of FLOPs above which a message reports it, and the one of a compiled module
#: above which it is a warning.
_MOST_ERROR, _WARNED_ERROR = 0.025, 0.1
_DIFFER = (
    "the FLOPs of batches of equal shape differ, and only some are counted: those "
    "of the whole run are known to about {:.0%}."
)
#: The share of training batches that were not counted for lack of time above which a message
#: reports it.
_MOST_LEFT_OUT = 0.1
_DEFINE = "Define flops_per_batch on the LightningModule to report it."


class FlopMeter:
    """Determines the FLOPs of each batch.

    The module's ``flops_per_batch`` takes precedence in training. Otherwise each new signature of
    input shapes is counted on the real batch while it runs; a compiled module is counted on a fake
    copy, so that it stays compiled, in a limited time. Some batches of known signatures are counted
    again, because those of a model with random structure differ; a counted batch has its own FLOPs,
    others have the mean. Counting is repeated when layers are frozen or unfrozen between epochs,
    when an epoch runs no backward, or when the start of an epoch or one batch in 40 to 200 shows
    another cost. After enough signatures, the FLOPs of new ones are predicted. Data loaders of
    validation are counted by themselves.

    Batches of one shape have kinds, each with its own cost. A kind is the number of nodes that the
    step adds to autograd's graph: it differs where some batches have a regularization, or leave out
    layers. With manual optimization, a kind has the optimizers that stepped, too. How often the
    step ran, or the closures of these optimizers, multiplies the FLOPs.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self.module = trainer, module
        self.peaks = PeakResolver(
            trainer.strategy.root_device,
            str(trainer.precision),
            compat.ranks_of(trainer).local_world_size,
        )
        self.wanted = False
        #: How many ranks train on each batch, whose declared FLOPs they share.
        self.sharing = 1
        #: Cost of the current batch, and whether counting slowed it down.
        self.work: BatchCost | None = None
        self.counted = False
        #: The least and most seconds that counting the last counted batch took; None if unknown.
        self.counting_seconds: tuple[float, float] | None = None
        #: When its step began, by the clock of batches; 0 before any.
        self.began = 0.0
        #: The span of counting on a shadow, which is no part of the step.
        self.span: AbstractContextManager[Any] = NOTHING
        # Seconds of all such counts, and when the first one began.
        self._shadow_seconds, self._shadow_began = 0.0, math.inf
        # Whether the step time has changed since the last one.
        self._changed = False
        self._stage = ""
        self._declares = self._compiled = False
        # Whether a module that is not compiled has called compiled functions.
        self._calls_compiled = False
        #: Whether the module declares the FLOPs of this stage's batches.
        self._declared = False
        #: The last declared value and its cost.
        self._last_declared: tuple[float, BatchCost] | None = None
        # By stage, trainable parameters, data loader and whether there is no backward.
        self._caches: dict[tuple[Hashable, ...], FlopCache] = {}
        #: The costs of this stage's signatures; None until its next step.
        self._cache: FlopCache | None = None
        self._signature: Signature = ()
        #: The number of the data loader.
        self._loader = 0
        self._warned_unpredictable = self._said_error = False
        #: Batches that were not counted for a profiler, and training batches without FLOPs for lack
        #: of time.
        self._profiled = self._left_out = 0
        #: The names of what runs and has no known FLOPs, as one text: MFU is then a lower bound.
        self.not_counted = ""
        #: The count of the current batch, if its FLOPs are not known.
        self.counting: _Counting | None = None
        # Patches of each step, patches during a counted batch, and of the first transfers.
        self._steps, self._backwards, self._transfers = PatchSet(), PatchSet(), PatchSet()
        # How often the step of the current batch has started: once per closure.
        self._begun = 0
        # Whether the module optimizes manually now. Then: the optimizers that the current batch has
        # stepped, and how often these have run their closures.
        self._manual = False
        self.stepped: list[int] = []
        self.closures = 0
        #: Whether the step returned nothing, so that Lightning skips the backward.
        self.skipped = False
        #: The nodes that the last step added to autograd's graph.
        self.nodes = 0

    def require(self, peak: float | str | None, name: str) -> None:
        """Request FLOPs, optionally with the device's peak, which an argument ``name`` gave.

        ConfigError if the peak is not valid or contradicts another callback's.
        """
        self.wanted = True
        if peak is not None:
            self.peaks.override(peak, name)
        self.peaks.prepare()

    def start(self, stage: str) -> None:
        """Prepare for a stage and resolve the peak, before any batch is timed."""
        if not self.wanted:
            return
        self._declares = True
        with suppress(Exception):  # of a property, which the first batch reports
            self._declares = getattr(self.module, "flops_per_batch", None) is not None
        self._last_declared = None
        self._compiled = self._compiled or is_compiled(self.module)
        self.resume(stage)
        if stage and not self._declared and compat.own_transfer(self._trainer, self.module):
            transfer = partial(_Transfer, meter=self)
            self._transfers.wrap(self._trainer.strategy, "batch_to_device", transfer)
        self.peaks.get(self.peaks.dtype)

    def resume(self, stage: str) -> None:
        """Continue a stage or start its next epoch: frozen parameters may have changed."""
        self._stage, self._cache, self._loader = stage, None, 0
        self.work, self.counted, self._begun = None, False, 0
        self._declared = stage == "train" and self._declares
        self._manual = stage == "train" and not self.module.automatic_optimization
        if stage and self.wanted and not self._declared:
            step = partial(_Step, stage=stage, meter=self)
            self._steps.wrap(self._trainer.strategy, _STEPS[stage], step)
            if self._manual:
                steps = partial(_OptimizerStep, meter=self)
                self._steps.wrap(self._trainer.strategy, "optimizer_step", steps)

    def close(self) -> None:
        """Stop counting and restore the strategy; report once what is not known of the FLOPs."""
        self._stage = ""
        self._stop_counting()
        self._steps.restore()
        self._transfers.restore()
        if self._profiled > _TRIES and not any(cache.costs for cache in self._caches.values()):
            self._profiled = 0
            warn(
                "FLOPs are not counted while torch.profiler records, whose trace would have each "
                f"operator twice: mfu is not reported. {_DEFINE}"
            )
        trained = sum(cache.batches for key, cache in self._caches.items() if key[0] == "train")
        if self._left_out > _MOST_LEFT_OUT * trained:
            left_out, known = self._left_out / trained, "mfu and flops_per_batch are those"
            if left_out > 1 - LEAST_KNOWN:
                known = "mfu is not reported, and flops_per_batch is that"
            self._warn_unpredictable(
                f"the FLOPs of {left_out:.0%} of the batches are not known, since counting a "
                f"compiled module takes long: {known} of the others."
            )
        errors = ((cache.error, cache.sparse) for cache in self._caches.values())
        error, sparse = max(errors, default=(0.0, False))
        if error > _MOST_ERROR and not self._said_error:
            self._said_error = True
            if sparse and error > _WARNED_ERROR:
                warn(f"{_DIFFER.format(error)} Counting a compiled module takes long. {_DEFINE}")
            else:
                compat.rank_zero_info(f"lightning_perf: {_DIFFER.format(error)}")

    def after_transfer(self, counts: Counts, is_last: bool) -> None:
        """Name the FLOPs of a transfer, such as those of a frozen encoder; end after the last one.

        They are not those of the step, which are counted, but their time is that of the batch.
        """
        if is_last:
            self._transfers.restore()
        if counts.model_flops:
            self._name_not_counted([compat.own_transfer(self._trainer, self.module)])

    def _name_not_counted(self, names: Iterable[str]) -> None:
        if self.not_counted:
            return
        self.not_counted = ", ".join(sorted(names))
        if self._trainer.global_rank == 0:
            _log.warning(_UNTRACKED, self.not_counted)

    def check(self, stage: str) -> None:
        """Count one of the next batches of a stage, because its step time has changed."""
        if stage == self._stage and self._cache is not None:
            self._changed = True
            self._cache.check()

    def on_step(self, stage: str, arguments: Sequence[Any], loader: int | None) -> None:
        """A step starts; a batch has several if its step has several closures. Never raises.

        ``loader`` is the number of the data loader, if there are several.
        """
        # Sanity-check validation runs steps too, but is not a stage.
        if stage != self._stage or not self.wanted:
            return
        self._begun += 1
        if self._begun > 1:
            return
        self.began = perf_counter()
        self.work, self.counted = None, False
        if self._manual:
            self.closures = 0
            self.stepped.clear()
        if loader is not None and loader != self._loader:
            self._loader, self._cache = loader, None
        batch = arguments[0] if arguments else None
        first = self._cache is None and arguments[1:2] == (0,)
        try:
            if self._cache is None:
                self._cache = self._find_cache()
            self._signature = signature(batch)
            if first:
                self._signature = self._cache.first(self._signature)
            self.work = self._cache.cost(self._signature)
            if self.work is None:
                self._find_cost(self._cache, batch, arguments[1:])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        let_through(error)
        self.work = None
        self.wanted = self.counted = False
        warn(
            f"FLOPs are no longer counted ({describe(error)}): mfu is not reported. {_DEFINE} "
            "Please report this."
        )

    def _find_cache(self) -> FlopCache:
        """Return the costs of this stage, of its trainable parameters and its data loader."""
        train = self._stage == "train"
        trainable = tuple(each.requires_grad for each in self.module.parameters())
        loader = 0 if train else self._loader
        key = self._stage, trainable, loader, compat.skips_backward(self._trainer)
        return self._caches.setdefault(key, FlopCache(_TRIES if train else 1, self._manual))

    def _find_cost(self, cache: FlopCache, batch: Any, arguments: Sequence[Any]) -> None:
        """Predict the cost of a batch with a new signature, or start counting it."""
        spent = self._shadow_spent(cache)
        predicted = cache.predict(self._signature, self._compiled, spent)
        if predicted is not None:
            self.work = self.peaks.cost_of(predicted)
            cache.store(self._signature, self.work)
        elif cache.full and self._signature not in cache.counts:
            self._warn_unpredictable(
                f"the FLOPs of batches with new shapes could not be predicted from {MOST_COUNTED} "
                "counted ones: such batches are excluded from mfu."
            )
        elif not cache.tries or (cache.skips >= _TRIES and self.skipped):
            pass  # there is nothing to count, or not before a batch that is not skipped
        elif compat.is_profiled():  # its trace would have each counted operator twice
            self.work = cache.known(self._signature)
            self._profiled += self.work is None
        elif spent:  # without FLOPs if its shape is new: MFU leaves it out
            self.work = cache.known(self._signature)
            if self.work is not None:
                cache.refuse(self._signature)
            self._left_out += self.work is None and self._stage == "train"
        elif self._compiled:
            self._count_on_shadow(cache, batch, arguments)
        else:
            strategy, counter = self._trainer.strategy, FlopCounter()
            self._backwards.wrap_in_context(strategy, "backward", self._in_backward)
            # Last, because nothing would stop it after an error above.
            self.counting = _Counting(counter)

    def _shadow_spent(self, cache: FlopCache) -> bool:
        """Whether counting on shadows has used up its time for now, and the batch can do without.

        Its shape is known, or others are.
        """
        if not self._compiled:
            return False
        since, free = max(self.began - self._shadow_began, 0.0), FREE_SECONDS
        known = cache.known(self._signature) is not None
        counted = sum(each.counted for each in self._caches.values())
        # Enough of them may find a cycle, if there is time.
        slow = self._shadow_seconds * MORE_RECOUNTS > FREE_SECONDS * counted
        if known and self._changed:
            free += _RESERVE
        elif known and slow and cache.counted > 1:  # the second one shows whether the first differs
            free *= min(since / _SPREAD_OVER, 1.0)
        enough = known or len(cache.counts) >= MIN_COUNTED[True]
        return enough and self._shadow_seconds > free + _SHARE * since

    def _in_backward(self) -> AbstractContextManager[Any]:
        if self.counting is not None and self._cache is not None and compat.is_profiled():
            self.work = self._cache.known(self._signature)  # a profiler has started meanwhile
            self._stop_counting()
        counting = self.counting
        return (counting and counting.counter) or NOTHING

    def _stop_counting(self) -> None:
        if self.counting is not None:
            self.counting.close()
            self.counting = None
            self._backwards.restore()

    def _warn_unpredictable(self, message: str) -> None:
        if not self._warned_unpredictable:
            self._warned_unpredictable = True
            warn(f"{message} {_DEFINE}")

    def _count_on_shadow(self, cache: FlopCache, batch: Any, arguments: Sequence[Any]) -> None:
        self.counted, self._changed = True, False
        began = perf_counter()
        self._shadow_began = min(began, self._shadow_began)
        try:
            with self.span:
                shadow, closures = self._run_shadow(batch, partial(self._step, arguments=arguments))
        except (RuntimeError, OSError) as error:  # no process can be started
            if self._calls_compiled:  # the rest can be counted, and what is compiled be named
                self._compiled = False
                return
            cache.tries = 0
            self._warn_unpredictable(
                f"the FLOPs of this compiled module cannot be counted ({error}): mfu is not "
                "reported."
            )
            return
        finally:
            self._shadow_seconds += perf_counter() - began
        self.counting = _Counting(shadow, closures, perf_counter() - began)

    def _run_shadow(
        self, batch: Any, step: Callable[[Any, Any], Any]
    ) -> tuple[Counts, list[Counts]]:
        """Count a step and its closures; in a child process where one can be forked.

        A step may change more than its module, and a child has a copy of everything.
        """
        apart = can_fork(self._trainer.strategy.root_device)

        def count() -> tuple[Counts, list[Counts]]:
            closures: list[Counts] = []
            counts = count_on_shadow(self.module, batch, step, closures, isolated=apart)
            return counts, closures

        if apart:
            parts = sum(1 for _ in self.module.modules())
            return in_child(count, _SECONDS + _SECONDS_PER_PART * parts)
        # A handler that saved a checkpoint meanwhile would save tensors without data. Ctrl-C ends
        # what hangs.
        handled, ctrl_c = handled_signals().items(), signal.default_int_handler
        with signals_held(number for number, handler in handled if handler is not ctrl_c):
            return count()

    def _step(self, module: Any, batch: Any, arguments: Sequence[Any]) -> Any:
        """Run the stage's step of a module in the precision plugin's context."""
        name = "val" if self._stage == "validate" else self._stage
        context = getattr(self._trainer.precision_plugin, f"{name}_step_context")
        with context():
            loss = getattr(module, _STEPS[self._stage])(batch, *arguments)
        return None if compat.skips_backward(self._trainer) else loss

    def after_batch(self, batch: Any) -> None:
        """Finish the batch that has just ended: set ``work`` and ``counted``."""
        begun, self._begun, counts = self._begun, 0, None
        if self.counting is not None:
            counts = self.counting.counts(begun, self._automatic)
            self.counting_seconds = self.counting.seconds
            self._stop_counting()
        if batch is None or not (begun or self._declared):  # Lightning skipped it
            self.work, self.counted = None, False
        elif self._declared:
            self.work, self.counted = self._declared_work(batch), False
        elif counts is not None:
            self.counted = True
            try:
                self._store(counts, (self.closures if self._manual else begun) or 1)
            except Exception as error:
                self._fail(error)
        elif self._cache is not None and self.work is not None:
            self._specify(self._cache, self.closures if self._manual else begun)

    def _specify(self, cache: FlopCache, runs: int) -> None:
        """Set ``work`` of a batch that was not counted by what is known after it."""
        assert self.work is not None
        if self.skipped and self._automatic:
            cost = cache.costs.get((*self._signature, _SKIPPED))
            self.work = cost or self.work
            if cost is None:
                cache.skip()
        elif (kind := self._kind) != cache.kind and kind is not None:
            self.work = cache.cost_of(self._signature, kind) or self.work
        if runs > 1:
            self.work = self.work.times(runs)

    def run_closure(self, closure: Callable[..., Any], *args: Any) -> Any:
        """Run the closure of an optimizer with manual optimization."""
        self.closures += 1
        return closure(*args)

    @property
    def _kind(self) -> Kind | None:
        """The kind of the current batch; None if all are of one kind."""
        told_apart = self._cache is not None and not self._cache.many_shapes
        if self._manual:
            return (*self.stepped, self.nodes * told_apart)
        return (self.nodes,) if told_apart else None

    @property
    def _automatic(self) -> bool:
        """Whether Lightning runs a backward for each step."""
        return self._stage == "train" and self.module.automatic_optimization

    def _store(self, counts: Counts, runs: int) -> None:
        """Store the counts of a batch whose step, or closures, ran ``runs`` times."""
        assert self._cache is not None  # found before the batch was counted
        cache = self._cache
        if COMPILED in counts.untracked_names and not self._calls_compiled:
            self._calls_compiled = self._compiled = True  # from the next batch on
            self._caches.clear()
            self._cache = None
            return
        if counts.untracked_names:
            self._name_not_counted({*counts.untracked_names})
        known = self._signature in cache.counts
        skipped = self._automatic and self.skipped
        # A batch that was skipped costs what it computed. It is no sample of a new signature.
        if known or (counts.model_flops and not skipped):
            one = weighted([(1 / runs, counts)]) if runs > 1 else counts
            own = (*self._signature, _SKIPPED) if skipped else self._signature
            cache.limit_kinds(own)
            kind = None if skipped else self._kind
            cache.store(own, self.peaks.cost_of(cache.count(own, one, kind)))
            if (of_this := of_kind(own, kind)) != own:
                cache.store(of_this, self.peaks.cost_of(cache.mean_of(of_this)))
            self.work = self.peaks.cost_of(counts)
        elif skipped:
            cache.skip()
        elif not cache.counts:
            cache.tries -= 1
            if not cache.tries and self._stage == "train":
                warn(f"no FLOPs were found in the first batches: mfu is not reported. {_DEFINE}")

    def _declared_work(self, batch: Any) -> BatchCost | None:
        try:
            value: Any = self.module.flops_per_batch
            flops = float(value(batch) if callable(value) else value)
            if self._last_declared is not None and self._last_declared[0] == flops:
                return self._last_declared[1]
            if not (math.isfinite(flops) and flops > 0):
                raise ValueError(f"{flops!r} is not a positive number")
        except Exception as error:
            let_through(error)
            self.wanted = False
            warn(
                f"flops_per_batch failed ({type(error).__name__}: {error}): mfu is not reported. "
                "It must be a number, or a function of the batch that returns one: the FLOPs of "
                "this rank's batch, forward and backward."
            )
            return None
        own = {self.peaks.dtype: round(flops / self.sharing)}
        cost = self.peaks.cost_of(Counts(model=own, hardware=own))
        self._last_declared = flops, cost
        return cost


class _Step(MethodPatch):
    """Announces a batch to the meter and runs the step, under the counter if there is one.

    A Lightning hook would announce the batch too, but takes several times as long to call.
    """

    def __init__(self, original: Callable[..., Any], stage: str, meter: FlopMeter) -> None:
        super().__init__(original)
        self._stage, self._meter = stage, meter
        # Lightning passes the number of the data loader if there are several.
        self._loader = 2
        with suppress(TypeError, ValueError):  # the step's parameters are unknown, or have no such
            names = [*inspect.signature(getattr(meter.module, _STEPS[stage])).parameters]
            self._loader = names.index("dataloader_idx")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meter = self._meter
        several = self._stage != "train" and len(args) > self._loader
        meter.on_step(self._stage, args, args[self._loader] if several else None)
        counting, position = meter.counting, next_node()
        if counting is None or counting.counter is None:
            found = self.original(*args, **kwargs)
        else:
            with counting.counter:
                found = self.original(*args, **kwargs)
        meter.nodes = next_node() - position
        meter.skipped = found is None
        return found


class _Transfer(MethodPatch):
    """Looks for FLOPs in the transfer of a stage's first batches."""

    def __init__(self, original: Callable[..., Any], meter: FlopMeter) -> None:
        super().__init__(original)
        self._meter, self._left = meter, _WATCHED_TRANSFERS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meter, counter = self._meter, FlopCounter()
        self._left -= 1
        with counter:
            found = self.original(*args, **kwargs)
        meter.after_transfer(counter.counts, is_last=self._left <= 0)
        return found


class _OptimizerStep(MethodPatch):
    """Tells the meter which optimizers a batch steps, and how often they run their closures."""

    def __init__(self, original: Callable[..., Any], meter: FlopMeter) -> None:
        super().__init__(original)
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meter = self._meter
        meter.stepped.append(id(args[0]) if args else 0)
        if len(args) > 1 and args[1] is not compat.NO_CLOSURE:
            args = (args[0], partial(meter.run_closure, args[1]), *args[2:])
        return self.original(*args, **kwargs)


class _Counting:
    """The count of the current batch: by a counter while it runs, or on a shadow before.

    Watches all optimizers meanwhile, however they are stepped. Excludes their operators, such as
    Muon's products, but not their closures', and counts how often each step runs its closure.
    """

    def __init__(
        self, counted: FlopCounter | Counts, closures: Sequence[Counts] = (), seconds: float = 0.0
    ) -> None:
        #: Counts the batch, unless a shadow did.
        self.counter = None if isinstance(counted, Counts) else counted
        # What the shadow counted of the step, and of each closure of its optimizers.
        self._source, self._closures, self._seconds = counted, closures, seconds
        self._waited = waited_for_cpu()
        # For each step of an optimizer, how often it ran its closure.
        self._runs: list[int] = []
        # Steps that run now: one may run another one.
        self._running = 0
        # Torch's hooks are called for the optimizers of all threads.
        self._thread = get_ident()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def counts(self, begun: int, automatic: bool) -> Counts:
        """The counts of a batch whose step ran ``begun`` times."""
        if not isinstance(self._source, Counts):
            return self._source.counts
        if automatic:
            return weighted([(begun, self._source)])
        # A shadow runs each closure once.
        repeats = [max(runs - 1, 0) for runs in self._runs]
        return weighted([(1, self._source), *zip(repeats, self._closures, strict=False)])

    @property
    def seconds(self) -> tuple[float, float] | None:
        """The least and most seconds that counting took until now; None if they are unknown."""
        if self.counter is None:
            return self._seconds, self._seconds
        now = waited_for_cpu()
        if now is None or self._waited is None:
            return None
        # While other processes have the CPU, a long step waits more often.
        least, most = (self.counter.seconds * calls for calls in _WITH_CALLS)
        return least, most + now - self._waited

    def close(self) -> None:
        """Stop watching."""
        if self.counter is not None and get_ident() == self._thread:
            self.counter.remove()
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: object, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if get_ident() != self._thread:
            return args, kwargs
        self._running += 1
        if self._running == 1:
            self._runs.append(0)
        self._pause(True)
        if len(args) > 1 and callable(args[1]):  # after the optimizer itself
            args = (args[0], self._counted(args[1]), *args[2:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._counted(kwargs["closure"])}
        return args, kwargs

    def _after(self, *_: object) -> None:
        if get_ident() == self._thread:
            self._running -= 1
            self._pause(self._running > 0)

    def _pause(self, paused: bool) -> None:
        if self.counter is not None:
            self.counter.paused = paused

    def _counted(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._running == 1 and self._runs:
                self._runs[-1] += 1
            running, self._running = self._running, 0
            self._pause(False)
            try:
                return closure(*args, **kwargs)
            finally:
                self._running = running
                self._pause(True)

        return counted
