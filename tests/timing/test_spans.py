"""Spans: exclusive times, and the user's profiler stays unchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.clocks import FakeClock
from helpers.lifecycle_log import LifecycleLog
from helpers.small import Records, Small, TwoOptimizers, trainer
from helpers.windows import rows_of
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from lightning.pytorch.profilers import (
    Profiler as LightningProfiler,
)
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_perf import SpeedMonitor, Timings
from lightning_perf.patches import ContextPatch, PatchSet
from lightning_perf.run import compat, context, spans
from lightning_perf.run.context import RunContext
from lightning_perf.timing import clock
from lightning_perf.timing.totals import CATEGORIES, Action, Floor, Totals


class Profiler(LifecycleLog):
    """Records the trainer's profiler."""

    def on_start(self, context: RunContext) -> None:
        super().on_start(context)
        self.seen = context.trainer.profiler


def test_the_default_profiler_is_restored(tmp_path: Path) -> None:
    """The default profiler is replaced during a run and restored afterwards."""
    watching = Profiler()
    run = trainer(tmp_path, watching)
    own = run.profiler
    run.fit(Small())
    assert run.profiler is own
    assert watching.seen is not own
    assert isinstance(watching.seen, PassThroughProfiler)


def test_the_profiler_is_restored_after_an_exception(tmp_path: Path) -> None:
    """The profiler is restored however a run ends, also with several callbacks."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("planted")

    run = trainer(tmp_path, LifecycleLog("a"), LifecycleLog("b"))
    own = run.profiler
    with pytest.raises(KeyError):
        run.fit(Failing())
    assert run.profiler is own


def test_the_user_s_profiler_receives_all_spans(tmp_path: Path) -> None:
    """The spans and their number are the same with and without us."""

    def spans(*callbacks: Any) -> dict[str, int]:
        profiler = SimpleProfiler()
        options: dict[str, Any] = {"limit_val_batches": 2, "enable_checkpointing": True}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        trainer(folder, *callbacks, profiler=profiler, **options).fit(Small())
        durations = profiler.recorded_durations.items()
        ours = ("LifecycleLog", "lightning_perf")
        return {name: len(times) for name, times in durations if not any(o in name for o in ours)}

    watching, timings = LifecycleLog("LifecycleLog"), Timings()
    assert spans(watching) == spans(timings) == spans()
    assert watching.entries
    assert timings.metrics["timings/forward"] > 0


class Notes(LightningProfiler):
    """A profiler of a user's own class with its own span type."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.note = ""

    def start(self, action_name: str) -> None:
        self.calls.append(("start", action_name))

    def stop(self, action_name: str) -> None:
        self.calls.append(("stop", action_name))

    def setup(self, **kwargs: Any) -> None:
        super().setup(**kwargs)
        self.calls.append(("setup", kwargs["stage"]))

    def describe(self) -> None:
        self.calls.append(("describe", self.note))

    def teardown(self, stage: str | None) -> None:
        self.calls.append(("teardown", str(stage)))


class UsesProfiler(L.Callback):
    """Uses the trainer's profiler like user code."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert isinstance(trainer.profiler, Notes)
        assert type(trainer.profiler) is Notes
        trainer.profiler.note = "seen"
        with trainer.profiler.profile("mine") as name:
            assert name == "mine"


def test_a_profiler_of_any_class_is_called_unchanged(tmp_path: Path) -> None:
    """Calls, attributes and isinstance are the same with and without us."""

    def calls(*callbacks: Any) -> list[tuple[str, str]]:
        profiler = Notes()
        trainer(tmp_path, *callbacks, profiler=profiler, limit_val_batches=1).fit(Small())
        return [call for call in profiler.calls if "lightning_perf" not in call[1]]

    assert calls(Timings(), UsesProfiler()) == calls(UsesProfiler())


@pytest.mark.parametrize("kind", [AdvancedProfiler, PyTorchProfiler])
def test_lightning_s_profilers_write_their_reports(kind: Any, tmp_path: Path) -> None:
    """Their report has the usual spans, and ours has its values."""

    def report(folder: Path, *callbacks: Any) -> str:
        folder.mkdir()
        profiler = kind(dirpath=folder, filename="report")
        trainer(tmp_path, *callbacks, profiler=profiler, limit_train_batches=6).fit(Small())
        return "".join(path.read_text() for path in folder.glob("*.txt"))

    timings = Timings()
    plain, ours = report(tmp_path / "plain"), report(tmp_path / "ours", timings)
    for action in ("run_training_batch", "[Strategy]", "[LightningModule]"):  # longer names are cut
        assert action in plain
        assert action in ours
    assert timings.metrics["timings/backward"] > 0


@pytest.mark.parametrize("moment", ["start", "stop"])
def test_an_error_of_the_profiler_is_raised(moment: str, tmp_path: Path) -> None:
    """The error reaches the user, and the trainer's profiler is restored."""

    class Broken(SimpleProfiler):
        def start(self, action_name: str) -> None:
            super().start(action_name)
            if moment == "start" and action_name.endswith("training_step"):
                raise KeyError("planted")

        def stop(self, action_name: str) -> None:
            super().stop(action_name)
            if moment == "stop" and action_name.endswith("backward"):
                raise KeyError("planted")

    profiler = Broken()
    run = trainer(tmp_path, Timings(), profiler=profiler)
    with pytest.raises(KeyError, match="planted"):
        run.fit(Small())
    assert run.profiler is profiler


def test_everything_is_restored(tmp_path: Path) -> None:
    """After a run or a failure, no object references ours."""

    class Failing(Small):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.fails, self.mean = fails, MeanMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert isinstance(vars(self.mean)["compute"], ContextPatch)
            assert isinstance(vars(self.trainer.fit_loop)["setup_data"], ContextPatch)
            if self.fails:
                raise KeyError("planted")
            return super().training_step(batch, batch_idx)

    for fails in (False, True):
        records, model = Records(), Failing(fails)
        run = trainer(tmp_path, Timings(), SpeedMonitor(2), logger=records)
        try:
            run.fit(model)
        except KeyError:
            assert fails
        fit = run.fit_loop
        owners = (run.strategy, fit, fit.epoch_loop, fit.epoch_loop.val_loop, model.mean, records)
        left = [
            key for owner in owners for key, v in vars(owner).items() if isinstance(v, ContextPatch)
        ]
        assert left == []
        assert type(run.profiler) is PassThroughProfiler


def test_compiled_code_has_no_graph_breaks(tmp_path: Path) -> None:
    """A metric inside a compiled module is not timed, because that would break the graph."""

    class Compiled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend="eager", fullgraph=True)
            self.mean = MeanMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert not isinstance(vars(self.mean)["compute"], ContextPatch)
            return super().training_step(batch, batch_idx)

    timings = Timings()
    trainer(tmp_path, timings, limit_train_batches=3).fit(Compiled())
    assert timings.metrics["timings/forward"] > 0


def test_a_profiler_set_during_training_is_kept(tmp_path: Path) -> None:
    """It is not replaced at the end, and later stages are measured."""
    mine = SimpleProfiler()

    class ExchangesProfiler(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer.profiler = mine

    timings = Timings()
    run = trainer(
        tmp_path, timings, ExchangesProfiler(), limit_train_batches=4, limit_val_batches=1
    )
    run.fit(Small())
    assert run.profiler is mine
    assert "run_training_batch" in mine.recorded_durations
    # The next stage, validation, finds the new profiler.
    assert rows_of(timings)


def test_metrics_are_reduced_in_a_second_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning compares the reduction functions of two fits: our patches are equal to them."""

    def reducing(trainer: Any) -> Any:  # as with several ranks
        return [(trainer.strategy, "reduce", "reduce_metrics", "Strategy.reduce")]

    monkeypatch.setattr(compat, "unspanned", reducing)

    class Syncing(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

    model, timings = Syncing(), Timings()
    run = trainer(tmp_path, timings, max_epochs=1)
    run.fit(model)
    run.fit_loop.max_epochs = 2
    run.fit(model)
    assert run.current_epoch == 2


def test_spans_of_other_threads_are_not_counted(tmp_path: Path) -> None:
    """Spans on a user's thread do not affect the times of the loop."""

    class Threaded(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            profiler = self.trainer.profiler

            def work() -> None:
                with profiler.profile("save_checkpoint"):
                    pass

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return super().training_step(batch, batch_idx)

    timings = Timings()
    trainer(tmp_path, timings).fit(Threaded())
    assert "timings/checkpoint" not in timings.metrics


def test_the_number_of_cached_spans_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User spans may have a new name each time: only a limited number is cached."""
    monkeypatch.setattr(spans, "MOST_SPANS", 50)

    class Naming(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            for number in range(20):
                with self.trainer.profiler.profile(f"step {batch_idx} {number}"):
                    pass
            return super().training_step(batch, batch_idx)

    class Looking(LifecycleLog):
        known = 0

        def on_end(self, context: RunContext) -> None:
            found = context.spans.recorder
            assert found is not None
            self.known = len(found.cache)

    looking = Looking()
    trainer(tmp_path, Timings(), looking).fit(Naming())
    assert 0 < looking.known <= 50


def test_missing_methods_of_lightning_count_as_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without private methods of Lightning, times still add up."""
    monkeypatch.setattr(compat, "unspanned", lambda trainer: iter(()))
    monkeypatch.setattr(compat, "validation_loop", lambda trainer: None)
    timings, records = Timings(), Records()
    run = trainer(tmp_path, timings, logger=records, val_check_interval=4, limit_val_batches=2)
    run.fit(Small())
    assert timings.metrics["timings/validation"] > 0
    assert "validate/timings/forward" in records.keys


def test_snapshots_are_subtracted(tmp_path: Path) -> None:
    """The difference of two snapshots is the time between them."""
    found: list[Totals] = []

    class UsesSnapshots(LifecycleLog):
        def prepare(self, context: RunContext) -> None:
            context.spans.require()

        def after_batch(self, context: RunContext, batch: Any) -> None:
            found.append(context.spans.totals())

    trainer(tmp_path, UsesSnapshots(), limit_train_batches=4, logger=Records()).fit(TwoOptimizers())
    between = found[3] - found[1]
    step = Action("train", "optimizer_step", "optimizer_step")
    backward = Action("train", "backward", "backward")
    assert between.costs[step].calls == between.costs[backward].calls == 4
    assert found[3].seconds - found[1].seconds == pytest.approx(between.seconds)
    assert between.train_batch > between.costs[step].seconds > 0
    names = {action.name for action in found[0].costs}
    assert {"iter", "first fetch", "UsesSnapshots.on_train_batch_end"} <= names


def test_memory_of_spans_does_not_grow_between_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of kept spans does not depend on the number of batches in a window."""
    monkeypatch.setattr(context, "MOST_SPAN_ITEMS", 200)
    kept: list[int] = []

    class Looking(LifecycleLog):
        def after_batch(self, context: RunContext, batch: Any) -> None:
            assert context.spans.recorder is not None
            kept.append(len(context.spans.recorder.clock.log))

    trainer(tmp_path, Timings("every 1000000ba"), Looking()).fit(Small())
    assert len(kept) == 16
    assert max(kept[8:]) <= max(kept[:8])


def test_unbalanced_spans_are_unwound() -> None:
    """A span left open by an exception ends with its enclosing span; unknown exits are ignored."""
    watch = clock.Clock()
    names = ("outer", "inner", "stray")
    outer, inner, stray = (clock.Span(watch, ("other", name), name) for name in names)
    with outer:
        inner.__enter__()
    stray.__exit__()
    assert watch.running == Action("", "other", "loop") == watch.innermost.action


def test_the_minimum_time_of_an_action_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time counts once, also if the log is read while the action runs."""
    fake = FakeClock()
    monkeypatch.setattr(clock, "perf_counter", fake)
    watch = clock.Clock()
    exchange = clock.Span(watch, ("other", "exchange"), "exchange")
    floor = watch.floors[exchange.timer.action] = Floor()
    for seconds in (1.0, 9.0) * 8:
        fake.sleep(5.0)
        with exchange:
            fake.sleep(seconds)
            watch.add_up()
    watch.add_up()
    assert floor.total() == 16.0


def seconds_of(watch: clock.Clock) -> float:
    return sum(cost.seconds for cost in watch.costs.values())


def collected(watch: clock.Clock) -> dict[tuple[str, str], int]:
    return {(each.category, each.name): calls for each, (_, calls) in watch.collections.items()}


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """Only those that a test asks for."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
def test_a_collection_belongs_to_the_action_in_which_it_began() -> None:
    """Also if the log is read much later, in another stage."""
    watch = clock.Clock()
    outer = clock.Span(watch, ("forward", "out"), "")
    inner = clock.Span(watch, ("to_device", "in"), "")
    watch.begin("train")
    gc.collect()
    with outer:
        gc.collect()
        with inner:
            gc.collect()
            gc.collect()
        gc.collect()
        watch.run("backward", "wait")
        gc.collect()
    watch.begin("validate")
    with inner:
        gc.collect()
    assert collected(watch) == {
        ("other", "loop"): 1, ("forward", "out"): 2, ("to_device", "in"): 2,
        ("backward", "wait"): 1, ("validation", "in"): 1,
    }  # fmt: skip
    watch.stop()
    gc.collect()
    assert sum(collected(watch).values()) == 7
    assert 0 < sum(cost.seconds for cost in watch.collections.values()) < seconds_of(watch)


@pytest.mark.usefixtures("_no_collections")
def test_collections_are_bounded_and_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest are kept while nobody reads them; `gc` has no callback of a dropped clock."""
    monkeypatch.setattr(clock, "_MOST_EVENTS", 4 * 3)
    before = list(gc.callbacks)
    watch = clock.Clock()
    for _ in range(5):
        gc.collect(0)
    assert collected(watch) == {("other", "loop"): 3}
    with clock.Span(watch, ("forward", "step"), ""):  # the log refers to the clock
        held = weakref.ref(watch)
    del watch
    gc.collect()
    assert held() is None
    assert gc.callbacks == before


@pytest.mark.usefixtures("_no_collections")
def test_half_a_collection_is_not_counted() -> None:
    """A clock that starts or stops within a collection has its end or its start alone."""
    watch = clock.Clock()
    phase, time = gc.callbacks[-2:]
    for call in (phase, time):
        call("stop", {})
    gc.collect(0)
    for call in (phase, time):
        call("start", {})
    assert collected(watch) == {("other", "loop"): 1}
    assert watch.collections[Action("gc", "other", "loop")].seconds < seconds_of(watch)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="no signals on Windows")
def test_the_handler_of_a_signal_may_read_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while they are added up, as SIGTERM does, which ends the run, and saving checkpoints."""
    watch, began = clock.Clock(), perf_counter()
    save = clock.SaveSpan(watch, ("checkpoint", "save_checkpoint"), "")
    process, read = watch._process, []

    def interrupted(*events: list[Any]) -> list[clock.Timer]:
        signal.raise_signal(signal.SIGUSR1)
        return process(*events)

    def handle(_number: int, _frame: Any) -> None:
        time.sleep(0.05)
        read.append(seconds_of(watch))
        with save:
            read.append(watch.batches)

    def fail(_number: int, _frame: Any) -> None:
        raise TimeoutError("it waits for itself")

    before = [(each, signal.getsignal(each)) for each in (signal.SIGUSR1, signal.SIGALRM)]
    signal.signal(signal.SIGUSR1, handle)
    signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    monkeypatch.setattr(watch, "_process", interrupted)
    try:
        with clock.Span(watch, ("forward", "step"), ""):
            time.sleep(0.05)
        assert seconds_of(watch) <= perf_counter() - began
    finally:
        signal.alarm(0)
        monkeypatch.undo()
        for number, handler in before:
            signal.signal(number, handler)
    assert 0.1 <= seconds_of(watch) <= perf_counter() - began
    assert [cost.calls for a, cost in watch.costs.items() if a.category == "checkpoint"] == [1]
    assert len(read) == 2


def test_the_numbers_of_timers_do_not_grow_with_calls() -> None:
    """Sums of an hour's events are in arrays that are as long as the largest number."""
    watch = clock.Clock()
    for _ in range(1000):
        watch.run("backward", "gradients")
    assert watch.timer("checkpoint", "late").number < 4 * len(CATEGORIES)
    watch.stop()


def test_a_batch_has_the_seconds_of_its_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per batch, up to its end, however often times are read meanwhile."""
    now = FakeClock()
    monkeypatch.setattr(clock, "perf_counter", now)
    watch = clock.Clock()
    watch.begin("train")
    watch.by_batch = deque()
    for length in (1.0, 2.0, 3.0):
        with clock.Span(watch, ("forward", "step"), ""):
            now.sleep(length)
            watch.add_up()
        now.sleep(0.25)
        assert watch.costs
        with clock.Span(watch, ("callbacks", "A.on_train_batch_end"), ""):
            now.sleep(0.5)
            watch.log.extend((now(), None, None))
            now.sleep(0.125)
    watch.stop()
    rows = np.concatenate([*watch.by_batch])
    found = {name: rows[:, at].tolist() for at, name in enumerate(CATEGORIES) if rows[:, at].any()}
    assert found == {
        "forward": [1.0, 2.0, 3.0], "callbacks": [0.5, 0.625, 0.625], "other": [0.25] * 3,
    }  # fmt: skip


class Owner:
    def work(self) -> str:
        return "done"


def test_a_patched_method_equals_its_original() -> None:
    """Equality, hash and attributes are those of the original; copies are not patched."""
    owner, patches = Owner(), PatchSet()
    original = owner.work
    patches.wrap_in_context(owner, "work", nullcontext)
    patches.wrap_in_context(owner, "work", nullcontext)  # one patch is enough
    patches.wrap_in_context(owner, "gone", nullcontext)
    assert owner.work == original == owner.work
    assert hash(owner.work) == hash(original)
    assert owner.work.__name__ == "work"
    for other in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert other.work.__self__ is other
        assert other.work() == "done"
    patches.restore()
    assert vars(owner) == {}


def test_a_foreign_patch_is_kept() -> None:
    """A user's patch around ours is kept, and the original is restored below it."""
    owner, patches = Owner(), PatchSet()
    owner.work = lambda: "patched"  # type: ignore[method-assign]
    before = owner.work
    patches.wrap_in_context(owner, "work", nullcontext)
    patches.restore()
    assert owner.work is before
    patches.wrap_in_context(owner, "work", nullcontext)
    on_top = owner.work = lambda: "on top"  # type: ignore[method-assign]
    patches.restore()
    assert owner.work is on_top
