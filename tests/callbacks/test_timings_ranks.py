"""Timings of two real processes: the sums of each, the mean of both, and the slowest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.clocks import JumpingClock
from helpers.small import RANKS, Records, Small, trainer
from helpers.timings import Stopped
from helpers.windows import rows_of, window_of

from lightning_perf import Timings
from lightning_perf.callbacks.timings import seconds_per_batch
from lightning_perf.timing.totals import CATEGORIES

pytestmark = pytest.mark.slow
CLOCK = JumpingClock()


@pytest.fixture(autouse=True)
def _jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a copy of the clock, advanced by its own sleeps."""
    CLOCK.replace_clocks(monkeypatch)


class Unequal(Small):
    """Rank 1 takes longer in forward; rank 0 in the transfer, in a metric, and once per batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        CLOCK.sleep(100.0 * self.global_rank)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        CLOCK.sleep(40.0 * (1 - self.global_rank))
        return batch


class WritesTimings(Stopped):
    """Writes its results at the end to one file per rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.names: list[str] = []

    def window_due(self, context: Any, at_end: bool) -> bool:
        self.names = [action.name for action in context.spans.totals().costs]
        return super().window_due(context, at_end)

    def receive(self, window: Any) -> Any:
        reported = super().receive(window)
        found = {
            "metrics": self.metrics,
            "own": [window.own(f"timings/{name}") / window.batches for name in CATEGORIES],
            "batches": window.batches,
            "wall": self.wall,
            "rows": rows_of(self),
            "names": self.names,
        }
        (self.folder / f"rank{window.rank}.json").write_text(json.dumps(found))
        return reported


def test_two_ranks_report_the_slowest_one_by_category(tmp_path: Path) -> None:
    """The categories of each rank add up; the plain key is the mean, beside its spread and rank."""
    torch.set_num_threads(1)
    # One report, at the end, covers the whole run.
    options: dict[str, Any] = {"log_every_n_steps": 1000, "logger": Records(), **RANKS}
    trainer(tmp_path, WritesTimings(tmp_path), **options).fit(Unequal())
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)]
    for rank in ranks:
        assert rank["batches"] == 8
        least, most = rank["wall"]
        assert least <= 8 * sum(rank["own"]) <= most
        assert "Trainer.broadcast_sigterm" in rank["names"]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    found = ranks[0]["metrics"]
    for index, name in enumerate(CATEGORIES):
        own = sorted(rank["own"][index] for rank in ranks)
        key = f"timings/{name}"
        if key not in found:
            assert not any(own)
            continue
        assert [found[f"{key}/min"], found[f"{key}/max"]] == own
        assert found[key] == pytest.approx(sum(own) / 2)
        assert found[f"{key}/median"] == pytest.approx(sum(own) / 2)
    assert found["timings/forward/slowest_rank"] == 1
    assert found["timings/to_device/slowest_rank"] == 0
    assert found["timings/forward/max"] > 100.0
    assert found["timings/reduce_metrics"] > 0
    assert not [key for key in found if "/device/" in key]
    steps = [step for step, _ in ranks[0]["rows"]]
    assert steps == [7]


def test_the_last_report_of_two_ranks_is_in_the_files(tmp_path: Path) -> None:
    """Files are written after the other rank's values arrive, so they cover the whole run."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"log_every_n_steps": 1000, "logger": Records(), **RANKS}
    trainer(tmp_path, Timings(), **options).fit(Unequal())
    (path,) = tmp_path.glob("*/summary.json")
    whole = json.loads(path.read_text())["stages"]["train"]["whole_run"]
    assert (whole["first"], whole["last"], whole["batches"]) == (0, 7, 8)


def test_a_thousand_ranks_have_the_same_keys_as_two() -> None:
    """The values of a thousand ranks give the same keys, and the slowest rank is found."""
    ranks = [float(rank) for rank in range(1000)]
    columns = {f"timings/{name}": list(ranks) for name in CATEGORIES}
    columns["timings/backward"][137] = 5000.0
    found = seconds_per_batch(window_of(columns | {"progress/batches": [1.0] * 1000}))
    assert found["timings/dataloader_next"] == found["timings/dataloader_next/median"] == 499.5
    assert found["timings/backward/slowest_rank"] == 137
    assert found["timings/forward/slowest_rank"] == 999
    assert (found["timings/forward/min"], found["timings/forward/max"]) == (0.0, 999.0)


def test_a_rank_without_batches_is_excluded_from_means() -> None:
    """Such a rank has ended before the others."""
    columns = {"timings/forward": [2.0, 0.5, 8.0], "progress/batches": [1.0, 0.0, 2.0]}
    assert seconds_per_batch(window_of(columns)) == {
        "timings/forward": 3.0,
        "timings/forward/min": 2.0,
        "timings/forward/median": 3.0,
        "timings/forward/max": 4.0,
        "timings/forward/slowest_rank": 2.0,
    }
