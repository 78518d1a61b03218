"""What a device does in fact: the best rate of a square matrix product.

On a busy CPU the threads of one product wait for one another, which makes it up to a thousand times
slower than one thread alone. So one thread is measured too, and bounds the rate from below.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from bisect import insort
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    _Product = Callable[[], Tensor]

#: What a measurement may take in all: it delays the start of training.
BUDGET_SECONDS = 0.05

_SIZES = [2**power for power in range(7, 14)]
# One thread comes near its best rate soon, in calls that are short against the time slices of a
# busy machine.
_SIZES_ALONE = [2**power for power in range(6, 9)]
_SHARE_ALONE = 0.4
# Each size is tried so often at least, and for this share of the time; the best try counts, if
# another one agrees with it.
_TRIES, _SHARE_A_SIZE, _AGREEMENT = 5, 0.1, 1.1
# Seconds after its time that a size is tried on until two tries agree.
_LATE = 0.2
# A larger size is worth trying until so many in a row were no faster than this factor.
_PATIENCE, _GAIN = 2, 1.02
# All cores together may do this much less than as many cores alone: clocks fall, and two hardware
# threads share one core.
_SHARED = 0.5
# FLOP/s of one core; every CPU that runs torch does more.
_LEAST_A_CORE = 1e8

_measured: dict[tuple[torch.dtype, torch.device, int], float | None] = {}
_now = time.perf_counter


def measure_peak(
    dtype: torch.dtype, device: torch.device, budget_seconds: float = BUDGET_SECONDS
) -> float | None:
    """The best rate of a square matrix product, measured once a process and number of threads.

    It draws no random number, and leaves autocast, gradients and settings as they are.

    Args:
        dtype: The operands'.
        device: Where the product runs, as fast as its current settings (threads, TF32) let it.
        budget_seconds: About how long to measure at most.

    Returns:
        FLOP/s, or None if the device has no product of this dtype, or if what was measured cannot
        be, as on a machine that is too busy.
    """
    key = dtype, torch.device(device), torch.get_num_threads()
    if key not in _measured:
        try:
            _measured[key] = _rate(dtype, key[1], budget_seconds)
        except (RuntimeError, TypeError, AssertionError):
            _measured[key] = None
    return _measured[key]


def plausible_rate(alone: float | None, together: float, cores: int) -> float | None:
    """What a CPU does, by what one thread and what all of them were measured to do.

    Args:
        alone: FLOP/s of one thread; 0 if its measurements did not agree, None if there are none.
        together: The same of all threads at once.
        cores: The cores that they may use.

    Returns:
        The rate of all threads, unless they waited for one another: then that of one thread on each
        core. None if neither is plausible.

    Example:
        >>> plausible_rate(alone=1e11, together=1.8e11, cores=2) / 1e9
        180.0
        >>> plausible_rate(alone=1e11, together=7e7, cores=2) / 1e9
        200.0
    """
    bound = None if alone is None else alone * cores
    rate = together if bound is None or together >= _SHARED * bound else bound
    trusted = bound is None or bound >= cores * _LEAST_A_CORE
    return rate if trusted and rate >= cores * _LEAST_A_CORE else None


def _rate(dtype: torch.dtype, device: torch.device, budget: float) -> float | None:
    make = partial(_product, dtype=dtype, device=device)
    if device.type != "cpu":
        return _best_rate(_SIZES, make, device, budget) or None
    threads = torch.get_num_threads()
    cores = min(threads, _usable_cores())
    # Made here, since that takes all threads; and the first product loads what they all need.
    small = {size: make(size) for size in _SIZES_ALONE}
    small[_SIZES_ALONE[0]]()
    search = partial(_best_rate, _SIZES_ALONE, small.__getitem__, device, _SHARE_ALONE * budget)
    alone = search() if threads == 1 else _on_one_thread(search)
    together = _best_rate(_SIZES, make, device, (1.0 - _SHARE_ALONE) * budget)
    return plausible_rate(alone, together, cores)


def _best_rate(
    sizes: Sequence[int], make: Callable[[int], _Product], device: torch.device, budget: float
) -> float:
    """The best rate over growing sizes; 0 if no two tries agree."""
    best, without_gain, deadline = 0.0, 0, _now() + budget
    for size in sizes:
        work = 2 * size**3
        if best and (1 + _TRIES) * work / best > deadline - _now():
            break
        fastest = _fastest(make(size), device, _SHARE_A_SIZE * budget, deadline)
        rate = work / fastest if fastest else 0.0
        without_gain = 0 if rate > _GAIN * best else without_gain + 1
        best = max(best, rate)
        if without_gain == _PATIENCE or _now() > deadline:
            break
    return best


def _fastest(
    product: _Product, device: torch.device, enough: float, deadline: float
) -> float | None:
    """The seconds of the fastest try, or None if the second fastest does not agree with it."""
    _seconds(product, device)  # The first call wakes threads.
    tries: list[float] = []
    end = min(_now() + enough, deadline)
    # The machine may stall for all of the time in one try: some more are made then.
    while _now() < end or len(tries) < _TRIES or not (_agree(tries) or _now() > _LATE + deadline):
        insort(tries, _seconds(product, device))
    return tries[0] if _agree(tries) else None


def _agree(tries: Sequence[float]) -> bool:
    return tries[1] <= _AGREEMENT * tries[0]


def _product(size: int, dtype: torch.dtype, device: torch.device) -> _Product:
    # Small numbers of both signs, none of them denormal, and not random: the user's generators
    # must stay where they are.
    values = torch.arange(size * size, device=device) % 13 - 6
    a = values.to(torch.float32).reshape(size, size).to(dtype)
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return multiply(a, a)

    return run


def _seconds(run: _Product, device: torch.device) -> float:
    if device.type == "cuda":
        return _seconds_on_cuda(run, device)
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def _seconds_on_cuda(run: _Product, device: torch.device) -> float:
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _on_one_thread(search: Callable[[], float]) -> float | None:
    """What a search finds where a product has one thread; None where that cannot be had.

    ``torch.set_num_threads`` would change the whole process, and for good: it also tells MKL never
    to choose by itself. OpenMP's own number belongs to the thread that sets it, so a new thread
    sets it and ends.
    """
    runtimes = _openmp()
    found: list[float] = []

    def run() -> None:
        for runtime in runtimes:
            runtime.omp_set_num_threads(1)
        found.append(search())

    if runtimes:
        thread = threading.Thread(target=run, name="lightning_perf peak")
        thread.start()
        thread.join()
    return found[0] if found else None


@cache
def _openmp() -> list[ctypes.CDLL]:
    """The OpenMP runtimes that this process has loaded, where the system tells."""
    try:
        maps = Path("/proc/self/maps").read_text()
        paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\b\S*\.so\S*", maps))
        return [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in sorted(paths)]
    except OSError:
        return []
