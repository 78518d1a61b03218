"""PINA: tensors of its own class, which torch's FLOP counter does not let it construct."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from comparison import logged, train_alike
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_perf import PyTorch, always_on

pytest.importorskip("pina")
ROWS, WIDTH = 20, 16


def test_a_physics_informed_network_trains_as_without_us(tmp_path: Path) -> None:
    """Derivatives by the inputs in the loss: same weights, and more FLOPs than two layers take."""
    from pina import Condition, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation, FixedValue
    from pina.model import FeedForward
    from pina.operator import laplacian
    from pina.problem import SpatialProblem
    from pina.solver import PINN

    square, edge = CartesianDomain({"x": [0, 1], "y": [0, 1]}), {"x": [0, 1], "y": 0}

    class Poisson(SpatialProblem):
        output_variables: ClassVar = ["u"]
        spatial_domain = square
        domains: ClassVar = {"inside": square, "edge": CartesianDomain(edge)}
        conditions: ClassVar = {
            "inside": Condition(domain="inside", equation=Equation(lambda x, u: laplacian(u, x))),
            "edge": Condition(domain="edge", equation=FixedValue(1.0)),
        }

    def train(**options: Any) -> nn.Module:
        problem = Poisson()
        problem.discretise_domain(80, "random", domains=["inside", "edge"])
        model = FeedForward(input_dimensions=2, output_dimensions=1, layers=[WIDTH])
        solver = PINN(problem=problem, model=model)
        Trainer(solver, max_epochs=3, batch_size=ROWS, **options).train()
        return solver

    weights, random = train_alike(train, tmp_path, [])
    callbacks = [always_on(show_summary=False), PyTorch(schedule="at 3ba for 2ba")]
    found, after = train_alike(train, tmp_path, callbacks, CSVLogger(tmp_path))
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert torch.equal(after, random)
    assert logged(tmp_path)["batch_flops"] > 2 * 3 * 2 * ROWS * (2 + 1) * WIDTH
