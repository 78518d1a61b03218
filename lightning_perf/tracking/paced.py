"""Loggers other than MLflow's: calls on the training thread, less often if they are slow."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import WarningDigest, describe, let_through
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A logger is slow if the median of its latest calls takes longer, in seconds. A delayed call alone
#: says nothing, such as the first one, which may open files.
_SLOW = 0.02
#: How many calls are the latest ones: few, since a logger may become slow, or fast again.
_LATEST = 9
#: The part of the time for calls of a slow logger.
_PART = 0.02


class PacedLogger:
    """A logger that our metrics go to. The training waits for each call.

    Between calls of a slow logger there are pauses. What comes meanwhile goes with the next call,
    at its step: the last value of each key.
    """

    def __init__(self, logger: Any) -> None:
        self._logger, self._name = logger, type(logger).__name__
        self._waiting: dict[str, float] = {}
        self._step = 0
        # Seconds of the latest calls, and when the last one ended.
        self._latest = deque[float](maxlen=_LATEST)
        self._ended = 0.0
        self._digest = WarningDigest()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass metrics on, now or with a later call."""
        self._step = max(step, self._step) if self._waiting else step
        self._waiting |= metrics
        # The low median of two is the shorter one.
        per_call = median_low(self._latest) if len(self._latest) > 1 else 0.0
        if per_call <= _SLOW or perf_counter() - self._ended >= per_call / _PART:
            self.flush()
        else:
            self._digest.once(
                "slow",
                f"{self._name} takes {duration(per_call)} per call. lightning_perf calls it less "
                f"often, in {_PART:.0%} of the time at most, each time with the latest values.",
            )

    def flush(self) -> None:
        """Pass on what waits. A logger that fails is called again the next time."""
        metrics, self._waiting = self._waiting, {}
        if not metrics:
            return
        began = perf_counter()
        try:
            self._logger.log_metrics(metrics=metrics, step=self._step)
        except Exception as error:
            let_through(error)
            why = describe(error)
            text = f"{self._name} did not accept metrics ({why}). Training continues."
            self._digest.once("failed", text)
        self._ended = perf_counter()
        self._latest.append(self._ended - began)
