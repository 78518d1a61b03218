"""Rules and their verdicts: a cause, its cost, and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lightning_perf.diagnosis.stats import lower_share

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
SEVERITIES = ("info", "warning", "critical")


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
    #: Fraction of the wall time that would be saved without the cause.
    share: float = 0.0
    #: Wall time now divided by wall time without the cause; by default ``1 / (1 - share)``.
    predicted_speedup: float = 0.0
    #: ``Class.hook``, ``Class.method`` or another name.
    culprit: str | None = None
    #: The rank concerned, if it is one rank.
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
    advice: str = ""
    #: Whether the first window, which holds the warm-up, counts.
    whole_run: bool = False
    #: Whether the seconds may include waiting for a CPU that other threads use.
    contended: bool = True
    #: The fraction of the seconds that is certainly due to this cause.
    certain: float = 1.0
    #: Whether it is work of the host, during which a GPU may continue.
    on_host: bool = True


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

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The verdicts on what the function finds."""
        for found in self.find(signals):
            if isinstance(found, Verdict):
                yield found
            else:
                yield from judge(self.code, self.threshold, signals, found)


def judge(code: str, threshold: float, signals: Signals, impact: Impact) -> Iterable[Verdict]:
    """The verdict on an impact, if it is large enough and certain enough.

    ``threshold`` is the share of the wall time that is worth a warning.
    """
    start = 0 if impact.whole_run else signals.start
    seconds, wall = impact.seconds[start:], signals.wall[start:]
    batches = max(signals.counts[start:].sum(), 1.0)
    if impact.on_host and signals.gpu_idle is not None and signals.setup.world_size == 1:
        # Only time in which the GPU is idle can be saved. With several ranks this is unknown,
        # because a GPU that waits for another one counts as busy.
        seconds = seconds * min(1.0, signals.gpu_idle * wall.sum() / max(seconds.sum(), 1e-12))
    each = float(seconds.sum() / batches)
    if not each >= _INFO * LEAST:
        return  # before the bootstrap, which takes most of the time
    share = float(seconds.sum() / wall.sum())
    waiting = signals.waiting[start:] if impact.contended else None
    certain = impact.certain * lower_share(seconds, wall, impact.events, waiting)
    if certain >= threshold and each >= LEAST:
        critical = certain >= max(CRITICAL, _CRITICAL_RATIO * threshold) * _NOISE
        severity = "critical" if critical else "warning"
    elif certain > 0.0 and share >= _INFO * threshold:
        severity = "info"
    else:
        return
    bound = min(certain, share)
    evidence = {"seconds_per_batch": each, "lower_bound_share": bound, **impact.evidence}
    yield Verdict(
        code, severity, min(share, 1.0), culprit=impact.culprit, rank=impact.rank,
        phase=impact.phase, evidence=evidence, advice=impact.advice,
    )  # fmt: skip


def graded(share: float, worth: bool = True) -> str:
    """The severity of a share of the wall time; ``info`` if it is not worth a warning."""
    return "info" if not worth else "critical" if share >= CRITICAL else "warning"


def without_none(**values: float | str | None) -> dict[str, float | str]:
    """The values that are not None: evidence, as far as it was measured."""
    return {name: value for name, value in values.items() if value is not None}
