"""Verdicts: what slows a run down, how much of its time that takes, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    #: ``info``, ``warning`` or ``critical``.
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
