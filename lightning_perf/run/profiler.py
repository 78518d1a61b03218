"""Receives the spans of the Trainer's profiler, and reduces their cost if there is none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.patches import MethodPatch, PatchSet
from lightning_perf.run.compat import PassThroughProfiler
from lightning_perf.run.spans import SpanRecorder
from lightning_perf.timing.clock import NOTHING
from lightning_perf.timing.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule

    from lightning_perf.timing.cuda_events import DeviceTimer

    Find = Callable[[str], AbstractContextManager[Any]]


class Spans:
    """The spans of a run, which are recorded once a callback requires their times.

    The user's profiler is patched. If the trainer has none, ours takes its place: its spans take
    less time than those of Lightning's default.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, device: DeviceTimer | None = None
    ) -> None:
        self._trainer, self._module, self._device = trainer, module, device
        #: Records times once they are required.
        self.recorder: SpanRecorder | None = None
        self._patches = PatchSet()
        # Lightning's default, and what replaces it.
        self._default, self._ours = self._trainer.profiler, SpanProfiler()
        if type(self._default) is PassThroughProfiler:
            self._trainer.profiler = self._ours

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
            self.recorder = SpanRecorder(self._trainer, self._module, self._device)
            self._ours.profile = self.recorder.cache.__getitem__
            self._patch(self.recorder)
        return self.recorder

    def enter(self, stage: str) -> None:
        """A stage starts."""
        if self.recorder is not None:
            self.recorder.enter(stage)
            self._patch(self.recorder)  # the user may have replaced it

    def restore(self) -> None:
        """Restore the profiler, unless the user replaced it meanwhile."""
        self._patches.restore()
        if self._trainer.profiler is self._ours:
            self._trainer.profiler = self._default
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _patch(self, recorder: SpanRecorder) -> None:
        theirs, find = self._trainer.profiler, recorder.cache.__getitem__
        if theirs is not self._ours:
            self._patches.wrap(theirs, "start", partial(_Start, find=find))
            self._patches.wrap(theirs, "stop", partial(_Stop, find=find))


class SpanProfiler(PassThroughProfiler):
    """A profiler that does nothing, or records every span if ``profile`` returns ours."""

    def __init__(self) -> None:
        super().__init__()
        # Without a generator per span, as Lightning's has.
        self.profile: Find = lambda _: NOTHING  # type: ignore[assignment]

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


class _Start(MethodPatch):
    """Starts our span around that of the user's profiler, so that theirs excludes our overhead."""

    def __init__(self, original: Callable[..., Any], find: Find) -> None:
        super().__init__(original)
        self._find = find

    @override
    def __call__(self, action_name: str) -> Any:
        self._find(action_name).__enter__()
        return self.original(action_name)


class _Stop(_Start):
    """Stops our span after that of the user's profiler."""

    @override
    def __call__(self, action_name: str) -> Any:
        try:
            return self.original(action_name)
        finally:
            self._find(action_name).__exit__(None, None, None)
