"""Sequences of different batches: counted, predicted or excluded."""

from __future__ import annotations

import random
import threading
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, HIDDEN, WIDTH, Records, Small, ours, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_perf import Flops, PerfWarning, SpeedMonitor
from lightning_perf.flops import FlopCounter
from lightning_perf.flops.cache import MOST_COUNTED
from lightning_perf.run import flop_meter

FORWARD = 2 * (WIDTH * HIDDEN + HIDDEN)


def rows(*sizes: int) -> list[Tensor]:
    """A batch for `Small` of each size."""
    return [torch.ones(size, WIDTH) for size in sizes]


class Fed(Small):
    """Trains on given batches, with a function that finds the tensor."""

    def __init__(self, batches: Any, find: Any = lambda batch: batch) -> None:
        super().__init__()
        self.batches, self.find = batches, find

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.find(batch)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.net(self.find(batch))

    def loader(self) -> Any:
        batches = self.batches
        return DataLoader(batches, batch_size=None) if isinstance(batches, list) else batches

    train_dataloader = loader


def reported(folder: Path, model: Fed, *callbacks: Any, **options: Any) -> Records:
    """The logged metrics of a training, without warnings of ours."""
    records = Records()
    flops = Flops(schedule="1ba", peak_flops=1e12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(folder, flops, SpeedMonitor(2), *callbacks, logger=records, **options).fit(model)
    assert not [text for text in ours(caught) if "cannot count the samples" not in text]
    return records


def counted(folder: Path, model: Fed, **options: Any) -> list[float]:
    return [value for _, value in reported(folder, model, **options).of("batch_flops")]


@pytest.mark.parametrize("kind", [dict, list], ids=["dict", "list"])
def test_an_exhausted_loader_gives_none(tmp_path: Path, kind: Any) -> None:
    """CombinedLoader("max_size") replaces one part by None in the middle of an epoch."""
    long, short = DataLoader(rows(2, 2, 3, 3), None), DataLoader(rows(2, 2), None)
    loaders = {"a": short, "b": long}
    combined = CombinedLoader(loaders if kind is dict else list(loaders.values()), "max_size")

    def find(batch: Any) -> Tensor:
        a, b = batch.values() if isinstance(batch, dict) else batch
        return b if a is None else torch.cat([a, b])

    assert counted(tmp_path, Fed(combined, find)) == [n * FLOPS_PER_SAMPLE for n in (4, 4, 3, 3)]


def test_validation_loaders_of_two_kinds(tmp_path: Path) -> None:
    """Loaders of tensors, of mappings and of both are counted, over two epochs."""

    class TwoLoaders(Fed):
        def val_dataloader(self) -> Any:
            first, second = rows(2, 2), rows(3, 3)
            return [
                DataLoader([(x, x) for x in first], None),
                DataLoader([{"x": x, "label": None} for x in second], None),
                DataLoader([({"x": x}, "a") for x in first], None),
            ]

    def find(batch: Any) -> Tensor:
        first = batch if isinstance(batch, dict) else batch[0]
        return first["x"] if isinstance(first, dict) else first

    model = TwoLoaders([(x, 1) for x in rows(2, 2)], find)
    records = reported(tmp_path, model, limit_val_batches=1.0, max_epochs=2)
    values = [value for _, value in records.of("validate/batch_flops")]
    # Each is the mean of the batches since the last report.
    assert all(2 * FORWARD <= value <= 3 * FORWARD for value in values)
    assert len(values) >= 2


@dataclass
class Sample:
    x: Tensor
    name: str = ""


class Box:
    """A batch of a custom class, which can be moved to a device."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x}

    def to(self, device: Any, **_: Any) -> Box:
        return Box(self.store["x"].to(device))


def test_each_batch_in_another_container(tmp_path: Path) -> None:
    """Batches in changing containers always have their own FLOPs."""
    one, two, three = rows(1, 2, 3)
    batches = [
        [one, one], [None, two], (two, 3), ("a", [three, None]), {"x": one, "y": None}, two,
        {"y": "a", "x": {"z": three}}, [[[two]]], Sample(three), [1, Box(one)], (three, three),
    ]  # fmt: skip

    def find(batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            parts = batch if isinstance(batch, list | tuple) else None
            if parts is None:
                parts = list((batch if isinstance(batch, dict) else vars(batch)).values())
            batch = next(one for one in parts if not isinstance(one, int | str | None))
        return batch

    expected = [1, 2, 2, 3, 1, 2, 3, 2, 3, 1, 3]
    assert counted(tmp_path, Fed(batches, find)) == [n * FLOPS_PER_SAMPLE for n in expected]


def test_batches_that_cannot_be_inspected_have_no_stale_flops(tmp_path: Path) -> None:
    """Such batches are counted up to a limit, then excluded with one warning."""

    class Sealed:
        """Hides its tensor in an iterator."""

        def __init__(self, x: Tensor) -> None:
            self.get = iter([x])

    sizes = [1 + n % 7 for n in range(MOST_COUNTED + 20)]
    model = Fed([Sealed(x) for x in rows(*sizes)], lambda sealed: next(sealed.get))
    records, flops = Records(), Flops(schedule="1ba", peak_flops=1e12)
    model.get_num_samples_in_batch = lambda batch: 1  # type: ignore[assignment]
    with pytest.warns(PerfWarning, match="flops_per_batch") as caught:
        trainer(tmp_path, flops, logger=records).fit(model)
    values = [value for _, value in records.of("batch_flops")]
    assert values == [n * FLOPS_PER_SAMPLE for n in sizes[:MOST_COUNTED]]
    assert len(ours(caught)) == 1


class Broken(UserDict[str, Tensor]):
    """A batch that raises when it is inspected."""

    def values(self) -> Any:
        raise RuntimeError("planted")


def test_a_batch_that_raises_when_it_is_accessed_is_counted(tmp_path: Path) -> None:
    """What it stores is read without its methods."""
    batches = [Broken(x=x) for x in rows(4, 2)]
    expected = [4 * FLOPS_PER_SAMPLE, 2 * FLOPS_PER_SAMPLE]
    assert counted(tmp_path, Fed(batches, lambda batch: batch["x"])) == expected


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_steps_that_fetch_their_batches(tmp_path: Path) -> None:
    """With training_step(self, dataloader_iter), no batch gets the FLOPs of another."""

    class Taking(Fed):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    sizes = [1 + n % 5 for n in range(MOST_COUNTED + 20)]
    records, flops = Records(), Flops(schedule="1ba", peak_flops=1e12)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer(tmp_path, flops, logger=records).fit(Taking(rows(*sizes)))
    values = [value for _, value in records.of("batch_flops")]
    assert values == [n * FLOPS_PER_SAMPLE for n in sizes[: len(values)]]
    assert 20 < len(values) <= MOST_COUNTED


class Graph:
    """A batch of nodes and edges, as in graph libraries."""

    def __init__(self, nodes: Tensor, edges: Tensor) -> None:
        self.nodes, self.edges = nodes, edges

    def to(self, device: Any, **_: Any) -> Graph:
        return Graph(self.nodes.to(device), self.edges.to(device))


def test_graphs_of_any_size_are_predicted(tmp_path: Path) -> None:
    """300 graphs with any number of nodes and edges: few of them are counted, at the edges."""

    class Passing(Fed):
        def __init__(self, graphs: list[Graph]) -> None:
            super().__init__(graphs)
            self.nodes, self.edges = nn.Linear(4, 8), nn.Linear(8, 8)

        def training_step(self, graph: Graph, batch_idx: int) -> Tensor:
            x, (source, target) = self.nodes(graph.nodes), graph.edges
            messages = self.edges(x[source]).relu()
            return torch.zeros_like(x).index_add(0, target, messages).square().mean()

    draw = random.Random(0)
    sizes = [(draw.randrange(2, 50), draw.randrange(1, 200)) for _ in range(300)]
    graphs = [Graph(torch.randn(n, 4), torch.randint(n, (2, e))) for n, e in sizes]
    records = reported(tmp_path, Passing(graphs))
    # Nodes: forward and weights. Edges: also the gradient of the data.
    expected = [2 * (2 * n * 4 * 8 + 3 * e * 8 * 8) for n, e in sizes]
    found = dict(records.of("batch_flops"))
    assert all(value == pytest.approx(expected[step], 1e-3) for step, value in found.items())
    assert len(found) >= 300 - 2
    assert len(records.of("mfu")) >= 300 - 16 - 4


def test_lengths_beyond_the_counted_ones_are_not_predicted(tmp_path: Path) -> None:
    """A model that truncates its input is never charged for what it leaves out."""

    class Truncating(Fed):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch[:64]).square().mean()

    draw = random.Random(0)
    short = [draw.randrange(8, 58) for _ in range(120)]
    lengths = [n if i % 20 != 19 else draw.randrange(200, 250) for i, n in enumerate(short)]
    records = reported(tmp_path, Truncating(rows(*lengths)))
    found = records.of("batch_flops")[1:]
    assert found == [(i, min(lengths[i], 64) * FLOPS_PER_SAMPLE) for i, _ in found]
    assert len(found) == 120 - 1


def test_optimizers_of_other_threads_do_not_pause_a_count() -> None:
    """Torch calls the hooks of optimizers for those of all threads."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.zero_grad()
    layer(torch.ones(2, 4)).sum().backward()
    seen: list[bool] = []
    counter = FlopCounter()
    counting = flop_meter._Counting(counter)
    try:
        optimizer.register_step_pre_hook(lambda *_: seen.append(counter.paused))
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        optimizer.step()
    finally:
        counting.close()
    assert seen == [False, True]
    assert not counter.paused
