"""Lightning's hooks of a run, received once for all of our callbacks on a Trainer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.errors import let_through
from lightning_perf.run.compat import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

    from lightning_perf.run.context import RunContext

#: Lightning's words for stages in the names of hooks.
_WORDS = {"train": "train", "validate": "validation", "test": "test", "predict": "predict"}
#: Lightning's hooks per batch, which are most of what a callback costs: it skips what is None.
PER_BATCH = [
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *(f"on_{word}_batch_{edge}" for word in _WORDS.values() for edge in ("start", "end")),
]


def skip_unused(callback: Callback) -> None:
    """Let Lightning skip the hooks per batch that neither the class nor the object defines."""
    for name in PER_BATCH:
        if getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name):
            setattr(callback, name, None)


def restore_unused(attributes: dict[str, Any]) -> None:
    """Undo `skip_unused` in the attributes of a callback, or in a copy of them."""
    for name in PER_BATCH:
        if name in attributes and attributes[name] is None:
            del attributes[name]


class _Hooks(Callback):
    """Is among the callbacks of a Trainer during a run: a copy has no hooks."""

    #: A plain attribute, because Lightning reads it at every hook.
    state_key = ""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.state_key = f"lightning_perf {id(self)}"
        skip_unused(self)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Callback, ()


class LastHooks(_Hooks):
    """Ends a run, after the hooks of a user's subclass, which may use it until then."""

    @override
    def teardown(self, *_: object, **__: object) -> None:
        self._run.leave("teardown")

    @override
    def on_exception(self, *_: object) -> None:
        self._run.fail()


class FirstHooks(_Hooks):
    """Advances a run, and calls the lifecycle methods of its callbacks.

    It comes before them: a hook of a user's subclass finds the batch counted.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        # Callbacks with `before_batch`, and by stage those with `after_batch`, with their spans.
        self._before: list[Any] = []
        self._after: dict[str, list[tuple[str, Any]]] = {}
        for stage, word in _WORDS.items():
            for name in ("start", "end", "batch_end"):
                setattr(self, f"on_{word}_{name}", partial(getattr(self, f"_{name}"), stage))

    def _start(self, stage: str, trainer: Trainer, *_: object) -> None:
        run, word = self._run, _WORDS[stage]
        if trainer.sanity_checking:
            return
        run.begin(stage)
        self._before = [each for each in run.members if each.overrides("before_batch")]
        start = partial(self._batch_start, stage) if self._before else None
        if stage == "train":
            start = partial(self._first_start, start)
        setattr(self, f"on_{word}_batch_start", start)
        self._after[stage] = [
            (f"[Callback]{each.state_key}.on_{word}_batch_end", each)
            for each in run.members
            if each.overrides("after_batch")
        ]
        # Before training starts an error may still stop it; validation inside of fit comes later.
        for member in run.members:
            member.call(member.on_start, run, reraise=not run.nested)

    def _end(self, stage: str, *_: object) -> None:
        run = self._run
        if run.stage == stage:
            for member in run.members:
                member.call(member.on_end, run)
            run.advance(run.end)

    @override
    def on_train_epoch_start(self, *_: object) -> None:
        run = self._run
        if run.stage == "train":
            run.advance(run.begin_epoch)
            for member in run.members:
                member.call(member.on_epoch, run)

    @override
    def on_train_epoch_end(self, *_: object) -> None:
        if self._run.stage == "train":
            self._run.advance(self._run.end_epoch)

    def _first_start(self, start: Callable[..., None] | None, *arguments: Any) -> None:
        """The first batch of a fit starts; ``start`` is the hook of the others."""
        vars(self)["on_train_batch_start"] = start
        self._run.advance(self._run.attempt.begin_first_batch, self._run)
        if start is not None:
            start(*arguments)

    def _batch_start(self, stage: str, *arguments: Any) -> None:
        run, batch = self._run, arguments[2]
        if run.stage == stage:
            for member in self._before:
                member.call(member.before_batch, run, batch)

    def _batch_end(
        self, stage: str, trainer: Any, _module: Any, _outputs: Any, batch: Any, *_: Any
    ) -> None:
        """A batch has ended: this runs once per batch, and makes few calls."""
        run = self._run
        if run.stages.stage != stage:
            return
        try:
            run.end_batch(batch)
        except Exception as error:
            let_through(error)
            run.disable("end_batch", error)
        for span, member in self._after[stage]:
            with trainer.profiler.profile(span):
                member.call(member.after_batch, run, batch)
        if run.report_possible:
            run.advance(run.windows.report, run, False)


#: The name under which timings list what these hooks take.
FirstHooks.__name__ = LastHooks.__name__ = "lightning_perf"
