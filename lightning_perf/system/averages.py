"""From readings to averages: counters to rates, samples to time-weighted means."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

Device = TypeVar("Device")


class Rates(Generic[Device]):
    """Rates from counters that only grow, summed over the devices that have them.

    A device counts from its second reading on. A counter that fell has wrapped or was reset:
    what it stands for has no rate in that interval.

    Example:
        >>> rates = Rates()
        >>> rates({"sda": {"iops": 30}}, now=0.0), rates({"sda": {"iops": 50}}, now=2.0)
        ({}, {'iops': 10.0})
    """

    def __init__(self) -> None:
        self._last: Mapping[Device, Mapping[str, float]] = {}
        self._then = 0.0

    def __call__(
        self, counters: Mapping[Device, Mapping[str, float]], now: float
    ) -> dict[str, float]:
        """Take a reading.

        Args:
            counters: By device and name.
            now: When they were read, in seconds.

        Returns:
            By name, what was counted a second since the last reading.
        """
        last, seconds = self._last, now - self._then
        self._last, self._then = counters, now
        common = [device for device in counters if device in last]
        if not common or seconds <= 0:
            return {}
        rates = {}
        for name in counters[common[0]]:
            grown = [counters[device][name] - last[device][name] for device in common]
            if min(grown) >= 0:
                rates[name] = sum(grown) / seconds
        return rates


class Averages:
    """Means over time of what was sampled since they were last taken; safe between two threads.

    Example:
        >>> averages = Averages()
        >>> averages.add({"load": 10.0}, seconds=3.0)
        >>> averages.add({"load": 50.0}, seconds=1.0)
        >>> averages.take(), averages.take()
        ({'load': 20.0}, {})
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, figures: Mapping[str, float], seconds: float) -> None:
        """Count in what held for some seconds."""
        with self._lock:
            for name, value in figures.items():
                total, time = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = total + value * seconds, time + seconds

    def take(self) -> dict[str, float]:
        """The means, and begin anew."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return {name: total / time for name, (total, time) in totals.items() if time > 0}
