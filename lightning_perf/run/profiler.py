"""Replaces the Trainer's profiler, to record its spans and reduce their cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

from lightning_perf.patches import same
from lightning_perf.run.spans import SpanRecorder
from lightning_perf.timing.clock import NOTHING
from lightning_perf.timing.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.timing.cuda_events import DeviceTimer

    _Span = AbstractContextManager[Any]
    Find = Callable[[str], _Span]


class Spans:
    """Replaces the trainer's profiler while the run's context lives.

    If no callback needs timings and the trainer has no profiler, spans take less time than without
    us.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, device: DeviceTimer | None = None
    ) -> None:
        self._trainer, self._module, self._device = trainer, module, device
        self._profiler = getattr(trainer, "profiler", None)
        self._installed: Any = None
        #: Records times once they are required.
        self.recorder: SpanRecorder | None = None
        if type(self._profiler) is PassThroughProfiler:
            # Like Lightning's default, but without a generator per span.
            self._install(SpanProfiler(lambda _: NOTHING))

    def totals(self) -> Totals:
        """Exclusive times since timings were first required."""
        return self.recorder.totals() if self.recorder is not None else Totals({})

    @property
    def latest(self) -> Totals:
        """What `totals` returned last: at the latest report."""
        return self.recorder.latest if self.recorder is not None else Totals({})

    def require(self) -> SpanRecorder:
        """Record times from now on."""
        if self.recorder is None:
            self._uninstall()
            self.recorder = SpanRecorder(self._trainer, self._module, self._device)
            self._listen(self.recorder)
        return self.recorder

    def enter(self, stage: str) -> None:
        """A stage starts."""
        if self.recorder is not None:
            self.recorder.enter(stage)
            if getattr(self._trainer, "profiler", None) is not self._installed:
                self._listen(self.recorder)  # the user replaced it

    def restore(self) -> None:
        """Restore the profiler, unless the user replaced it meanwhile."""
        self._uninstall()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _listen(self, recorder: SpanRecorder) -> None:
        theirs, find = getattr(self._trainer, "profiler", None), recorder.cache.__getitem__
        none = type(theirs) is PassThroughProfiler
        self._install(SpanProfiler(find) if none else TeeProfiler(theirs, find))

    def _install(self, replacement: Any) -> None:
        self._profiler = getattr(self._trainer, "profiler", None)
        self._installed = self._trainer.profiler = replacement  # type: ignore[attr-defined]

    def _uninstall(self) -> None:
        if getattr(self._trainer, "profiler", None) is self._installed:
            self._trainer.profiler = self._profiler  # type: ignore[attr-defined]


class SpanProfiler(PassThroughProfiler):
    """Records every span of a trainer without a profiler; ``find`` returns ours by its name."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self.profile = find  # type: ignore[method-assign, assignment]

    @override
    def start(self, action_name: str) -> None:
        self.profile(action_name).__enter__()

    @override
    def stop(self, action_name: str) -> None:
        self.profile(action_name).__exit__(None, None, None)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the trainer gets the default profiler.
        return PassThroughProfiler, ()


class TeeProfiler:
    """Records every span and forwards it to the user's profiler.

    All other attributes, ``__class__`` included, are those of the user's profiler.
    """

    def __init__(self, theirs: Any, find: Find) -> None:
        # Bypasses __setattr__, which writes to the user's profiler.
        vars(self).update(_theirs=theirs, _find=find)

    def profile(self, action_name: str) -> _Span:
        """Return the context of a span."""
        return _TeeSpan(self._find(action_name), self._theirs.profile(action_name))

    def start(self, action_name: str) -> None:
        """Start a span."""
        self._find(action_name).__enter__()
        self._theirs.start(action_name)

    def stop(self, action_name: str) -> None:
        """Stop a span."""
        try:
            self._theirs.stop(action_name)
        finally:
            self._find(action_name).__exit__(None, None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return same, (self._theirs,)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_theirs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._theirs, name, value)


class _TeeSpan:
    """Our span around that of the user's profiler, so that theirs excludes our overhead."""

    __slots__ = ("_ours", "_theirs")

    def __init__(self, ours: _Span, theirs: _Span) -> None:
        self._ours, self._theirs = ours, theirs

    def __enter__(self) -> Any:
        self._ours.__enter__()
        try:
            return self._theirs.__enter__()
        except BaseException:
            self._ours.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._theirs.__exit__(*error)
        finally:
            self._ours.__exit__(None, None, None)
