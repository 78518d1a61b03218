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
#: Shares of the time: of computing where the host does nothing else, and of its waits for the GPU.
_LAUNCHES, _WAITS = 0.7, 0.05
#: Evidence of throttling: the sensor, the unit that is shown, and how many of the sensor's it is.
_GPU_STATE = (
    ("gpu_temperature", "celsius", 1.0), ("gpu_power", "watts", 1.0), ("gpu_sm_clock", "mhz", 1e6),
)  # fmt: skip


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
        free = signals.average("system/free_memory", latest=True)
        yield from growth(self.code, signals, "memory/rss", free=free)


class DeviceMemoryGrowth:
    """The device's memory grows without levelling off."""

    code = "device-memory-growth"

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The trend of the allocated memory."""
        if signals.setup.device == "cuda":
            found = [
                signals.average(*columns, latest=True)
                for columns in signals.gpus("gpu_free_memory")
            ]
            known = [each for each in found if each is not None and isfinite(each)]
            free = min(known, default=None)
            yield from growth(self.code, signals, "memory/current_allocated_mem", 1e9, free)


class CpuSaturated:
    """The training thread waits for a CPU."""

    code, threshold, foreign = "cpu-saturated", 0.10, 20.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in the kernel's run queue: ready to run, while other threads have the CPUs."""
        if WAITING not in signals.actions:
            raise Unknown("the kernel does not say how long a thread waits for a CPU")
        setup, evidence = signals.setup, dict[str, float | str]()
        use, foreign = signals.average("system/cpu_util_simple"), signals.foreign
        advice = "Use fewer DataLoader workers, or fewer threads (torch.set_num_threads)."
        if use is not None and foreign is not None:
            evidence |= {"cpu_percent": use, "own_percent": use - foreign}
            if foreign > self.foreign:
                advice = (
                    f"Other programs use {foreign:.0f} % of the CPUs: run them elsewhere, or "
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


def gpu_idle(signals: Signals) -> float:
    """Share of the time in which the GPUs of a training on GPUs had no work.

    Raises:
        Unknown: It was not sampled.
    """
    if signals.gpu_idle is None:
        raise Unknown("NVML's utilization was not sampled")
    return signals.gpu_idle


class Throttled:
    """GPUs run below their clock because of heat, hardware or power."""

    code, threshold, most = "throttled", 10.0, 50.0

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """NVML's throttle reasons, in percent of the time; a power limit is the usual state."""
        if signals.setup.device != "cuda":
            return
        share = signals.gpu_average("gpu_throttled")
        if share is None:
            raise Unknown("NVML's throttle reasons were not sampled")
        if share < self.threshold:
            return
        kinds = {
            kind: signals.gpu_average(f"gpu_throttled_{kind}") or 0.0
            for kind in ("power", "thermal", "hardware")
        }
        evidence: dict[str, float | str] = {"throttled_percent": share}
        evidence |= {f"{kind}_percent": value for kind, value in kinds.items()}
        for name, unit, scale in _GPU_STATE:
            value = signals.gpu_average(name)
            if value is not None:
                evidence[f"{name}_{unit}"] = value / scale
        faulty = max(share - kinds["power"], kinds["thermal"], kinds["hardware"])
        severity, advice = "info", "GPUs reach their power limit, as is usual under full load."
        if faulty >= self.threshold:
            severity = "critical" if faulty >= self.most else "warning"
            advice = (
                "GPUs are slowed down by heat, or by their hardware: check the cooling and the "
                "power supply, and nvidia-smi -q -d PERFORMANCE."
            )
        yield Verdict(self.code, severity, evidence=evidence, advice=advice)


def _launching(signals: Signals) -> tuple[bool, Numbers]:
    """Whether the host launches kernels all the time; and how long, beyond the GPU's work."""
    compute = sum((signals.category(name) for name in COMPUTE), np.zeros(len(signals.windows)))
    busy = signals.share(compute) >= _LAUNCHES
    busy = busy and signals.share(signals.category("from_device")) <= _WAITS
    # While the host does something else, the GPU may have work or not: what it has is counted here.
    return busy, np.maximum(compute - (1 - gpu_idle(signals)) * signals.wall, 0.0)


class LowGpuUtilization:
    """The GPU idles while the host computes, and nothing else explains it."""

    code, threshold, idle, launches = "low-gpu-utilization", 0.10, 0.5, False
    advice = (
        "The GPU has work {busy:.0%} of the time: use a larger batch size, and a trace (PyTorch()) "
        "to see what the host does meanwhile."
    )

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """NVML's utilization, less what the host spends on input, callbacks and the like."""
        if signals.setup.device != "cuda":
            return
        idle, (launching, seconds) = gpu_idle(signals), _launching(signals)
        if idle <= self.idle or launching != self.launches:
            return
        compiler = "" if signals.setup.compiled else "torch.compile, "
        advice = self.advice.format(busy=1 - idle, compiler=compiler)
        evidence = {"gpu_percent": 100 * (1 - idle)}
        impact = Impact(seconds, phase="forward", evidence=evidence, advice=advice)
        yield from judge(self.code, self.threshold, signals, impact)


class LaunchBound(LowGpuUtilization):
    """The host launches kernels in forward and backward more slowly than the GPU runs them."""

    code, idle, launches = "launch-bound", 0.3, True
    advice = (
        "Kernels are too small for the GPU, which has work {busy:.0%} of the time: use "
        "{compiler}CUDA graphs or a larger batch size."
    )


class SyncBound:
    """The host waits for the device to read values back, and then has no work for it."""

    code, threshold = "sync-bound", 0.10

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in copies to the host, as far as the GPU idles."""
        if signals.setup.device != "cuda":
            return
        idle, seconds = gpu_idle(signals), signals.category("from_device")
        advice = (
            "Values are copied to the host in each step, which waits for the device: log rarely, "
            "and avoid .item(), .cpu() and print of tensors."
        )
        impact = Impact(
            np.minimum(seconds, idle * signals.wall), None, signals.culprit_in("from_device"),
            "from_device", evidence={"gpu_percent": 100 * (1 - idle)}, advice=advice,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)
