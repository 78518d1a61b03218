"""All sensors of a node."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from lightning_perf.errors import warn
from lightning_perf.system.gpus import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set


class Sensor(Protocol):
    """Something that can be read again and again."""

    @property
    def name(self) -> str:
        """What it measures, for people."""
        ...

    def __call__(self, now: float, /) -> Mapping[str, float]:
        """Numbers by name: present states, and rates since the last call.

        Args:
            now: The time in seconds.
        """
        ...


@contextmanager
def node_sensors(
    processes: Set[int], visible: Sequence[str] | None = None, ranks: int = 0
) -> Iterator[list[Sensor]]:
    """The sensors that work here, for as long as they are needed.

    Args:
        processes: Ids of this job's processes on this node.
        visible: As for `lightning_perf.system.gpus.gpus`.
        ranks: Likewise.
    """
    with gpus(visible, ranks) as devices:
        yield [*_host_sensors(processes), *devices]


def _host_sensors(processes: Set[int]) -> Iterator[Sensor]:
    try:
        from lightning_perf.system.host import Cpu, Disks, Memory, Network, Processes, Swap
    except ImportError:
        warn("CPU, memory, network and disks are not measured. Install the package psutil.")
        return
    makers: list[Callable[[], Sensor]] = [
        Cpu, Memory, Swap, Network, Disks, lambda: Processes(processes),
    ]  # fmt: skip
    for make in makers:
        try:
            yield make()
        except Exception as error:
            warn(f"a sensor does not work here ({type(error).__name__}: {error}).")
