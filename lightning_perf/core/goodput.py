"""Goodput: the part of a job's time that went into steps that were kept, over all its attempts."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from math import inf, sqrt
from typing import TYPE_CHECKING, Any

from lightning_perf.units import counted, rough

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: The status of an attempt that reached the end of its training.
FINISHED = "finished"
#: The parts of the rest of the time.
LOSSES = ("restarts", "repeated_steps", "setup", "validation", "checkpoints", "stalls", "other")
#: Seconds without the end of a batch that are a stall.
STALLED = 60.0
#: Losses below this share of the time are not shown, and bring no advice. Other intervals between
#: checkpoints are advised if they are shorter by this factor.
_LEAST, _SHORTER = 0.01, 1.5
#: The goodput of one attempt that took fewer seconds is not shown.
_SHORT = 600.0
#: No number of an attempt is larger: seconds since the epoch are the largest ones. Its parts may be
#: longer than the whole by these seconds.
_MOST, _ROUNDING = 1e11, 1.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """The contribution of one process to a job: seconds, up to its last sign of life.

    Step seconds are those of the job: a resumed process continues from its checkpoint's.
    """

    #: Its name, and that of the job's first attempt.
    name: str
    job: str
    host: str
    pid: float
    #: ``"running"``, also if it was killed; or how it ended.
    status: str
    #: When the process started, and its last sign of life, since the epoch.
    began: float
    seen: float
    #: From the start of the process to its first batch, whose loading is included.
    setup: float
    #: Seconds of steps, without checkpoints and stalls: of the checkpoint that it resumed, at the
    #: first batch, and at the end of the last batch.
    resumed: float
    first: float
    last: float
    #: Since the end of the last batch without checkpoints, and those of batches that stalled.
    unfinished: float
    stalls: float
    #: Validation without checkpoints, and checkpoints.
    validation: float
    checkpoints: float
    #: The number of checkpoints.
    saves: float
    #: The folder of its run, and when the process started, as `system.process` has it.
    folder: str = ""
    started: float = 0.0
    #: Seconds of steps at its last checkpoint; 0 in files of older versions.
    saved: float = 0.0

    @property
    def trained(self) -> float:
        """Seconds of all its steps."""
        return max(self.last - self.first, 0.0)

    @property
    def covered(self) -> float:
        """Seconds of its steps up to its last checkpoint."""
        last = min(self.saved or self.last, self.last)
        return max(last - self.first, 0.0) if self.saves else 0.0

    @property
    def known(self) -> float:
        """Seconds that have a name."""
        pauses = self.validation + self.checkpoints + self.stalls
        return self.setup + self.trained + self.unfinished + pauses


def attempt_of(content: Any) -> Attempt:
    """The attempt that the content of a file describes; raises `ValueError` if there is none."""
    known = content if isinstance(content, dict) else {}
    values = {each.name: known.get(each.name, each.default) for each in fields(Attempt)}
    for each in fields(Attempt):
        value = values[each.name]
        number = each.type == "float" and type(value) in (int, float) and 0 <= value <= _MOST
        if not (number or (each.type == "str" and isinstance(value, str))):
            raise ValueError(f"{each.name} is not a plausible value of an attempt")
    found = Attempt(**values)
    if found.known > found.seen - found.began + _ROUNDING:
        raise ValueError("an attempt is longer than from its start to its last sign of life")
    return found


def goodput(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """The goodput of a job: the time of steps that were kept, divided by all time.

    Steps after the checkpoint that the next attempt resumes are repeated. After an attempt that
    finished, no time is counted until the next one begins.

    Args:
        attempts: At least one, in the order in which they began.

    Returns:
        The section of ``summary.json``: ``docs/summary.md`` describes it.
    """
    losses, interruptions = dict.fromkeys(LOSSES, 0.0), 0
    kept = whole = held = 0.0
    # The step seconds that later attempts have kept, and when the next one began.
    limit = later = inf
    for number, each in reversed([*enumerate(attempts)]):
        stalled = each.unfinished > STALLED
        # Clocks of machines differ, and may be set: no attempt lasts into the next one.
        ended = max(min(each.seen, later), each.began + each.known)
        interrupted = later < inf and each.status != FINISHED
        gap = max(later - ended, 0.0) if interrupted else 0.0
        whole += ended - each.began + gap
        steps = min(max(limit - each.first, 0.0), each.trained)
        # A checkpoint that is later than the last sign of life, or of attempts that are unknown.
        unseen = max(limit - each.last, 0.0) if interrupted else 0.0
        ended_later = 0.0 if stalled else min(unseen, each.unfinished)
        unseen = min(unseen - ended_later, gap)
        kept += steps + ended_later + unseen
        held += ended - each.began + unseen
        losses["restarts"] += gap - unseen
        losses["restarts" if number else "setup"] += each.setup
        losses["repeated_steps"] += each.trained - steps
        losses["validation"] += each.validation
        losses["checkpoints"] += each.checkpoints
        losses["stalls"] += each.stalls
        if stalled or interrupted:
            losses["stalls" if stalled else "repeated_steps"] += each.unfinished - ended_later
        interruptions += interrupted
        limit, later = min(limit, each.resumed), each.began
    losses["other"] = max(whole - kept - sum(losses.values()), 0.0)
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(attempts[0].began))
    found = {
        "share": min(kept / whole, 1.0) if whole else 0.0, "since": since, "seconds": whole,
        "kept_seconds": kept, "held_seconds": held, "attempts": len(attempts),
        "interruptions": interruptions, "losses": losses, "job": attempts[0].job,
    }  # fmt: skip
    return found | _checkpoints(attempts, interruptions, losses["repeated_steps"] > _LEAST * whole)


def held_and_kept(found: Mapping[str, Any], others: Sequence[Attempt]) -> tuple[float, float]:
    """Seconds of the processes of a run, and those of its steps that were kept.

    Steps of other runs that it repeats are not kept of its own.

    Args:
        found: The `goodput` of its job up to its latest attempt.
        others: The attempts before that one that are of other runs.
    """
    held, kept = found["held_seconds"], found["kept_seconds"]
    if others:
        before = goodput(others)
        held, kept = held - before["held_seconds"], kept - before["kept_seconds"]
    return held, min(max(kept, 0.0), held)


def _checkpoints(attempts: Sequence[Attempt], interruptions: int, costly: bool) -> dict[str, float]:
    """The interval between checkpoints, and a better one if repeated steps are ``costly``.

    The best interval is the square root of twice the product of the cost of a checkpoint and the
    step seconds between interruptions: Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17 (9), 1974.
    """
    trained = sum(each.trained for each in attempts)
    saves, spent = sum(each.saves for each in attempts), sum(each.checkpoints for each in attempts)
    # Not what follows the last one of an attempt: that interval did not end.
    covered = sum(each.covered for each in attempts)
    if not (saves and covered):
        return {}
    interval, cost = covered / saves, spent / saves
    best = sqrt(2 * cost * trained / interruptions) if costly and interruptions else 0.0
    if not 0 < best < interval / _SHORTER:
        return {"checkpoint_interval": interval}
    # On average half an interval is repeated.
    loss = interruptions * best / 2 + cost * trained / best
    return {"checkpoint_interval": interval, "advised_interval": best, "advised_loss": loss}


def called(loss: str) -> str:
    """The name of a loss in texts."""
    return loss.replace("_", " ").replace("setup", "set-up")


def texts(found: Mapping[str, Any]) -> Iterator[str]:
    r"""Sentences about a goodput: itself, the largest losses, and advice.

    None for a short training that was not interrupted.

    Example:
        >>> losses = {"restarts": 960, "repeated_steps": 1140, "other": 9}
        >>> found = {"share": 0.73, "seconds": 7800, "attempts": 5, "interruptions": 4}
        >>> print(*texts(found | {"losses": losses, "checkpoint_interval": 1800}), sep="\n")
        73% of 2.2 h in 5 attempts were steps that were kept
        lost: repeated steps 19 min (checkpoints come every 30 min), restarts 16 min (4 of 4 min)
    """
    whole, losses = found["seconds"], found["losses"]
    if found["attempts"] < 2 and whole < _SHORT:
        return
    attempts = counted(int(found["attempts"]), "attempt")
    yield f"{found['share']:.0%} of {rough(whole)} in {attempts} were steps that were kept"
    notes = {}
    if times := found["interruptions"]:
        notes["restarts"] = f" ({times} of {rough(losses.get('restarts', 0) / times)})"
    if every := found.get("checkpoint_interval"):
        notes["repeated_steps"] = f" (checkpoints come every {rough(every)})"
    parts = [
        f"{called(name)} {rough(losses[name])}{notes.get(name, '')}"
        for name in sorted(losses, key=losses.__getitem__, reverse=True)
        if losses[name] > _LEAST * whole
    ]
    if parts:
        yield f"lost: {', '.join(parts)}"
    if best := found.get("advised_interval"):
        loss = rough(found.get("advised_loss", 0.0))
        yield f"checkpoints every {rough(best)} would lose about {loss}, their own time included"
