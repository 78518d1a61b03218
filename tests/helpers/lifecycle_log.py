"""A callback that records the calls of its lifecycle methods."""

from __future__ import annotations

from typing import Any

from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.context import RunContext


class LifecycleLog(PerfCallback):
    """Records each call of a lifecycle method, with the stage and the number of batches."""

    def __init__(self, name: str = "lifecycle_log") -> None:
        super().__init__()
        self.name = name
        self.entries: list[tuple[str, str, int]] = []
        self.moments: list[Any] = []
        self.stamps: list[Any] = []

    @property
    def state_key(self) -> str:
        return self.name

    def _record(self, method: str, context: RunContext) -> None:
        done = context.timestamp.batch if context.stage else 0
        self.entries.append((method, context.stage, done))

    def on_start(self, context: RunContext) -> None:
        self._record("start", context)

    def before_batch(self, context: RunContext, batch: Any) -> None:
        self._record("before", context)

    def after_batch(self, context: RunContext, batch: Any) -> None:
        self._record("after", context)
        self.moments.append(context.moment)
        self.stamps.append(context.timestamp)

    def on_end(self, context: RunContext) -> None:
        self._record("end", context)

    def close(self, context: RunContext, reason: str) -> None:
        self._record(f"close:{reason}", context)
