"""Differences between runs, and whether they exceed the noise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.diagnosis.stats import Numbers, resampled_ratios
from lightning_perf.errors import DAMAGE, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The fewest windows for an interval.
_FEWEST_WINDOWS = 5
_RESAMPLES, _INTERVAL = 2000, (0.025, 0.975)
#: Batch sizes that differ by more make times per batch incomparable.
_SAME_BATCH = 0.01
#: Rates: the quantities of timed batches that are divided by their seconds.
_RATES = {
    "batches_per_sec": "timed_batches",
    "samples_per_sec": "samples",
    "tokens_per_sec": "tokens",
    "mfu": "ideal_seconds",
}
_STEP, _SAMPLE, _SIZE = ("step", "batch"), ("step", "sample"), ("size", "batch")
#: All of the time per batch, and that of timed batches alone.
_WHOLE, _TIMED = ("step", "whole"), ("step", "timed")
_KINDS, _RATIOS = ("step", "phase", "culprit", "rate"), ("step", "rate")


class Incomparable(LookupError):
    """Runs that cannot be compared; the message says why, in one line."""


class Measured(NamedTuple):
    """A run, and the summary of its main stage."""

    name: str
    stage: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    #: ``step`` (all of a batch), ``phase`` and ``culprit`` are in seconds per batch; a ``rate`` is
    #: per second, or MFU.
    kind: str
    name: str
    #: The mean of the baselines.
    before: float
    after: float
    #: 95 % interval of ``after - before``, at least ``-before``; None if a run has too few windows.
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float:
        """The value now minus the value before."""
        return self.after - self.before

    @property
    def certain(self) -> bool:
        """Whether the interval excludes that nothing changed."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def relative(self, difference: float) -> float:
        """A difference as a fraction of the value before; 0 if that value is 0."""
        return difference / self.before if self.before else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**asdict(self), "relative": self.relative(self.difference)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against its baselines."""

    #: The step; phases and culprits, the largest change first; rates.
    changes: Sequence[Change]
    #: Decides whether the run is slower: time per batch, or per sample if batch sizes differ.
    slowdown: Change
    #: Comparisons that were not possible, and why.
    notes: Sequence[str]

    def slower_than(self, threshold: float) -> bool | None:
        """Whether the run is slower by more than a fraction, at 95 %; None if that is unknown."""
        low = self.slowdown.low
        return None if low is None else self.slowdown.relative(low) > threshold


def compare(run: Measured, baselines: Sequence[Measured]) -> Comparison:
    """Compare the speed of a run with that of others.

    Intervals are from a block bootstrap over the windows of each run. With several baselines, each
    resample draws one of them: the interval includes how much they differ.

    Raises:
        Incomparable: A run is damaged or has no windows, or they have no time in common.

    Example:
        >>> def stage(seconds):
        ...     return {"windows": {"batches": [10] * 6, "timings": {"forward": [seconds] * 6}}}
        >>> found = compare(Measured("new", stage(1.5)), [Measured("old", stage(1.0))])
        >>> found.slowdown.before, found.slowdown.after, found.slower_than(0.05)
        (0.1, 0.15, True)
    """
    runs = [run, *baselines]
    figures = [_figures(one_run) for one_run in runs]
    common = [key for key in (_WHOLE, _TIMED) if all(key in ratios for ratios in figures)]
    if not common:
        raise Incomparable("the runs have no time per batch in common: add Timings to them")
    notes = []
    if any(_WHOLE in ratios for ratios in figures) and _WHOLE not in common:
        notes.append("not all runs have timings: a step is without validation and first batches")
    for ratios in figures:
        ratios[_STEP] = ratios[common[0]]
        for key in (_WHOLE, _TIMED):
            ratios.pop(key, None)
    notes += [
        f"{one_run.name} has {windows} windows after the warm-up, and an interval needs "
        f"{_FEWEST_WINDOWS}: train longer, or lower log_every_n_steps"
        for one_run, ratios in zip(runs, figures, strict=True)
        if (windows := len(ratios[_STEP].parts)) < _FEWEST_WINDOWS
    ]
    # Phases and culprits that a run does not list cost nothing, if it has phases.
    timed = all(any(kind == "phase" for kind, _ in ratios) for ratios in figures)
    keys = [
        key
        for key in dict.fromkeys(key for ratios in figures for key in ratios)
        if (timed if key[0] in ("phase", "culprit") else all(key in ratios for ratios in figures))
    ]
    decides, per_sample = _STEP, {_SAMPLE, _SIZE}
    if per_sample <= set(keys):
        sizes = [ratios[_SIZE].value for ratios in figures]
        if max(sizes) > (1 + _SAME_BATCH) * min(sizes):
            notes.append("batch sizes differ: times are compared per sample")
            decides = _SAMPLE
    shown = (key for key in keys if key == decides or key not in per_sample)
    changes = {key: _change(key, figures) for key in shown}
    order = sorted(
        changes.values(), key=lambda change: (_KINDS.index(change.kind), -abs(change.difference))
    )
    return Comparison(order, changes[decides], notes)


class _Ratio(NamedTuple):
    """A figure of a run: the sum of one series over its windows, divided by that of another."""

    parts: Numbers
    wholes: Numbers

    @property
    def value(self) -> float:
        return float(self.parts.sum() / self.wholes.sum())


#: By kind and name.
_Figures = dict[tuple[str, str], _Ratio]


def _figures(run: Measured) -> _Figures:
    """The figures of a run's windows."""
    try:
        windows = run.stage.get("windows")
        if windows and len(windows["batches"]) > windows.get("warm_up", 0):
            return _ratios(windows, run.stage.get("whole_run", {}).get("throughput", {}))
    except DAMAGE as error:
        raise Incomparable(f"the windows of {run.name} are damaged ({describe(error)})") from error
    raise Incomparable(
        f"{run.name} has no windows (a run needs two reports, and the present version): train "
        "longer, or lower log_every_n_steps"
    )


def _ratios(windows: Mapping[str, Any], known: Mapping[str, Any]) -> _Figures:
    """The figures of a summary's windows.

    ``known`` are the rates of the whole run: others could not be counted in each batch.
    """
    flat = {("", name): values for name, values in windows.items() if isinstance(values, list)}
    for group in ("timings", "culprits"):
        flat |= {(group, name): values for name, values in windows.get(group, {}).items()}
    keys, table = list(flat), np.array(list(flat.values()), dtype=float)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ValueError("the lists differ in length, or contain values that are not numbers")
    series = dict(zip(keys, table[:, windows.get("warm_up", 0) :], strict=True))
    times = [row for (group, _), row in series.items() if group == "timings"]
    batches, timed = series["", "batches"], series.get(("", "timed_seconds"))
    ratios: _Figures = {}
    if times:
        ratios[_WHOLE] = _Ratio(np.sum(times, axis=0), batches)
    if timed is not None:
        ratios[_TIMED] = _Ratio(timed, series["", "timed_batches"])
    for (group, name), row in series.items():
        if group:
            ratios["phase" if group == "timings" else "culprit", name] = _Ratio(row, batches)
    if timed is not None:
        rates = {rate: name for rate, name in _RATES.items() if rate in known}
        ratios |= {("rate", rate): _Ratio(series["", name], timed) for rate, name in rates.items()}
        if "samples_per_sec" in rates:
            ratios[_SAMPLE] = _Ratio(timed, series["", "samples"])
            ratios[_SIZE] = _Ratio(series["", "samples"], series["", "timed_batches"])
    return {key: ratio for key, ratio in ratios.items() if ratio.wholes.sum() > 0}


def _change(key: tuple[str, str], figures: Sequence[_Figures]) -> Change:
    ratios = []
    for of_run in figures:
        step = of_run[_STEP]
        ratios.append(of_run.get(key, step._replace(parts=np.zeros_like(step.parts))))
    after, *before = (ratio.value for ratio in ratios)
    low = high = None
    if min(len(ratio.parts) for ratio in ratios) >= _FEWEST_WINDOWS:
        now, *others = (
            resampled_ratios(*ratio, _RESAMPLES, seed) for seed, ratio in enumerate(ratios)
        )
        chosen = np.random.default_rng(len(others)).integers(len(others), size=_RESAMPLES)
        then, mean = np.stack(others)[chosen, np.arange(_RESAMPLES)], float(np.mean(before))
        # Steps and rates are compared by their ratio, which is never negative. Parts of a step may
        # be 0 in a resample.
        changes = mean * (now / then - 1) if key[0] in _RATIOS and then.all() else now - then
        low, high = (max(float(bound), -mean) for bound in np.quantile(changes, _INTERVAL))
    return Change(*key, float(np.mean(before)), after, low, high)
