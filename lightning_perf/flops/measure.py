"""What a device does in fact: the best rate of a square matrix product."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_SMALLEST, _LARGEST = 256, 8192
# Long enough that a launch and a clock's resolution do not matter.
_ENOUGH_SECONDS = 2e-3

_measured: dict[tuple[torch.dtype, torch.device], float | None] = {}


def measure_peak(
    dtype: torch.dtype, device: torch.device, budget_seconds: float = 0.3
) -> float | None:
    """The best rate of a square matrix product, measured once a process.

    Draws no random number, and leaves autocast, gradients and settings as they are.

    Args:
        dtype: The operands'.
        device: Where the product runs, as fast as its current settings (threads, TF32) let it.
        budget_seconds: About how long to measure.

    Returns:
        FLOP/s, or None if the device has no product of this dtype.
    """
    key = dtype, torch.device(device)
    if key not in _measured:
        try:
            _measured[key] = _best_rate(dtype, key[1], budget_seconds)
        except (RuntimeError, TypeError, AssertionError):
            _measured[key] = None
    return _measured[key]


def _best_rate(dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float:
    deadline = time.perf_counter() + budget_seconds
    size, best = _SMALLEST, 0.0
    product = _product(size, dtype, device)
    _seconds(product, device)  # The first call loads libraries and wakes threads.
    while True:
        seconds = _seconds(product, device)
        best = max(best, 2 * size**3 / seconds)
        if time.perf_counter() > deadline:
            return best
        if seconds < _ENOUGH_SECONDS and size < _LARGEST:
            size *= 2
            product = _product(size, dtype, device)


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
