"""Rules about the machine: memory, CPUs and GPUs."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules.base import Impact, judge
from lightning_perf.diagnosis.signals import COMPUTE, WAITING, Signals, Unknown
from lightning_perf.diagnosis.verdicts import Verdict
from lightning_perf.units import bytes_text, duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.diagnosis.stats import Numbers

#: What memory must grow by: bytes, and share of its level.
_GROWTH_BYTES, _GROWTH_SHARE = 100e6, 0.10
#: Samples that a trend needs, and the share of the run that is its warm-up.
_FEWEST_SAMPLES, _WARMUP = 8, 0.2
#: Growth that goes on: the second half grows at this share of the whole run's rate.
_GOES_ON = 0.4
#: Memory that ends within this many seconds is critical.
_SOON = 3600.0


def growth(
    code: str, signals: Signals, column: str, unit: float = 1.0, free: float | None = None
) -> Iterable[Verdict]:
    """Memory that grows to the end of the run.

    Args:
        code: Of the verdict.
        signals: The run's.
        column: A gauge.
        unit: Its unit in bytes.
        free: Bytes that are left; None if unknown.
    """
    times, sizes = samples(signals, column, unit)
    if len(sizes) < _FEWEST_SAMPLES:
        raise Unknown(f"{column} was sampled {len(sizes)} times, and needs {_FEWEST_SAMPLES}")
    whole = stats.trend(times, sizes)
    grown = whole.slope * (times[-1] - times[0])
    level = float(sizes[0])
    if whole.low <= 0 or grown < _GROWTH_BYTES or grown < _GROWTH_SHARE * level:
        return
    half = len(sizes) // 2
    later = stats.trend(times[half:], sizes[half:])
    if later.low <= 0 or later.slope < _GOES_ON * whole.slope:
        return
    wall, batches = float(signals.wall.sum()), max(signals.batches, 1)
    per_batch = later.slope * wall / batches
    evidence: dict[str, float | str] = {
        "grown_bytes": grown,
        "bytes_per_batch": per_batch,
        "first_bytes": level,
        "last_bytes": float(sizes[-1]),
    }
    advice = (
        f"Memory grew by {bytes_text(grown)}, by {bytes_text(per_batch)} per batch, to the end of "
        "the run. Look for tensors or objects that are kept per batch: losses without .detach(), "
        "lists of outputs, caches without a bound."
    )
    severity = "warning"
    if free is not None:
        left = free / later.slope
        evidence["seconds_until_full"] = left
        advice += f" At this rate it is full in {duration(left)}."
        severity = "critical" if left < _SOON else severity
    yield Verdict(code, severity, evidence=evidence, advice=advice)


def samples(signals: Signals, column: str, unit: float) -> tuple[Numbers, Numbers]:
    """Seconds and bytes of a gauge's samples, without repetitions and without the warm-up."""
    if not signals.windows or column not in signals.windows[0].columns:
        raise Unknown(f"{column} is not measured")
    times = np.cumsum(signals.wall)
    ranks = np.array([window[column] for window in signals.windows])
    known = np.isfinite(ranks).all(axis=0)
    sizes = unit * ranks[:, known].max(axis=1, initial=0.0)
    fresh = np.append(True, np.diff(sizes) != 0) & (sizes > 0)
    fresh &= times >= _WARMUP * times[-1]
    return times[fresh], sizes[fresh]


class HostMemoryGrowth:
    """The processes' memory grows without levelling off."""

    code = "host-memory-growth"

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The trend of the resident memory."""
        free = signals.average("system/free_memory")
        yield from growth(self.code, signals, "memory/rss", free=free)


class DeviceMemoryGrowth:
    """The device's memory grows without levelling off."""

    code = "device-memory-growth"

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The trend of the allocated memory."""
        if signals.setup.device == "cuda":
            yield from growth(self.code, signals, "memory/current_allocated_mem", 1e9)


class CpuSaturated:
    """The training thread waits for a CPU."""

    code, threshold, foreign = "cpu-saturated", 0.10, 20.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in the kernel's run queue: ready to run, while other threads have the CPUs."""
        if WAITING not in signals.actions:
            raise Unknown("the kernel does not say how long a thread waits for a CPU")
        setup, evidence = signals.setup, dict[str, float | str]()
        use, own = (
            signals.average(f"system/{name}") for name in ("cpu_util_simple", "process_cpu")
        )
        advice = "Use fewer DataLoader workers, or fewer threads (torch.set_num_threads)."
        if use is not None and own is not None:
            own /= max(setup.cpus, 1)
            evidence |= {"cpu_percent": use, "own_percent": own}
            if use - own > self.foreign:
                advice = (
                    f"Other programs use {use - own:.0f} % of the CPUs: run them elsewhere, or "
                    "give this training CPUs of its own."
                )
        workers = setup.loader.num_workers if setup.loader is not None else 0
        evidence |= {
            "usable_cpus": setup.cpus, "torch_threads": setup.threads, "num_workers": workers,
        }  # fmt: skip
        impact = Impact(
            signals.actions[WAITING].seconds, evidence=evidence, advice=advice, contended=False
        )
        yield from judge(self.code, self.threshold, signals, impact)


def gpu_average(signals: Signals, name: str) -> float | None:
    """The mean of a sensor over the time and the GPUs that were sampled."""
    columns = signals.windows[0].columns if signals.windows else ()
    slots = [each for each in columns if each.endswith(f"/{name}")]
    found = [signals.average(slot, f"{slot.rpartition('/')[0]}/seconds") for slot in slots]
    known = [value for value in found if value is not None and isfinite(value)]
    return float(np.mean(known)) if known else None


def gpu_use(signals: Signals) -> float | None:
    """NVML's utilization of the GPUs, in percent; None for a training on another device.

    Raises:
        Unknown: It was not sampled.
    """
    if signals.setup.device != "cuda":
        return None
    use = gpu_average(signals, "gpu_util")
    if use is None:
        raise Unknown("NVML's utilization was not sampled")
    return use


class Throttled:
    """GPUs run below their clock because of heat or power."""

    code, threshold = "throttled", 10.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """NVML's throttle reasons, in percent of the time."""
        if signals.setup.device != "cuda":
            return
        share = gpu_average(signals, "gpu_throttled")
        if share is None:
            raise Unknown("NVML's throttle reasons were not sampled")
        if share < self.threshold:
            return
        evidence: dict[str, float | str] = {"throttled_percent": share}
        for name in ("gpu_temperature", "gpu_power", "gpu_sm_clock"):
            value = gpu_average(signals, name)
            if value is not None:
                evidence[name] = value
        advice = (
            "GPUs are slowed down by heat or their power limit: check the cooling, and "
            "nvidia-smi -q -d PERFORMANCE."
        )
        severity = "critical" if share >= 50 else "warning"
        yield Verdict(self.code, severity, evidence=evidence, advice=advice)


class LowGpuUtilization:
    """The GPU idles, and nothing else explains it."""

    code, threshold = "low-gpu-utilization", 50.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """NVML's utilization, where the host is busy neither with input nor with callbacks."""
        use = gpu_use(signals)
        if use is None:
            return
        compute = sum(signals.share(signals.category(name)) for name in COMPUTE)
        if use >= self.threshold or compute < 0.5:
            return
        severity = "warning" if use >= self.threshold / 2 else "critical"
        advice = f"The GPU is busy {use:.0f} % of the time: use a larger batch size."
        yield Verdict(
            self.code, severity, compute * (1 - use / 100), phase="forward",
            evidence={"gpu_percent": use}, advice=advice,
        )  # fmt: skip


class LaunchBound:
    """The host launches kernels more slowly than the GPU runs them."""

    code, busy = "launch-bound", 70.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The host is busy in forward and backward while the GPU has nothing to do."""
        use = gpu_use(signals)
        if use is None:
            return
        wait = signals.share(signals.category("from_device"))
        compute = sum(signals.category(name) for name in COMPUTE)
        if use >= self.busy or wait > 0.05 or signals.share(np.asarray(compute)) < 0.7:
            return
        advice = (
            "Kernels are too small for the GPU: use torch.compile, CUDA graphs or a larger batch."
        )
        impact = Impact(
            np.asarray(compute) * (1 - use / 100), None, None, "forward",
            evidence={"gpu_percent": use}, advice=advice,
        )  # fmt: skip
        yield from judge(self.code, 0.10, signals, impact)


class SyncBound:
    """The host waits for the device to read values back."""

    code, threshold = "sync-bound", 0.10

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in copies to the host, on a GPU."""
        if signals.setup.device != "cuda":
            return
        advice = (
            "Values are copied to the host in each step, which waits for the device: log rarely, "
            "and avoid .item(), .cpu() and print of tensors."
        )
        culprit = signals.culprit_in("from_device")
        impact = Impact(
            signals.category("from_device"), None, culprit, "from_device", advice=advice
        )
        yield from judge(self.code, self.threshold, signals, impact)
