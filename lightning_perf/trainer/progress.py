"""How far a run is, stage by stage: batches, samples, tokens, steps and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning_perf.batch import checked_count, get_num_samples, get_num_tokens
from lightning_perf.errors import warn
from lightning_perf.moment import STAGES
from lightning_perf.timestamp import Timestamp

_Counter = Callable[[Any], int]
_INFERRED: dict[str, _Counter] = {
    "get_num_samples_in_batch": get_num_samples,
    "get_num_tokens_in_batch": get_num_tokens,
}


class Counters:
    """Where one stage stands, counted in place: a step that nobody asks about makes no Timestamp.

    Args:
        stamp: Where it stands already.
    """

    __slots__ = (
        "_epoch_began", "_last_epoch", "batch", "epoch", "last_samples", "last_seconds",
        "last_steps", "last_tokens", "sample", "step", "token", "total_wct",
    )  # fmt: skip

    def __init__(self, stamp: Timestamp | None = None) -> None:
        stamp = stamp or Timestamp()
        self.epoch, self.batch, self.step = stamp.epoch, stamp.batch, stamp.step
        self.sample, self.token, self.total_wct = stamp.sample, stamp.token, stamp.total_wct
        self._epoch_began = (
            stamp.batch - stamp.batch_in_epoch,
            stamp.sample - stamp.sample_in_epoch,
            stamp.token - stamp.token_in_epoch,
            stamp.total_wct - stamp.epoch_wct,
        )
        self._last_epoch = stamp.epoch
        self.last_samples: int | None = 0
        self.last_tokens: int | None = 0
        self.last_steps = 0
        self.last_seconds = 0.0

    def add(self, samples: int | None, tokens: int | None, seconds: float, step: int) -> None:
        """Count a batch.

        Args:
            samples: Samples in it, None where they cannot be told.
            tokens: Tokens in it, None where they cannot be told.
            seconds: How long it took.
            step: Optimizer steps so far, this batch's included.
        """
        self.batch += 1
        self.sample += samples or 0
        self.token += tokens or 0
        self.total_wct += seconds
        self.last_samples, self.last_tokens, self.last_seconds = samples, tokens, seconds
        self.last_steps, self.step = step - self.step, step
        self._last_epoch = self.epoch

    def end_epoch(self) -> None:
        """Begin the counts within an epoch again."""
        self.epoch += 1
        self._epoch_began = self.batch, self.sample, self.token, self.total_wct

    def timestamp(self) -> Timestamp:
        """All counts as a value."""
        batch, sample, token, wct = self._epoch_began
        return Timestamp(
            self.epoch,
            self.batch,
            self.sample,
            self.token,
            self.step,
            self.batch - batch,
            self.sample - sample,
            self.token - token,
            self.total_wct,
            self.total_wct - wct,
            self.last_seconds,
        )

    def previous(self) -> Timestamp:
        """The totals one batch earlier; the same as now before the first batch."""
        if not self.last_seconds:
            return self.timestamp()
        return Timestamp(
            self._last_epoch,
            self.batch - 1,
            self.sample - (self.last_samples or 0),
            self.token - (self.last_tokens or 0),
            self.step - self.last_steps,
            total_wct=self.total_wct - self.last_seconds,
        )


class Progress:
    """The counters of all stages, kept as long as a trainer lives and across resume."""

    def __init__(self) -> None:
        self.stages = {stage: Counters() for stage in STAGES}
        #: Seconds spent in validation inside of fit.
        self.validation_seconds = 0.0

    def timestamp(self, stage: str) -> Timestamp:
        """Where a stage stands."""
        return self.stages[stage].timestamp()

    def state_dict(self) -> dict[str, Any]:
        """Plain ints, floats and dicts, as ``weights_only=True`` asks for."""
        stages = {stage: self.timestamp(stage).state_dict() for stage in STAGES}
        return {"stages": stages, "validation_seconds": self.validation_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stood."""
        for stage in STAGES:
            if stage in state.get("stages", {}):
                self.stages[stage] = Counters(Timestamp.from_state_dict(state["stages"][stage]))
        self.validation_seconds = float(state.get("validation_seconds", 0.0))


class BatchCounter:
    """Counts samples and tokens of a batch, by the user's own functions or by inference.

    A batch that cannot be counted is said once, and its figure is None.

    Args:
        owners: Where the user's functions are looked for; the first one wins.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._samples = _find(owners, "get_num_samples_in_batch")
        self._tokens = _find(owners, "get_num_tokens_in_batch")
        self._inferred = (self._samples, self._tokens) == (get_num_samples, get_num_tokens)
        self._said: set[str] = set()

    def count(self, batch: Any) -> tuple[int | None, int | None]:
        """Samples and tokens in a batch; None where they cannot be told, 0 if not tracked."""
        if self._inferred and (type(batch) is list or type(batch) is tuple):
            # Tensors of one length, the usual batch: the rules would say the same, more slowly.
            try:
                first, *others = [part.shape[0] for part in batch]
            except (AttributeError, IndexError, TypeError, ValueError):
                pass
            else:
                if all(other == first for other in others):
                    return first, 0
        if batch is None:  # Lightning lets a loader skip a batch
            return 0, 0
        return self._told(self._samples, "samples", batch), self._told(
            self._tokens, "tokens", batch
        )

    def _told(self, counter: _Counter, what: str, batch: Any) -> int | None:
        try:
            return counter(batch)
        except Exception as error:
            if what not in self._said:
                self._said.add(what)
                _say(what, error)
            return None


def _find(owners: list[object], name: str) -> _Counter:
    for owner in owners:
        counter = getattr(owner, name, None)
        if callable(counter):
            return partial(_checked, counter, name)
    return _INFERRED[name]


def _checked(counter: Callable[[Any], object], name: str, batch: Any) -> int:
    return checked_count(counter(batch), name)


def _say(what: str, error: Exception) -> None:
    warn(
        f"cannot count the {what} of a batch ({type(error).__name__}: {error}), so {what} per "
        f"second are left out. Define get_num_{what}_in_batch(batch) -> int on the "
        "LightningModule or the LightningDataModule."
    )
