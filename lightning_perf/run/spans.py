"""Times Lightning's profiler spans, patched methods and waits for other ranks as exclusive time."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable
from torchmetrics import Metric

from lightning_perf.diagnosis.signals import SAMPLER
from lightning_perf.errors import let_through
from lightning_perf.flops import is_compiled
from lightning_perf.patches import MethodPatch, PatchSet, is_of_class
from lightning_perf.run import compat
from lightning_perf.timing.clock import (
    NOTHING,
    Clock,
    SaveSpan,
    Span,
    SpanWithCallbacks,
    TimedIterator,
)
from lightning_perf.timing.totals import Action, Cost, Floor, Totals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.timing.cuda_events import DeviceTimer

    #: Lightning's name of a span, or the category and the name of a method that has none.
    Key = str | tuple[str, str]


#: Spans recorded separately at most: the user's own may have any number of names.
MOST_SPANS = 4096
_LOGGER_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "after_save_checkpoint")
#: Categories of which the device's own time is measured, at the end of their spans.
_DEVICE = ("dataloader_next", "to_device", "forward", "backward", "optimizer_step")
#: Spans without a mark: they lie within others that have one, or before the first batch.
_UNMARKED = {
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "iter",
}
#: The action, within backward, of waiting for the other ranks' gradients.
GRADIENTS = "DistributedDataParallel.gradients"
#: The action, within forward, of waiting for the buffers of rank 0.
BUFFERS = "DistributedDataParallel.buffers"
#: The action, at the start of a batch, of waiting for rank 0.
START = "Trainer.broadcast_sigterm"
_ITER = ("dataloader_next", "iter")
_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
_MOVE = ("from_device", "predictions")


#: By the last part of a span's name; the parts before it are classes of the user.
_CATEGORIES = {
    hook: category
    for category, hooks in {
        "dataloader_next": ("train_dataloader_next", "val_next", "test_next", "predict_next"),
        "to_device": (
            "on_before_batch_transfer", "batch_to_device", "transfer_batch_to_device",
            "on_after_batch_transfer",
        ),
        "forward": ("training_step", "validation_step", "test_step", "predict_step"),
        "backward": ("backward",),
        "optimizer_step": ("optimizer_step",),
        "step_lr_schedulers": ("lr_scheduler_step",),
        "checkpoint": ("save_checkpoint",),
        "other": ("run_training_batch", "run_training_epoch", "on_predict_batch_end"),
    }.items()
    for hook in hooks
}  # fmt: skip
#: Hooks that do work even if the user does not override them.
_ALWAYS_ACTIVE = {"optimizer_step", "lr_scheduler_step", "on_predict_batch_end"}
#: Hooks of the module, besides those whose names begin with ``on_``, that have a name of their own.
_NAMED = ("on_", "configure_gradient_clipping", "optimizer_zero_grad")
#: Lightning's base classes, whose hooks are empty.
_EMPTY = {"Callback", "LightningModule", "LightningDataModule", "ModelHooks", "DataHooks"}
#: Runs only while a checkpoint is written.
_SAVE_HOOK = "on_save_checkpoint"
_MODULES = ("[LightningModule]", "[LightningDataModule]")


def classify(action: str, trainer: Trainer) -> tuple[str, str] | None:
    """The category and the name under which a span of Lightning is recorded.

    None for spans that are not: empty hooks, which the trainer's callbacks and modules do not
    override, and the user's own spans.
    """
    owner, _, hook = action.rpartition(".")
    if owner.startswith("[Callback]"):
        return _callback(owner.removeprefix("[Callback]"), hook, trainer)
    if owner.startswith(_MODULES):
        return _module_hook(owner.partition("]")[2], hook, trainer)
    if owner and not owner.startswith("["):
        return None
    category = _CATEGORIES.get(hook)
    return None if category is None else (category, hook)


def _callback(key: str, hook: str, trainer: Trainer) -> tuple[str, str] | None:
    callbacks = getattr(trainer, "callbacks", ())
    owners = [callback for callback in callbacks if callback.state_key == key]
    if owners and not any(_overrides(owner, hook) for owner in owners):
        return None
    name = type(owners[0]).__name__ if owners else key.partition("{")[0]
    saves = any(base.__name__ == "Checkpoint" for o in owners for base in type(o).__mro__)
    return "checkpoint" if saves or hook == _SAVE_HOOK else "callbacks", f"{name}.{hook}"


def _module_hook(name: str, hook: str, trainer: Trainer) -> tuple[str, str] | None:
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    ours = any(_overrides(owner, hook) for owner in owners if type(owner).__name__ == name)
    if hook in _CATEGORIES:
        return (_CATEGORIES[hook], hook) if ours or hook in _ALWAYS_ACTIVE else None
    category = "checkpoint" if hook == _SAVE_HOOK else "other"
    return (category, f"{name}.{hook}") if ours and hook.startswith(_NAMED) else None


def _overrides(owner: object, hook: str) -> bool:
    """Whether a hook is not the empty one of Lightning's base class."""
    base = next((each for each in type(owner).__mro__ if hook in vars(each)), None)
    if base is None or not is_of_class(owner, hook, getattr(owner, hook, None)):
        return True
    return base.__name__ not in _EMPTY or not base.__module__.startswith(compat.PACKAGES)


class SpanRecorder:
    """Records the trainer's spans, patches what has none, and keeps exclusive times."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, device: DeviceTimer | None
    ) -> None:
        # Weak: a patched logger or metric may outlive the module.
        self._trainer: Trainer = weakref.proxy(trainer)
        self._module: LightningModule = weakref.proxy(module)  # type: ignore[assignment]
        self.clock = Clock()
        #: Times on the device, where it has a clock of its own.
        self.device = device
        #: Our spans by their keys, made on first use.
        self.cache = SpanCache(self._span)
        #: Entered while we call a logger.
        self.own_calls = OwnCalls()
        self._first_fetch: Span | None = None
        #: Seconds of waiting for other ranks in training while none is late, which is the exchange
        #: itself, by action.
        self.exchange = {GRADIENTS: Floor(), START: Floor(), BUFFERS: Floor()}
        self.clock.floors[Action("train", "forward", BUFFERS)] = self.exchange[BUFFERS]
        if device is not None:
            device.wanted = True
            device.floors |= {name: self.exchange[name] for name in (GRADIENTS, START)}
        else:
            self.clock.floors[Action("train", "other", START)] = self.exchange[START]
        self._patches, self._backward = PatchSet(), PatchSet()
        #: What `totals` returned last.
        self.latest = Totals({})
        self._wrap()

    def totals(self) -> Totals:
        """Exclusive times since this was constructed, up to now."""
        device: dict[Action, Cost] = {}
        if self.device is not None:
            self.device.read()
            device |= self.device.costs
        self.latest = Totals(self.clock.costs, self.clock.batches, device)
        return self.latest

    def enter(self, stage: str) -> None:
        """A stage starts, or continues after one within it; empty: the last one has ended."""
        if not self.clock.stage:
            self._wrap()  # loggers and metrics may be new
        self.clock.begin(stage)
        if self.device is not None:
            self.device.stage = stage

    def close(self) -> None:
        """Stop recording; spans that are still held do nothing."""
        self.clock.stop()
        self._patches.restore()
        self._backward.restore()

    def _span(self, key: Key) -> AbstractContextManager[Any]:
        name = key if isinstance(key, str) else key[1]
        try:
            what = classify(key, self._trainer) if isinstance(key, str) else key
        except Exception as error:  # a user's callback raises: Lightning will raise it, too
            let_through(error)
            what = None
        if what is None:
            return NOTHING if name.startswith("[") else nullcontext(name)
        category, label = what
        clock = self.clock
        if label == "run_training_batch":
            clock.batch = Span(clock, what, name)
            return clock.batch
        if label == "save_checkpoint":
            return SaveSpan(clock, what, name)
        if label == "run_training_epoch":
            return SpanWithCallbacks(clock, what, name, entered=self._begin_epoch)
        if label == "on_predict_batch_end":
            # Predictions are moved to the host next.
            return SpanWithCallbacks(clock, what, name, left=partial(clock.run, *_MOVE))
        if self.device is not None and label == START:
            entered, left = (partial(self.device.mark, tag) for tag in ("dataloader_next", START))
            return SpanWithCallbacks(clock, what, name, entered, left)
        unmarked = label in _UNMARKED or label.startswith(SAMPLER)
        if self.device is not None and category in _DEVICE and not unmarked:
            # If backward is called within the step, the time before it is forward.
            ready = partial(self.device.mark, "forward") if category == "backward" else None
            return SpanWithCallbacks(clock, what, name, ready, partial(self.device.mark, category))
        return Span(clock, what, name)

    def _begin_epoch(self) -> None:
        """An epoch starts with the loader's iterator; its first fetch has its own name."""
        self.clock.run(*_ITER)
        if self._first_fetch is None:
            what, usual = ("dataloader_next", "first fetch"), self.cache[_FETCH]

            def fetched() -> None:
                self.cache[_FETCH] = usual
                if self.device is not None:
                    self.device.mark("dataloader_next")
                compat.wrap_samplers(self._trainer, self._drawn)

            self._first_fetch = SpanWithCallbacks(self.clock, what, _FETCH, left=fetched)
        self.cache[_FETCH] = self._first_fetch

    def _drawn(self, indices: Any, sampler: str) -> TimedIterator:
        """Time what a sampler draws, in the main process, after the first batch of an epoch."""
        return TimedIterator(indices, self.cache["dataloader_next", SAMPLER + sampler])

    def _wait(self) -> bool:
        """From now on, backward waits for the other ranks' gradients."""
        if not getattr(self._trainer.strategy.model, "require_backward_grad_sync", True):
            return False  # they are accumulated
        self._divide_backward(GRADIENTS, "backward")
        return True

    def _divide_backward(self, following: str, device: str) -> None:
        """Backward continues under another name; its part on the device so far has one, too."""
        if get_ident() == self.clock.thread:
            self.clock.run("backward", following)
        if self.device is not None:
            self.device.mark(device)

    def _add_exchange(self, seconds: float) -> None:
        if self.device is None:  # the device adds its own
            self.exchange[GRADIENTS].add(seconds)

    def _wrap(self) -> None:
        """Patch methods of Lightning that have no span."""
        trainer, module = self._trainer, self._module
        for owner, method, category, name in compat.unspanned(trainer):
            self._time(owner, method, category, name)
        for logger in trainer.loggers:
            for method in _LOGGER_METHODS:
                span = partial(self._logger_span, f"{type(logger).__name__}.{method}")
                self._patches.wrap_in_context(logger, method, span)
        strategy = trainer.strategy
        if trainer.world_size > 1:
            self._time(strategy, "reduce", "reduce_metrics", f"{type(strategy).__name__}.reduce")
            self._time(strategy.model, "_sync_buffers", "forward", BUFFERS)
            ended = partial(self._divide_backward, "backward", GRADIENTS)
            waits = partial(
                GradientsReady, ready=self._wait, ended=ended, waited=self._add_exchange
            )
            self._backward.wrap(strategy, "backward", waits)
        if not module.automatic_optimization:
            self._time(strategy, "backward", "backward", "backward")
        # In compiled code our clock would break the graph.
        metrics = [] if is_compiled(module) else module.modules()
        for metric in metrics:
            if isinstance(metric, Metric):
                name = f"{type(metric).__name__}.compute"
                self._time(metric, "compute", "reduce_metrics", name)

    def _logger_span(self, name: str) -> AbstractContextManager[Any]:
        ours = "callbacks", f"lightning_perf.{name}"
        return self.cache[ours if self.own_calls.running else ("logging", name)]

    def _time(self, owner: object, method: str, category: str, name: str) -> None:
        self._patches.wrap_in_context(
            owner, method, partial(self.cache.__getitem__, (category, name))
        )


class OwnCalls:
    """Tells whether a logger is called by us, and not by Lightning or the user."""

    running = False

    def __enter__(self) -> None:
        self.running = True

    def __exit__(self, *_: object) -> None:
        self.running = False


class GradientsReady(MethodPatch):
    """Calls functions in each backward when this rank's gradients are computed, and the others'.

    DDP waits for the other ranks in a function that runs after the backward pass, queued when the
    last gradient is ready. A hook of the loss, which runs first, queues ours ahead of it. Ours
    queues another one, which is then the last. What the user's ``backward`` does next is its own.

    Args:
        original: The strategy's ``backward``, which takes the loss first.
        ready: Returns whether the rank waits now. On a GPU it runs on autograd's thread.
        ended: Called when it no longer waits, on the same thread; at the latest at the end.
        waited: Receives the seconds of waiting, at the end.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        ready: Callable[[], bool],
        ended: Callable[[], None],
        waited: Callable[[float], None],
    ) -> None:
        super().__init__(original)
        self._ready, self._ended, self._waited = ready, ended, waited
        # When the current wait began, and the seconds of those before it in this backward.
        self._began: float | None = None
        self._seconds: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward."""
        hook = None
        with suppress(Exception):  # not a tensor, or without gradients: the original will say so
            hook = args[0].register_hook(self._queue)
        try:
            return self.original(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            self._reduced()
            seconds, self._seconds = self._seconds, None
            if seconds is not None:
                self._waited(seconds)

    def _queue(self, _gradient: object) -> None:
        with suppress(Exception):  # private: no waits are measured without it
            Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        with suppress(Exception):  # in C++, an error would end the backward
            if self._ready():
                self._began = perf_counter()
                Variable._execution_engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        began, self._began = self._began, None
        if began is not None:
            with suppress(Exception):
                self._seconds = (self._seconds or 0.0) + perf_counter() - began
                self._ended()


class SpanCache(dict[Any, "AbstractContextManager[Any]"]):
    """Spans by their keys: only the first look-up of a key calls our code."""

    def __init__(self, make: Callable[[Key], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> AbstractContextManager[Any]:
        if len(self) >= MOST_SPANS:
            return nullcontext(str(key))
        span = self[key] = self._make(key)
        return span
