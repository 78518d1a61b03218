"""Lightning's spans cost less with us, and a profiler of the user's sees all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from small import Small, trainer
from test_hooks import Diary

from lightning_perf.trainer.driver import Driver


class Profiler(Diary):
    """Notes the trainer's profiler."""

    def on_start(self, driver: Driver) -> None:
        super().on_start(driver)
        self.seen = driver.trainer.profiler


def test_a_trainer_without_a_profiler_gets_its_own_back(tmp_path: Path) -> None:
    """Another one stands in while we watch, and none of it is left afterwards."""
    watching = Profiler()
    run = trainer(tmp_path, watching)
    own = run.profiler
    run.fit(Small())
    assert run.profiler is own
    assert watching.seen is not own
    assert isinstance(watching.seen, PassThroughProfiler)


def test_it_comes_back_after_an_exception(tmp_path: Path) -> None:
    """However a run ends, and with several callbacks."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("planted")

    run = trainer(tmp_path, Diary("a"), Diary("b"))
    own = run.profiler
    with pytest.raises(KeyError):
        run.fit(Failing())
    assert run.profiler is own


def test_a_profiler_of_the_user_s_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    """The same spans, as often, with and without us."""

    def spans(*callbacks: Any) -> dict[str, int]:
        profiler = SimpleProfiler()
        trainer(tmp_path, *callbacks, profiler=profiler).fit(Small())
        durations = profiler.recorded_durations.items()
        return {name: len(times) for name, times in durations if "Diary" not in name}

    watching = Diary("Diary")
    assert spans(watching) == spans()
    assert watching.entries
