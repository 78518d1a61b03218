"""Rules about the machine: memory, CPUs and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_perf.diagnosis.rules import Impact, Verdict, without_none
from lightning_perf.diagnosis.signals import COMPUTE, FULL, WAITING, Signals, Unknown
from lightning_perf.diagnosis.stats import trend
from lightning_perf.units import bytes_text, counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from lightning_perf.diagnosis.stats import Numbers

#: The share of the run that is the warm-up of its memory.
_WARMUP = 0.2
#: Percent of the CPUs from which on training itself uses most of them.
_MOSTLY = 60.0


class Growth(NamedTuple):
    """The growth of memory that is worth a verdict."""

    least_bytes: float
    #: The least growth, as a share of the level of the memory.
    share: float
    #: Seconds until the memory is full that are critical.
    soon: float
    #: The second half grows at this share of the whole run's rate.
    continues: float
    #: Samples required for a trend.
    samples: int


class Idling(NamedTuple):
    """The idling of a GPU that is worth a verdict, as shares of the time."""

    idle: float
    #: The host launches kernels if it computes for this share, and waits for the GPU for less.
    computing: float
    waiting: float


def host_memory_growth(signals: Signals, least: Growth) -> Iterable[Verdict]:
    """The processes' memory grows without levelling off."""
    free = signals.average("system/free_memory", latest=True)
    windows, sizes = _samples(signals, "memory/rss_level", 1.0)
    # A node is sampled at intervals: several short windows have the same sample.
    fresh = np.append(True, np.diff(sizes) != 0)[: len(sizes)]
    windows, sizes = windows[fresh], sizes[fresh]
    recordings = signals.recordings[windows]
    # Leave out what our own profilers allocate, and what they free or write afterwards.
    grown, earlier = np.diff(sizes), np.append(recordings[:1], recordings)[: len(sizes) - 1]
    grown[recordings[1:] > earlier] = 0.0
    sizes = sizes[:1] + np.append(0.0, np.cumsum(grown))[: len(sizes)]
    yield from _growth("host-memory-growth", signals, windows, sizes, free, least)


def device_memory_growth(signals: Signals, least: Growth) -> Iterable[Verdict]:
    """The GPU's memory grows without levelling off."""
    if signals.setup.device == "cuda":
        free = min(signals.gpu_averages("gpu_free_memory", latest=True), default=None)
        windows, sizes = _samples(signals, "memory/current_allocated_mem", 1e9)
        yield from _growth("device-memory-growth", signals, windows, sizes, free, least)


def _growth(
    code: str,
    signals: Signals,
    windows: NDArray[np.intp],
    sizes: Numbers,
    free: float | None,
    least: Growth,
) -> Iterable[Verdict]:
    """Memory in bytes at the end of some windows that grows to the end, and the bytes left."""
    if len(sizes) < least.samples:
        count = counted(len(sizes), "sample")
        raise Unknown(f"memory has {count} after the warm-up, and a trend needs {least.samples}")
    # Over batches, since their speed may change.
    batches, times = (np.cumsum(each)[windows] for each in (signals.counts, signals.wall))
    whole, level = trend(batches, sizes), float(sizes[0])
    grown = whole.slope * (batches[-1] - batches[0])
    if whole.least <= 0 or grown < max(least.least_bytes, least.share * level):
        return
    half = len(sizes) // 2
    later = trend(batches[half:], sizes[half:])
    if later.least <= 0 or later.slope < least.continues * whole.slope:
        return
    rate = later.slope * (batches[-1] - batches[half]) / (times[-1] - times[half])
    per_batch, left = whole.slope, None if free is None else free / rate
    evidence = without_none(
        grown_bytes=grown, bytes_per_batch=per_batch, first_bytes=level,
        last_bytes=float(sizes[-1]), seconds_until_full=left,
    )  # fmt: skip
    advice = (
        f"Memory grew by {bytes_text(grown)}, by {bytes_text(per_batch)} per batch, to the end of "
        "the run. Look for tensors or objects that are kept per batch: losses without .detach(), "
        "lists of outputs, caches without a bound."
    )
    if left is not None:
        advice += f" At this rate the memory is full in {duration(left)}."
    severity = "critical" if left is not None and left < least.soon else "warning"
    yield Verdict(code, severity, evidence=evidence, advice=advice)


def _samples(signals: Signals, column: str, unit: float) -> tuple[NDArray[np.intp], Numbers]:
    """The windows at whose ends a gauge is known, without the warm-up; and its bytes.

    The gauge is in ``unit`` bytes.
    """
    if not signals.windows or column not in signals.windows[0].columns:
        raise Unknown(f"{column} is not measured")
    times = np.cumsum(signals.wall)
    ranks = np.array([window[column] for window in signals.windows])
    sizes = unit * np.fmax.reduce(ranks, axis=1)  # NaN only where no rank was sampled
    kept = np.flatnonzero((sizes > 0) & (times >= _WARMUP * times[-1]))
    return kept, sizes[kept]


def cpu_saturated(signals: Signals, hidden: float, named: float) -> Iterable[Impact]:
    """The training thread is ready to run while other threads use the CPUs.

    Workers hide the loading if waiting for batches takes less than the share ``hidden``. Other
    programs are named if they use more than ``named`` percent of the CPUs.
    """
    if WAITING not in signals.actions:
        raise Unknown("the kernel does not say how long a thread waits for a CPU")
    setup = signals.setup
    use, foreign = signals.average("system/cpu_util_simple"), signals.foreign
    workers = 0 if setup.loader is None else setup.loader.num_workers
    # Workers that training waits for are not too many.
    fewer = ["DataLoader workers"] * (workers > 0 and signals.share(signals.waits) < hidden)
    fewer += ["threads (torch.set_num_threads)"] * (setup.threads > 1)
    elsewhere = "run them elsewhere, or give this run CPUs of its own."
    reduce = f"Use fewer {', or fewer '.join(fewer)}."
    crowded = setup.threads > setup.cpus  # its threads wait for one another
    if foreign is not None and foreign > named:
        advice = f"Other programs use {foreign:.0f}% of the CPUs: {elsewhere}"
        # More of them than CPUs that are left wait for one another.
        advice += f" {reduce}" * (setup.threads > max(1, setup.cpus * (1 - foreign / 100)))
    elif (
        foreign is not None and use is not None and not crowded
        and (use >= FULL or (not fewer and use - foreign >= _MOSTLY))
    ):  # fmt: skip
        advice = (
            f"This training itself uses the {counted(setup.cpus, 'CPU')}, so that neither workers "
            "nor threads help: give it more CPUs, or less work per batch, such as data that is "
            "decoded and resized ahead."
        )
    elif fewer:
        advice = reduce
    else:
        advice = f"Other programs use the CPUs: {elsewhere}"
    evidence = without_none(
        cpu_percent=None if foreign is None else use,
        own_percent=None if use is None or foreign is None else use - foreign,
        usable_cpus=setup.cpus, torch_threads=setup.threads,
        num_workers=None if setup.loader is None else setup.loader.num_workers,
    )  # fmt: skip
    yield Impact(signals.waiting, evidence=evidence, advice=advice, contended=False)


def _gpu_idle(signals: Signals) -> float:
    """Share of the time in which the GPUs had no work."""
    if signals.gpu_idle is None:
        raise Unknown("NVML's utilization was not sampled")
    return signals.gpu_idle


def throttled(signals: Signals, percent: float, critical: float) -> Iterable[Verdict]:
    """GPUs run below their clock because of heat or hardware; a power limit is the usual state.

    For some percent of the time; for ``critical`` percent, the verdict is critical.
    """
    if signals.setup.device != "cuda":
        return
    share = signals.gpu_average("gpu_throttled")
    if share is None:
        raise Unknown("NVML's throttle reasons were not sampled")
    if share < percent:
        return
    kinds = ("power", "thermal", "hardware")
    power, thermal, hardware = (signals.gpu_average(f"gpu_throttled_{k}") or 0.0 for k in kinds)
    clock = signals.gpu_average("gpu_sm_clock")
    evidence = without_none(
        throttled_percent=share, power_percent=power, thermal_percent=thermal,
        hardware_percent=hardware, gpu_temperature_celsius=signals.gpu_average("gpu_temperature"),
        gpu_power_watts=signals.gpu_average("gpu_power"),
        gpu_sm_clock_mhz=None if clock is None else clock / 1e6,
    )  # fmt: skip
    faulty = max(share - power, thermal, hardware)
    severity, advice = "info", "GPUs reach their power limit, as is usual under full load."
    if faulty >= percent:
        severity = "critical" if faulty >= critical else "warning"
        advice = (
            "GPUs are slowed down by heat, or by their hardware: check the cooling and the "
            "power supply, and nvidia-smi -q -d PERFORMANCE."
        )
    yield Verdict("throttled", severity, evidence=evidence, advice=advice)


def low_gpu_utilization(signals: Signals, least: Idling) -> Iterable[Impact]:
    """The GPU is idle for a share of the time while the host computes, for no other reason."""
    advice = (
        "The GPU has work {busy:.0%} of the time: use a larger batch size, and a trace (PyTorch()) "
        "to see what the host does meanwhile."
    )
    yield from _idling(signals, least, launches=False, advice=advice)


def launch_bound(signals: Signals, least: Idling) -> Iterable[Impact]:
    """The host launches kernels in forward and backward more slowly than the GPU executes them.

    The GPU is idle for a share of the time.
    """
    compiler = "" if signals.setup.compiled else "torch.compile, "
    advice = (
        "Kernels are too small for the GPU, which has work {busy:.0%} of the time: use "
        f"{compiler}CUDA graphs or a larger batch size."
    )
    yield from _idling(signals, least, launches=True, advice=advice)


def _idling(signals: Signals, least: Idling, launches: bool, advice: str) -> Iterable[Impact]:
    """What the host spends on computing beyond the GPU's work, if that idles.

    ``launches`` is whether the host launches kernels all the time.
    """
    if signals.setup.device != "cuda":
        return
    idle = _gpu_idle(signals)
    compute = sum((signals.category(name) for name in COMPUTE), signals.nothing)
    busy = signals.share(compute) >= least.computing
    busy = busy and signals.share(signals.category("from_device")) <= least.waiting
    if idle <= least.idle or busy != launches:
        return
    # While the host does something else, the GPU may have work or not: what it has is counted here.
    seconds = np.maximum(compute - (1 - idle) * signals.wall, 0.0)
    part = seconds / np.maximum(compute, 1e-12)
    yield Impact(
        seconds, phase="forward", evidence={"gpu_percent": 100 * (1 - idle)},
        advice=advice.format(busy=1 - idle),
        within={name: part * signals.category(name) for name in COMPUTE},
    )  # fmt: skip


def sync_bound(signals: Signals) -> Iterable[Impact]:
    """The host waits for the device to read values, which then has no work."""
    if signals.setup.device != "cuda":
        return
    idle, seconds = _gpu_idle(signals), signals.category("from_device")
    hook = signals.slowest([row for row in signals.rows("from_device") if "." in row.name])
    advice = (
        "Values are copied to the host in each batch, which waits for the device: log rarely, "
        "and avoid .item(), .cpu() and print of tensors."
    )
    yield Impact(
        np.minimum(seconds, idle * signals.wall), culprit=hook and hook.name, phase="from_device",
        evidence={"gpu_percent": 100 * (1 - idle)}, advice=advice,
    )  # fmt: skip


def slow_precision(signals: Signals, ratio: float) -> Iterable[Verdict]:
    """Products take longer than in float32 by a ratio, as bfloat16 does on many CPUs."""
    setup = signals.setup
    if not (setup.peak_flops and setup.float32_peak_flops):
        return
    faster = setup.float32_peak_flops / setup.peak_flops
    if faster >= ratio:
        yield Verdict(
            "slow-precision", "warning", phase=max(COMPUTE, key=signals.typical),
            evidence={"float32_ratio": faster},
            advice=f"This {setup.device} computes float32 products {faster:.1f} times as fast as "
            f'those of precision="{setup.precision}", for which it has no instructions. Use '
            'precision="32-true".',
        )  # fmt: skip
