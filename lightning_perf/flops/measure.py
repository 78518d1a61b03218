"""Measures the peak of a device: the best rate of a square matrix product.

On a busy CPU the threads of a product wait for each other, which can make it a thousand times
slower than a single thread. A single thread is therefore measured too, as a lower bound.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from bisect import insort
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from lightning_perf.cgroup import usable_cpus
from lightning_perf.errors import DAMAGE
from lightning_perf.files import parsed, read_bytes, written_whole
from lightning_perf.flops.compat import multiply_int8
from lightning_perf.flops.operators import tf32, tf32_is_on

_T = TypeVar("_T")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    _Product = Callable[[], Tensor]

#: Time limit of a measurement, which delays the start of training.
_BUDGET_SECONDS = 0.05

_SIZES = [2**power for power in range(7, 14)]
# A single thread nears its best rate at small sizes, in calls much shorter than a time slice.
_SIZES_ALONE = [2**power for power in range(6, 9)]
_SHARE_ALONE = 0.4
# Minimum tries per size, and the share of the time limit per size. The best try counts if the
# second best is within this factor.
_TRIES, _SHARE_PER_SIZE, _AGREEMENT = 5, 0.1, 1.1
# Extra seconds to wait for two tries that agree.
_LATE = 0.2
# Stop after this many sizes in a row without a gain of this factor.
_PATIENCE, _GAIN = 2, 1.02
# Lowest plausible rate of all cores relative to single cores: clocks drop under load, and two
# hardware threads share a core.
_SHARED = 0.5
# Limits of the file of CPU peaks: measurements per setting, settings, bytes, and plausible FLOP/s.
# The largest measurement is trusted if another one is within the last factor.
_KEPT, _MOST_SETTINGS, _MOST_KEPT_BYTES, _LEAST, _MOST, _CONFIRMED = 3, 100, 1 << 16, 1e8, 1e15, 4.0
# FLOP/s per core that every CPU exceeds.
_MIN_PER_CORE = 1e8

MEASURED: dict[tuple[torch.device | str, str, int, bool], float | None] = {}


class Machine:
    """Runs and times products on this machine."""

    now = staticmethod(time.perf_counter)
    cpus = staticmethod(usable_cpus)
    threads = staticmethod(torch.get_num_threads)

    def product(self, size: int, dtype: torch.dtype, device: torch.device) -> _Product:
        """Return a product of two square matrices."""
        # Small numbers of both signs, not denormal, and not random, to leave the user's generators
        # unchanged. Each row is shifted by one; no further memory of the device is needed.
        values = (torch.arange(2 * size, device=device) % 13 - 6).to(torch.float32).to(dtype)
        a = values.unfold(0, size, 1)[:size].contiguous()
        multiply = multiply_int8 if dtype == torch.int8 else torch.mm

        def run() -> Tensor:
            # This thread has no autocast; leaving one would clear the cache of all threads.
            with torch.no_grad():
                return multiply(a, a)

        return run

    def seconds(self, run: _Product, device: torch.device) -> float:
        """Return the seconds of one product."""
        if device.type == "cuda":
            with torch.cuda.device(device):
                begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                begin.record()
                run()
                end.record()
                end.synchronize()
                return float(begin.elapsed_time(end)) / 1e3
        synchronize = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
        synchronize()
        start = self.now()
        run()
        synchronize()
        return self.now() - start

    def on_one_thread(self, search: Callable[[], float]) -> float | None:
        """Run a search with one OpenMP thread; return None if that is not possible.

        ``torch.set_num_threads`` would change the whole process permanently: it also switches off
        MKL's own choice. OpenMP's setting is per thread, so a new thread sets it and ends.
        """
        runtimes = openmp()

        def run() -> float:
            for runtime in runtimes:
                runtime.omp_set_num_threads(1)
            return search()

        return _on_a_thread(run) if runtimes else None


def _on_a_thread(search: Callable[[], _T]) -> _T:
    """Run a search on a thread of its own, which has no modes of torch and no settings."""
    with ThreadPoolExecutor(1, "lightning_perf peak") as pool:
        return pool.submit(search).result()


_MACHINE = Machine()


def measure_peak(
    device: torch.device | str,
    dtype: str,
    budget_seconds: float = _BUDGET_SECONDS,
    machine: Machine = _MACHINE,
) -> float | None:
    """Measure the best rate of a square matrix product, once per process and setting.

    Products of float32 use TensorFloat-32 if the process allows it, those of ``tf32`` always. Uses
    no random numbers; autocast, gradients and settings are unchanged afterwards.

    Returns:
        FLOP/s, or None if the device does not exist or does not support the dtype, or if the result
        is implausible, as on a busy machine.
    """
    key = device, dtype, machine.threads(), tf32_is_on()
    if key not in MEASURED:
        name, mode = ("float32", tf32()) if dtype == "tf32" else (dtype, nullcontext())
        try:
            operands, place = getattr(torch, name), torch.device(device)
            with mode:
                # The caller's modes, such as a FlopCounterMode, must not see our products.
                search = partial(fastest_rate, operands, place, budget_seconds, machine)
                MEASURED[key] = _on_a_thread(search)
        except (RuntimeError, TypeError, AssertionError, AttributeError):
            MEASURED[key] = None
    return MEASURED[key]


def kept_file() -> Path:
    """Where the best measured peaks of this user's CPUs are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")  # noqa: PTH111, PTH117
    return Path(folder, "lightning_perf", "peaks.json")


def kept_peaks() -> dict[str, list[tuple[float, str]]]:
    """The largest measured FLOP/s by setting, each with its date, the largest first."""
    kept: dict[str, list[tuple[float, str]]] = {}
    with suppress(OSError, *DAMAGE):
        for setting, rows in parsed(read_bytes(kept_file(), _MOST_KEPT_BYTES)).items():
            with suppress(*DAMAGE):
                found = [(float(value), str(date)) for value, date in rows]
                kept[setting] = sorted((x for x in found if _LEAST < x[0] < _MOST), reverse=True)
    return kept


def trusted_peak(kept: Sequence[tuple[float, str]]) -> tuple[float, str] | None:
    """The largest of some measurements, unless it is much larger than all others."""
    pairs = pairwise(kept)
    last = kept[-1] if kept else None
    return next((high for high, low in pairs if high[0] <= _CONFIRMED * low[0]), last)


@cache
def best_peak(setting: str, measured: float | None) -> float | None:
    """The best FLOP/s that this user measured on such a machine, which are kept in a file.

    One measurement on a busy machine may be much too low. Each counts once per process; several
    processes may call this at the same time.
    """
    kept = kept_peaks()
    rows = earlier = kept.pop(setting, [])
    if measured is not None:
        rows = sorted([*earlier, (measured, time.strftime("%Y-%m-%d"))], reverse=True)[:_KEPT]
    if rows != earlier:
        kept = dict([*kept.items(), (setting, rows)][-_MOST_SETTINGS:])
        with suppress(OSError), written_whole(kept_file(), durable=False) as file:
            file.write(json.dumps(kept, indent=1).encode())
    trusted = trusted_peak(rows)
    return trusted and trusted[0]


def plausible_rate(alone: float | None, together: float, cores: int) -> float | None:
    """Return the FLOP/s of all threads, or ``cores`` times that of one if they waited for others.

    The rate of one thread is 0 if its tries did not agree, and None if it was not measured. None if
    neither is plausible.
    """
    bound = None if alone is None else alone * cores
    rate = together if bound is None or together >= _SHARED * bound else bound
    trusted = bound is None or bound >= cores * _MIN_PER_CORE
    return rate if trusted and rate >= cores * _MIN_PER_CORE else None


def fastest_rate(
    dtype: torch.dtype, device: torch.device, budget: float, machine: Machine
) -> float | None:
    """Return the largest rate of several sizes, in FLOP/s; None if it was not measured."""
    make = partial(machine.product, dtype=dtype, device=device)
    best_rate = partial(_best_rate, machine, device)
    if device.type == "meta":  # it computes nothing
        return None
    if device.type != "cpu":
        return best_rate(_SIZES, make, budget) or None
    threads = machine.threads()
    cores = min(threads, machine.cpus())
    # Created here, because this uses all threads; the first product loads the libraries.
    small = {size: make(size) for size in _SIZES_ALONE}
    small[_SIZES_ALONE[0]]()
    search = partial(best_rate, _SIZES_ALONE, small.__getitem__, _SHARE_ALONE * budget)
    alone = search() if threads == 1 else machine.on_one_thread(search)
    together = best_rate(_SIZES, make, (1.0 - _SHARE_ALONE) * budget)
    if alone and cores < threads:
        # A quota stops all threads, but only after a burst on more cores than it grants.
        together = min(together, cores * alone)
    return plausible_rate(alone, together, cores)


def _best_rate(
    machine: Machine,
    device: torch.device,
    sizes: Sequence[int],
    make: Callable[[int], _Product],
    budget: float,
) -> float:
    """Return the best rate over growing sizes; 0 if no two tries agree."""
    best, without_gain, deadline = 0.0, 0, machine.now() + budget
    for size in sizes:
        work = 2 * size**3
        if best and (1 + _TRIES) * work / best > deadline - machine.now():
            break
        began = machine.now()
        seconds = partial(machine.seconds, make(size), device)
        seconds()  # warm-up: starts the threads, loads a GPU's libraries
        if device.type != "cpu":
            # Each size may load a kernel, and the first one all of cuBLAS: up to seconds.
            deadline += machine.now() - began
        fastest = _fastest(seconds, machine.now, _SHARE_PER_SIZE * budget, deadline)
        rate = work / fastest if fastest else 0.0
        without_gain = 0 if rate > _GAIN * best else without_gain + 1
        best = max(best, rate)
        if without_gain == _PATIENCE or machine.now() > deadline:
            break
    return best


def _fastest(
    seconds: Callable[[], float], now: Callable[[], float], enough: float, deadline: float
) -> float | None:
    """Return the seconds of the fastest try, or None if the second fastest disagrees."""
    tries: list[float] = []
    end = min(now() + enough, deadline)
    # One try may stall for the whole time limit: make some more then.
    while now() < end or len(tries) < _TRIES or not (_agree(tries) or now() > _LATE + deadline):
        insort(tries, seconds())
    return tries[0] if _agree(tries) else None


def _agree(tries: Sequence[float]) -> bool:
    return tries[1] <= _AGREEMENT * tries[0]


@cache
def openmp() -> list[ctypes.CDLL]:
    """Return the OpenMP runtimes that this process has loaded, on Linux."""
    try:
        maps = Path("/proc/self/maps").read_text()
        paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\b\S*\.so\S*", maps))
        return [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in sorted(paths)]
    except OSError:
        return []
