"""Patches of one method by several owners nest, and can be undone in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.small import FLOPS_PER_SAMPLE, Records, TwoOptimizers, trainer
from hypothesis import given
from hypothesis import strategies as st

from lightning_perf import Flops, Timings
from lightning_perf.patches import PatchSet

_ABSENT = object()


class Owner:
    def work(self) -> str:
        return "done"


@given(
    st.lists(
        st.sampled_from(["put 0", "put 1", "put 2", "restore 0", "restore 1", "restore 2"])
        | st.sampled_from(["patch", "undo"]),
        max_size=30,
    )
)
def test_patches_unwind_in_any_order(steps: list[str]) -> None:  # noqa: C901
    """Each owner's patch takes effect once; at the end the method is the original."""
    owner, patches, calls = Owner(), [PatchSet(), PatchSet(), PatchSet()], Counter[int]()
    saved: list[Any] = []

    @contextmanager
    def counted(number: int) -> Iterator[None]:
        calls[number] += 1
        yield

    def patch() -> None:
        """Patch by assignment, as users do, and by `unittest.mock`."""
        saved.append(vars(owner).get("work", _ABSENT))
        inner: Callable[[], str] = owner.work
        owner.work = lambda: inner()  # type: ignore[method-assign]

    def undo() -> None:
        if not saved:
            return
        before = saved.pop()
        if before is _ABSENT:
            vars(owner).pop("work", None)
        else:
            owner.work = before  # type: ignore[method-assign]

    for step in steps:
        calls.clear()
        owner.work()
        others = calls.copy()
        verb, _, number = step.partition(" ")
        if verb == "put":
            patches[int(number)].wrap_in_context(owner, "work", partial(counted, int(number)))
        elif verb == "restore":
            patches[int(number)].restore()
        else:
            (patch if verb == "patch" else undo)()
        calls.clear()
        assert owner.work() == "done"
        assert max(calls.values(), default=0) <= 1
        if number:
            assert calls.pop(int(number), 0) == (verb == "put")
            others.pop(int(number), None)
            assert calls == others
    for each in patches:
        each.restore()
    while saved:
        undo()
    calls.clear()
    assert owner.work() == "done"
    assert not calls
    assert vars(owner) == {}


@pytest.mark.parametrize("flops_first", [True, False])
def test_backward_is_timed_and_counted_under_manual_optimization(
    tmp_path: Path, flops_first: bool
) -> None:
    """Timings and Flops both wrap the strategy's backward, in either order."""
    records, flops = Records(), Flops(schedule="1ba", peak_flops=1e9)
    callbacks = [flops, Timings()] if flops_first else [Timings(), flops]
    run = trainer(tmp_path, *callbacks, logger=records)
    run.fit(TwoOptimizers())
    backwards = [value for _, value in records.of("timings/backward")]
    assert len(backwards) > 0
    assert min(backwards) > 0
    assert flops.metrics["batch_flops"] > 4 * FLOPS_PER_SAMPLE  # two steps per batch
    assert "backward" not in vars(run.strategy)
