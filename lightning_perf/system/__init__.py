"""Metrics of a node's hardware, sampled by a thread. No torch, no Lightning."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import contextmanager
from functools import partial
from math import inf
from threading import RLock
from typing import TYPE_CHECKING

from lightning_perf.background import Worker
from lightning_perf.errors import describe, warn
from lightning_perf.system.gpus import open_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set
    from contextlib import AbstractContextManager

    from lightning_perf.system.host import Sensor

    _Open = Callable[[set[int]], AbstractContextManager[Sequence[Sensor]]]
    _Samples = Iterator[float]

#: The metrics of a node. docs/keys.md has their meaning and units.
HOST = (
    "net_throughput_sent", "net_throughput_recv",
    "disk_iops", "disk_throughput_read", "disk_throughput_write",
    "free_memory", "swap_used",
    "cpu_util_simple", "cpu_util_max", "cpu_iowait",
    "process_rss", "process_cpu",
)  # fmt: skip


#: Seconds that the end of a run waits for the thread.
_JOIN_TIMEOUT = 0.2


@contextmanager
def node_sensors(
    processes: Set[int], visible: Sequence[str] | None = None, ranks: int = 0
) -> Iterator[list[Sensor]]:
    """Open the sensors of this node, of this job's processes, and those of `open_gpus`."""
    from lightning_perf.system.host import host_sensors  # imports psutil, in the thread

    with open_gpus(visible, ranks) as devices:
        yield [*host_sensors(processes), *devices]


class Sampler:
    """Samples the node's sensors on a thread while there are subscribers.

    ``open_sensors`` returns the sensors, in the thread that reads them.
    """

    def __init__(self, open_sensors: _Open = node_sensors) -> None:
        self._open_sensors = open_sensors
        self._intervals: dict[str, float] = {}
        self._lock = RLock()  # of the sums, which both threads access
        self._sums: dict[str, tuple[float, float]] = {}
        self._worker: Worker | None = None
        self._samples: _Samples | None = None
        #: The known processes of this job on this node.
        self.processes = {os.getpid()}
        #: The latest value by name.
        self.latest: dict[str, float] = {}

    def subscribe(self, name: str, interval: float = inf) -> None:
        """Sample at least every ``interval`` seconds; the first subscriber starts the thread."""
        self._intervals = {**self._intervals, name: interval}
        if self._worker is None:
            self._worker = worker = Worker("lightning_perf system")
            self._samples = _sample(weakref.ref(self), worker, self._open_sensors, self.processes)
            if not worker.submit(partial(_repeat, worker, self._samples), "sampling"):
                warn("the machine is not measured (can't start new thread).")

    def unsubscribe(self, name: str) -> None:
        """End a subscription; without any, the thread ends."""
        self._intervals = {key: each for key, each in self._intervals.items() if key != name}
        if not self._intervals and self._worker is not None:
            worker, self._worker = self._worker, None
            # It usually ends at once; a sensor that hangs must not delay the end of a run.
            worker.close(_JOIN_TIMEOUT)

    @property
    def subscribed(self) -> bool:
        """Whether there is a subscriber."""
        return self._worker is not None

    def totals(self) -> dict[str, tuple[float, float]]:
        """By name, the sum of value x seconds since sampling began, and the seconds."""
        with self._lock:
            return dict(self._sums)

    def refresh(self, timeout: float) -> bool:
        """Take a sample now, and return whether it was finished within ``timeout`` seconds."""
        if self._worker is None or self._samples is None:
            return False
        try:
            return self._worker.call(partial(next, self._samples, None), timeout) is not None
        except TimeoutError:
            return False

    @property
    def interval(self) -> float:
        """Seconds between samples; 1 if no subscriber has chosen any."""
        least = min(self._intervals.values(), default=inf)
        return least if least < inf else 1.0

    def receive(self, figures: Mapping[str, float], seconds: float) -> None:
        """Record values that held for some seconds; called by the thread."""
        self.latest.update(figures)
        with self._lock:
            for name, value in figures.items():
                total, held = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + value * seconds, held + seconds


def _sample(
    owner: weakref.ref[Sampler], worker: Worker, open_sensors: _Open, processes: set[int]
) -> _Samples:
    """Take a sample per step, until the owner is deleted or has another worker.

    Yields the seconds until the next step. Holds no reference to the owner between steps.
    """
    try:
        with open_sensors(processes) as found:
            sensors = dict.fromkeys(found, 0.0)
            while (sampler := owner()) is not None and sampler._worker is worker:
                for sensor, then in list(sensors.items()):
                    now = time.monotonic()
                    try:
                        sampler.receive(sensor(now), now - then if then else 0.0)
                        sensors[sensor] = now
                    except Exception as error:
                        del sensors[sensor]
                        warn(f"{sensor.name} is no longer measured ({describe(error)}).")
                interval = sampler.interval
                del sampler
                yield interval
    except Exception as error:
        warn(f"the machine is not measured ({describe(error)}).")


def _repeat(worker: Worker, samples: _Samples) -> None:
    """Take a sample, and submit the next one to the worker after the interval."""
    interval = next(samples, None)
    if interval is None:
        worker.close(0.0)
    elif not worker.submit(partial(_repeat, worker, samples), "sampling", interval):
        next(samples, None)  # it was closed meanwhile: close the sensors
