"""Flops: the counted FLOPs of real batches, and the resulting utilization."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from math import inf, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_nvml import FakeGpu, FakeNvml, install
from helpers.small import FLOPS_PER_SAMPLE, WIDTH, Records, Small, ours, trainer
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_perf import (
    ConfigError,
    Every,
    Flops,
    Never,
    PerfWarning,
    SpeedMonitor,
    SystemMetrics,
    Timings,
    Window,
    WindowCallback,
)  # fmt: skip
from lightning_perf.background import wait_until
from lightning_perf.flops import measure
from lightning_perf.flops.peaks import BatchCost, Peak, PeakResolver, resolve_peak
from lightning_perf.run import flop_meter
from lightning_perf.run.batches import BatchRecord, BatchTotals
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.context import RunContext
from lightning_perf.run.signals import FormulaSignal
from lightning_perf.tracking.summary import headline, read_summary, rows

KEYS = {
    "mfu", "hfu", "batch_flops", "actual_batches_per_sec", "max_batches_per_sec", "total_flops",
    "tflops_per_device", "tracked_operations", "untracked_operations",
}  # fmt: skip


def test_all_keys_are_reported_every_five_batches(tmp_path: Path, records: Records) -> None:
    """Without code in the module, the documented keys are logged at the first batch and every 5."""
    trainer(tmp_path, Flops(), logger=records).fit(Small())
    assert records.keys - {"epoch"} == KEYS
    assert [step for step, _ in records.of("batch_flops")] == [0, 4, 9, 14]
    assert [step for step, _ in records.of("mfu")] == [4, 9, 14]


@pytest.mark.parametrize("first", [1, 5, 7])
def test_the_users_own_profiler_has_each_operator_once(tmp_path: Path, first: int) -> None:
    """Batches that torch.profiler records are not counted, nor one in which it starts."""

    class Profiled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.profiler = torch.profiler.profile()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == first:
                self.profiler.start()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == first + 4:
                self.profiler.stop()

    def operators(*callbacks: Callback) -> dict[str, int]:
        trainer(tmp_path, *callbacks).fit(module := Profiled())
        rows = module.profiler.key_averages()
        return {row.key: row.count for row in rows if row.key.startswith("aten::")}

    flops = Flops()
    assert operators(flops) == operators()
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE


def test_lightnings_profiler_has_each_operator_once(tmp_path: Path) -> None:
    """It starts between the step and the backward of a batch."""

    def operators(*callbacks: Callback) -> dict[str, int]:
        profiler = PyTorchProfiler(dirpath=tmp_path, export_to_chrome=False)
        trainer(tmp_path, *callbacks, profiler=profiler).fit(Small())
        assert profiler.function_events is not None
        rows = profiler.function_events.key_averages()
        return {row.key: row.count for row in rows if row.key.startswith("aten::")}

    assert operators(Flops()) == operators()


def test_a_training_that_is_profiled_as_a_whole_is_not_counted(tmp_path: Path) -> None:
    """One warning says why there is no MFU, and what to do."""
    flops = Flops()
    with torch.profiler.profile(), pytest.warns(PerfWarning, match="torch.profiler") as caught:
        trainer(tmp_path, flops).fit(Small())
    assert len(ours(caught)) == 1
    assert not flops.metrics.get("batch_flops")


def test_flops_are_counted_exactly(tmp_path: Path) -> None:
    """Forward and backward of a real batch equal the number computed by hand."""
    flops = Flops(peak_flops=1e9)
    trainer(tmp_path, flops).fit(Small())
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE
    assert flops.metrics["total_flops"] == 1e9
    assert flops.metrics["max_batches_per_sec"] == 1e9 / (4 * FLOPS_PER_SAMPLE)
    assert flops.metrics["untracked_operations"] == 0


def test_mfu_is_flops_over_peak_and_time(tmp_path: Path) -> None:
    """MFU is the counted FLOPs per second divided by the peak; waiting time is included."""

    class Slow(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    flops = Flops(peak_flops=1e9)
    trainer(tmp_path, flops).fit(Slow())
    row = flops.metrics
    assert row["actual_batches_per_sec"] < 100
    expected = row["actual_batches_per_sec"] / row["max_batches_per_sec"]
    assert row["mfu"] == pytest.approx(expected)
    assert row["hfu"] == pytest.approx(row["mfu"])


def test_a_schedule_that_is_never_true_still_counts_once(tmp_path: Path, records: Records) -> None:
    """FLOPs are reported at the start, whatever the schedule."""
    trainer(tmp_path, Flops(schedule=Never()), logger=records).fit(Small())
    assert records.of("batch_flops")[0][0] == 0


def test_new_shapes_are_counted_when_they_occur(tmp_path: Path) -> None:
    """An uneven last batch has its own FLOPs."""
    flops = Flops(schedule="1ba")
    trainer(tmp_path, flops).fit(Small(batch_size=10))
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE


def test_two_callbacks_share_one_counter_and_one_peak(tmp_path: Path) -> None:
    """A peak given to one callback applies to the other; two different peaks are refused."""
    monitor, flops = SpeedMonitor(window_size=4), Flops(peak_flops=2e9)
    trainer(tmp_path, monitor, flops).fit(Small())
    speed = monitor.metrics
    assert speed["throughput/device/mfu"] == pytest.approx(speed["throughput/flops_per_sec"] / 2e9)
    with pytest.raises(
        ConfigError, match=r"peak_flops=2000000000\.0 contradicts gpu_flops_available=1"
    ):
        trainer(tmp_path, SpeedMonitor(4, gpu_flops_available=1e9), Flops(peak_flops=2e9)).fit(
            Small()
        )


def test_a_formula_is_reported_beside_the_count(tmp_path: Path) -> None:
    """A user's own formula is reported together with the utilization that it gives."""
    flops = Flops(peak_flops=1e9, formula=lambda batch: 2 * FLOPS_PER_SAMPLE * len(batch[0]))
    trainer(tmp_path, flops).fit(Small())
    row = flops.metrics
    assert row["batch_flops_from_formula"] == 2 * row["batch_flops"]
    assert row["mfu_from_formula"] == pytest.approx(2 * row["mfu"])


class Net(torch.nn.Module):
    """Code of torch itself is not compiled, so the layer is in a module of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_compiled_module_stays_compiled_and_is_counted(
    tmp_path: Path, how: str, fullgraph: bool
) -> None:
    """Its FLOPs are exact, and each of its batches runs the compiled graph."""
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model, net = Small(), Net()
    if how == "torch.compile":
        model.net = torch.compile(net, backend=backend, fullgraph=fullgraph)
    else:
        net.compile(backend=backend, fullgraph=fullgraph)
        model.net = net
    flops = Flops(peak_flops=1e9)
    trainer(tmp_path, flops).fit(model)
    assert len(calls) == 16
    assert flops.metrics["batch_flops"] == 4 * 2 * (8 + 8)  # forward, and backward by the weight
    assert flops.metrics["mfu"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, in which an error would end it
@pytest.mark.parametrize("branches", [False, True])
def test_functions_that_inductor_compiles_are_counted_or_named(
    tmp_path: Path, branches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernels are no operators of torch: those of one query are counted from shapes.

    If the step branches on values, which shapes do not tell, they are named, and the rest counts.
    """

    def pool(query: Tensor, keys: Tensor) -> Tensor:
        return torch.softmax(query @ keys.transpose(1, 2), -1) @ keys

    torch._dynamo.reset()
    compiled = torch.compile(pool)

    class Pools(Small):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.net = nn.Parameter(torch.randn(1, 1, 16)), nn.Linear(8, 16)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            keys = self.net(batch[0])[None]
            loss = compiled(self.query, keys).square().mean()
            return loss if not branches or loss.item() >= 0 else -loss

    flops = Flops(peak_flops=1e9)
    with caplog.at_level("WARNING", logger="lightning_perf"):
        trainer(tmp_path, flops, max_epochs=2).fit(Pools())
    linear, products = 2 * 4 * 8 * 16, 2 * 4 * 16
    assert flops.metrics["batch_flops"] == 2 * linear + (0 if branches else 3 * 2 * products)
    assert ("functions compiled by torch.compile" in caplog.text) == branches


@pytest.fixture
def shadows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per count on a shadow."""
    counts, count = list[int](), flop_meter.FlopMeter._run_shadow

    def counting(*args: Any) -> Any:
        counts.append(1)
        return count(*args)

    monkeypatch.setattr(flop_meter.FlopMeter, "_run_shadow", counting)
    return counts


@pytest.mark.parametrize(("free", "least"), [(0.0, 1), (inf, 12)])
def test_counts_of_a_compiled_module_take_a_limited_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: Records,
    shadows: list[int],
    free: float,
    least: int,
) -> None:
    """Once their time is used up, no batch of known shapes is counted again.

    Their time is that of a callback.
    """
    monkeypatch.setattr(flop_meter, "FREE_SECONDS", free)
    monkeypatch.setattr(flop_meter, "_SHARE", 0.0)
    count = flop_meter.FlopMeter._run_shadow

    def slow(*args: Any) -> Any:
        time.sleep(0.3 * (least == 1))
        return count(*args)

    monkeypatch.setattr(flop_meter.FlopMeter, "_run_shadow", slow)
    model = Small()
    model.net = torch.compile(Net(), backend="eager")
    flops = Flops(peak_flops=1e9)
    trainer(tmp_path, flops, Timings(), logger=records, max_epochs=8).fit(model)
    assert len(shadows) == 1 if least == 1 else len(shadows) >= least
    assert flops.metrics["batch_flops"] == 4 * 2 * (8 + 8)
    spent = max(seconds for _, seconds in records.of("timings/callbacks"))
    assert spent > 0.3 * (least == 1)


def test_counts_of_a_known_shape_are_spread_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shadows: list[int]
) -> None:
    """The second batch is counted at once, and others not before there is time for them."""
    monkeypatch.setattr(flop_meter, "FREE_SECONDS", 60.0)
    monkeypatch.setattr(flop_meter, "_SHARE", 0.0)
    monkeypatch.setattr(flop_meter, "_SPREAD_OVER", 1e9)
    monkeypatch.setattr(flop_meter, "MORE_RECOUNTS", 1e9)  # they would take too long
    monkeypatch.setattr(flop_meter.FlopMeter, "check", lambda *_: None)
    model = Small()
    model.net = torch.compile(Net(), backend="eager")
    trainer(tmp_path, Flops(peak_flops=1e9), max_epochs=8).fit(model)
    assert len(shadows) == 2


class Shapes(Small):
    """A compiled module, and batches of given shapes."""

    def __init__(self, *shapes: tuple[int, ...], slow: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self.net = torch.compile(Net(), backend="eager", dynamic=True)
        self.shapes, self.slow = shapes, slow

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.03 * (batch[0].shape[:-1] in self.slow))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        rows = [(torch.ones(*shape, 8), torch.ones(*shape, 1)) for shape in self.shapes]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


class Whole(WindowCallback):
    """Keeps the sums of the whole training."""

    columns = ("batch/seconds", "flops/seconds", "flops/batches", "flops/uncounted_batches")

    def __init__(self) -> None:
        super().__init__(schedule=Never())

    def on_window(self, window: Window) -> None:
        self.sums = [window.total(name) for name in self.columns]


@pytest.mark.parametrize("free", [0.0, inf])
def test_new_shapes_of_a_compiled_module_are_counted_in_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Records, free: float
) -> None:
    """Six are counted in any case; then MFU leaves out batches of others, with their time.

    The end of the training says how many if two sizes vary, which six counts cannot predict.
    """
    monkeypatch.setattr(flop_meter, "FREE_SECONDS", free)
    monkeypatch.setattr(flop_meter, "_SHARE", 0.0)
    counted = [(1, 3), (2, 4), (3, 5), (1, 6), (2, 7), (3, 3)]
    slow = [(1, 5), (2, 6)]
    shapes, whole = [*counted, *slow] * 2, Whole()
    flops = Flops(schedule="1ba", peak_flops=1e9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, flops, whole, logger=records).fit(Shapes(*shapes, slow=slow))
    known = counted if free == 0.0 else shapes
    steps = [step for step, shape in enumerate(shapes) if shape in known]
    expected = [(step, 2 * 2 * 8 * prod(shapes[step])) for step in steps]
    assert records.of("batch_flops") == expected
    seconds, flops_seconds, batches, uncounted = whole.sums
    assert (batches, uncounted) == (len(steps) - 1, 16 - len(steps))
    assert flops_seconds <= seconds - 0.03 * uncounted
    said = [text for text in ours(caught) if "FLOPs of 25% of the batches are not known" in text]
    assert len(said) == len(ours(caught)) == (free == 0.0)


def test_growing_lengths_of_a_compiled_module_are_predicted_from_six_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Records, shadows: list[int]
) -> None:
    """Without time to count a batch on a shadow, it has the predicted FLOPs at any length."""
    monkeypatch.setattr(flop_meter, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(flop_meter, "_SHARE", 0.0)
    lengths = range(4, 36)
    flops = Flops(schedule="1ba", peak_flops=1e9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, flops, logger=records).fit(Shapes(*((n,) for n in lengths)))
    assert [value for _, value in records.of("batch_flops")] == [2 * 2 * 8 * n for n in lengths]
    assert len(shadows) == 6
    assert not ours(caught)


def test_predictions_for_a_compiled_module_are_verified_when_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Records
) -> None:
    """A length beyond the counted ones is counted then, and a wrong prediction is dropped."""

    class Truncating(Shapes):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 19:
                monkeypatch.setattr(flop_meter, "FREE_SECONDS", inf)
            return super().training_step([part[:16] for part in batch], batch_idx)

    monkeypatch.setattr(flop_meter, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(flop_meter, "_SHARE", 0.0)
    lengths = range(4, 34)
    flops = Flops(schedule="1ba", peak_flops=1e9)
    trainer(tmp_path, flops, logger=records).fit(Truncating(*((n,) for n in lengths)))
    charged = [n if step < 20 else 16 for step, n in enumerate(lengths)]
    assert [value for _, value in records.of("batch_flops")] == [2 * 2 * 8 * n for n in charged]


def test_a_declaration_that_raises_is_reported_once(tmp_path: Path) -> None:
    """Everything else is measured."""

    class Declares(Small):
        @property
        def flops_per_batch(self) -> float:
            raise ValueError("unknown")

    flops, monitor = Flops(peak_flops=1e9), SpeedMonitor(window_size=4)
    run = trainer(tmp_path, flops, monitor)
    with pytest.warns(PerfWarning, match="flops_per_batch failed") as caught:
        run.fit(Declares())
    assert len(ours(caught)) == 1
    assert monitor.metrics["throughput/batches_per_sec"] > 0


def test_a_compiled_module_that_cannot_be_copied_trains_without_mfu(tmp_path: Path) -> None:
    """One warning says that it is not counted and what to define."""

    class Stubborn(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > -1 else 2 * loss  # a branch on a value

    model = Stubborn()
    model.net = torch.compile(Net(), backend="eager")
    flops = Flops()
    with pytest.warns(PerfWarning, match="cannot be counted.*flops_per_batch") as caught:
        trainer(tmp_path, flops).fit(model)
    assert len(ours(caught)) == 1
    assert "mfu" not in flops.metrics


def test_flops_of_ever_changing_lengths_are_predicted(tmp_path: Path) -> None:
    """After sixteen shapes only much larger ones are counted, and the predictions are exact."""

    class Varying(Small):
        def train_dataloader(self) -> Any:
            rows = [(torch.ones(n, 8), torch.ones(n, 1)) for n in range(3, 63)]
            return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    records = Records()
    flops, monitor = Flops(schedule="1ba", peak_flops=1e9), SpeedMonitor(window_size=10)
    trainer(tmp_path, flops, monitor, logger=records).fit(Varying())
    values = [value for _, value in records.of("batch_flops")]
    assert values == [n * FLOPS_PER_SAMPLE for n in range(3, 63)]
    assert records.of("throughput/device/mfu")
    assert [step for step, _ in records.of("mfu")] == [*range(16, 60)]  # from the first timed one


def collate(items: list[int]) -> list[Tensor] | None:
    """The collate function of `Small`, except that one batch is None, which Lightning skips."""
    return None if items[0] == 9 else [torch.ones(4, 8), torch.ones(4, 1)]


def test_a_skipped_batch_is_not_passed_to_user_functions(tmp_path: Path) -> None:
    """Neither ``flops_per_batch`` nor a formula is called with None."""

    class Declared(Small):
        def flops_per_batch(self, batch: list[Tensor]) -> float:
            return 10.0 * len(batch[0])

    flops = Flops(peak_flops=1e9, formula=lambda batch: 20.0 * len(batch[0]))
    loader = DataLoader(range(16), collate_fn=collate)
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        trainer(tmp_path, flops).fit(Declared(), loader)
    assert flops.metrics["batch_flops"] == 40.0
    assert flops.metrics["batch_flops_from_formula"] == 80.0
    assert flops.metrics["mfu_from_formula"] == pytest.approx(2 * flops.metrics["mfu"])


def test_a_window_that_opens_at_the_first_batch_stays_open(
    tmp_path: Path, records: Records
) -> None:
    """The first batch, which always has a report, is passed to the schedule too."""
    run = trainer(tmp_path, Flops("at 1ba for 12sp", peak_flops=1e9), logger=records)
    run.fit(Small())
    assert [step for step, _ in records.of("batch_flops")] == [0, 1, 2]


@pytest.mark.parametrize("batches", [999, 1000, 1001])
def test_a_formula_is_applied_to_its_own_batch(batches: int) -> None:
    """This also holds if records are summed within a stage before the formula is applied."""
    totals = BatchTotals().start()
    formula = FormulaSignal(lambda flops: flops, SimpleNamespace(stage="train"), totals)
    cost = BatchCost(ideal_seconds=1.0, total=1.0)
    for number in range(batches):
        totals.end_batch("train", BatchRecord(1.0, 1, 0, cost, False, number == 0, False))
        formula.count(number)
    totals.fold("train")
    assert formula.totals("train") == (sum(range(batches)), batches - 1)


def test_ranks_that_share_a_batch_share_the_formula(tmp_path: Path) -> None:
    """This also holds if the callback that declares it comes after Flops in the list."""

    class Sharing(PerfCallback):
        def prepare(self, context: RunContext) -> None:
            context.sharing = context.batches.sharing = context.meter.sharing = 2

    flops = Flops(peak_flops=1e9, formula=lambda _: 4.0)
    trainer(tmp_path, flops, Sharing()).fit(Small())
    assert flops.metrics["batch_flops_from_formula"] == 2.0


def test_a_skipped_batch_has_no_flops(tmp_path: Path, records: Records) -> None:
    """If a data loader returns None, Lightning skips the batch; the rates of others stay known."""

    monitor = SpeedMonitor(window_size=4)
    run = trainer(tmp_path, monitor, logger=records, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        run.fit(Small(), DataLoader(range(16), collate_fn=collate))
    rates = dict(records.of("throughput/batches_per_sec"))
    flops = dict(records.of("throughput/flops_per_sec"))
    assert flops.keys() == rates.keys()
    per_batch = [flops[step] / rates[step] / (4 * FLOPS_PER_SAMPLE) for step in (8, 9, 12, 13)]
    assert per_batch == pytest.approx([1.0, 0.75, 0.75, 1.0])


def test_an_error_while_counting_keeps_the_throughput(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one warning, and later batches do not count as slowed by counting."""

    class Compiled(Small):
        def configure_model(self) -> None:
            self.net.compile(backend="eager")

    def fail(*args: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(PeakResolver, "cost_of", fail)
    monitor = SpeedMonitor(window_size=4)
    run = trainer(tmp_path, monitor, logger=records, log_every_n_steps=1)
    with pytest.warns(PerfWarning, match="no longer counted.*planted"):
        run.fit(Compiled())
    steps = [step for step, _ in records.of("throughput/batches_per_sec")]
    assert steps == list(range(4, 16))


def test_a_formula_may_be_named(tmp_path: Path) -> None:
    """The sizes come from the module's config; a model without them is refused at set-up."""
    run = trainer(tmp_path, Flops(formula="palm"))
    with pytest.raises(ConfigError, match="formula"):
        run.fit(Small())
    assert run.global_step == 0


def test_the_strategy_is_restored(tmp_path: Path) -> None:
    """No wrapper of ours stays on the strategy, not even after an exception."""

    class Failing(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("in the counted batch")

    run = trainer(tmp_path, Flops())
    with pytest.raises(RuntimeError, match="in the counted batch"):
        run.fit(Failing())
    assert not {"training_step", "backward"} & set(vars(run.strategy))
    x = torch.ones(2, 2)
    assert torch.equal(x @ x, 2 * x)


def test_manual_optimization_is_counted_once(tmp_path: Path) -> None:
    """A backward call within the training step is not counted twice."""

    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    flops = Flops()
    trainer(tmp_path, flops).fit(Manual())
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE


def test_declared_flops_apply_before_and_after_validation(tmp_path: Path) -> None:
    """flops_per_batch applies to training only; validation batches are counted."""

    class Declared(Small):
        flops_per_batch = 12345

    records = Records()
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 4}
    trainer(tmp_path, Flops(), logger=records, **options).fit(Declared())
    assert {value for _, value in records.of("batch_flops")} == {12345}
    assert {value for _, value in records.of("validate/batch_flops")} == {4 * 2 * (8 * 16 + 16)}


@pytest.mark.parametrize("kind", ["attribute", "method"])
def test_declared_flops_may_change_during_training(
    tmp_path: Path, records: Records, kind: str
) -> None:
    """A new value of flops_per_batch applies from the batch at which it is set."""

    class Declared(Small):
        def __init__(self) -> None:
            super().__init__()
            self.value: Any = 100
            if kind == "method":
                self.flops_per_batch = lambda batch: self.value

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.value = [100, 100, 250, 250.5, torch.tensor(300), 100][min(batch_idx, 5)]
            if kind == "attribute":
                self.flops_per_batch = self.value
            return super().training_step(batch, batch_idx)

    model = Declared()
    if kind == "attribute":
        model.flops_per_batch = 100
    trainer(tmp_path, Flops(schedule="1ba"), logger=records, limit_train_batches=7).fit(model)
    assert [v for _, v in records.of("batch_flops")] == [100, 100, 250, 250, 300, 100, 100]


def test_unfrozen_layers_are_counted_again(tmp_path: Path) -> None:
    """A backbone that is unfrozen between epochs changes the FLOPs from then on."""

    class Thawing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01)

    records = Records()
    trainer(tmp_path, Flops(schedule="8ba"), logger=records, max_epochs=2).fit(Thawing())
    frozen = (
        4 * 2 * (8 * 16 + 2 * 16)
    )  # the first layer in forward; the second one in forward and for its weights
    values = [value for _, value in records.of("batch_flops")]
    assert values == [frozen, frozen, frozen, 4 * FLOPS_PER_SAMPLE, 4 * FLOPS_PER_SAMPLE]


def test_a_first_batch_without_a_loss_is_not_used_as_the_count(tmp_path: Path) -> None:
    """If training_step first returns None, a later batch is counted."""

    class Skipping(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    flops = Flops()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`training_step` returned `None`")
        trainer(tmp_path, flops).fit(Skipping())
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE


@pytest.mark.parametrize("dtypes", [{"float32"}, {"bfloat16", "float32"}], ids=len)
def test_the_peak_of_a_cpu_is_measured_before_timers_start(
    tmp_path: Path, dtypes: set[str], monkeypatch
) -> None:
    """A Timer earlier in the callback list starts after the peak of each used dtype is measured."""
    measured: dict[Any, float | None] = {}
    monkeypatch.setattr(measure, "MEASURED", measured)
    monkeypatch.setattr(measure, "_MIN_PER_CORE", 0.0)  # other work must not make it implausible
    seen: list[set[str]] = []

    class Timer(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append({dtype for _, dtype, *_ in measured})

    precision = {} if len(dtypes) == 1 else {"precision": "bf16-mixed"}
    run = trainer(tmp_path, Timer(), SpeedMonitor(), Flops(), **precision)
    run.fit(Small())
    assert seen == [dtypes]
    assert len(measured) == len(dtypes)


def test_a_given_peak_is_not_measured(tmp_path: Path, monkeypatch) -> None:
    """With a peak as argument nothing is timed."""
    monkeypatch.setattr(measure, "MEASURED", {})
    trainer(tmp_path, Flops(peak_flops=1e12)).fit(Small())
    assert measure.MEASURED == {}


def test_a_failed_peak_measurement_gives_one_warning(tmp_path: Path, monkeypatch) -> None:
    """The warning says why; `mfu` is not logged, and training continues."""
    monkeypatch.setattr(measure, "MEASURED", {})
    monkeypatch.setattr(measure, "fastest_rate", lambda *_: None)
    flops = Flops()
    with pytest.warns(PerfWarning, match="could not be measured.*busy machine") as caught:
        trainer(tmp_path, flops).fit(Small())
    assert len(ours(caught)) == 1
    assert "mfu" not in flops.metrics
    assert flops.metrics["batch_flops"] == 4 * FLOPS_PER_SAMPLE


def test_a_utilization_above_one_is_flagged(tmp_path: Path) -> None:
    """An impossible utilization is reported unchanged, with one warning about the peak."""
    module = Small()
    module.flops_per_batch = 1e15
    flops = Flops(peak_flops=1e9)
    with pytest.warns(PerfWarning, match=r"1e\+09 FLOP/s .given.") as caught:
        trainer(tmp_path, flops).fit(module)
    assert flops.metrics["mfu"] > 1
    assert len(ours(caught)) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"peak_flops": 0}, "peak_flops"),
        ({"peak_flops": -1.0}, "peak_flops"),
        ({"peak_flops": "guess"}, "peak_flops"),
        ({"peak_flops": 312}, "peak_flops"),
        ({"schedule": 5}, "schedule"),
        ({"schedule": "every now and then"}, "schedule"),
        ({"formula": 6e9}, "formula"),
        ({"formula": "gpt"}, "formula"),
        ({"formula": {"kind": "palm", "pases": 3}}, "formula"),
    ],
)
def test_bad_settings_are_refused_at_construction(options: dict[str, Any], field: str) -> None:
    """The message names the field, the value and a valid example."""
    with pytest.raises(ConfigError, match=f"{field}=.*Try"):
        Flops(**options)


def test_a_fraction_of_training_needs_a_limit(tmp_path: Path) -> None:
    """dur without max_steps, max_epochs or max_time is refused at set-up, not during training."""
    run = trainer(tmp_path, Flops(schedule=Every("0.1dur")), max_epochs=-1)
    with pytest.raises(ConfigError, match="dur"):
        run.fit(Small())
    assert run.global_step == 0


class CausalAttention(Small):
    """Self-attention over the features of a sample, under a causal mask."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features = batch[0][:, None, :, None] * self.net[0].weight.sum()
        mixed = torch.nn.functional.scaled_dot_product_attention(
            features, features, features, is_causal=True
        )
        return mixed.square().mean()


def test_mfu_under_a_causal_mask_is_logged_in_both_conventions(
    tmp_path: Path, records: Records
) -> None:
    """A square of n queries and keys counts in full for mfu, and n (n + 1) / 2 for mfu_causal."""
    trainer(tmp_path, Flops(peak_flops=1e12), logger=records).fit(CausalAttention())
    full, half = dict(records.of("mfu")), dict(records.of("mfu_causal"))
    assert full.keys() == half.keys() == {4, 9, 14}
    for step, value in full.items():
        assert half[step] / value == pytest.approx((WIDTH + 1) / (2 * WIDTH))


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU at 1,098 MHz as NVML sees it, whose peak holds at 1,830 MHz."""
    gpu = FakeGpu("GPU-a", clocks=(1098, 2619))
    install(monkeypatch, gpu)
    monkeypatch.setattr("lightning_perf.callbacks.flops.clocked", lambda _: True)
    peak = Peak(1e12, "table: H100 SXM (datasheet)", 1.83e9)
    monkeypatch.setattr("lightning_perf.flops.peaks.resolve_peak", lambda *_: peak)
    return gpu


class Sampled(Small):
    """Waits in the third batch until a GPU was sampled."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            # While the third sample is read, two are recorded.
            wait_until(lambda: self.gpu.readings >= 3, 60)
        return super().training_step(batch, batch_idx)


def test_mfu_is_also_logged_of_the_peak_at_the_sampled_clock(
    tmp_path: Path, records: Records, h100: FakeGpu
) -> None:
    """At 0.6 of the clock that the peak holds at, MFU is 1 / 0.6 times as large."""
    trainer(tmp_path, Flops(), SystemMetrics(0.1), logger=records).fit(Sampled(h100))
    mfu, at_clock = dict(records.of("mfu")), dict(records.of("mfu_at_clock"))
    assert 4 in at_clock
    for step, value in at_clock.items():
        assert value == pytest.approx(mfu[step] * 1830 / 1098)
    (path,) = tmp_path.rglob("summary.json")
    assert read_summary(path)["setup"]["peak_clock"] == 1.83e9


@pytest.mark.parametrize("broken", ["clocks", "driver"])
def test_there_is_no_mfu_at_an_unknown_clock(
    tmp_path: Path, records: Records, h100: FakeGpu, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Neither if the GPU does not tell its clock, nor without NVML; MFU is reported anyway."""
    h100.values["clocks"] = FakeNvml.NVMLError_NotSupported()
    if broken == "driver":
        install(monkeypatch, fault=FakeNvml.NVMLError_DriverNotLoaded())
        h100.readings = 3
    trainer(tmp_path, Flops(), SystemMetrics(0.1), logger=records).fit(Sampled(h100))
    assert "mfu" in records.keys
    assert "mfu_at_clock" not in records.keys


def test_the_user_s_peak_holds_at_no_known_clock(
    tmp_path: Path, records: Records, h100: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak that was given is not scaled."""
    monkeypatch.setattr("lightning_perf.flops.peaks.resolve_peak", resolve_peak)
    trainer(tmp_path, Flops(peak_flops=1e12), SystemMetrics(0.1), logger=records).fit(Sampled(h100))
    assert "system/node_0/gpu_0/gpu_sm_clock" in records.keys
    assert "mfu_at_clock" not in records.keys


@torch.library.custom_op("perf_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


opaque.register_autograd(lambda _, gradient: gradient)


class PartlyOpaque(Small):
    """Runs an operator whose FLOPs nobody knows."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([opaque(batch[0]), batch[1]], batch_idx)


def test_mfu_is_shown_as_a_bound_if_something_is_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The summary, its headline and the progress bar say so, and one warning names it."""
    fit = trainer(tmp_path, Flops(peak_flops=1e12), SpeedMonitor(4), log_every_n_steps=4)
    fit.fit(PartlyOpaque())
    (path,) = tmp_path.rglob("summary.json")
    summary = read_summary(path)
    facts, figures = rows(summary)
    assert dict(facts)["not counted"] == "perf_tests::opaque: MFU is a lower bound"
    (mfu,) = (row for row in figures if row[0] == "MFU")
    assert all(cell.startswith(">= ") for cell in mfu[1:])
    assert headline(summary).startswith("MFU >= ")
    assert fit.progress_bar_metrics["mfu % at least"] >= 0
    assert "mfu %" not in fit.progress_bar_metrics
    warned = [one for one in caplog.messages if "perf_tests::opaque are not counted" in one]
    assert len(warned) == 1
