"""The parts of the check. Each yields rows, so that the rows before a failure are kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import lightning as L
import torch
from helpers.fake_device import Unsynchronized
from helpers.outcome import Wrapped
from helpers.small import Small

from gpu.bench import Bench, Edges, Row, spins, traced
from gpu.models import GPT, Costed, Graphed, Repeated, ResNet, Spinner, Spinning
from lightning_perf import (
    Diagnosis,
    Fixed,
    Flops,
    MemorySnapshot,
    PyTorch,
    SpeedMonitor,
    SystemMetrics,
    Timings,
)
from lightning_perf.flops import device_name, lookup, measure_peak, peak_flops
from lightning_perf.system.gpus import nvidia_driver, open_gpus

ROOT = Path(__file__).parents[2]
#: Calls of the CUDA runtime that wait for the device.
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def tests(bench: Bench) -> Iterator[Row]:
    """Run the tests that are marked ``gpu``."""
    marked = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]  # fmt: skip
    report = bench.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, f"--junitxml={report}", *map(str, marked)], cwd=ROOT)
    (suite,) = ElementTree.parse(report).getroot()
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    total, skipped, *failed = counts.values()
    yield Row("tests passed", total - skipped - sum(failed), note=f"in {len(marked)} files")
    yield Row("tests skipped", skipped, note="on a CPU, all are")
    yield Row("no test failed", done.returncode == 0, note=str(counts))


def _product(bench: Bench) -> float:
    """FLOP/s of a large bf16 matrix product, by events around a series of products."""
    size, times = (8192, 20) if bench.cuda else (512, 5)
    a = torch.ones(size, size, dtype=torch.bfloat16, device=bench.device)
    best = 0.0
    for _ in range(3):
        edges = Edges(warm=1)
        for _ in range(times):
            edges._mark()
            a @ a
        edges.on_train_end()
        best = max(best, 2 * size**3 / edges.median)
    return best


def mfu(bench: Bench) -> Iterator[Row]:
    """MFU of a bf16 GPT and a ResNet against a measured product and the peak table."""
    name, dtype = device_name(bench.device), "bfloat16"
    # First, in a fresh process, because libraries load during the measurement.
    ours = measure_peak(bench.device, dtype)
    rate = _product(bench)
    yield Row("device", name, note=f"torch {torch.__version__}, driver {nvidia_driver()}")
    value = ours / 1e12 if ours else None
    limits = (0.7, 1.3) if bench.cuda else (None, None)
    yield Row("measured peak, TFLOP/s", value, rate / 1e12, *limits, "against products by events")
    table, entry = peak_flops(name, dtype), lookup(name)
    if table is not None and entry is not None:
        yield Row("matrix product of the table's peak", rate, table, 0.4, 1.05, entry.name)
    else:
        yield Row("peak in the table", "none", note=name)
    # Beside the true figure, MFU is checked with a peak that is known exactly.
    peak = table or rate
    models: dict[str, Callable[[], Costed]] = {
        "GPT": lambda: GPT(1024, 8, 1024, 8, 8192) if bench.cuda else GPT(64, 2, 32, 2, 128),
        "ResNet": lambda: ResNet(64, 64, 256) if bench.cuda else ResNet(8, 8, 4),
    }
    for kind, make in models.items():
        for precision in ("bf16-true", "bf16-mixed"):
            if kind == "ResNet" and precision == "bf16-true":
                continue  # its images are float32
            model, edges = make(), Edges(warm=20)
            flops = Flops(schedule="every 10ba", peak_flops=peak)
            monitor = SpeedMonitor(window_size=30)
            run = bench.fit(model, edges, monitor, flops, precision=precision)
            what = f"{kind} {precision}"
            counted = flops.metrics.get("batch_flops", 0.0)
            yield Row(
                f"{what}: FLOPs of a batch, from its shapes", counted, model.flops, 0.98, 1.02
            )
            by_hand = model.flops / edges.mean / peak
            within = (0.95, 1.05) if bench.cuda else (0.3, 3.0)
            rolling = monitor.metrics.get("throughput/device/mfu")
            yield Row(f"{what}: mfu of SpeedMonitor", rolling, by_hand, *within)
            yield Row(f"{what}: mfu of Flops", flops.metrics.get("mfu"), by_hand, *within)
            of_product = model.flops / edges.mean / rate
            note = f"{edges.mean * 1e3:.1f} ms per batch, {run.global_step} steps"
            yield Row(f"{what}: share of the measured product", of_product, note=note)
    # cuDNN's convolutions use TensorFloat-32 by default, other products do not.
    flops = Flops(schedule="every 10ba")
    bench.fit(models["ResNet"](), flops, precision="32-true")
    reached = flops.metrics.get("mfu", 0.0)
    yield Row("ResNet 32-true: mfu at most 1", reached <= 1, note=f"mfu {reached:.3g}")


def batch_times(bench: Bench) -> Iterator[Row]:
    """Batch times by our events, against the kernels in a trace of torch.profiler."""
    spin = Spinner(bench.device)
    for milliseconds in (5, 20):
        speed = SpeedMonitor(window_size=10)
        profiler = PyTorch(schedule=Fixed(20, 15), with_flops=False, profile_memory=False)
        edges = Edges()
        model = Spinning(spin, forward=milliseconds / 1e3, steps=60)
        bench.fit(model, edges, speed, profiler)
        ours = 1 / speed.metrics["throughput/batches_per_sec"]
        starts = [float(e["ts"]) / 1e6 for e in spins(traced(bench.folder / f"run{bench.runs}"))]
        periods = [b - a for a, b in pairwise(starts)]
        within = (0.9, 1.1) if bench.cuda else (0.3, 3.0)
        name = f"batch of {milliseconds} ms: seconds"
        yield Row(f"{name}, by the trace", ours, median(periods), *within)
        yield Row(f"{name}, by events of the benchmark", ours, edges.median, *within)


def device_timings(bench: Bench) -> Iterator[Row]:
    """``timings/device/*`` against the kernels in a trace; on a CPU, the host's ``timings/*``."""
    spin, passes = (
        Spinner(bench.device),
        {"forward": 6e-3, "backward": 4e-3, "optimizer_step": 2e-3},
    )
    profiler = PyTorch(schedule=Fixed(20, 10), with_flops=False, profile_memory=False)
    run = bench.fit(Spinning(spin, *passes.values(), steps=150), Timings(), profiler)
    kernels = [float(e["dur"]) / 1e6 for e in spins(traced(bench.folder / f"run{bench.runs}"))]
    # Medians, because the host stands still while torch writes the trace.
    rows = [row for _, row in run.logger.rows]
    found = {key: median([row[key] for row in rows if key in row]) for key in set().union(*rows)}
    prefix = "timings/device" if bench.cuda else "timings"
    within = (0.9, 1.25) if bench.cuda else (0.3, 3.0)
    for name, seconds in passes.items():
        # By duration, because a window may start with kernels that were launched before it.
        of_trace = median(each for each in kernels if abs(each / seconds - 1) < 0.25)
        yield Row(f"{prefix}/{name}, s", found.get(f"{prefix}/{name}"), of_trace, *within)
    if bench.cuda:
        yield Row("timings/exposed_input, s", found.get("timings/exposed_input"), note="near 0")
        spread = sum(
            v for k, v in found.items() if k.startswith("timings/device/") and k.count("/") == 2
        )
        yield Row("sum of timings/device/*, s", spread, sum(passes.values()), 0.9, 1.25)


def overhead(bench: Bench) -> Iterator[Row]:
    """Seconds per step with the always-on set, divided by those without, in alternation."""
    spin = Spinner(bench.device)
    plan = {0: 300, 2: 300, 20: 80, 200: 15} if bench.cuda else {0: 40, 2: 40, 20: 15, 200: 8}
    for milliseconds, steps in plan.items():
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for ours in found:
                edges = Edges(warm=min(10, steps // 2))
                callbacks = [edges, *(bench.always_on() if ours else [])]
                bench.fit(Spinning(spin, forward=milliseconds / 1e3, steps=steps), *callbacks)
                found[ours].append(edges.mean)
        limits = (0.97, 1.03) if bench.cuda and milliseconds >= 2 else (None, None)
        note = f"{min(found[False]) * 1e3:.3f} ms without, {min(found[True]) * 1e3:.3f} ms with"
        what = f"step of {milliseconds} ms of device time, s"
        yield Row(what, min(found[True]), min(found[False]), *limits, note)


class _Traced(L.Callback):
    """Records the CUDA runtime's calls from the sixth batch to the next to last."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 5:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if index == trainer.num_training_batches - 1:
            self.profiler.stop()
            for event in self.profiler.events():
                self.calls[event.name] += 1


@contextmanager
def _counted_waits(calls: Counter[str]) -> Iterator[None]:
    """Count Python's own calls that synchronize."""
    cuda = torch.cuda
    owners = [(cuda, "synchronize"), (cuda.Event, "synchronize"), (cuda.Stream, "synchronize")]

    def counting(name: str, original: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options)

        return counted

    with ExitStack() as undo:
        for owner, name in owners:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, counting(f"{owner.__name__}.{name}", original))
        yield


class _Strict(Unsynchronized):
    """Forbids synchronizing calls on a GPU; on a CPU the same training."""

    steps = 60

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.device.type == "cuda":
            super().on_train_batch_start(batch, batch_idx)

    def on_train_end(self) -> None:
        if self.device.type == "cuda":
            super().on_train_end()

    def train_dataloader(self) -> Any:
        x = torch.ones(4, 8)
        batch = [x, x[:, :1].contiguous()]
        if torch.cuda.is_available():
            batch = [each.pin_memory() for each in batch]
        return Repeated(batch, self.steps)


def synchronization(bench: Bench) -> Iterator[Row]:
    """The always-on set does not synchronize between the first batch and the last."""
    bench.fit(_Strict(), *bench.always_on())
    yield Row("a training with set_sync_debug_mode('error') ends", True)
    spin = Spinner(bench.device)
    found: dict[bool, Counter[str]] = {}
    python: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for ours in python:
        calls = _Traced()
        with _counted_waits(python[ours]):
            model = Spinning(spin, forward=2e-3, steps=60)
            bench.fit(model, calls, *(bench.always_on() if ours else []))
        found[ours] = calls.calls
    for name in WAITS:
        # A trace contains the profiler's own synchronizations, with and without us.
        yield Row(f"calls of {name}", found[True][name] <= found[False][name],
                  note=f"{found[True][name]} with, {found[False][name]} without")  # fmt: skip
    extra = {n: c for n, c in python[True].items() if c > python[False][n]}
    yield Row("calls of torch.cuda's synchronize", not extra, note=str(extra or "none by us"))
    # cudaEventRecordWithFlags in newer versions of torch.
    on, off = (
        sum(n for name, n in found[ours].items() if name.startswith("cudaEventRecord"))
        for ours in (True, False)
    )
    events = on - off
    yield Row("events recorded by us, per batch", events / 54, note="about nine are expected")


#: nvidia-smi's names of our keys, and the tolerance between two readings.
SMI = {
    "gpu_used_memory": ("memory.used", 1 << 20, 0.9, 1.1),
    "gpu_free_memory": ("memory.free", 1 << 20, 0.9, 1.1),
    "gpu_util": ("utilization.gpu", 1, 0.5, 2.0),
    "gpu_power": ("power.draw", 1, 0.7, 1.4),
    "gpu_temperature": ("temperature.gpu", 1, 0.85, 1.15),
    "gpu_sm_clock": ("clocks.sm", 1e6, 0.8, 1.25),
    "gpu_memory_clock": ("clocks.mem", 1e6, 0.8, 1.25),
}


def nvml(bench: Bench) -> Iterator[Row]:
    """Our sensors against nvidia-smi, under load."""
    smi = shutil.which("nvidia-smi")
    if smi is None or not bench.cuda:
        yield Row("nvidia-smi", "absent", note="nothing to compare with")
        return
    spin = Spinner(bench.device)
    spin(8.0)  # both readings are under load; nvidia-smi may start slowly
    time.sleep(1.5)
    fields = ",".join(["index", *(name for name, *_ in SMI.values())])
    query = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with open_gpus() as sensors:
        for sensor in sensors:
            sensor(0.0)
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        readings = {sensor.name: sensor(0.0) for sensor in sensors}
    torch.cuda.synchronize()
    told = {line.split(",")[0].strip(): line.split(",")[1:] for line in lines.splitlines()}
    yield Row("GPUs", len(readings), note=", ".join(readings))
    for gpu, values in readings.items():
        index = gpu.split("_")[1]
        for (key, (name, unit, low, high)), theirs in zip(SMI.items(), told[index], strict=True):
            ours = values.get(f"{gpu}/{key}")
            try:
                reference = float(theirs) * unit
            except ValueError:  # [N/A]
                yield Row(f"{gpu} {key}", ours, theirs.strip())
                continue
            yield Row(f"{gpu} {key}, nvidia-smi's {name}", ours, reference, low, high)
        throttled = {k.partition("/")[2]: v for k, v in values.items() if "throttled" in k}
        yield Row(f"{gpu} throttle reasons", str(throttled))


class _Greedy(Small):
    """Allocates more memory than is available, in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.device.type == "cuda":
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        if batch_idx == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


def snapshots(bench: Bench) -> Iterator[Row]:
    """Memory snapshots of windows and of an out-of-memory error, and their pages."""
    with ExitStack() as stack:
        if not bench.cuda:
            from helpers.fake_allocator import simulated_cuda

            stack.enter_context(simulated_cuda())
        bench.fit(Small(), MemorySnapshot(schedule=Fixed(2, 2)))
        yield from _pages(bench, 2, "a window")
        for schedule, what in (
            ("always", "out of memory, with history"),
            ("never", "out of memory"),
        ):
            try:
                bench.fit(_Greedy(), MemorySnapshot(schedule=schedule))
                yield Row(f"{what}: the error reached the user", False)
            except torch.OutOfMemoryError:
                yield Row(f"{what}: the error reached the user", True)
            yield from _pages(bench, 5, what)


def _pages(bench: Bench, number: int, what: str) -> Iterator[Row]:
    from helpers.pages import loaded_from_elsewhere

    folder = bench.folder / f"run{bench.runs}"
    found = [*folder.rglob("memory_snapshots/*")]
    names = ", ".join(sorted(path.name for path in found))
    yield Row(f"{what}: {number} files", len(found) == number, note=names)
    ours = [path for path in found if not path.name.endswith(("plot.html", ".pickle"))]
    texts = [path.read_text() for path in ours]
    offline = bool(texts) and not any(map(loaded_from_elsewhere, texts))
    yield Row(f"{what}: pages open without a network", offline)


class _Compiled(Small):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        if mode != "eager":
            torch._dynamo.reset()
            options: dict[str, Any] = {"mode": mode} if mode != "aot_eager" else {"backend": mode}
            self.net = torch.compile(Wrapped(self.net), **options)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        return loss


def _bits(model: Any) -> list[str]:
    tensors = [*model.losses, *model.parameters()]
    return [each.detach().double().sum().item().hex() for each in tensors]


def compiled(bench: Bench) -> Iterator[Row]:
    """Compiled and CUDA-graph trainings are bit-identical, and compiled as often as without us."""
    kinds: dict[str, Callable[[], Any]] = {
        mode: lambda mode=mode: _Compiled(mode) for mode in ("eager", "aot_eager")
    }
    if bench.cuda:
        for mode in ("default", "reduce-overhead"):
            kinds[mode] = lambda mode=mode: _Compiled(mode)
    kinds["a step captured as a CUDA graph"] = Graphed
    for kind, make in kinds.items():
        try:
            yield from _alike(bench, kind, make)
        except Exception as error:  # such as inductor without a C compiler
            yield Row(f"{kind}: trained", False, note=f"{type(error).__name__}: {error}"[:300])


def _alike(bench: Bench, kind: str, make: Callable[[], Any]) -> Iterator[Row]:
    bits, compilations, seconds = [], [], []
    for ours in (False, False, True):
        L.seed_everything(3, verbose=False)
        torch._dynamo.utils.counters.clear()
        model, edges = make(), Edges(warm=6)
        bench.fit(model, edges, *(bench.always_on() if ours else []))
        bits.append(_bits(model))
        stats = torch._dynamo.utils.counters["stats"]
        compilations.append((stats["unique_graphs"], stats["calls_captured"]))
        seconds.append(edges.median)
    if bits[0] != bits[1]:
        yield Row(f"{kind}: weights and losses", "not repeatable without us either")
    else:
        yield Row(f"{kind}: the same weights and losses", bits[0] == bits[2])
    yield Row(f"{kind}: as often compiled", compilations[0] == compilations[2],
              note=f"graphs and calls: {compilations[2]}")  # fmt: skip
    yield Row(f"{kind}: median step, s", seconds[2], min(seconds[:2]))


# -- verdicts -----------------------------------------------------------------------------------


class _Launching(Small):
    """Thousands of kernels that take microseconds each."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for _ in range(1500 if self.device.type == "cuda" else 50):
            x = x + 1e-9
        return super().training_step([x, batch[1]], batch_idx)


class _Reading(Spinning):
    """Logs its loss in each step, which Lightning reads back."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class _Keeping(Spinning):
    """Keeps a tensor of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        size = 8 << 20 if self.device.type == "cuda" else 1 << 10
        kept = self.__dict__.setdefault("kept", [])
        kept.append(torch.ones(size // 4, device=self.device))
        return super().training_step(batch, batch_idx)


class _Moving(Spinning):
    """Large batches, which take long to copy."""

    def train_dataloader(self) -> Any:
        size = 16 << 20 if torch.cuda.is_available() else 1 << 16
        x = torch.ones(4, 8)
        return Repeated([x, x[:, :1].contiguous(), torch.ones(4, size // 4)], self.steps)


class _Waiting(Spinning):
    """A slow loader."""

    def train_dataloader(self) -> Any:
        batch, spin = super().train_dataloader().batch, Spinner("cpu")

        class Slow(Repeated):
            def __iter__(self) -> Any:
                for _ in range(self.length):
                    spin(10e-3)
                    yield self.batch

        return Slow(batch, self.steps)


@contextmanager
def _hot() -> Iterator[None]:
    """NVML that reports high temperatures, without a change of the machine's settings."""
    import pynvml

    name = "nvmlDeviceGetCurrentClocksEventReasons"
    original = getattr(pynvml, name)
    setattr(pynvml, name, lambda handle: original(handle) | 0x20)
    try:
        yield
    finally:
        setattr(pynvml, name, original)


def verdicts(bench: Bench) -> Iterator[Row]:
    """Verdicts on planted causes that only a GPU has."""
    # NVML's utilization is a mean over up to a second.
    spin, steps = Spinner(bench.device), 400 if bench.cuda else 40
    plan: dict[str, Callable[[], L.LightningModule]] = {
        "healthy|compute-bound": lambda: Spinning(spin, 6e-3, 3e-3, steps=steps),
        "launch-bound|low-gpu-utilization": _Launching,
        "sync-bound": lambda: _Reading(spin, 8e-3, steps=steps),
        "device-memory-growth": lambda: _Keeping(spin, 8e-3, steps=steps),
        "transfer-bound": lambda: _Moving(spin, 2e-3, steps=steps),
        "input-bound": lambda: _Waiting(spin, 2e-3, steps=steps),
        "throttled": lambda: Spinning(spin, 8e-3, steps=steps),
    }
    for expected, make in plan.items():
        diagnosis = Diagnosis(terminal=False)
        with _hot() if expected == "throttled" and bench.cuda else ExitStack():
            options = {
                "max_epochs": 30 if expected.startswith("launch") else 1,
                "log_every_n_steps": 1 if expected.startswith("sync") else 10,
            }
            sensors = SystemMetrics(interval="100ms")
            bench.fit(make(), diagnosis, sensors, SpeedMonitor(), Flops(), **options)
        said = [f"{each.code} {each.share:.0%}" for each in diagnosis.verdicts]
        codes = {each.code for each in diagnosis.verdicts}
        named = bool(codes & set(expected.split("|")))
        note = f"said {', '.join(said)}"
        needs_gpu = expected != "input-bound" and not bench.cuda
        yield Row(f"planted {expected}", "a CPU" if needs_gpu else named, note=note)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        tests, mfu, batch_times, device_timings, overhead, synchronization, nvml, snapshots,
        compiled, verdicts,
    )
}  # fmt: skip
