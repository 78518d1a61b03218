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


class Machine:
    """A made-up device: small products are slow to launch, and some calls stall."""

    RATE, LAUNCH, STALL = 100e9, 1e-4, 0.5

    def __init__(self, monkeypatch, stalls=lambda call: False):
        self.calls, self.seconds, self.sizes, self.stalls = 0, 0.0, [], stalls
        monkeypatch.setattr(measure, "_product", lambda size, *_: size)
        monkeypatch.setattr(measure, "_seconds", self.time)

    def time(self, size, _device):
        self.calls += 1
        self.sizes.append(size)
        seconds = self.LAUNCH + 2 * size**3 / self.RATE
        self.seconds += seconds
        return seconds + self.STALL * self.stalls(self.calls)


@pytest.mark.parametrize(
    "stalls",
    [
        lambda call: False,
        lambda call: call in (1, 2, 3),
        lambda call: call % 2,
        lambda call: call % 5,
    ],
    ids=["never", "at first", "every other", "four of five"],
)
def test_a_stall_decides_nothing(monkeypatch, stalls):
    """However often a call is held up, the peak is found within two percent and in bounded time."""
    machine = Machine(monkeypatch, stalls)
    assert measure_peak(torch.float32, CPU) == pytest.approx(machine.RATE, rel=0.02)
    assert machine.seconds < 3


def test_the_search_ends_where_nothing_improves(monkeypatch):
    """On a device that is as fast with small products, large ones are never tried."""
    monkeypatch.setattr(Machine, "LAUNCH", 0.0)
    machine = Machine(monkeypatch)
    assert measure_peak(torch.float32, CPU) == pytest.approx(machine.RATE)
    assert max(machine.sizes) == 512
    assert machine.seconds < 0.4


def test_a_slow_device_costs_no_more_than_the_budget(monkeypatch):
    """A size that would not fit into the time left is not begun."""
    monkeypatch.setattr(Machine, "RATE", 1e9)
    machine = Machine(monkeypatch)
    assert measure_peak(torch.float32, CPU, budget_seconds=1.0) == pytest.approx(1e9, rel=0.05)
    assert machine.seconds < 1


def test_measuring_again_keeps_the_larger(monkeypatch):
    """A second measurement can only raise the peak, and a failing one leaves it."""
    rates = iter([3e9, 7e9, 5e9])
    monkeypatch.setattr(measure, "_best_rate", lambda *_: next(rates))
    found = [measure_peak(torch.float32, CPU, again=again) for again in (False, True, True, False)]
    assert found == [3e9, 7e9, 7e9, 7e9]

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "_best_rate", fail)
    assert measure_peak(torch.float32, CPU, again=True) == 7e9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_on_the_device():
    """The measured rate is near the table's: an enqueue time would be far above it."""
    device = torch.device("cuda", 0)
    rate = measure_peak(torch.float16, device)
    assert rate is not None
    assert 1e12 < rate < 3e15
