"""Detection of compiled modules, for all ways to compile one."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from lightning_perf.flops import is_compiled


def compiled(function):
    return torch.compile(function, backend="eager")


class Decorated(nn.Linear):
    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


class Helped(nn.Linear):
    @staticmethod
    @torch.compile(backend="eager")
    def helper(x):
        return x


def by_call():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


def by_attribute():
    module = nn.Linear(2, 2)
    module.step = compiled(module.forward)
    return module


def by_lightning():
    module = nn.Linear(2, 2)
    module._compiler_ctx = {"compiler": "dynamo"}
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled(nn.Linear(2, 2)),
        by_call,
        by_attribute,
        by_lightning,
        lambda: Decorated(2, 2),
        lambda: Helped(2, 2),
    ],
)
def test_each_way_is_detected_at_any_depth(make):
    """A compiled module is detected alone and as a submodule."""
    assert is_compiled(make())
    assert is_compiled(nn.Sequential(nn.ReLU(), nn.Sequential(make())))


def test_plain_modules_are_not_compiled():
    """Modules that are not compiled are not detected, whatever their attributes return."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.proxy, module.settings = MagicMock(), SimpleNamespace(_torchdynamo_orig_callable=1)
    module._compiler_ctx = None
    assert not is_compiled(module)


def test_the_compiler_is_not_imported():
    """Detection does not import torch's compiler, which takes a second."""
    code = (
        "import sys; from torch import nn; from lightning_perf.flops import is_compiled; "
        "assert not is_compiled(nn.Linear(2, 2)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
