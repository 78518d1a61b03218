"""Lightning inspects the signature of a step of training once; it gets the same arguments."""

from __future__ import annotations

from collections import OrderedDict
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from helpers.small import Small, trainer
from lightning.pytorch.loops import training_epoch_loop
from torch import Tensor

from lightning_perf import Flops
from lightning_perf.patches import MethodPatch


def doubled(step: Any) -> Any:
    @wraps(step)
    def wrapper(*args: Any) -> Tensor:
        return step(*args) * 2

    return wrapper


def without_number(module: Small, batch: list[Tensor]) -> Tensor:
    return Small.training_step(module, batch, 0)


class BatchOnly(Small):
    def training_step(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


class OtherName(Small):
    def training_step(self, batch: list[Tensor], number: int) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, number)


class AnyNumber(Small):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class Decorated(Small):
    training_step = doubled(Small.training_step)


class Replaced(Small):
    """Gets another step after five batches, which does not take the batch's number."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.training_step = MethodType(without_number, self)  # type: ignore[method-assign, assignment]


def count_inspections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the loop of training inspects from now on."""
    inspected = []
    inspect = training_epoch_loop.is_param_in_hook_signature

    def count(*args: Any, **kwargs: Any) -> bool:
        inspected.append(args)
        return inspect(*args, **kwargs)

    monkeypatch.setattr(training_epoch_loop, "is_param_in_hook_signature", count)
    return inspected


@pytest.mark.parametrize(
    ("kind", "functions"),
    [(BatchOnly, 1), (OtherName, 1), (AnyNumber, 1), (Decorated, 1), (Replaced, 2)],
)
def test_each_function_is_inspected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Small], functions: int
) -> None:
    """A step is called with the same arguments in every batch, and inspected once per function."""
    inspected, calls = count_inspections(monkeypatch), []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def on_before_zero_grad(self, optimizer: Any) -> None:
            calls.append(self.trainer.fit_loop.epoch_loop.batch_idx)

    fit = trainer(tmp_path, Flops(), max_epochs=1)
    fit.fit(Watched())
    assert len(calls) == 16
    assert len(inspected) == functions
    assert not isinstance(fit.fit_loop.epoch_loop._build_kwargs, MethodPatch)


class Marked(training_epoch_loop._TrainingEpochLoop):
    """Another project's loop, which gives its steps a batch of its own."""

    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> Any:
        return super()._build_kwargs(kwargs, [batch[0] + batch_idx, batch[1]], batch_idx)


def test_the_loop_of_another_project_is_left_alone(tmp_path: Path) -> None:
    """A loop that makes the arguments itself makes them in every batch."""
    losses: dict[bool, list[float]] = {True: [], False: []}

    class Watched(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            losses[ours].append(float(batch[0].sum()))
            return super().training_step(batch, batch_idx)

    for ours in (True, False):
        fit = trainer(tmp_path, *([Flops()] if ours else []), max_epochs=1)
        fit.fit_loop.epoch_loop = Marked(fit)
        fit.fit(Watched())
    assert len(losses[True]) == 16
    assert losses[True] == losses[False]
