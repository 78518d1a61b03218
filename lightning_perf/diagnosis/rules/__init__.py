"""Rules and their verdicts: a cause, its cost, and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from lightning_perf.diagnosis.signals import FETCH, WAITS
from lightning_perf.diagnosis.stats import lower_share
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.diagnosis.stats import Numbers

#: The minimum seconds per batch of a cause for a warning.
LEAST = 1e-3
#: Shares above this fraction of the threshold give an ``info``.
_INFO = 1 / 3
#: The lower bound of a critical share is at least this fraction of it.
_NOISE = 0.9
#: A share of this many times the threshold, and of ``CRITICAL``, is critical.
_CRITICAL_RATIO, CRITICAL = 2.0, 0.2
#: An inferred cause keeps at least this part of its seconds; otherwise other verdicts explain it.
_KEPT = 0.5
#: In advice: the time per batch that it gives, instead of the present one.
PROMISE = "{promise}"
SEVERITIES = ("info", "warning", "critical")
#: Names of actions in texts, by those in Lightning's code.
_CALLED = {
    FETCH: "the training DataLoader",
    "iter": "the iterator of the training DataLoader",
    "first fetch": "the first batch of each epoch",
    "lr_scheduler_step": "stepping the learning rate schedulers",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause of lost time.

    Example:
        >>> verdict = Verdict("callback-bound", "critical", 0.25, culprit="Plots.setup")
        >>> round(verdict.predicted_speedup, 2)
        1.33
    """

    #: One of ``CODES``, or the code of a user's own rule.
    code: str
    #: One of ``SEVERITIES``: ``info``, ``warning`` or ``critical``.
    severity: str
    #: Fraction of the run's wall time that the cause takes. No second is in two verdicts.
    share: float = 0.0
    #: Wall time now divided by wall time with the advice followed, if the evidence has
    #: ``advised_step_seconds``, and otherwise without the cause, the maximum: ``1 / (1 - share)``,
    #: or with the waiting for a CPU within the cause, ``1 / (1 - with_waiting_share)``. 1 if the
    #: cause is over.
    predicted_speedup: float = 0.0
    #: ``Class.hook``, ``Class.method`` or another name.
    culprit: str | None = None
    #: The rank concerned, of several the one that is the latest; None if it is no rank's own.
    rank: int | None = None
    #: The category of time, such as ``forward``.
    phase: str | None = None
    #: Measured values by name. The name ends in the unit: ``_seconds``, ``_share``, ``_bytes``;
    #: other values are counts or words.
    evidence: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    #: What to do about it.
    advice: str = ""

    def __post_init__(self) -> None:
        if not self.predicted_speedup:
            object.__setattr__(self, "predicted_speedup", 1 / (1 - min(self.share, 0.99)))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**asdict(self), "evidence": dict(self.evidence)}


class Rule(Protocol):
    """Finds one kind of cause. Pure: the same signals give the same verdicts."""

    @property
    def code(self) -> str:
        """The code of its verdicts."""
        ...

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The verdicts; none if nothing is wrong.

        Raises:
            Unknown: A signal is missing, or too short.
        """
        ...


@dataclass(frozen=True, slots=True)
class Impact:
    """The cost of a cause."""

    #: Seconds in each window.
    seconds: Numbers
    #: How often it occurred; None if in every batch.
    events: float | None = None
    culprit: str | None = None
    phase: str | None = None
    rank: int | None = None
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    #: May contain `PROMISE` if ``saves`` is given.
    advice: str = ""
    #: The fraction of the seconds that the advice saves; None if it is unknown, 0 if the cause is
    #: over.
    saves: float | None = None
    #: Whether the first window, which holds the warm-up, counts.
    whole_run: bool = False
    #: Whether the seconds may include waiting for a CPU that other threads use. If not, they are
    #: this waiting.
    contended: bool = True
    #: The fraction of the seconds that is certainly due to this cause.
    certain: float = 1.0
    #: Whether it is work of the host, during which a GPU may continue.
    on_host: bool = True
    #: The seconds by category; empty if they may be in any, in proportion to what other verdicts
    #: leave there. By default they are in the category ``phase``, if that is one.
    within: Mapping[str, Numbers] | None = None
    #: Whether the seconds are inferred, and not measured in a category: if other verdicts claim
    #: most of them, they explain it.
    inferred: bool = False
    #: The highest severity.
    highest: str = "critical"
    #: The number of events of equal cost, if it may vary by chance; infinite if it does not.
    number: float | None = None


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """A rule from a function.

    Example:
        >>> def scheduler_bound(signals):
        ...     seconds = signals.category("step_lr_schedulers")
        ...     yield Impact(seconds, advice="Step the scheduler less often.")
        >>> FunctionRule("scheduler-bound", scheduler_bound, threshold=0.05).code
        'scheduler-bound'
    """

    code: str
    #: Yields verdicts, or impacts for `judge`.
    find: Callable[[Signals], Iterable[Impact | Verdict]]
    #: Share of the wall time from which on an impact is worth a warning.
    threshold: float = 0.0

    def __call__(self, signals: Signals, unclaimed: Unclaimed | None = None) -> Iterable[Verdict]:
        """The verdicts on what the function finds, as far as no other verdict claims it."""
        unclaimed = unclaimed or Unclaimed(signals)
        for cause in self.find(signals):
            if isinstance(cause, Verdict):
                yield unclaimed.limited(cause)
            else:
                yield from judge(self.code, self.threshold, signals, cause, unclaimed)


class Claim(NamedTuple):
    """Seconds that a verdict takes, in each window."""

    parts: Mapping[str, Numbers]
    #: The sum of the parts.
    seconds: Numbers
    #: As of the `Impact`.
    contended: bool
    #: The share of the wall time, without and with waiting for a CPU, which has its own verdict.
    share: float
    whole: float


class Unclaimed:
    """The seconds that no verdict claims yet, so that none is claimed twice.

    Rules are applied in order, the most specific first: they take from what is left.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._seconds = dict(signals.spent)
        if not signals.on_device:
            waits = {n: np.minimum(w, signals.spent[n]) for n, w in signals.mutual.items()}
            self._seconds |= {n: signals.spent[n] - each for n, each in waits.items()}
            self._seconds[WAITS] = sum(waits.values(), signals.nothing)
        # The part of each category in which the training thread waited for a CPU, if that has a
        # verdict.
        self._waited = dict.fromkeys(self._seconds, signals.nothing)
        self._share = 1.0

    def part(self, impact: Impact) -> dict[str, Numbers]:
        """What is left of an impact's seconds, by category."""
        within = {impact.phase or "": impact.seconds} if impact.within is None else impact.within
        if within and within.keys() <= self._seconds.keys():
            return {name: np.minimum(part, self._seconds[name]) for name, part in within.items()}
        left = {n: e for n, e in self._seconds.items() if n != "validation" or not impact.contended}
        total = sum(left.values(), self._signals.nothing)
        fraction = np.minimum(impact.seconds / np.maximum(total, 1e-12), 1.0)
        return {name: fraction * seconds for name, seconds in left.items()}

    def claim(self, parts: Mapping[str, Numbers], steady: bool, contended: bool = True) -> Claim:
        """What a verdict on seconds by category would claim.

        A ``steady`` cause takes in the warm-up what it may take later, at most.
        """
        signals = self._signals
        if steady and signals.start:
            parts = {
                name: np.append(min(part[0], signals.usual(name, part)), part[1:])
                for name, part in parts.items()
            }
        seconds = sum(parts.values(), signals.nothing)
        waits = sum((self._waited[name] * part for name, part in parts.items()), signals.nothing)
        waited = float(waits.sum() / signals.wall.sum()) if contended else 0.0
        share = self._left(float(seconds.sum() / signals.wall.sum()) - waited)
        return Claim(parts, seconds, contended, share, share + waited)

    def take(self, claim: Claim) -> None:
        """Give seconds to a verdict."""
        if claim.contended:
            self._seconds |= {n: self._seconds[n] - part for n, part in claim.parts.items()}
        else:
            asleep = self._signals.asleep
            awake = sum(
                ((1 - asleep[name]) * spent for name, spent in self._signals.spent.items()),
                self._signals.nothing,
            )
            waited = np.minimum(claim.seconds / np.maximum(awake, 1e-12), 1.0)
            self._waited |= {name: (1 - part) * waited for name, part in asleep.items()}
        self._share -= claim.share

    def limited(self, verdict: Verdict) -> Verdict:
        """A verdict whose seconds are unknown, with what is left of its share."""
        share = self._left(verdict.share)
        self._share -= share
        if share == verdict.share:
            return verdict
        severity = verdict.severity if share >= _KEPT * verdict.share else "info"
        return replace(verdict, share=share, severity=severity, predicted_speedup=0.0)

    def _left(self, share: float) -> float:
        return min(share, self._share) if share > 0 else 0.0  # not NaN, from a rule of the user's


def judge(
    code: str, threshold: float, signals: Signals, impact: Impact, unclaimed: Unclaimed
) -> Iterable[Verdict]:
    """The verdict on an impact, if it is large enough and certain enough.

    ``threshold`` is the share of the wall time that is worth a warning. What other verdicts claim
    does not count.
    """
    start = 0 if impact.whole_run else signals.start
    parts, wall = unclaimed.part(impact), signals.wall[start:]
    seconds = sum(parts.values(), signals.nothing)[start:]
    if impact.on_host and signals.gpu_idle is not None and signals.setup.world_size == 1:
        # Only time in which the GPU is idle can be saved. With several ranks this is unknown,
        # because a GPU that waits for another one counts as busy.
        idle = min(1.0, signals.gpu_idle * wall.sum() / max(seconds.sum(), 1e-12))
        parts, seconds = {name: idle * part for name, part in parts.items()}, idle * seconds
    waits, wanted = (each.get(WAITS, signals.nothing) for each in (parts, impact.within or {}))
    for left, every in ((seconds, impact.seconds[start:]), (waits[start:], wanted[start:])):
        # A late rank costs nothing beyond what others wait for it.
        if impact.inferred and left.sum() < _KEPT * every.sum():
            return
    claim = unclaimed.claim(parts, steady=start > 0, contended=impact.contended)
    share = claim.share
    per_batch = share * float(signals.wall.sum()) / signals.batches
    if not per_batch >= _INFO * LEAST:
        return  # before the bootstrap, which takes most of the time
    waiting = signals.waiting[start:] if impact.contended else None
    certain = impact.certain * lower_share(seconds, wall, impact.events, waiting, impact.number)
    certain = min(certain, share)
    severity = severity_of(share, certain, threshold, per_batch)
    if severity is None:
        return
    unclaimed.take(claim)
    evidence = {"seconds_per_batch": per_batch, "lower_bound_share": certain, **impact.evidence}
    if claim.whole > share:
        evidence["with_waiting_share"] = claim.whole
    saves, advice = 1.0 if impact.saves is None else impact.saves, impact.advice
    speedup = 1 / (1 - min(claim.whole * saves, 0.99))
    if impact.saves:
        now = signals.step_seconds
        evidence["advised_step_seconds"] = now / speedup
        promise = f"{duration(now / speedup)} per batch instead of {duration(now)}"
        advice = advice.replace(PROMISE, promise)
    yield Verdict(
        code, min(severity, impact.highest, key=SEVERITIES.index), share, speedup, impact.culprit,
        impact.rank, impact.phase, evidence, advice,
    )  # fmt: skip


def severity_of(share: float, certain: float, threshold: float, per_batch: float) -> str | None:
    """The severity of a share, its lower bound and its seconds per batch; None if it is small."""
    if certain >= threshold and per_batch >= LEAST:
        critical = certain >= max(CRITICAL, _CRITICAL_RATIO * threshold) * _NOISE
        return "critical" if critical else "warning"
    return "info" if certain > 0.0 and share >= _INFO * threshold else None


def called(name: str) -> str:
    """The name of an action in texts."""
    return _CALLED.get(name, name)


def stretch_of(signals: Signals, begin: int, end: int, margin: float) -> str:
    """What some batches are called: those of an epoch, but for a margin, have its number."""
    of_epoch = signals.setup.batches_per_epoch or 0
    if of_epoch >= 2 * margin:
        epoch = round(begin / of_epoch)
        if max(abs(begin - epoch * of_epoch), abs(end - (epoch + 1) * of_epoch)) <= margin:
            return f"epoch {epoch}"
    return f"batches {begin} to {end - 1}"


def without_none(**values: float | str | None) -> dict[str, float | str]:
    """The values that are not None: evidence, as far as it was measured."""
    return {name: value for name, value in values.items() if value is not None}
