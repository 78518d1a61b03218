"""FLOPs of whole trainings, in every stage and strategy, compared with expected sums."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import (
    FLOPS_PER_SAMPLE,
    HIDDEN,
    WIDTH,
    Records,
    Small,
    TwoOptimizers,
    ours,
    trainer,
)
from helpers.versions import interrupted, needs_model_parallel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _python_dispatch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_perf import Flops, PerfWarning, WindowCallback
from lightning_perf.core.window import Window, utilization
from lightning_perf.flops.cache import FlopCache
from lightning_perf.flops.compat import current_mode
from lightning_perf.flops.counter import Counts, FlopCounter
from lightning_perf.flops.peaks import BatchCost
from lightning_perf.run import flop_meter
from lightning_perf.run.callback import PerfCallback

FORWARD = 2 * (WIDTH * HIDDEN + HIDDEN)  # of one sample, without a gradient


@pytest.fixture(autouse=True)
def no_further_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, on which steps take longer, does not change which batches are counted."""
    monkeypatch.setattr(flop_meter.FlopMeter, "check", lambda *_: None)


class Known(WindowCallback):
    """Keeps the FLOPs of a batch of the whole run."""

    columns = ("flops/*",)
    mean = 0.0

    def on_window(self, window: Window) -> None:
        self.mean = utilization(window.whole_run)["batch_flops"]


def counted(folder: Path, model: Small, **options: Any) -> dict[str, float]:
    """The metrics that Flops reports for a training."""
    flops = Flops(peak_flops=1e9)
    trainer(folder, flops, **options).fit(model)
    return flops.metrics


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_count_their_own_forward(tmp_path: Path, records: Records, stage: str) -> None:
    """Under inference_mode a batch costs its forward, with the stage in the key."""
    run = trainer(tmp_path, Flops(peak_flops=1e9), logger=records, limit_val_batches=1.0)
    getattr(run, stage)(Small())
    assert [value for _, value in records.of(f"{stage}/batch_flops")][-1] == 4 * FORWARD
    assert records.of(f"{stage}/mfu")
    assert "batch_flops" not in records.keys


def test_validation_inside_fit_is_counted_separately(tmp_path: Path, records: Records) -> None:
    """Training and validation have their own FLOPs in one run."""
    options: dict[str, Any] = {"limit_val_batches": 3, "val_check_interval": 8}
    trainer(tmp_path, Flops(peak_flops=1e9), logger=records, **options).fit(Small())
    assert {value for _, value in records.of("batch_flops")} == {4 * FLOPS_PER_SAMPLE}
    assert {value for _, value in records.of("validate/batch_flops")} == {4 * FORWARD}


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.5},
        {"max_epochs": 3},
    ],
    ids=str,
)
def test_trainer_options_do_not_change_flops(tmp_path: Path, options: dict[str, Any]) -> None:
    """Accumulation, precision and clipping do not change the FLOPs of a batch."""
    found = counted(tmp_path, Small(), **options)
    assert found["batch_flops"] == 4 * FLOPS_PER_SAMPLE
    assert found["untracked_operations"] == 0


def test_manual_optimization_counts_both_optimizers(tmp_path: Path) -> None:
    """Two forwards and two backwards in one batch are both counted."""

    assert counted(tmp_path, TwoOptimizers())["batch_flops"] == 2 * 4 * FLOPS_PER_SAMPLE


class Critic(TwoOptimizers):
    """Trains its second network with every ``every``-th batch only, from batch ``first`` on."""

    def __init__(self, every: int, first: int) -> None:
        super().__init__()
        self.every, self.first, self.batches = every, first, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batches += 1
        for number, optimizer in enumerate(self.optimizers()):
            if number == 0 or (self.batches - 1) % self.every == self.first:
                loss = Small.training_step(self, batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()


@pytest.mark.parametrize(("every", "first"), [(5, 0), (5, 4), (10, 9), (2, 1), (1, 0)])
def test_batches_of_one_shape_may_train_different_networks(
    tmp_path: Path, every: int, first: int
) -> None:
    """A network that only some batches train counts with these batches."""
    known, flops = Known("1000ba"), Flops(peak_flops=1e9)
    trainer(tmp_path, known, flops, max_epochs=4).fit(Critic(every, first))
    steps = 64 + len(range(first, 64, every))
    assert known.mean == pytest.approx(4 * FLOPS_PER_SAMPLE * steps / 64)
    assert flops.metrics["mfu"] > 0


def test_a_network_that_is_trained_more_often_later_has_its_share(tmp_path: Path) -> None:
    """The optimizers that step tell what a batch costs that is not counted: 5 to 1, then each."""

    class Later(Critic):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.every = 5 if self.batches < 101 else 1
            super().training_step(batch, batch_idx)

    known = Known("1000ba")
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=15).fit(Later(5, 0))
    steps = 240 + 21 + 139
    assert known.mean == pytest.approx(4 * FLOPS_PER_SAMPLE * steps / 240)


class LayerDrop(Small):
    """Has a further layer in every second batch, and skips every fourth batch if ``skips``."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips, self.more = skips, torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.skips and batch_idx % 4 == 2:
            return None
        x = self.more(batch[0]) if batch_idx % 2 else batch[0]
        return torch.nn.functional.mse_loss(self.net(x), batch[1])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("skips", [False, True])
def test_layers_that_only_some_batches_use_count_with_their_share(
    tmp_path: Path, skips: bool
) -> None:
    """So with automatic optimization; batches that are skipped cost nothing."""
    flops = Flops("4ba", peak_flops=1e9)
    trainer(tmp_path, flops, max_epochs=5).fit(LayerDrop(skips))
    found = flops.metrics
    # Without ``more`` no gradient flows to the input of ``net``.
    more = 4 * 2 * (2 * WIDTH * WIDTH + WIDTH * HIDDEN)
    share = (found["batch_flops"] - 4 * FLOPS_PER_SAMPLE * (3 / 4 if skips else 1)) / more
    assert share == pytest.approx(1 / 2, abs=1e-3)  # whole FLOPs


def test_few_batches_of_one_cost_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two, ten after sixteen others, and those that begin an epoch."""
    started: list[int] = []
    monkeypatch.setattr(
        "lightning_perf.run.flop_meter.FlopCounter",
        lambda: started.append(run.global_step) or FlopCounter(),
    )
    run = trainer(tmp_path, Flops(peak_flops=1e9), max_epochs=10)
    run.fit(Small())
    assert started == [0, 1, 16, *range(18, 28), *sorted([68, 109, 150, *range(32, 160, 16)])]


class Orthogonal(torch.optim.SGD):
    """Multiplies the gradients of matrices before it uses them, as Muon does."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for one in self.param_groups[0]["params"]:
            one.grad = one.grad @ (one.grad.T @ one.grad) if one.dim() == 2 else one.grad
        return super().step() if loss is None else loss


class Manual(Small):
    """One optimizer, whose step gets the forward and the backward as a closure or follows them."""

    automatic_optimization = False

    def __init__(self, closure: bool) -> None:
        super().__init__()
        self.closure = closure

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, forward = self.optimizers(), super().training_step

        def train() -> Tensor:
            optimizer.zero_grad()
            loss = forward(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if self.closure:
            optimizer.step(closure=train)
        else:
            train()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return Orthogonal(self.parameters(), lr=0.01)


@pytest.mark.parametrize("closure", [False, True])
def test_products_of_an_optimizer_are_not_counted(tmp_path: Path, closure: bool) -> None:
    """Under manual optimization, as otherwise, the products of an optimizer do not count."""
    assert counted(tmp_path, Manual(closure))["batch_flops"] == 4 * FLOPS_PER_SAMPLE


@pytest.mark.parametrize("automatic", [True, False])
def test_products_of_an_optimizer_that_lightning_does_not_step(
    tmp_path: Path, automatic: bool
) -> None:
    """They do not count under manual optimization, nor if a hook of the backward steps."""

    class Raw(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.own = [Orthogonal(self.net.parameters(), lr=0.01)]
            if automatic:
                last = next(self.net.parameters())
                last.register_post_accumulate_grad_hook(lambda _: self.own[0].step())

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if automatic:
                return loss
            self.own[0].zero_grad()
            loss.backward()
            return self.own[0].step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    assert counted(tmp_path, Raw())["batch_flops"] == 4 * FLOPS_PER_SAMPLE


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("compiled", [False, True])
def test_batches_without_a_loss_cost_what_they_compute(tmp_path: Path, compiled: bool) -> None:
    """A third of the batches computes nothing, and a third the forward only."""

    class Skips(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if self.global_step >= 0 and batch_idx % 3 == 0:
                return None
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx % 3 == 1 else None

    model = Skips()
    if compiled:
        model.net.compile(backend="eager")
    data = torch.utils.data.TensorDataset(torch.ones(4 * 60, WIDTH), torch.ones(4 * 60, 1))
    known = Known("30ba")
    trainer(tmp_path, known, Flops(peak_flops=1e9)).fit(model, DataLoader(data, 4))
    assert known.mean == pytest.approx(4 * (FLOPS_PER_SAMPLE + FORWARD) / 3, 0.02)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_without_a_loss_do_not_change_the_cost_of_others(
    tmp_path: Path, records: Records
) -> None:
    """If each third batch is skipped, it costs its forward; each other batch costs all."""

    class Skips(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 3 == 2 else loss

    flops = Flops("1ba", peak_flops=1e9)
    trainer(tmp_path, flops, logger=records, max_epochs=4).fit(Skips())
    found = [value for _, value in records.of("batch_flops")]
    expected = [4 * (FORWARD if n % 16 % 3 == 2 else FLOPS_PER_SAMPLE) for n in range(64)]
    # Only the cost of the first one that is skipped is not known yet.
    assert [n for n in range(64) if found[n] != expected[n]] == [2]


@pytest.mark.filterwarnings("ignore:(Swapping|SWA|The number of|`training_step)")
@pytest.mark.parametrize("compiled", [False, True])
def test_an_epoch_without_a_backward_costs_its_forwards(
    tmp_path: Path, records: Records, compiled: bool
) -> None:
    """The last epoch of StochasticWeightAveraging, which only updates batch norms."""

    model = Small()
    model.net.insert(1, torch.nn.BatchNorm1d(HIDDEN))
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    if compiled:
        model.net.compile(backend="eager")
    flops = Flops(peak_flops=1e9, schedule="every 4ba")
    trainer(tmp_path, flops, averaging, max_epochs=2, logger=records).fit(model)
    found = [value for _, value in records.of("batch_flops")]
    assert found[1:] == [4 * FLOPS_PER_SAMPLE] * 8 + [4 * FORWARD] * 4


class Extra(Small):
    """Runs further forwards in some batches."""

    def __init__(self, when: Any, compiled: bool = False) -> None:
        super().__init__()
        self.when = when
        if compiled:
            self.net.compile(backend="eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.when(self, batch_idx):
            with torch.no_grad():
                for _ in range(20):
                    self.net(batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("every", "epochs"), [(4, 5), (8, 5), (1000, 5)])
def test_extra_work_of_some_batches_has_its_share(
    tmp_path: Path, compiled: bool, every: int, epochs: int
) -> None:
    """Eager or compiled, extra work counts with its share; that of the first batch not at all."""

    def when(module: Any, batch_idx: int) -> bool:
        return (16 * module.current_epoch + batch_idx) % every == 0

    found = counted(tmp_path, Extra(when, compiled), max_epochs=epochs)
    extra = 20 * 4 * FORWARD / every * (every < 1000)
    assert found["batch_flops"] == pytest.approx(4 * FLOPS_PER_SAMPLE + extra, abs=1)


def test_extra_work_of_the_last_batch_of_ten_has_its_share(tmp_path: Path) -> None:
    """Counting again covers ten batches in a row, so work of each tenth is in it at any phase."""

    def when(module: Any, _: int) -> bool:
        return module.global_step % 10 == 7

    found = counted(tmp_path, Extra(when), max_epochs=8)
    assert found["batch_flops"] == pytest.approx(4 * FLOPS_PER_SAMPLE + 2 * 4 * FORWARD, abs=1)


@pytest.mark.parametrize(("compiled", "batches"), [(False, 10), (True, 10), (False, 64)])
def test_extra_work_of_the_first_batch_of_each_validation(
    tmp_path: Path, records: Records, compiled: bool, batches: int
) -> None:
    """Each validation has it once, however many batches it has."""

    class Images(Extra):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(31 if batch_idx == 0 else 1):
                self.net(batch[0])

        def val_dataloader(self) -> Any:
            return DataLoader(ConcatDataset([self.train_dataloader().dataset] * 4), batch_size=4)

    model = Images(lambda *_: False, compiled)
    options: dict[str, Any] = {"limit_val_batches": batches, "val_check_interval": 4}
    trainer(tmp_path, Flops(peak_flops=1e9), logger=records, max_epochs=3, **options).fit(model)
    found = [value for _, value in records.of("validate/batch_flops")]
    assert found == pytest.approx([(1 + 30 / batches) * 4 * FORWARD] * 12, abs=1)


@pytest.mark.parametrize("every", [None, 10])
def test_extra_work_of_the_first_batch_of_each_epoch(tmp_path: Path, every: int | None) -> None:
    """Its FLOPs are those of the first batches, unless other batches do the same."""
    log = Known(schedule="1000ba")
    model = Extra(lambda _, batch_idx: batch_idx % every == 0 if every else batch_idx == 0)
    model.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        ConcatDataset([Small().train_dataloader().dataset] * 5), batch_size=4
    )
    trainer(tmp_path, log, Flops("1000ba", peak_flops=1e9), max_epochs=5).fit(model)
    extra = 20 * 4 * FORWARD
    expected = 4 * FLOPS_PER_SAMPLE + extra / (every or 80)
    assert log.mean == pytest.approx(expected, abs=extra / 400)  # one such batch of 400


class Scheduled(Small):
    """Runs as many further forwards in each batch as a function of its number says.

    Skips the batch after them if the function returns a negative number. With ``graph``, they are
    in autograd's graph.
    """

    def __init__(
        self, extra: Callable[[int], int], compiled: bool = False, graph: bool = False
    ) -> None:
        super().__init__()
        self.extra, self.batches, self.graph = extra, 0, graph
        if compiled:
            self.net.compile(backend="eager")

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        extra = self.extra(self.batches)
        with torch.set_grad_enabled(self.graph):
            for _ in range(abs(extra)):
                self.net(batch[0])
        return None if extra < 0 else super().training_step(batch, batch_idx)

    def cost(self, batch: int) -> int:
        """The FLOPs of a batch."""
        extra = self.extra(batch)
        return 4 * (abs(extra) * FORWARD + (extra >= 0) * FLOPS_PER_SAMPLE)


@pytest.mark.parametrize("compiled", [False, True])
def test_work_that_changes_with_the_epoch_is_found_at_once(tmp_path: Path, compiled: bool) -> None:
    """As in progressive resizing: three times the FLOPs in each second epoch."""
    known, model = Known("1000ba"), Scheduled(lambda n: 5 * 3 ** (n // 32), compiled)
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=8).fit(model)
    assert known.mean == pytest.approx(sum(map(model.cost, range(128))) / 128)


@pytest.mark.parametrize("compiled", [False, True])
def test_epochs_of_one_batch_are_checked_as_others_are(tmp_path: Path, compiled: bool) -> None:
    """Full-batch training: the first batch of each epoch is its only one."""
    model = Scheduled(lambda n: 20 * (n >= 40), compiled)
    found = counted(tmp_path, model, max_epochs=75, limit_train_batches=1)
    assert found["batch_flops"] == model.cost(74)


def test_validations_of_one_batch_are_checked_as_others_are(tmp_path: Path) -> None:
    """The first batch of each validation is its only one."""

    class Grows(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(20 if self.global_step > 40 else 1):
                self.net(batch[0])

    options = {"limit_train_batches": 1, "limit_val_batches": 1}
    found = counted(tmp_path, Grows(), max_epochs=75, **options)
    assert found["validate/batch_flops"] == 20 * 4 * FORWARD


def test_a_network_that_grows_in_each_epoch_is_followed(tmp_path: Path) -> None:
    """Each of six epochs of 48 batches has more layers; few batches of each are counted."""
    known, model = Known("1000ba"), Scheduled(lambda n: 3 * (n // 48), False)
    loader = DataLoader(TensorDataset(torch.ones(192, WIDTH), torch.ones(192, 1)), 4)
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=6).fit(model, loader)
    assert known.mean == pytest.approx(sum(map(model.cost, range(288))) / 288)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("first", [1, 20, 100])
def test_a_warm_up_of_skipped_batches_ends_nothing(
    tmp_path: Path, records: Records, first: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOPs are known from the second batch with a loss on, at the latest."""
    started: list[int] = []
    for name in ("FlopCounter", "in_child"):
        real = getattr(flop_meter, name)

        def counts(*args: Any, real: Any = real) -> Any:
            started.append(model.batches)
            return real(*args)

        monkeypatch.setattr(flop_meter, name, counts)
    known, model = Known("1000ba"), Scheduled(lambda n: -2 if n < first else 0, compiled)
    flops = Flops("1ba", peak_flops=1e9)
    trainer(tmp_path, known, flops, logger=records, max_epochs=10).fit(model)
    assert len([batch for batch in started if batch < first]) == min(first, 8)
    values = [value for _, value in records.of("batch_flops")]
    assert {known.mean, *values} == {4 * FLOPS_PER_SAMPLE}
    assert len(values) >= 160 - first - 1


def test_batches_with_a_loss_but_without_flops_give_one_warning(
    tmp_path: Path, records: Records
) -> None:
    """After the first ones, FLOPs are no longer counted."""

    class Scale(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return sum(each.sum() for each in self.parameters())

    with pytest.warns(PerfWarning, match="no FLOPs were found") as caught:
        trainer(tmp_path, Flops("1ba", peak_flops=1e9), logger=records).fit(Scale())
    assert len(ours(caught)) == 1
    assert not records.of("batch_flops")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Callable[[int], int], float]:
    """Further forwards by batch, in epochs of 16, and how many of them may be missed in all."""
    base, more, every = draw(st.integers(0, 9)), draw(st.integers(1, 30)), draw(st.integers(2, 10))
    start = draw(st.integers(1, 9))
    return draw(
        st.sampled_from(
            [
                (lambda n: base, 0),
                # Some cycles more or less: the first batches are the least typical ones.
                (lambda n: base + more * (n % every == every - 1), 7 * more),
                (lambda n: base + more * (n // 16 >= start), 0),
                (lambda n: base + more * (n // 16 // (3 + start)), 0),
                # Unknown until the next epoch begins.
                (lambda n: base + more * (n >= 16 * start + 5), 16 * more),
                (lambda n: -1 if n < 10 * start else base, 0),
            ]
        )
    )


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@given(schedule=schedules())
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_mean_of_a_run_is_right_for_any_schedule(
    tmp_path: Path, schedule: tuple[Callable[[int], int], float]
) -> None:
    """Constant, cyclic, changing at one or some epochs or within one, skipped at first."""
    extra, missed = schedule
    known, model = Known("1000ba"), Scheduled(extra)
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=10).fit(model)
    costs = [model.cost(n) for n in range(160) if extra(n) >= 0]
    error = missed * 4 * FORWARD / len(costs)
    assert known.mean == pytest.approx(sum(costs) / len(costs), abs=error + 1)


DRAWS = np.random.default_rng(0).random(600)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "heavy",
    [
        lambda n: n % 16 == 15,
        lambda n: n % 50 % 32 == 0,
        lambda n: DRAWS[n] < 0.1,
        lambda n: n >= 90,
    ],
    ids=["each 16th", "in epochs", "at random", "from batch 90 on"],
)
def test_batches_of_another_graph_have_a_cost_of_their_own(
    tmp_path: Path, heavy: Callable[[int], bool], compiled: bool
) -> None:
    """Some of each are counted, as of batches with a regularization or with layers left out."""
    known, model = Known("1000ba"), Scheduled(lambda n: 40 * heavy(n), compiled, graph=True)
    loader = DataLoader(TensorDataset(torch.ones(200, WIDTH), torch.ones(200, 1)), 4)
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=12).fit(model, loader)
    assert known.mean == pytest.approx(sum(map(model.cost, range(600))) / 600, rel=0.1)


@pytest.mark.parametrize(
    "extra", [lambda n: int(40 * DRAWS[n]), lambda n: n // 8], ids=["loops", "grows"]
)
def test_few_batches_are_counted_if_each_builds_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: Callable[[int], int]
) -> None:
    """As of a network that loops or grows: one batch in 20 at most, others cost as similar ones."""
    started: list[None] = []
    real = FlopCounter

    def counter() -> FlopCounter:
        started.append(None)
        return real()

    monkeypatch.setattr("lightning_perf.run.flop_meter.FlopCounter", counter)
    known, model = Known("1000ba"), Scheduled(extra, graph=True)
    loader = DataLoader(TensorDataset(torch.ones(2400, WIDTH), torch.ones(2400, 1)), 4)
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=1).fit(model, loader)
    assert len(started) <= 30 + 600 / 20
    assert known.mean == pytest.approx(sum(map(model.cost, range(600))) / 600, rel=0.15)


def test_work_that_is_added_later_is_found(tmp_path: Path) -> None:
    """One batch in some hundred is counted again, so that a later cost replaces the first one."""
    model = Extra(lambda module, _: module.current_epoch >= 14)
    found = counted(tmp_path, model, max_epochs=30)
    assert found["batch_flops"] == 4 * FLOPS_PER_SAMPLE + 20 * 4 * FORWARD


def long_epoch() -> Any:
    """160 batches in one epoch."""
    return DataLoader(ConcatDataset([Small().train_dataloader().dataset] * 10), batch_size=4)


@pytest.mark.parametrize("compiled", [False, True])
def test_work_that_is_added_within_an_epoch_is_found(tmp_path: Path, compiled: bool) -> None:
    """As in a GAN whose discriminator starts late: without an epoch's start or a validation."""
    model = Extra(lambda _, batch_idx: batch_idx >= 50, compiled)
    model.train_dataloader = long_epoch  # type: ignore[method-assign]
    found = counted(tmp_path, model)
    assert found["batch_flops"] == 4 * FLOPS_PER_SAMPLE + 20 * 4 * FORWARD


def test_a_network_that_is_trained_late_and_rarely_is_found(tmp_path: Path) -> None:
    """With each tenth batch from batch 100 on; with manual optimization checks are frequent."""

    class Late(Critic):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.first = 9 if self.batches >= 100 else -1
            super().training_step(batch, batch_idx)

    model, known = Late(10, 9), Known("10000ba")
    model.train_dataloader = long_epoch  # type: ignore[method-assign]
    trainer(tmp_path, known, Flops("10000ba", peak_flops=1e9), max_epochs=3).fit(model)
    # 38 of 480 batches train it, of which the first two are not counted.
    assert known.mean == pytest.approx(4 * FLOPS_PER_SAMPLE * (480 + 38 - 2) / 480)


def test_layers_that_are_unfrozen_within_an_epoch_are_found(tmp_path: Path) -> None:
    """Their gradients count from the next batch on that is counted again."""

    class Unfreezes(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx >= 50)

    model = Unfreezes()
    model.train_dataloader = long_epoch  # type: ignore[method-assign]
    assert counted(tmp_path, model)["batch_flops"] == 4 * FLOPS_PER_SAMPLE


def counted_batches(batches: int, cost: Callable[[int], int]) -> tuple[int, float]:
    """How many batches of one shape are counted, and the sum of the costs divided by the true one.

    ``cost`` is that of each batch.
    """
    cache, number, total = FlopCache(8), 0, 0
    for batch in range(batches):
        counts = Counts(model={"float32": cost(batch)})
        if cache.cost(()) is None:
            number += 1
            cache.store((), BatchCost(total=cache.count((), counts).model_flops))
            total += cost(batch)
        else:
            total += cache.costs[()].total
    return number, total / sum(map(cost, range(batches)))


@pytest.mark.parametrize(
    ("cost", "most", "error"),
    [
        (lambda batch: 100, 12 + 10 + 50, 0),
        (lambda batch: 100 * (1 + (batch >= 3000)), 24 + 13 + 50, 0.02),
        (lambda batch: 100 * (1 + (batch < 24)), 32 + 10 + 50, 0.01),
        (lambda batch: 1000 + batch, 64 + 10_000 / 20, 0.02),
        (lambda batch: 1000 + batch // 30, 64 + 10_000 / 20, 0.02),
        (lambda batch: 1000 + hash((batch, 7)) % 1000, 10_000 / 40, 0.05),
        (lambda batch: 1000 * (1 + (batch % 5 == 0)), 32 + 10 + 50, 0.01),
    ],
    ids=["constant", "changes once", "warms up", "grows", "grows slowly", "random", "each fifth"],
)
def test_work_that_changes_is_followed_at_a_bounded_cost(
    cost: Callable[[int], int], most: int, error: float
) -> None:
    """Of 10,000 batches, one in 200 is counted, and one in 20 if the work changes all the time."""
    number, ratio = counted_batches(10_000, cost)
    assert number <= most
    assert ratio == pytest.approx(1, abs=error)


@pytest.mark.parametrize("low", [0.1, 0.5])
def test_the_mean_of_random_work_gets_better_in_a_long_run(low: float) -> None:
    """Checks are added to the counts: over ten seeds, the error is small in the last tenth."""

    def error(seed: int) -> float:
        draws = np.random.default_rng(seed).random(10_000)
        cache, found, true = FlopCache(8), 0.0, 0
        for batch, draw in enumerate(draws):
            cost = 100_000 if draw < low else 1_000_000
            if cache.cost(()) is None:
                mean = cache.count((), Counts(model={"": cost})).model_flops
                cache.store((), BatchCost(total=mean))
            if batch >= 9000:
                true += cost
                found += cache.costs[()].total
        return abs(found / true - 1)

    errors = [error(seed) for seed in range(10)]
    assert np.mean(errors) < 0.05
    assert max(errors) < 0.15


def test_a_mix_of_costs_that_changes_is_followed() -> None:
    """Each cost was seen before, but in another proportion: the checks differ from the mean."""
    draws = np.random.default_rng(0).random(4000)
    cache = FlopCache(8)
    for batch, draw in enumerate(draws):
        if cache.cost(()) is None:
            cost = 8000 if draw < (0.2 if batch < 1000 else 0.9) else 1000
            mean = cache.count((), Counts(model={"": cost})).model_flops
            cache.store((), BatchCost(total=mean))
    assert cache.costs[()].total == pytest.approx(8000 * 0.9 + 1000 * 0.1, rel=0.15)


def test_random_work_is_said_to_be_a_rough_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the error of the mean."""
    draws = np.random.default_rng(0).integers(0, 30, 160)
    texts: list[str] = []
    monkeypatch.setattr("lightning_perf.run.compat.rank_zero_info", texts.append)
    counted(tmp_path, Scheduled(lambda n: int(draws[n])), max_epochs=10)
    (found,) = (text for text in texts if "equal shape differ" in text)
    assert re.search(r"known to about \d+%", found)


@pytest.mark.parametrize(("start", "said"), [(50, True), (1000, False)])
def test_work_that_starts_late_is_said_to_be_known_roughly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, said: bool
) -> None:
    """Batches between two counts had the one cost or the other."""
    model = Extra(lambda _, batch_idx: batch_idx >= start, compiled=False)
    model.train_dataloader = long_epoch  # type: ignore[method-assign]
    texts: list[str] = []
    monkeypatch.setattr("lightning_perf.run.compat.rank_zero_info", texts.append)
    counted(tmp_path, model)
    assert any("equal shape differ" in text for text in texts) == said


def sparsely_counted(batches: int, every: int, cost: Callable[[int], int]) -> tuple[float, float]:
    """The relative error of the sum of all costs, and the one that is said.

    After the second count there is time for one in so many batches.
    """
    cache, latest, total = FlopCache(8), 0, 0
    for batch in range(batches):
        due = cache.cost(()) is None
        if due and cache.counted > 1 and batch < latest + every:
            cache.refuse(())
        elif due:
            latest = batch
            mean = cache.count((), Counts(model={"": cost(batch)})).model_flops
            cache.store((), BatchCost(total=mean))
        total += cost(batch) if batch == latest else cache.costs[()].total
    return total / sum(map(cost, range(batches))) - 1, cache.error


@pytest.mark.parametrize(
    ("cost", "most", "said"),
    [
        (lambda batch: 100, 0, 0),
        (lambda batch: 100 + 50 * (batch == 0), 0.001, 0),
        (lambda batch: 100 * (1 + 9 * (batch >= 3000)), 0.02, 0.02),
        (lambda batch: 100 * (1 + 27 * (batch % 2)), 0.1, 0.15),
        (lambda batch: 100 * (1 + 27 * (batch % 10 == 0)), 0.3, 0.4),
        (lambda batch: 1000 + batch, 0.02, 0.01),
    ],
    ids=["constant", "first", "changes once", "each other", "each tenth", "grows"],
)
def test_sparse_counts_follow_the_work_and_their_error_is_said(
    cost: Callable[[int], int], most: int, said: float
) -> None:
    """Each of about 100 counts holds until the next one."""
    off, error = sparsely_counted(10_000, 80, cost)
    assert abs(off) <= most
    assert said / 2 <= error <= said


@pytest.mark.parametrize("low", [0.1, 0.5])
def test_the_error_that_sparse_counts_say_is_the_usual_one(low: float) -> None:
    """Over forty seeds, of work at random."""
    found = []
    for seed in range(40):
        draws = np.random.default_rng(seed).random(4000)
        found.append(
            sparsely_counted(4000, 80, lambda n: 1000 if draws[n] < low else 100)  # noqa: B023
        )
    off, said = np.array(found).T
    assert abs(off.mean()) < 0.1
    assert (said**2).mean() ** 0.5 == pytest.approx((off**2).mean() ** 0.5, rel=0.5)


@pytest.mark.parametrize("kind", ["equal", "once", "at random"])
def test_a_compiled_module_whose_work_differs_is_said_to_be_known_roughly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """There is no time for most of its counts: a change is found late, the rest is a warning."""
    latest = [0]
    draws = np.random.default_rng(0).integers(0, 2, 1200)
    extras = {"equal": lambda n: 0, "once": lambda n: 9 * (n >= 100)}
    model = Scheduled(extras.get(kind, lambda n: 9 * int(draws[n])), compiled=True)
    rows = ConcatDataset([model.train_dataloader().dataset] * 75)

    def spent(_: Any, cache: FlopCache) -> bool:
        refused = cache.counted > 1 and cache.batches < latest[0] + 80
        latest[0] = latest[0] if refused else cache.batches
        return refused

    monkeypatch.setattr(flop_meter.FlopMeter, "_shadow_spent", spent)
    known, texts = Known("1000ba"), list[str]()
    monkeypatch.setattr("lightning_perf.run.compat.rank_zero_info", texts.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=1).fit(
            model, DataLoader(rows, batch_size=4)
        )
    assert [bool(re.search(r"known to about \d+%", text)) for text in ours(caught)] == [
        True for _ in range(kind == "at random")
    ]
    assert any("equal shape differ" in text for text in texts) == (kind == "once")
    mean = sum(map(model.cost, range(1200))) / 1200
    assert known.mean == pytest.approx(mean, rel={"equal": 0, "once": 0.1}.get(kind, 0.5))


@pytest.mark.parametrize("batches", range(100, 1000, 97))
def test_few_batches_have_another_cost_unnoticed(batches: int) -> None:
    """At most as long as until the first checks, or a fourth of the run."""
    for start in range(30, batches, 10):
        _, ratio = counted_batches(batches, lambda batch: 100 + 100 * (batch >= start))  # noqa: B023
        unnoticed = max(45, 0.25 * batches)
        assert ratio > 1 - unnoticed / (2 * batches - start) - 0.01


@pytest.mark.parametrize("kind", ["hardware", "hidden"])
def test_changes_of_recomputation_or_masks_are_followed(kind: str) -> None:
    """The model's own FLOPs stay the same, those of HFU or of the causal MFU change."""
    cache, latest = FlopCache(8), {}
    for batch in range(200):
        if cache.cost(()) is None:
            other: dict[str, Any] = {kind: {"float32": 100 if batch < 100 else 125}}
            latest = getattr(cache.count((), Counts(model={"float32": 100}, **other)), kind)
            cache.store((), BatchCost())
    assert latest == {"float32": 125}


def test_work_that_grows_all_the_time_is_followed() -> None:
    """Many counts at its start do not keep later ones from being made."""
    cache, counted = FlopCache(8), []
    for batch in range(2000):
        if cache.cost(()) is None:
            counted.append(batch)
            cost = cache.count((), Counts(model={"": 1 + batch // 10})).model_flops
            cache.store((), BatchCost(total=cost))
    assert max(np.diff(counted)) <= 41
    assert len(counted) < 64 + 2000 / 20


def test_a_check_counts_one_of_the_next_batches() -> None:
    """It is asked for when batches take another time than before."""
    cache, counted = FlopCache(8), []
    for batch in range(160):
        if batch == 150:
            cache.check()
        if cache.cost(()) is None:
            counted.append(batch)
            cache.store((), BatchCost(total=cache.count((), Counts(model={"": 1})).model_flops))
    assert 150 in counted


class Repeats(torch.optim.SGD):
    """Runs its closure as often as a function of the number of its step says."""

    def __init__(self, parameters: Any, times: Callable[[int], int]) -> None:
        super().__init__(parameters, lr=0.0)
        self.times, self.steps = times, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return [closure() for _ in range(self.times(self.steps))][-1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("times", [lambda _: 3, lambda step: max(20 - step // 4, 2)])
def test_closures_count_as_often_as_they_run(
    tmp_path: Path, compiled: bool, manual: bool, times: Callable[[int], int]
) -> None:
    """In each batch, counted or not: L-BFGS needs fewer and fewer runs of its closure."""

    class Closures(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            if compiled:
                self.net.compile(backend="eager")

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            step = super().training_step
            if not manual:
                return step(batch, batch_idx)
            closure = lambda: self.manual_backward(step(batch, batch_idx))  # noqa: E731
            return self.optimizers().step(closure=closure)

        def configure_optimizers(self) -> Any:
            return Repeats(self.parameters(), times)

    known = Known("1000ba")
    trainer(tmp_path, known, Flops("1000ba", peak_flops=1e9), max_epochs=5).fit(Closures())
    assert known.mean == pytest.approx(4 * FLOPS_PER_SAMPLE * sum(map(times, range(1, 81))) / 80)


@pytest.mark.parametrize("compiled", [False, True])
def test_validation_loaders_of_one_shape_have_their_own_flops(
    tmp_path: Path, compiled: bool
) -> None:
    """The step of the second loader runs ten forwards."""

    class Two(Small):
        def __init__(self) -> None:
            super().__init__()
            if compiled:
                self.net.compile(backend="eager")

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            for _ in range(10 if dataloader_idx else 1):
                self.net(batch[0])

        def val_dataloader(self) -> Any:
            return [self.train_dataloader(), self.train_dataloader()]

    flops = Flops("1000ba", peak_flops=1e9)
    trainer(tmp_path, flops, limit_val_batches=10).validate(Two())
    # Of 10 batches each, the very first one was reported alone.
    assert flops.metrics["validate/batch_flops"] == pytest.approx(109 / 19 * 4 * FORWARD)


def test_batches_that_are_counted_are_part_of_the_mean(tmp_path: Path) -> None:
    """Those of a rare shape are counted, and not timed, but their FLOPs are known."""
    log = Known(schedule="1000ba")
    model, data = Small(), Small().train_dataloader().dataset
    model.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        data, batch_sampler=[range(n) for n in (2, 4, 4, 4, 32, 4, 4)]
    )
    trainer(tmp_path, log, Flops("1000ba", peak_flops=1e9)).fit(model)
    assert log.mean == pytest.approx(54 / 7 * FLOPS_PER_SAMPLE)


class Dump(PerfCallback):
    """Writes the metrics of Flops to one file per rank."""

    def __init__(self, folder: Path, flops: Flops) -> None:
        super().__init__()
        self.folder, self.flops = folder, flops

    def close(self, context: Any, reason: str) -> None:
        path = self.folder / f"rank{context.ranks.global_rank}.json"
        path.write_text(json.dumps(self.flops.metrics))


class Sharded(Small):
    """Both layers sharded over two ranks."""

    def configure_model(self) -> None:
        if not hasattr(self, "done"):
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.done = True


class TensorParallel(Small):
    """The hidden units split over two ranks."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def train_sharded(folder: Path) -> None:
    """Train each sharded model, one after the other, and write what the ranks report to files."""
    warnings.simplefilter("ignore")
    for model, sizes in ((Sharded, (2, 1)), (TensorParallel, (1, 2))):
        flops = Flops(peak_flops=1e9)
        (folder / model.__name__).mkdir(exist_ok=True)
        callbacks = (flops, Dump(folder / model.__name__, flops))
        strategy = strategies.ModelParallelStrategy(*sizes)
        trainer(folder, *callbacks, devices=2, strategy=strategy).fit(model())


@needs_model_parallel
def test_sharded_models_are_counted_by_the_work_of_each_rank(
    fork_server: Any, tmp_path: Path
) -> None:
    """Sharding parameters changes no FLOPs; splitting the units halves each rank's."""
    fork_server.ranks(tmp_path, 2, train_sharded, tmp_path)
    for model, batches in (("Sharded", 2), ("TensorParallel", 1)):
        for rank in (0, 1):
            found = json.loads((tmp_path / model / f"rank{rank}.json").read_text())
            assert found["batch_flops"] == batches * 4 * FLOPS_PER_SAMPLE, (model, rank)


@pytest.mark.parametrize("place", ["before", "within torch"])
def test_an_interruption_leaves_no_counter_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C while the counter stops: all later operators of the process would be counted."""
    owner, name = {
        "before": (FlopCounter, "end"), "within torch": (_python_dispatch, "_pop_mode"),
    }[place]  # fmt: skip
    original: Any = getattr(owner, name)

    def interrupt(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise KeyboardInterrupt

    class Interrupted(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 1:
                monkeypatch.setattr(owner, name, interrupt)
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, Flops(peak_flops=1e9))
    with interrupted():
        run.fit(Interrupted())
    assert current_mode() is None
