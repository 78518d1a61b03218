"""Lightning's hooks of a run, received once for all of our callbacks on a Trainer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

    from lightning_perf.run.context import RunContext

#: Lightning's words for stages in the names of hooks.
_WORDS = {"train": "train", "validate": "validation", "test": "test", "predict": "predict"}
#: Lightning's hooks per batch, which are most of what a callback costs: it skips what is None.
_PER_BATCH = [
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *(f"on_{word}_batch_{edge}" for word in _WORDS.values() for edge in ("start", "end")),
]


def skip_unused(callback: Callback) -> None:
    """Let Lightning skip the hooks per batch that neither the class nor the object defines."""
    for name in _PER_BATCH:
        if getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name):
            setattr(callback, name, None)


def restore_unused(attributes: dict[str, Any]) -> None:
    """Undo `skip_unused` in the attributes of a callback, or in a copy of them."""
    for name in _PER_BATCH:
        if name in attributes and attributes[name] is None:
            del attributes[name]


class _Hooks(Callback):
    """A callback of these hooks, for one run: a copy has none."""

    def __init__(self, hooks: dict[str, Callable[..., object]]) -> None:
        vars(self).update(hooks)
        skip_unused(self)

    @property
    @override
    def state_key(self) -> str:
        return f"lightning_perf {id(self)}"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Callback, ()


#: The name under which timings list what these hooks take.
_Hooks.__name__ = "lightning_perf"


def hooks_around(run: RunContext) -> list[Callback]:
    """What Lightning calls before our first callback and after our last one.

    A hook of a user's subclass finds the batch counted, and the run not yet ended.
    """
    calls = _Dispatch(run)
    first: dict[str, Callable[..., object]] = {
        "on_train_epoch_start": calls.epoch_start,
        "on_train_epoch_end": calls.epoch_end,
    }
    for stage, word in _WORDS.items():
        for hook in (calls.start, calls.end, calls.batch_start, calls.batch_end):
            first[f"on_{word}_{hook.__name__}"] = partial(hook, stage)
    last: dict[str, Callable[..., object]] = {
        "teardown": lambda *_, **__: run.leave("teardown"),
        "on_exception": lambda *_, **__: run.leave("exception"),
    }
    return [_Hooks(first), _Hooks(last)]


class _Dispatch:
    """Advances a run, and calls the lifecycle methods of its callbacks."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        # By stage: callbacks with methods per batch, the second ones with Lightning's span of them.
        self._before: dict[str, list[Any]] = {}
        self._after: dict[str, list[tuple[str, Any]]] = {}

    def start(self, stage: str, trainer: Trainer, *_: object) -> None:
        run = self._run
        if trainer.sanity_checking:
            return
        run.begin(stage)
        self._before[stage] = [each for each in run.members if each.overrides("before_batch")]
        self._after[stage] = [
            (f"[Callback]{each.state_key}.on_{_WORDS[stage]}_batch_end", each)
            for each in run.members
            if each.overrides("after_batch")
        ]
        # Before training starts an error may still stop it; validation inside of fit comes later.
        for member in run.members:
            member.call(member.on_start, run, reraise=not run.nested)

    def end(self, stage: str, *_: object) -> None:
        run = self._run
        if run.stage == stage:
            for member in run.members:
                member.call(member.on_end, run)
            run.advance(run.end)

    def epoch_start(self, *_: object) -> None:
        run = self._run
        if run.stage == "train":
            run.advance(run.begin_epoch)
            for member in run.members:
                member.call(member.on_epoch, run)

    def epoch_end(self, *_: object) -> None:
        if self._run.stage == "train":
            self._run.advance(self._run.end_epoch)

    def batch_start(self, stage: str, *arguments: Any) -> None:
        run, batch = self._run, arguments[2]
        if run.stages.stage == stage:
            for member in self._before[stage]:
                member.call(member.before_batch, run, batch)

    def batch_end(
        self, stage: str, trainer: Any, _module: Any, _out: Any, batch: Any, *_: Any
    ) -> None:
        """A batch has ended: this runs once per batch, and makes few calls."""
        run = self._run
        if run.stages.stage != stage:
            return
        run.advance(run.tracker.end_batch, batch)
        for span, member in self._after[stage]:
            with trainer.profiler.profile(span):
                member.call(member.after_batch, run, batch)
        if run.tracker.report_possible:
            run.advance(run.report)
