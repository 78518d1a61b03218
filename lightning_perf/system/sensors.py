"""All sensors of a node."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from lightning_perf.errors import warn
from lightning_perf.system.gpus import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set


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
