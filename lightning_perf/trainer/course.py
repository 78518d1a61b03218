"""The course of a run: which stage it is in, how far, and how long each batch took."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_perf.moment import Limits, Moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_perf.moment import Ranks
    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trainer.progress import Progress


@dataclass(slots=True)
class _Stage:
    """One stage on the stack: validation inside of fit lies on top of train."""

    name: str
    entered: float
    #: Where the next batch's seconds are counted from.
    mark: float
    #: The timestamp one batch earlier.
    previous: Timestamp
    limits: Limits


class Course:
    """Keeps the stages, their clocks and their timestamps.

    Args:
        progress: The timestamps, which outlive this object.
        ranks: Where this process stands.
        run_name: The run's name.
    """

    def __init__(self, progress: Progress, ranks: Ranks, run_name: str) -> None:
        self.progress, self.ranks, self.run_name = progress, ranks, run_name
        self._stages: list[_Stage] = []
        # Of stages that are over for now: what the last batch crossed counts when they go on.
        self._previous: dict[str, Timestamp] = {}
        self._moment: Moment | None = None
        self._epoch_ends = False
        #: Seconds that the last batch took.
        self.batch_seconds = 0.0

    @property
    def stage(self) -> str | None:
        """The stage that is running, in Lightning's words."""
        return self._stages[-1].name if self._stages else None

    @property
    def nested(self) -> bool:
        """Whether the present stage is validation inside of fit."""
        return len(self._stages) > 1

    @property
    def timestamp(self) -> Timestamp:
        """Where the present stage stands."""
        return self.progress.timestamps[self._stages[-1].name]

    @property
    def moment(self) -> Moment:
        """The present moment, as the next batch sees it: after the last one, in the next epoch."""
        if self._moment is None:
            stage, stamp = self._stages[-1], self.timestamp
            self._moment = Moment(
                stage.name,
                stamp.to_next_epoch() if self._epoch_ends else stamp,
                stage.previous,
                stage.limits,
                self.ranks,
                self.run_name,
                self.batch_seconds,
            )
        return self._moment

    def enter(self, name: str, limits: Limits) -> None:
        """A stage begins."""
        now = time.perf_counter()
        previous = self._previous.get(name, self.progress.timestamps[name])
        self._stages.append(_Stage(name, now, now, previous, limits))
        self._epoch_ends, self._moment = False, None

    def count(self, samples: int, tokens: int, steps: int, epoch_ends: bool) -> None:
        """A batch has ended.

        Args:
            samples: Samples in it.
            tokens: Tokens in it.
            steps: Optimizer steps that it completed.
            epoch_ends: Whether it was the last of its epoch.
        """
        stage, now = self._stages[-1], time.perf_counter()
        before = stage.previous = self.progress.timestamps[stage.name]
        self.batch_seconds, stage.mark = now - stage.mark, now
        self.progress.timestamps[stage.name] = before.to_next_batch(
            samples, tokens, self.batch_seconds, steps
        )
        self._epoch_ends, self._moment = epoch_ends, None

    def end_epoch(self) -> None:
        """An epoch of the present stage is over."""
        name = self._stages[-1].name
        self.progress.timestamps[name] = self.progress.timestamps[name].to_next_epoch()
        self._epoch_ends, self._moment = False, None

    def exit(self) -> None:
        """The present stage is over."""
        if self._stages[-1].name != "train":  # its epochs end by themselves; others are one
            self.end_epoch()
        ended = self._stages.pop()
        self._previous[ended.name] = ended.previous
        self._moment = None
        if self._stages:
            # Validation inside of fit is left out of the training batch around it.
            seconds = time.perf_counter() - ended.entered
            self.progress.validation_seconds += seconds
            self._stages[-1].mark += seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what happens within out of the batch's seconds: it is ours, not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._stages:
                self._stages[-1].mark += time.perf_counter() - start
