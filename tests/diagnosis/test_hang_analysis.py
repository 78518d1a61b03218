"""Who makes a training hang, from the states of all ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from lightning_perf.diagnosis.hang import (
    FAILED,
    LEFT,
    RankState,
    culprits,
    page_parts,
    report,
    sentence,
)
from lightning_perf.errors import DAMAGE

LOADS = {"category": "dataloader_next", "seconds": 312.0}
WAITS = {
    "category": "backward", "name": "DistributedDataParallel.gradients", "seconds": 310.0,
    "position": 5,
}  # fmt: skip


def states(*of: dict[str, Any], **others: Any) -> list[RankState]:
    return [RankState(rank, **{"stage": "train"} | each | others) for rank, each in enumerate(of)]


def test_the_sentence_names_rank_place_and_who_waits() -> None:
    """As the issue has it: the worker, its line, since when, and the ranks that wait."""
    worker = "worker 2 waits in `read(path)`, dataset.py:41"
    found = states(WAITS, WAITS, WAITS, LOADS | {"workers": (worker,)})
    assert sentence(found) == (
        "rank 3 has been in dataloader_next (worker 2 waits in `read(path)`, dataset.py:41) for "
        "312 s; ranks 0 to 2 wait for it in backward"
    )


GPU = {"category": "forward"}
STOPPED = {"missing": "is stopped (SIGSTOP)"}
FAILS = {"missing": FAILED}
START = {"category": "other", "name": "Trainer.broadcast_sigterm"}
VALIDATES = {"stage": "validate", "category": "forward", "collective": "barrier"}
COMPUTES = {"category": "reduce_metrics", "name": "M.compute"}
UNKNOWN = {"missing": "is on another node and has not answered", "moves": True}
CASES: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "one rank": ([LOADS], [0]),
    "one that does not wait": ([WAITS, GPU, WAITS], [1]),
    "several that do not wait": ([WAITS, LOADS, GPU], [1, 2]),
    "a stopped rank": ([WAITS, WAITS, STOPPED], [2]),
    "a stopped rank and one that hangs by itself": ([WAITS, LOADS, STOPPED], [1, 2]),
    "a stopped rank, where no one is seen to wait": ([GPU, GPU, STOPPED], [2]),
    "a stopped rank, where a GPU waits in backward": (
        [STOPPED, {"category": "backward", "name": "backward"}, WAITS],
        [0],
    ),
    "one that is the last to end": ([{"missing": LEFT}, LOADS, {"missing": LEFT}], [1]),
    "one that has ended too early": ([WAITS, {"missing": LEFT}], [1]),
    "one that has ended, while a GPU waits": (
        [{"missing": LEFT}, {"category": "backward", "name": "backward"}],
        [0],
    ),
    "one that has ended, while another waits for one that hangs": (
        [WAITS, {"missing": LEFT}, LOADS],
        [2],
    ),
    "one that has ended, and one that has failed": ([WAITS, {"missing": LEFT}, FAILS], [2]),
    "one that has failed, and one that hangs by itself": ([WAITS, FAILS, LOADS], [1, 2]),
    "one of which nothing is known, and one that hangs by itself": ([UNKNOWN, LOADS], [0, 1]),
    "one of which nothing is known, and others that wait": ([UNKNOWN, WAITS], [0]),
    "one that went past a collective": (
        [{"category": "forward", "collective": "barrier"}, WAITS, GPU | {"collective": "barrier"}],
        [1],
    ),
    "one in the next batch": (
        [WAITS, WAITS | {"batch": 1, "category": "other", "name": "Trainer.broadcast_sigterm"}],
        [1],
    ),
    "one that validates, since its epoch has ended": (
        [WAITS | {"batch": 20, "trained": 20}, VALIDATES | {"trained": 20, "epochs": 1}],
        [1],
    ),
    "one that has ended the same validation": (
        [VALIDATES | {"batch": 5, "trained": 20}, WAITS | {"batch": 20, "trained": 20}],
        [1],
    ),
    "all in one place but for their lines": (
        [WAITS | {"place": "`a()`, a.py:3"}, WAITS | {"place": "`b()`, a.py:4"}],
        [0, 1],
    ),
    "a GPU that is elsewhere": ([GPU, GPU, LOADS, GPU], [2]),
    "one in a metric that is in no collective": (
        [
            START | {"collective": "broadcast", "batch": 1},
            COMPUTES | {"place": "`time.sleep(9)`, a.py:3"},
        ],
        [1],
    ),
    "one whose metric waits for a collective": (
        [COMPUTES | {"collective": "barrier"}, COMPUTES],
        [1],
    ),
    "all in one collective": ([WAITS, WAITS], [0, 1]),
    "all at one place": ([GPU, GPU], [0, 1]),
}


def test_a_span_that_has_the_name_of_its_category_is_named_once() -> None:
    """Others follow their category."""
    phases = [
        RankState(0, stage="train", category=category, name=name).phase
        for category, name in (("checkpoint", "checkpoint writing (M)"), ("other", "M.on_fit_end"))
    ]
    assert phases == ["checkpoint writing (M)", "other M.on_fit_end"]


def test_a_logger_that_hangs_in_our_call_after_the_training_is_named() -> None:
    """Our own hooks there are the end; what they call is not."""
    names = ("lightning_perf.teardown", "lightning_perf.CSVLogger.log_metrics")
    phases = [RankState(0, category="callbacks", name=name).phase for name in names]
    assert phases == ["set-up or the end", f"callbacks {names[1]}"]


@pytest.mark.parametrize("case", CASES)
def test_the_culprit_is_the_rank_that_the_others_wait_for(case: str) -> None:
    """Ranks that wait in a collective are not, but for one that is ahead."""
    of, expected = CASES[case]
    assert [each.rank for each in culprits(states(*of))] == expected


def test_a_rank_that_hangs_by_itself_does_not_wait_for_a_stopped_one() -> None:
    """Both are named; a rank of which it is not known is said to be where it is, and no more."""
    sleeps = GPU | {"place": "`time.sleep(9)`, a.py:3", "seconds": 312.0}
    assert sentence(states(WAITS, STOPPED, sleeps)) == (
        "rank 1 is stopped (SIGSTOP); rank 2 has been in forward (`time.sleep(9)`, a.py:3) for "
        "312 s; rank 0 waits for them in backward"
    )
    assert sentence(states(sleeps, STOPPED)) == (
        "rank 1 is stopped (SIGSTOP); rank 0 is in forward (`time.sleep(9)`, a.py:3)"
    )


def test_the_rank_that_did_not_join_is_named() -> None:
    """Where all ranks wait in different collectives."""
    forward = {"category": "forward", "collective": "barrier", "place": "`barrier()`, a.py:3"}
    assert sentence(states(forward, WAITS)) == (
        "rank 1 has been in backward for 310 s; rank 0 waits for it in forward (barrier, "
        "`barrier()`, a.py:3); rank 1 did not join a collective of the others"
    )


def test_the_rank_whose_data_ended_first_is_named() -> None:
    """Its loader has fewer batches than the others, which go on with their epoch."""
    found = states(WAITS | {"batch": 20, "trained": 20}, VALIDATES | {"trained": 20, "epochs": 1})
    assert sentence(found) == (
        "rank 1 has been in validate, forward (barrier) for 0 s; rank 0 waits for it in "
        "backward; rank 1 has ended its epoch after 20 batches of training, and the others have not"
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, "all ranks are in the same collective"),
        ({"collective": "all_reduce"}, "the ranks are in different collectives"),
        ({"place": "`b()`, a.py:9"}, "the ranks call the collective in different lines"),
    ],
)
def test_collectives_that_do_not_match_are_said_to_differ(
    other: dict[str, Any], expected: str
) -> None:
    """Where no rank is ahead: which of them is wrong is not known."""
    forward = {"category": "forward", "collective": "barrier", "place": "`b()`, a.py:3"}
    assert sentence(states(forward, forward | other)).endswith(f"; {expected}")


def test_views_show_names_of_strangers_as_text() -> None:
    """The report is Markdown with one row per rank, whatever the names are."""
    found = states(LOADS | {"place": "a|b\n<script>"})
    hang = {"began": "now", "batch": 3, "seconds": 3.0, "text": sentence(found)}
    text = report(hang, found)
    assert "<script" not in text
    assert len([row for row in text.splitlines() if row.startswith("|")]) == 3
    assert "hangs, for 3 s so far" in str([*page_parts([hang])])
    assert "stood for 3 s" in str([*page_parts([hang | {"ended": "later"}])])


def test_a_state_survives_its_file_and_damaged_ones_are_refused() -> None:
    """Types and lengths are checked, since another process has written it."""
    (state,) = states(LOADS | {"workers": ("worker 1",), "place": "x" * 1000})
    content = json.loads(json.dumps(asdict(state)))
    again = RankState.of(content)
    assert (again.workers, again.category) == (("worker 1",), "dataloader_next")
    assert len(again.place) == 300
    for damage in ({"seconds": "x"}, {"workers": 3}, {"pid": []}):
        with pytest.raises(DAMAGE):
            RankState.of({**content, **damage})
    with pytest.raises(DAMAGE):
        RankState.of({})
