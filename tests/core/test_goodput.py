"""The arithmetic of goodput: losses by name add up, and advice follows from the intervals."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import sqrt
from typing import Any

import pytest

from lightning_perf.core.goodput import Attempt, attempt_of, goodput, held_and_kept, texts


def attempt(number: int, began: float, seen: float, **changes: Any) -> Attempt:
    """An attempt of 10 s of set-up, that trains without checkpoints from the start."""
    trained = seen - began - 10.0
    values: dict[str, Any] = {
        "name": f"{number}", "job": "1", "host": "here", "pid": 1, "status": "running",
        "began": began, "seen": seen, "setup": 10.0, "resumed": 0.0, "first": 0.0,
        "last": trained, "unfinished": 0.0, "stalls": 0.0, "validation": 0.0,
        "checkpoints": 0.0, "saves": 0,
    }  # fmt: skip
    return Attempt(**values | changes)


def resumed(number: int, began: float, seen: float, at: float, **changes: Any) -> Attempt:
    """The same, from a checkpoint at some training seconds."""
    last = at + seen - began - 10.0
    return attempt(number, began, seen, **{"resumed": at, "first": at, "last": last} | changes)


def losses(*attempts: Attempt) -> dict[str, float]:
    """Losses other than 0, and the kept seconds; together they are all seconds."""
    found = goodput(attempts)
    parts = {"kept": found["kept_seconds"], **found["losses"]}
    assert sum(parts.values()) == pytest.approx(found["seconds"])
    assert found["share"] == pytest.approx(found["kept_seconds"] / found["seconds"])
    return {name: seconds for name, seconds in parts.items() if seconds}


def test_steps_after_the_checkpoint_are_repeated() -> None:
    """Set-up of later attempts, and the time between attempts, are restarts."""
    first, second = attempt(1, 0, 100), resumed(2, 130, 200, 60, status="finished")
    assert losses(first, second) == {
        "kept": 120,
        "restarts": 40,
        "repeated_steps": 30,
        "setup": 10,
    }


def test_an_older_checkpoint_loses_what_several_attempts_did() -> None:
    """The third attempt resumes from the first one's checkpoint: the second one kept nothing."""
    first, second = attempt(1, 0, 100), resumed(2, 100, 200, 80)
    third = resumed(3, 200, 300, 50, status="finished")
    assert losses(first, second, third)["kept"] == 50 + 90
    assert losses(first, second, third)["repeated_steps"] == 40 + 90


def test_time_between_attempts_is_held_by_nobody() -> None:
    """What a run repeats of another run's steps is lost by the one that repeats them."""
    first, second = attempt(1, 0, 100), resumed(2, 1000, 1070, 60)
    third = resumed(3, 2000, 2100, 80, status="finished")
    job = [first, second, third]
    found = goodput(job)
    assert (found["held_seconds"], found["seconds"]) == (270, 2100)
    assert held_and_kept(goodput(job), []) == (270, found["kept_seconds"]) == (270, 80 + 90)
    assert held_and_kept(goodput(job[:1]), []) == (100, 90)
    assert held_and_kept(goodput(job[:2]), job[:1]) == (70, 60 - 30)
    assert held_and_kept(goodput(job), job[:2]) == (100, 90 - 40)


def test_a_checkpoint_later_than_the_last_sign_of_life_was_kept() -> None:
    """It ends the attempt later than is known: its steps are no time between attempts."""
    first, second = attempt(1, 0, 100), resumed(2, 130, 200, 94, status="finished")
    assert losses(first, second) == {"kept": 94 + 60, "restarts": 26 + 10, "setup": 10}


def test_time_after_a_finished_attempt_is_not_counted() -> None:
    """A training that is extended a week later was not interrupted."""
    first = attempt(1, 0, 100, status="finished")
    second = resumed(2, 700_000, 700_100, 90, status="finished")
    assert losses(first, second) == {"kept": 180, "restarts": 10, "setup": 10}
    assert goodput([first, second])["interruptions"] == 0


def test_pauses_are_counted_once() -> None:
    """Validation, checkpoints and stalls are no step seconds."""
    pauses = {"validation": 5.0, "checkpoints": 8.0, "stalls": 4.0, "last": 70.0}
    assert losses(attempt(1, 0, 100, saves=4, **pauses)) == {
        "kept": 70,
        "setup": 10,
        "validation": 5,
        "checkpoints": 8,
        "stalls": 4,
        "other": 3,
    }


@pytest.mark.parametrize(("unfinished", "name"), [(5.0, "repeated_steps"), (400.0, "stalls")])
def test_a_batch_that_did_not_end_is_lost(unfinished: float, name: str) -> None:
    """A long one is a stall."""
    first = attempt(1, 0, 500, unfinished=unfinished, last=490 - unfinished)
    second = resumed(2, 500, 600, 490 - unfinished, status="finished")
    assert losses(first, second)[name] == unfinished


def test_clocks_that_disagree_give_no_negative_time() -> None:
    """The second machine's clock is 50 s late."""
    found = losses(attempt(1, 0, 100), resumed(2, 60, 150, 90, status="finished"))
    assert min(found.values()) > 0


def test_an_attempt_does_not_last_into_the_next_one() -> None:
    """The first machine's clock was a year ahead when the attempt ended."""
    first = attempt(1, 0, 100)
    found = losses(replace(first, seen=3e7), resumed(2, 130, 200, 60, status="finished"))
    assert found == {"kept": 120, "restarts": 10, "repeated_steps": 30, "setup": 10, "other": 30}


def test_a_batch_that_ended_after_the_last_sign_of_life_was_kept() -> None:
    """If the checkpoint has it; the rest of its time was lost."""
    first = attempt(1, 0, 100, last=80, unfinished=10)
    second = resumed(2, 130, 200, 84, status="finished")
    assert losses(first, second) == {
        "kept": 84 + 60,
        "repeated_steps": 6,
        "restarts": 40,
        "setup": 10,
    }


def test_checkpoints_at_the_best_interval_are_advised() -> None:
    """By Young's formula; none if the present interval is near it, or nothing was lost."""
    job = [
        attempt(1, 0, 3610, checkpoints=4.0, saves=2),
        resumed(2, 3700, 7310, 1800, checkpoints=4.0, saves=2, status="finished"),
    ]
    found = goodput(job)
    assert found["checkpoint_interval"] == 1800
    best = found["advised_interval"]
    assert best == pytest.approx(sqrt(2 * 2 * 7200))
    assert found["advised_loss"] == pytest.approx(best / 2 + 2 * 7200 / best)
    assert found["advised_loss"] < found["losses"]["repeated_steps"] == 1800
    assert [*texts(found)][1:] == [
        "lost: repeated steps 30 min (checkpoints come every 30 min), restarts 2 min (1 of 2 min)",
        "checkpoints every 3 min would lose about 3 min, their own time included",
    ]  # fmt: skip
    assert "advised_interval" not in goodput([job[0]])
    often = [
        attempt(1, 0, 3610, checkpoints=40.0, saves=20),
        resumed(2, 3700, 7310, 3500, checkpoints=40.0, saves=20, status="finished"),
    ]
    assert "advised_interval" not in goodput(often)


def test_the_interval_between_checkpoints_ends_with_the_last_one_of_an_attempt() -> None:
    """Steps after it belong to no interval; older files do not say when it was."""
    job = [
        attempt(1, 0, 3610, saves=2, saved=2000.0),
        resumed(2, 3700, 4610, 2000, saves=0),
        resumed(3, 5000, 7310, 2000, saves=2, saved=4000.0, status="finished"),
    ]
    assert goodput(job)["checkpoint_interval"] == 1000
    assert "checkpoint_interval" not in goodput([job[1]])
    old = asdict(replace(job[0], saved=0.0))
    del old["saved"]
    assert goodput([attempt_of(old)])["checkpoint_interval"] == 1800


def test_a_short_training_is_not_commented() -> None:
    """Its set-up is most of it."""
    assert [*texts(goodput([attempt(1, 0, 100)]))] == []
    assert [*texts(goodput([attempt(1, 0, 1000)]))] == [
        "99% of 17 min in 1 attempt were steps that were kept",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"seen": -1}, {"seen": 1e12}, {"seen": True}, {"seen": "1"}, {"seen": None},
        {"seen": float("nan")}, {"status": 1}, {"name": None}, {"began": 10**400},
        {"unfinished": 1e9}, {"last": 200}, {"seen": 50},
    ],
)  # fmt: skip
def test_implausible_files_are_refused(change: dict[str, Any]) -> None:
    """Files may be damaged, or another's."""
    content = asdict(attempt(1, 0, 100))
    assert attempt_of({**content, "later": "version"}) == attempt(1, 0, 100)
    for bad in ({**content, **change}, [], None, {}, "text"):
        with pytest.raises(ValueError, match="an attempt"):
            attempt_of(bad)
