"""The windows in a summary: differences of totals, in bounded memory."""

from __future__ import annotations

from lightning_perf.run.summary import StageHistory
from lightning_perf.timing.totals import Action, Cost, Totals

PLOTS = Action("train", "callbacks", "Plots.on_train_batch_end")
COLUMNS = ("timings/forward", "batch/samples", "batch/seconds", "batch/count", "memory/rss")


def history(reports: int, every: int = 1, ranks: int = 1) -> StageHistory:
    """One second, four samples and half a second of a callback per batch and rank."""
    found = StageHistory()
    for batch in range(every, reports * every + 1, every):
        if found.due(batch, at_end=False):
            row = [batch * each for each in (1.0, 4.0, 1.0, 1.0, 7.0)]
            found.add(batch - 1, batch, COLUMNS, [row] * ranks, costs(batch))
    return found


def costs(batch: int) -> Totals:
    return Totals({PLOTS: Cost(batch / 2, batch)})


def test_windows_are_differences_without_the_warm_up() -> None:
    """Seconds are means over ranks, samples are sums; other columns are left out."""
    found = history(reports=3, every=10, ranks=2).table()
    assert found == {
        "last": [19, 29],
        "batches": [10, 10],
        "timed_batches": [10.0, 10.0],
        "timed_seconds": [10.0, 10.0],
        "samples": [80.0, 80.0],
        "timings": {"forward": [10.0, 10.0]},
        "culprits": {"Plots.on_train_batch_end": [5.0, 5.0]},
    }


def test_memory_is_bounded_and_nothing_is_lost() -> None:
    """100,000 reports become some dozens of windows of equal length that add up."""
    found = history(reports=100_000).table()
    batches = found["batches"]
    assert 40 <= len(batches) <= 100
    assert max(batches) <= 4 * min(batches[:-1])
    assert sum(batches) == found["last"][-1]  # without the first batch
    assert sum(found["timings"]["forward"]) == sum(batches)


def test_the_end_of_a_stage_is_kept_if_it_has_new_batches() -> None:
    """A short last window counts; a report right after another one has no batches."""
    found = history(reports=100_000)
    last = found.table()["last"][-1] + 1
    assert not found.due(last, at_end=True)
    assert not found.due(last + 1, at_end=False)
    assert found.due(last + 1, at_end=True)


def test_reports_with_other_columns_are_left_out() -> None:
    """A callback that subscribes later does not break the table."""
    found = StageHistory()
    found.add(4, 5, COLUMNS[1:], [[1.0, 1.0, 1.0, 1.0]], costs(5))
    for batch in (10, 20):
        found.add(batch - 1, batch, COLUMNS, [[float(batch)] * 5], costs(batch))
    assert found.table()["batches"] == [10]
    assert StageHistory().table() == {}
