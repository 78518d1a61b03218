"""The commands that show peaks: of the table, with their confidence, and of this machine."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.command import call

from lightning_perf import flops
from lightning_perf.flops import lookup, peak_flops, table


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command on a wide terminal; return the exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    return partial(call, capsys)


def rows(out: str) -> list[str]:
    """The rows between the table's head and the remark below it."""
    lines = [line.rstrip() for line in out.splitlines()]
    return [line for line in lines[2:] if line and not line.startswith(("*", "?"))]


def test_all_devices_are_shown_with_their_peaks(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry has a row, nothing is truncated at 80 columns, and the A100's peaks are right."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("devices")
    assert code == 0
    assert len(rows(out)) == len(table())
    assert all(row.startswith(entry.name) for row, entry in zip(rows(out), table(), strict=True))
    assert "…" not in out
    row = next(row for row in rows(out) if row.startswith("A100 "))
    assert row.split() == ["A100", "312", "312", "156", "19.5", "19.5", "624"]


def test_weak_entries_are_marked(command) -> None:
    """Entries that are not entirely from a data sheet, or unverified, have explained marks."""
    _, out, _ = command("devices")
    marked = [("*" in row, "?" in row) for row in rows(out)]
    assert marked == [(row.confidence != "datasheet", not row.url) for row in table()]
    assert "derived, or from third-party sources" in out
    assert "unverified" in out
    a100 = command("devices", "A100")[1]
    assert "derived, or" not in a100
    assert "unverified" not in a100
    assert "derived, unverified" in command("devices", "Apple M2 Max")[1]


@pytest.mark.parametrize("name", ["B300", "NVIDIA H200", "MI300"])
def test_a_device_is_shown_with_its_sources(command, name: str) -> None:
    """For torch's name, ours or a part of it: source, confidence and note."""
    code, out, _ = command("devices", name)
    expected = lookup(name) or next(row for row in table() if name in row.name)
    flat = "".join(out.split())
    assert code == 0
    for part in (expected.source, expected.quality, expected.note, expected.url, expected.quote):
        assert "".join(part.split()) in flat


def test_an_unknown_device_is_an_error(command) -> None:
    """The message says what to do."""
    code, _, err = command("devices", "TARDIS")
    assert code == 2
    assert "peak_flops=" in err


def test_this_machine_is_measured(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured peak is shown, and the table's if the device is in it."""
    monkeypatch.setattr(flops, "measure_peak", lambda *_, **__: 156e12)
    code, out, _ = command("measure", "--dtype", "bfloat16")
    assert code == 0
    assert "bfloat16: 156 TFLOP/s (measured)" in out
    assert "no peak for this device" in out
    monkeypatch.setattr(flops, "device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16") == 312e12
    _, out, _ = command("measure", "--dtype", "bfloat16")
    assert "312 TFLOP/s (table: A100, datasheet); measured is 50.0% of it." in out


@pytest.mark.parametrize(
    "args",
    [("--device", "tardis"), ("--device", "cuda:77"), ("--dtype", "float12"), ("--dtype", "bool")],
)
def test_an_invalid_device_or_dtype(command, args: tuple[str, ...]) -> None:
    """An invalid device or dtype is an error that says what to try."""
    code, _, err = command("measure", *args)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{args[1]}" in err
    assert "Try --device cpu --dtype float32." in err
