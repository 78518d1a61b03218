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


class Progress:
    """The timestamps of all stages, kept as long as a trainer lives and across resume."""

    def __init__(self) -> None:
        self.timestamps = {stage: Timestamp() for stage in STAGES}
        #: Seconds spent in validation inside of fit.
        self.validation_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain ints, floats and dicts, as ``weights_only=True`` asks for."""
        stages = {name: stamp.state_dict() for name, stamp in self.timestamps.items()}
        return {"stages": stages, "validation_seconds": self.validation_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stood."""
        for stage in STAGES:
            if stage in state.get("stages", {}):
                self.timestamps[stage] = Timestamp.from_state_dict(state["stages"][stage])
        self.validation_seconds = float(state.get("validation_seconds", 0.0))


class BatchCounter:
    """Counts samples and tokens of a batch, by the user's own function or by inference.

    What cannot be counted is said once; its keys are left out from then on.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._samples = _find(owners, "get_num_samples_in_batch")
        self._tokens = _find(owners, "get_num_tokens_in_batch")

    def samples(self, batch: Any) -> int:
        """Samples in a batch, 0 where they cannot be told."""
        if self._samples is None:
            return 0
        try:
            return self._samples(batch)
        except Exception as error:
            self._samples = None
            _say("samples", error)
            return 0

    def tokens(self, batch: Any) -> int:
        """Tokens in a batch, 0 where they cannot be told."""
        if self._tokens is None:
            return 0
        try:
            return self._tokens(batch)
        except Exception as error:
            self._tokens = None
            _say("tokens", error)
            return 0


def _find(owners: list[object], name: str) -> _Counter | None:
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
