"""Samples a node's hardware on a thread."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lightning_perf.errors import describe, warn
from lightning_perf.system.gpus import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set
    from contextlib import AbstractContextManager

    _Open = Callable[[set[int]], AbstractContextManager[Sequence["Sensor"]]]


#: What is measured of a node. docs/system_metrics.md says what each is, and in which unit.
HOST = (
    "net_throughput_sent", "net_throughput_recv",
    "disk_iops", "disk_throughput_read", "disk_throughput_write",
    "free_memory", "swap_used",
    "cpu_util_simple", "cpu_util_max", "cpu_iowait",
    "process_rss", "process_cpu",
)  # fmt: skip

Device = TypeVar("Device")


class Sensor(Protocol):
    """Something that can be sampled repeatedly."""

    @property
    def name(self) -> str:
        """What it measures, for messages."""
        ...

    def __call__(self, now: float, /) -> Mapping[str, float]:
        """Return values by name: current values, and rates since the last call.

        Args:
            now: The current time in seconds.
        """
        ...


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


class TimeWeighted:
    """Sums over time of what was sampled; safe between two threads.

    Example:
        >>> sums = TimeWeighted()
        >>> sums.add({"load": 10.0}, seconds=3.0)
        >>> sums.add({"load": 50.0}, seconds=1.0)
        >>> sums.totals()
        {'load': (80.0, 4.0)}
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, figures: Mapping[str, float], seconds: float) -> None:
        """Add values that held for some seconds."""
        with self._lock:
            for name, value in figures.items():
                total, time = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = total + value * seconds, time + seconds

    def totals(self) -> dict[str, tuple[float, float]]:
        """By name, the sum of value x seconds, and the seconds."""
        with self._lock:
            return dict(self._totals)


#: Seconds that the end of a run waits for the thread.
_JOIN_TIMEOUT = 0.2
#: Requests to the thread: to sample now and set the event, or to end.
Mailbox = SimpleQueue[Event | None]


@contextmanager
def node_sensors(
    processes: Set[int], visible: Sequence[str] | None = None, ranks: int = 0
) -> Iterator[list[Sensor]]:
    """Open the sensors that are available on this node.

    Args:
        processes: Ids of this job's processes on this node.
        visible: See `lightning_perf.system.gpus.gpus`.
        ranks: See `lightning_perf.system.gpus.gpus`.
    """
    with gpus(visible, ranks) as devices:
        yield [*_host_sensors(processes), *devices]


def _host_sensors(processes: Set[int]) -> Iterator[Sensor]:
    try:
        from lightning_perf.system.host import Cpu, Disks, Memory, Network, Processes, Swap
    except ImportError:
        warn("CPU, memory, network and disks are not sampled. Install the package psutil.")
        return
    makers: list[Callable[[], Sensor]] = [
        Cpu, Memory, Swap, Network, Disks, lambda: Processes(processes),
    ]  # fmt: skip
    for make in makers:
        try:
            yield make()
        except Exception as error:
            warn(f"a sensor failed to start ({type(error).__name__}: {error}).")


class Sampler:
    """Samples the node's sensors on a thread while somebody subscribes.

    Args:
        open_sensors: Returns the sensors, in the thread that reads them.

    Example:
        >>> sampler = Sampler()
        >>> sampler.subscribe("me", interval=1.0)
        >>> sampler.refresh(timeout=60), sampler.refresh(timeout=60)
        (True, True)
        >>> total, seconds = sampler.totals()["free_memory"]
        >>> total / seconds > 0
        True
        >>> sampler.unsubscribe("me")
    """

    def __init__(
        self,
        open_sensors: _Open = node_sensors,
    ) -> None:
        self._open_sensors = open_sensors
        self._intervals: dict[str, float] = {}
        self._sums = TimeWeighted()
        self._mailbox: Mailbox | None = None
        self._thread: Thread | None = None
        self._failed = False
        #: This job's processes on this node, as far as they are known.
        self.processes = {os.getpid()}
        #: The latest value by name.
        self.latest: dict[str, float] = {}

    def subscribe(self, name: str, interval: float) -> None:
        """Sample at least this often; the first subscriber starts the thread.

        Args:
            name: The subscriber's.
            interval: Seconds between samples; the shortest of all subscribers' is used.
        """
        self._intervals = {**self._intervals, name: interval}
        if self._mailbox is None and not self._failed:
            mailbox: Mailbox = SimpleQueue()
            arguments = (weakref.ref(self), mailbox, self._open_sensors, self.processes)
            thread = Thread(target=_run, args=arguments, name="lightning_perf system", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads
                self._failed = True
                warn(f"the machine is not measured ({describe(error)}).")
                return
            self._mailbox, self._thread = mailbox, thread

    def unsubscribe(self, name: str) -> None:
        """End a subscription; without any, the thread ends."""
        self._intervals = {key: each for key, each in self._intervals.items() if key != name}
        if not self._intervals and self._mailbox is not None:
            self._mailbox.put(None)
            self._mailbox = None
            # It usually ends at once; a sensor that hangs must not hold up the end of a run.
            if self._thread is not None:
                self._thread.join(_JOIN_TIMEOUT)
                self._thread = None

    @property
    def subscribed(self) -> bool:
        """Whether the thread runs."""
        return self._mailbox is not None

    def totals(self) -> dict[str, tuple[float, float]]:
        """By name, the sum of value x seconds since sampling began, and the seconds."""
        return self._sums.totals()

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
        return min(self._intervals.values(), default=1.0)

    def receive(self, figures: Mapping[str, float], seconds: float) -> None:
        """Record what a sensor measured; called by the thread.

        Args:
            figures: By name.
            seconds: How long they held.
        """
        self.latest.update(figures)
        self._sums.add(figures, seconds)


def _run(
    owner: weakref.ref[Sampler], mailbox: Mailbox, open_sensors: _Open, processes: set[int]
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
