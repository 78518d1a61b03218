"""What a device does in fact: the best rate of a square matrix product."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_SIZES = [2**power for power in range(7, 14)]
# Each size is tried so often and for so long, and the best try counts: one that the machine stalled
# in decides nothing.
_REPEATS, _SECONDS_A_SIZE = 5, 0.02
# A larger size is worth trying until so many in a row were no faster than this factor.
_PATIENCE, _GAIN = 2, 1.02

_measured: dict[tuple[torch.dtype, torch.device], float | None] = {}


def measure_peak(
    dtype: torch.dtype, device: torch.device, budget_seconds: float = 2.0, *, again: bool = False
) -> float | None:
    """The best rate of a square matrix product, measured once a process.

    It takes about half a second on a CPU. It draws no random number, and leaves autocast, gradients
    and settings as they are.

    Args:
        dtype: The operands'.
        device: Where the product runs, as fast as its current settings (threads, TF32) let it.
        budget_seconds: About how long to measure at most, time in which the machine stalls left
            out.
        again: Measure once more, and keep the larger value.

    Returns:
        FLOP/s, or None if the device has no product of this dtype.
    """
    key = dtype, torch.device(device)
    if again or key not in _measured:
        try:
            _measured[key] = max(_measured.get(key) or 0.0, _best_rate(*key, budget_seconds))
        except (RuntimeError, TypeError, AssertionError):
            _measured.setdefault(key, None)
    return _measured[key]


def _best_rate(dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float:
    best, left, without_gain = 0.0, budget_seconds, 0
    for size in _SIZES:
        work = 2 * size**3
        if best and (1 + _REPEATS) * work / best > left:
            break
        fastest, repeats = _fastest(_product(size, dtype, device), device)
        left -= fastest * repeats
        without_gain = 0 if work / fastest > _GAIN * best else without_gain + 1
        best = max(best, work / fastest)
        if without_gain == _PATIENCE:
            break
    return best


def _fastest(product: Callable[[], Tensor], device: torch.device) -> tuple[float, int]:
    _seconds(product, device)  # The first call loads libraries and wakes threads.
    fastest, repeats = _seconds(product, device), 1
    while repeats < _REPEATS or repeats * fastest < _SECONDS_A_SIZE:
        fastest = min(fastest, _seconds(product, device))
        repeats += 1
    return fastest, repeats


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    # Small numbers of both signs, none of them denormal, and not random: the user's generators
    # must stay where they are.
    values = torch.arange(size * size, device=device) % 13 - 6
    a = values.to(torch.float32).reshape(size, size).to(dtype)
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return multiply(a, a)

    return run


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        return _seconds_on_cuda(run, device)
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def _seconds_on_cuda(run: Callable[[], Tensor], device: torch.device) -> float:
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
