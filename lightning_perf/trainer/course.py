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
    from lightning_perf.trainer.laps import Laps
    from lightning_perf.trainer.progress import Counters, Progress


@dataclass(slots=True)
class _Stage:
    """One stage on the stack: validation inside of fit lies on top of train."""

    name: str
    entered: float
    #: Where the next batch's seconds are counted from.
    mark: float
    limits: Limits
    counters: Counters
    #: Batches since the stage was entered.
    batches: int = 0


class Course:
    """Keeps the stages, their clocks and their timestamps.

    Args:
        progress: The counters, which outlive this object.
        ranks: Where this process stands.
        run_name: The run's name.
        laps: Measures batches on the device, where it has a clock of its own.
    """

    def __init__(
        self, progress: Progress, ranks: Ranks, run_name: str, laps: Laps | None = None
    ) -> None:
        self.progress, self.ranks, self.run_name = progress, ranks, run_name
        self._laps = laps
        self._stages: list[_Stage] = []
        self._moment: Moment | None = None
        self._epoch_ends = False
        self._timestamp: Timestamp | None = None

    @property
    def stage(self) -> str:
        """The stage that is running, in Lightning's words; empty between stages."""
        return self._stages[-1].name if self._stages else ""

    @property
    def nested(self) -> bool:
        """Whether the present stage is validation inside of fit."""
        return len(self._stages) > 1

    @property
    def counters(self) -> Counters:
        """The counters of the present stage."""
        return self._stages[-1].counters

    @property
    def batches(self) -> int:
        """Batches since the present stage was entered."""
        return self._stages[-1].batches

    @property
    def timestamp(self) -> Timestamp:
        """Where the present stage stands."""
        if self._timestamp is None:
            self._timestamp = self.counters.timestamp()
        return self._timestamp

    @property
    def moment(self) -> Moment:
        """The present moment, as the next batch sees it: after the last one, in the next epoch."""
        if self._moment is None:
            stage, stamp = self._stages[-1], self.timestamp
            self._moment = Moment(
                stage.name,
                stamp.to_next_epoch() if self._epoch_ends else stamp,
                stage.counters.previous(),
                stage.limits,
                self.ranks,
                self.run_name,
                stage.counters.last_seconds,
            )
        return self._moment

    def enter(self, name: str, limits: Limits) -> None:
        """A stage begins."""
        now = time.perf_counter()
        self._stages.append(_Stage(name, now, now, limits, self.progress.stages[name]))
        if self._laps is not None:
            self._laps.enter()
        self._changed()

    def count(self, samples: int | None, tokens: int | None, step: int, epoch_ends: bool) -> int:
        """A batch has ended.

        Args:
            samples: Samples in it, None where they cannot be told.
            tokens: Tokens in it, None where they cannot be told.
            step: Optimizer steps so far.
            epoch_ends: Whether it was the last of its epoch.

        Returns:
            Batches since the stage was entered.
        """
        stage, now = self._stages[-1], time.perf_counter()
        stage.counters.add(samples, tokens, now - stage.mark, step)
        stage.mark = now
        stage.batches += 1
        self._epoch_ends, self._moment, self._timestamp = epoch_ends, None, None
        return stage.batches

    def end_epoch(self) -> None:
        """An epoch of the present stage is over."""
        self.counters.end_epoch()
        self._changed()

    def exit(self) -> None:
        """The present stage is over."""
        if self._stages[-1].name != "train":  # its epochs end by themselves; others are one
            self.end_epoch()
        ended = self._stages.pop()
        if self._laps is not None:
            self._laps.exit()
        self._changed()
        if self._stages:
            # Validation inside of fit is left out of the training batch around it.
            seconds = time.perf_counter() - ended.entered
            self.progress.validation_seconds += seconds
            self._stages[-1].mark += seconds

    def _changed(self) -> None:
        self._epoch_ends, self._moment, self._timestamp = False, None, None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what happens within out of the batch's seconds: it is ours, not training."""
        start = time.perf_counter()
        if self._laps is not None:
            self._laps.pause()
        try:
            yield
        finally:
            if self._laps is not None:
                self._laps.resume()
            if self._stages:
                self._stages[-1].mark += time.perf_counter() - start
