"""The commands about peaks: of the devices in the table, and of this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_perf.cli import Failure, argument, command, flag, new_console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from lightning_perf.flops import DevicePeaks


_COLUMNS = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "int8", "fp4")
# Longer than in training, for a better estimate.
_BUDGET_SECONDS = 1.0


@command(
    argument(
        "name", "A device name as in torch, or a part of it; also shows the sources.", nargs="?"
    ),
    flag("--json", "Print JSON, in FLOP/s."),
)
def devices(name: str | None, json: bool) -> int:
    """Show the dense peaks of devices, by dtype."""
    from lightning_perf.flops import table

    rows = table() if name is None else _named(name)
    if not rows:
        raise Failure(
            f"no device matches {name}. Try lightning-perf devices, or Flops(peak_flops=...) with "
            "its peak in FLOP/s", 1,
        )  # fmt: skip
    if json:
        print_json([asdict(row) for row in rows])
        return 0
    console = new_console()
    console.print(_table(rows))
    if any(row.confidence != "datasheet" for row in rows):
        console.print("* derived, or from third-party sources instead of the vendor's data sheet.")
    for row in rows if name is not None else ():
        note = f"\n  note: {row.note}" if row.note else ""
        console.print(f"{row.name}: {row.confidence}\n  source: {row.source}{note}")
    return 0


def _named(name: str) -> list[DevicePeaks]:
    """The entries of this name, else those that contain it, else the one that MFU would use."""
    from lightning_perf.flops import lookup, table

    exact = [row for row in table() if row.name.casefold() == name.casefold()]
    found = lookup(name)
    part = [row for row in table() if name.casefold() in row.name.casefold()]
    return exact or part or ([found] if found else [])


def _table(rows: Sequence[DevicePeaks]) -> Table:
    from rich.table import Table

    title = "dense peaks in TFLOP/s (int8: TOP/s)"
    # No lines, to fit into 80 columns.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        name = row.name if row.confidence == "datasheet" else f"{row.name} *"
        table.add_row(name, *(_teraflops(getattr(row, column)) for column in _COLUMNS))
    return table


def _teraflops(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e12:.0f}" if value >= 1e14 else f"{value / 1e12:.3g}"


@command(
    argument("--dtype", "Operand dtype, as a torch name (e.g. bfloat16).", default="float32"),
    argument("--device", "The device, as a torch name (e.g. cpu, cuda, cuda:1).", default="cpu"),
    flag("--json", "Print JSON, in FLOP/s."),
)
def measure(dtype: str, device: str, json: bool) -> int:
    """Measure the peak of a device of this machine with a matrix product."""
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
    text = "The table has no peak for this device and dtype."
    if listed is not None and entry is not None:
        text = (
            f"{listed / 1e12:.4g} TFLOP/s (table: {entry.name}, {entry.confidence}); "
            f"measured is {peak / listed:.1%} of it."
        )
    console = new_console(soft_wrap=True)
    console.print(f"{name}, {dtype}: {peak / 1e12:.4g} TFLOP/s (measured)\n{text}")
    return 0
