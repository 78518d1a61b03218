"""Measuring a device: a plausible rate, once, without a trace."""

import pytest
import torch

from lightning_perf.flops import measure, measure_peak

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(measure, "_measured", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cpu_has_a_rate(dtype):
    """Any machine that runs this does between a megaflop and a petaflop a second."""
    rate = measure_peak(dtype, CPU, budget_seconds=0.02)
    assert rate is not None
    assert 1e6 < rate < 1e15


def test_it_is_measured_once_a_process():
    """A second question is answered from memory, whatever the budget."""
    first = measure_peak(torch.float32, CPU, budget_seconds=0.01)
    assert measure_peak(torch.float32, torch.device("cpu"), budget_seconds=60) == first


def test_it_leaves_no_trace():
    """Random numbers, gradients and autocast are as they were, and do not change what is timed."""
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        measure_peak(torch.float32, CPU, budget_seconds=0.01)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dtype_without_a_product():
    """A dtype that the device cannot multiply has no peak, which is no error."""
    assert measure_peak(torch.bool, CPU, budget_seconds=0.01) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_on_the_device():
    """The measured rate is near the table's: an enqueue time would be far above it."""
    device = torch.device("cuda", 0)
    rate = measure_peak(torch.float16, device)
    assert rate is not None
    assert 1e12 < rate < 3e15
