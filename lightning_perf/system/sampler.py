"""Samples a node's hardware on a thread and averages between reports."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Generic, TypeVar

from lightning_perf.errors import describe, warn
from lightning_perf.system.sensors import Sensor, node_sensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    OpenSensors = Callable[[set[int]], AbstractContextManager[Sequence[Sensor]]]


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


#: What the thread is told: to sample now and set the event, or to end.
Mailbox = SimpleQueue[Event | None]


class Sampler:
    """Samples while somebody subscribes, each with averages of their own.

    Args:
        open_sensors: Gives the sensors, in the thread that reads them.

    Example:
        >>> sampler = Sampler()
        >>> sampler.subscribe("me", interval=1.0)
        >>> sampler.refresh(timeout=60), sampler.refresh(timeout=60)
        (True, True)
        >>> sampler.take("me")["free_memory"] > 0
        True
        >>> sampler.unsubscribe("me")
    """

    def __init__(self, open_sensors: OpenSensors = node_sensors) -> None:
        self._open_sensors = open_sensors
        self._subscribers: dict[str, tuple[float, Averages]] = {}
        self._mailbox: Mailbox | None = None
        #: This job's processes on this node, as far as they are known.
        self.processes = {os.getpid()}
        #: What was read last, by name.
        self.latest: dict[str, float] = {}

    def subscribe(self, name: str, interval: float) -> None:
        """Have averages kept under a name.

        Args:
            name: The subscriber's.
            interval: Seconds between samples; the shortest of all subscribers' holds.
        """
        self._subscribers = {**self._subscribers, name: (interval, Averages())}
        if self._mailbox is None:
            self._mailbox = SimpleQueue()
            arguments = (weakref.ref(self), self._mailbox, self._open_sensors, self.processes)
            Thread(target=_run, args=arguments, name="lightning_perf system", daemon=True).start()

    def unsubscribe(self, name: str) -> None:
        """Leave; without subscribers the thread ends, and is not waited for."""
        self._subscribers = {key: each for key, each in self._subscribers.items() if key != name}
        if not self._subscribers and self._mailbox is not None:
            self._mailbox.put(None)
            self._mailbox = None

    def take(self, name: str) -> dict[str, float]:
        """A subscriber's averages since they were last taken; empty if nothing was sampled."""
        return self._subscribers[name][1].take()

    def refresh(self, timeout: float) -> bool:
        """Have a sample taken now.

        Args:
            timeout: Seconds to wait for it at most.

        Returns:
            Whether it came in time.
        """
        if self._mailbox is None:
            return False
        done = Event()
        self._mailbox.put(done)
        return done.wait(timeout)

    @property
    def interval(self) -> float:
        """Seconds between samples."""
        return min((interval for interval, _ in self._subscribers.values()), default=1.0)

    def receive(self, figures: Mapping[str, float], seconds: float) -> None:
        """Take in what a sensor told; called by the thread.

        Args:
            figures: By name.
            seconds: How long they held.
        """
        self.latest.update(figures)
        for _, averages in self._subscribers.values():
            averages.add(figures, seconds)


def _run(
    owner: weakref.ref[Sampler], mailbox: Mailbox, open_sensors: OpenSensors, processes: set[int]
) -> None:
    """The thread's work. It must not keep its owner alive, nor raise."""
    with suppress(Exception), open_sensors(processes) as found:
        sensors, done = dict.fromkeys(found, 0.0), None
        while (sampler := owner()) is not None:
            for sensor, then in list(sensors.items()):
                now = time.monotonic()
                try:
                    sampler.receive(sensor(now), now - then if then else 0.0)
                    sensors[sensor] = now
                except Exception as error:
                    del sensors[sensor]
                    warn(f"{sensor.name} is not measured any more ({describe(error)}).")
            interval = sampler.interval
            del sampler
            if done is not None:
                done.set()
            try:
                done = mailbox.get(timeout=interval)
            except Empty:
                done = None
            else:
                if done is None:
                    return
