"""Measuring a device: a plausible rate, once, without side effects."""

import json
import multiprocessing
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_perf.flops import measure
from lightning_perf.flops.measure import Machine, measure_peak, openmp, plausible_rate
from lightning_perf.flops.operators import tf32_is_on
from lightning_perf.flops.peaks import resolve_peak

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(measure, "MEASURED", {})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_cpu_has_a_rate(dtype):
    """Any CPU reaches between a megaflop and a petaflop per second."""
    rate = measure_peak(CPU, dtype, budget_seconds=0.02)
    assert rate is not None
    assert 1e6 < rate < 1e15


def test_it_is_measured_once_per_process():
    """A second call returns the cached result, whatever the budget."""
    first = measure_peak(CPU, "float32", budget_seconds=0.01)
    assert measure_peak(torch.device("cpu"), "float32", budget_seconds=60) == first


def test_it_has_no_side_effects():
    """Random state, gradients and autocast do not change and do not affect the result."""
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        measure_peak(CPU, "float32", budget_seconds=0.01)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_products_use_the_precision_of_the_training(monkeypatch):
    """Those of cuDNN use TensorFloat-32, others the setting, which may change before a fit."""
    monkeypatch.setattr(measure, "fastest_rate", lambda *_: 156e12 if tf32_is_on() else 19.5e12)
    assert resolve_peak(CUDA, "float32", "measure").value == 19.5e12
    assert resolve_peak(CUDA, "tf32", "measure").value == 156e12
    assert not tf32_is_on()
    try:
        torch.set_float32_matmul_precision("high")
        assert resolve_peak(CUDA, "float32", "measure").value == 156e12
        assert resolve_peak(CUDA, "tf32", "measure").value == 156e12
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("device", "dtype"), [(CPU, "bool"), (CPU, "no_dtype"), (CPU, "nn"), ("nothing", "float32")]
)
def test_devices_without_matrix_products_have_no_peak(device, dtype):
    """A dtype without matrix products and a device that does not exist have no peak."""
    assert measure_peak(device, dtype, budget_seconds=0.01) is None


class Simulated(Machine):
    """A simulated CPU: small products are slow to launch, some calls stall, threads may wait."""

    def __init__(
        self,
        stalls=lambda call: False,
        threads=1,
        waiting=1.0,
        cpus=99,
        rate=100e9,
        launch=1e-4,
        stall=0.005,
    ):
        self.calls, self.elapsed, self.sizes = 0, 0.0, []
        self.stalls, self.waiting, self.alone = stalls, waiting, False
        self.rate, self.launch, self.stall = rate, launch, stall
        self.now, self.cpus, self.threads = lambda: self.elapsed, lambda: cpus, lambda: threads

    def product(self, size, dtype, device):
        return lambda: size

    def seconds(self, run, device):
        self.calls += 1
        self.sizes.append(run())
        factor = 1 if self.alone else self.waiting / self.threads()
        seconds = self.launch + factor * 2 * run() ** 3 / self.rate
        seconds += self.stall * bool(self.stalls(self.calls))
        self.elapsed += seconds
        return seconds

    def on_one_thread(self, search):
        self.alone = True
        rate = search()
        self.alone = False
        return rate

    def peak(self, device=CPU, dtype="float32", budget_seconds=0.05):
        return measure_peak(device, dtype, budget_seconds, self)


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
def test_stalls_do_not_affect_the_result(stalls):
    """With stalls, the peak is found within 2 % and in bounded time."""
    machine = Simulated(stalls)
    assert machine.peak(budget_seconds=2.0) == pytest.approx(machine.rate, rel=0.02)
    assert machine.elapsed < 3


@pytest.mark.parametrize("waiting", [1, 1.2, 3, 1000])
def test_waiting_threads_do_not_affect_the_result(waiting):
    """On a busy machine the peak is that of single threads, not a thousandth of it."""
    machine = Simulated(threads=4, waiting=waiting)
    assert machine.peak() == pytest.approx(4 * machine.rate, rel=0.3)


@pytest.mark.parametrize("waiting", [1, 16])
def test_a_container_has_the_peak_of_its_quota(waiting):
    """64 threads on a quota of 4 CPUs reach that of 4, though they run on 64 in a burst."""
    machine = Simulated(threads=64, waiting=waiting, cpus=4)
    assert machine.peak() == pytest.approx(4 * machine.rate, rel=0.3)


def test_a_long_stall_extends_the_search():
    """If the first tries stall for longer than the budget, more are made."""
    machine = Simulated(lambda call: call in (1, 2, 4), stall=0.1)
    assert machine.peak() == pytest.approx(machine.rate, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_always_stalls_is_refused(seed):
    """If no two tries agree, there is no peak and the search ends."""
    draw = random.Random(seed)

    class Stalling(Simulated):
        def seconds(self, *args):
            return super().seconds(*args) * 10 ** draw.uniform(0, 9)

    machine = Stalling(lambda call: True, threads=2, stall=1.0)
    assert machine.peak() is None
    assert machine.elapsed < 20


@pytest.mark.parametrize(
    ("alone", "together", "expected"),
    [
        (1e11, 1.9e11, 1.9e11),
        (1e11, 1.1e11, 1.1e11),  # two hardware threads of one core
        (1e11, 7e7, 2e11),
        (1e11, 0.0, 2e11),
        (None, 1.9e11, 1.9e11),
        (None, 7e7, None),
        (0.0, 1.9e11, None),
        (3e7, 3e7, None),
    ],
)
def test_plausible_rate(alone, together, expected):
    """All threads count unless they reach less than half of the rate of single threads."""
    assert plausible_rate(alone, together, 2) == expected


def test_the_search_ends_without_improvement():
    """If small products are as fast, large ones are not tried."""
    machine = Simulated(launch=0.0)
    assert machine.peak() == pytest.approx(machine.rate)
    assert max(machine.sizes) == 512
    assert machine.elapsed < 0.1


def test_a_slow_device_costs_no_more_than_the_budget():
    """A size that exceeds the remaining time is not tried."""
    machine = Simulated(rate=1e9)
    assert machine.peak(budget_seconds=1.0) == pytest.approx(1e9, rel=0.05)
    assert machine.elapsed < 1.1


def test_loading_libraries_does_not_use_up_the_time():
    """A GPU's first product of each size may load libraries for longer than the time limit."""
    first = lambda _: machine.sizes.count(machine.sizes[-1]) == 1  # noqa: E731
    machine = Simulated(first, rate=5e14, launch=1e-5, stall=0.3)
    assert machine.peak(torch.device("cuda"), "float16") == pytest.approx(5e14, rel=0.05)


def test_the_single_thread_search_uses_one_thread():
    """It does not change the thread count afterwards."""
    seen = []
    runtimes = openmp()
    if not runtimes:
        pytest.skip("no OpenMP runtime was found")
    before = torch.get_num_threads(), runtimes[0].omp_get_max_threads()

    def search():
        seen.append(runtimes[0].omp_get_max_threads())
        return 7.0

    assert Machine().on_one_thread(search) == 7.0
    assert seen == [1]
    assert (torch.get_num_threads(), runtimes[0].omp_get_max_threads()) == before


def test_the_caller_s_modes_do_not_see_the_products():
    """Torch's own counter around a training counts its FLOPs alone."""
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        assert measure_peak(CPU, "float32")
    assert counter.get_total_flops() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_on_the_device():
    """The measured rate is near the table's, so kernels are timed and not their launches."""
    device = torch.device("cuda", 0)
    rate = measure_peak(device, "float16")
    assert rate is not None
    assert 1e12 < rate < 3e15


#: As in processes of their own.
best_peak = measure.best_peak.__wrapped__


def test_the_best_measurement_of_a_machine_is_used():
    """Busy moments do not lower it, and an outlier counts once another measurement confirms it."""
    used = [best_peak("cpu", value) for value in (1e11, 1.8e11, 9e10, None, 9e13, 1e11, 8e13)]
    assert used == [1e11, 1.8e11, 1.8e11, 1.8e11, 1.8e11, 1.8e11, 9e13]
    assert best_peak("another cpu", None) is None
    assert len(measure.kept_peaks()["cpu"]) == 3


ROWS = ["x", None, {}, [1], [["1e12", []]], [[1e300, ""]], [[-1, ""]], [[True, ""]], [[1e12]]]


@pytest.mark.parametrize("content", [b"\x00", b"[]", b"1", b"[" * 10**5, b'{"cpu": NaN}', *ROWS])
def test_a_damaged_file_of_peaks_is_replaced(content):
    """What it has that cannot be a peak is ignored."""
    path = measure.kept_file()
    path.parent.mkdir(parents=True)
    text = content if isinstance(content, bytes) else json.dumps({"cpu": content}).encode()
    path.write_bytes(text)
    assert best_peak("cpu", 2e12) == 2e12
    assert measure.kept_peaks()["cpu"][0][0] == 2e12


def test_a_home_that_takes_no_file_is_no_error(monkeypatch):
    """The measurement of this process is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert best_peak("cpu", 1e11) == 1e11
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert measure.kept_file().is_absolute()


@pytest.mark.slow
def test_processes_keep_their_peaks_at_the_same_time():
    """The file is whole at all times, and has a measurement of each setting in the end."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=keep, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert measure.kept_peaks()["cpu"]


def keep(number):
    for each in range(50):
        assert best_peak("cpu", 1e11 + number * each) >= 1e11


def test_a_peak_counts_for_processes_that_share_the_cores_alike(monkeypatch):
    """A CPU that two ranks share is not measured by one process alone."""
    for processes, rate in ((1, 4e11), (2, 1e11)):
        measure.MEASURED[CPU, "float32", torch.get_num_threads(), tf32_is_on()] = rate
        assert resolve_peak(CPU, "float32", "measure", processes).value == rate
