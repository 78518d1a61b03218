"""The summary's comparison of counted FLOPs with the activity of tensor cores."""

from __future__ import annotations

import pytest

from lightning_perf.tracking.summary import rows


@pytest.mark.parametrize(
    ("mfu", "hfu", "ofu", "says"),
    [
        (0.40, 0.40, 45.0, "45% of their peak by NVML (OFU), which agrees"),
        (0.30, 0.40, 45.0, "which agrees"),  # recomputation runs, and is not the model's
        (0.20, 0.20, 45.0, "kernels run that are not counted"),
        (0.80, 0.80, 45.0, "more is counted than runs, or the peak is too low"),
        (0.60, 0.60, 0.5, None),  # float32 without tensor cores
        (0.60, 0.60, None, None),
    ],
)
def test_flops_are_checked_against_the_tensor_cores(
    mfu: float, hfu: float, ofu: float | None, says: str | None
) -> None:
    """Kernels that are not counted, and FLOPs that do not run, are told apart."""
    window = {"first": 0, "last": 9, "batches": 10, "throughput": {"mfu": mfu, "hfu": hfu}}
    summary = {
        "run": "a", "status": "finished", "stages": {"train": {"whole_run": window}},
        "system": {} if ofu is None else {"ofu": ofu},
    }  # fmt: skip
    facts, _ = rows(summary)
    shown = dict(facts).get("tensor cores")
    assert (shown is None) if says is None else says in str(shown)
