"""Measure the peak of a device of this machine with a matrix product."""

from __future__ import annotations

from lightning_perf.cli import Failure, argument, flag, print_json

# Longer than in training, for a better estimate.
_BUDGET_SECONDS = 1.0

ARGUMENTS = {
    "--dtype": argument("Operand dtype, as a torch name (e.g. bfloat16).", default="float32"),
    "--device": argument("The device, as a torch name (e.g. cpu, cuda, cuda:1).", default="cpu"),
    "--json": flag("Print JSON, in FLOP/s."),
}


def run(dtype: str, device: str, json: bool) -> int:
    """Print the measured peak and the one in the table; code 1 if it could not be measured."""
    from rich.console import Console

    from lightning_perf.flops import device_name, lookup, measure_peak, peak_flops, tf32_is_on

    peak = measure_peak(device, dtype, _BUDGET_SECONDS)
    if peak is None:
        why = f"{device} cannot multiply {dtype} matrices, or this machine is too busy"
        raise Failure(f"{why}. Try --device cpu --dtype float32", 1)
    name = device_name(device)
    listed, entry = peak_flops(name, dtype, tf32=tf32_is_on()), lookup(name)
    if json:
        print_json({"device": name, "dtype": dtype, "measured": peak, "table": listed})
        return 0
    console = Console(highlight=False)
    console.print(f"{name}, {dtype}: {peak / 1e12:.4g} TFLOP/s (measured)", soft_wrap=True)
    if listed is None or entry is None:
        console.print("The table has no peak for this device and dtype.")
    else:
        console.print(
            f"{listed / 1e12:.4g} TFLOP/s (table: {entry.name}, {entry.confidence}); "
            f"measured is {peak / listed:.1%} of it.",
            soft_wrap=True,
        )
    return 0
