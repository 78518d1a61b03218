"""Where every second goes: what Lightning's spans tell, and what it shows in none."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_perf.flops import is_compiled
from lightning_perf.timings import Action, Totals
from lightning_perf.trainer import compat
from lightning_perf.trainer.actions import classify
from lightning_perf.trainer.clock import Clock, Silent, Span, WatchedSpan
from lightning_perf.trainer.device_clock import DeviceClock
from lightning_perf.trainer.wraps import Wraps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

    #: Lightning's name of a span, or the category and the name of a method that has none.
    Key = str | tuple[str, str]

#: Spans that are told apart at most, a stage: the user's own may have any names.
_MOST_SPANS = 4096
_LOGGER_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "after_save_checkpoint")
#: Devices with a clock of their own.
_CLOCKED = {"cuda"}
#: After which of their spans the device has come to the end of what a category names.
_DEVICE = ("dataloader_next", "to_device", "forward", "backward", "optimizer_step")
#: Spans within others that have a mark already, and those before there is a batch.
_UNMARKED = {
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "iter",
}
_NOT_OURS = Silent("")


class Hub:
    """Hears the trainer's spans, times what has none, and knows where every second went."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._thread: int | None = get_ident()
        self._clock = Clock()
        self._stage = ""
        self._nested = False
        self._books: dict[str, dict[Key, Span | Silent]] = {}
        self._book = self._books.setdefault("", {})
        self._wraps = Wraps()
        clocked = trainer.strategy.root_device.type in _CLOCKED
        #: The device's own clock, where it has one.
        self.device = DeviceClock() if clocked else None
        self._wrap()

    @property
    def totals(self) -> Totals:
        """Where the time went since this was made, up to now."""
        device = self.device.costs if self.device is not None else {}
        return Totals(self._clock.costs, self._clock.train_batch, device)

    def span(self, key: Key) -> AbstractContextManager[Any]:
        """Our span of an action; one of another thread has none."""
        if get_ident() != self._thread:
            return _NOT_OURS
        return self._book.get(key) or self._make(key)

    def enter(self, stage: str) -> None:
        """A stage begins; empty: the last one is over."""
        if not self._nested:
            self._wrap()  # loggers and metrics may be new
            self._begin(stage)
            self._clock.begin(stage)

    def close(self) -> None:
        """Time nothing any more; spans that somebody still holds do no harm."""
        self._thread = None
        self._wraps.restore()

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self._book = self._books.setdefault(stage, {})
        if self.device is not None:
            self.device.begin(stage)

    @contextmanager
    def _inside(self, stage: str) -> Iterator[None]:
        """Another stage lies within the present one."""
        if self._trainer.sanity_checking or self._nested:
            yield
            return
        outer, self._nested = self._stage, True
        self._begin(stage)
        try:
            with self._clock.root(stage):
                yield
        finally:
            self._nested = False
            self._begin(outer)

    def _make(self, key: Key) -> Span | Silent:
        name = key if isinstance(key, str) else key[1]
        if len(self._book) >= _MOST_SPANS:
            return Silent(name)
        try:
            what = classify(key, self._trainer) if isinstance(key, str) else key
        except Exception:  # a callback of the user's that cannot be asked: Lightning will tell
            what = None
        span = self._span(name, *what) if what is not None else Silent(name)
        self._book[key] = span
        return span

    def _span(self, name: str, category: str, label: str) -> Span:
        account = self._clock.account(Action(self._stage, category, label))
        if name == "run_training_batch":
            return self._clock.whole(account, name)
        if label == "on_predict_batch_end":
            # Predictions are brought to the host next.
            moving = self._clock.account(Action(self._stage, "from_device", "predictions"))
            return WatchedSpan(self._clock, account, name, left=partial(self._clock.run, moving))
        if self.device is not None and category in _DEVICE and label not in _UNMARKED:
            # Where backward is called within the step, what was before it is forward.
            entered = partial(self.device.mark, "forward") if category == "backward" else None
            left = partial(self.device.mark, category)
            return WatchedSpan(self._clock, account, name, entered, left)
        return Span(self._clock, account, name)

    def _wrap(self) -> None:
        """Time what Lightning shows in no span."""
        trainer, module = self._trainer, self._module
        for owner, method, category, name in compat.unspanned(trainer):
            self._time(owner, method, category, name)
        inside = partial(self._inside, "validate")
        self._wraps.put(compat.validation_loop(trainer), "run", inside)
        for logger in trainer.loggers:
            for method in _LOGGER_METHODS:
                self._time(logger, method, "logging", f"{type(logger).__name__}.{method}")
        strategy = type(trainer.strategy).__name__
        self._time(trainer.strategy, "reduce", "reduce_metrics", f"{strategy}.reduce")
        if not module.automatic_optimization:
            self._time(trainer.strategy, "backward", "backward", "backward")
        # Within compiled code our clock would break the graph.
        metrics = [] if is_compiled(module) else module.modules()
        for metric in metrics:
            if isinstance(metric, Metric):
                name = f"{type(metric).__name__}.compute"
                self._time(metric, "compute", "reduce_metrics", name)

    def _time(self, owner: object, method: str, category: str, name: str) -> None:
        self._wraps.put(owner, method, partial(self.span, (category, name)))
