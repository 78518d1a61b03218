"""Finds which rank makes a training hang, and where, from the states of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from lightning_perf.charts import Finding, Heading, Part
from lightning_perf.errors import printable
from lightning_perf.units import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Characters of a text in a state, and workers, that are kept: another process has written it.
_LONGEST, _MOST_WORKERS = 300, 100


def _text(value: object) -> str:
    return printable(str(value)[:_LONGEST])


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank does while the training makes no progress."""

    rank: int
    #: Why the rank did not answer, as the end of a sentence; empty if it did.
    missing: str = ""
    #: Lightning's name of the stage; empty before the first and after the last one.
    stage: str = ""
    #: The batches that it has completed in the stage.
    batch: int = 0
    #: The training batches that it has completed, and the epochs that have no further ones.
    trained: int = 0
    epochs: int = 0
    #: How far it has come since the end of a batch; 0 before the next one.
    position: int = 0
    #: What its time is spent on, and the name of the span.
    category: str = ""
    name: str = ""
    #: Since when it makes no progress.
    seconds: float = 0.0
    #: The line of the user that it is in, with what is called there.
    place: str = ""
    #: The function of torch.distributed that it is in.
    collective: str = ""
    #: Data loader workers that do not wait for work, with where they are.
    workers: tuple[str, ...] = ()
    #: Whether it makes progress, or may still take this long.
    moves: bool = False
    #: Whether nothing more is added.
    complete: bool = True
    #: Whether it is ready to be aborted.
    aborts: bool = False
    host: str = ""
    pid: int = 0

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The state in a file; raises as reading a damaged file does (`errors.DAMAGE`)."""
        values: dict[str, Any] = {}
        for each in fields(cls):
            value = content[each.name]
            default: Any = 0 if each.name == "rank" else each.default
            if isinstance(default, tuple):
                values[each.name] = tuple(_text(each) for each in value[:_MOST_WORKERS])
            else:
                kind: Any = type(default)
                values[each.name] = _text(value) if kind is str else kind(value)
        return cls(**values)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: a metric's `compute` may also hang by itself."""
        return bool(self.collective) or self.name in _WAITS

    @property
    def phase(self) -> str:
        """Where it is, by the words of the metrics."""
        named = f" {self.name}" if self.category in _NAMED else ""
        if not self.stage:  # hooks that follow ours at its end have names
            is_hook = "." in named and self.name.rpartition(".")[0] != "lightning_perf"
            return f"{self.category}{named}" if is_hook else "set-up or the end"
        within = f"{self.stage}, " if self.stage != "train" else ""
        if self.category and self.name.startswith(f"{self.category} "):  # "checkpoint writing"
            return f"{within}{self.name}"
        return f"{within}{self.category or 'a batch'}{named}"


#: Spans in which a rank waits for others, by their names in `run/spans.py`.
_WAITS = (
    "DistributedDataParallel.gradients",
    "DistributedDataParallel.buffers",
    "Trainer.broadcast_sigterm",
)
#: Categories whose spans are named.
_NAMED = ("callbacks", "logging", "checkpoint", "other", "reduce_metrics")


#: `RankState.missing` of a rank whose training has ended as it should, and of another one.
LEFT, FAILED = "has ended its training", "has ended its training by an exception"


def culprits(states: Sequence[RankState]) -> list[RankState]:
    """The ranks that the others wait for; all of them if that is not known.

    The first of these that applies:

    - ranks that failed or did not answer, and ranks that do not wait while others do. If no rank
      waits, the latter count only if nothing is known of the former;
    - ranks that have ended as they should, if all others wait;
    - if all ranks wait, those that are ahead: they did not join an earlier collective;
    - otherwise, as while GPUs wait for each other, the fewest ranks that are in one place.
    """
    silent = [each for each in states if each.missing not in ("", LEFT)]
    gone = [each for each in states if each.missing]
    states = [each for each in states if not each.missing]
    free = [each for each in states if not (_may_wait(each) if gone else each.waits)]
    if silent or 0 < len(free) < len(states):
        alone = len(free) == len(states) and not all(each.moves for each in silent)
        return sorted(silent + ([] if alone else free), key=lambda each: each.rank)
    if gone and not free:
        return gone
    if not free:
        furthest = max(map(_order, states))
        return [each for each in states if _order(each) == furthest]
    groups: dict[tuple[object, ...], list[RankState]] = {}
    for each in states:
        where = (each.stage, each.batch, each.category, each.place)
        groups.setdefault(where, []).append(each)
    if len(groups) == 1:
        return [*states]
    return min(groups.values(), key=lambda group: (len(group), -_longest(group)))


def _may_wait(state: RankState) -> bool:
    """Whether it waits for other ranks, or is in backward: a GPU's wait has no name of its own."""
    return state.waits or state.category == "backward"


def _order(state: RankState) -> tuple[int, ...]:
    """How far a rank has come: it validates after a batch, and before the next one."""
    training = state.stage == "train"
    return state.epochs, state.trained, training, state.batch, state.position


def _longest(states: Iterable[RankState]) -> float:
    return max(each.seconds for each in states)


def sentence(states: Sequence[RankState], ranks: int = 0) -> str:
    """Which rank is where, since when, and which ranks wait for it.

    ``ranks`` is how many the run has, if the states of some are left out.

    Example:
        >>> loads = RankState(0, stage="train", category="dataloader_next", seconds=31.0)
        >>> waits = RankState(1, stage="train", category="forward", collective="barrier")
        >>> sentence([loads, waits])
        'rank 0 has been in dataloader_next for 31 s; rank 1 waits for it in forward (barrier)'
    """
    found = culprits(states)
    others = [each for each in states if each not in found and not each.missing]
    parts = [_culprit(group, ranks or len(states)) for group in _alike(found)]
    it = "it" if len(found) == 1 else "them"
    for group in _alike(others):
        one, waits = len(group) == 1, _may_wait(group[0])
        does = f"wait{'s' * one} for {it}" if waits else "is" if one else "are"
        parts.append(f"{ranks_text(group)} {does} in {group[0].phase}{_where(group[0])}")
    if len(states) > 1 and all(each.waits for each in states):
        parts.append(_mismatch(found, others))
    return "; ".join(parts)


def _mismatch(found: Sequence[RankState], others: Sequence[RankState]) -> str:
    """What is known if all ranks wait for each other."""
    if others and found[0].epochs > max(each.epochs for each in others):
        has = "has" if len(found) == 1 else "have"
        batches = f"ended its epoch after {found[0].trained:,} batches of training"
        return f"{ranks_text(found)} {has} {batches}, and the others have not"
    if others:
        return f"{ranks_text(found)} did not join a collective of the others"
    if len({each.collective for each in found}) > 1:
        return "the ranks are in different collectives"
    if len({each.place for each in found}) > 1:
        return "the ranks call the collective in different lines"
    return "all ranks are in the same collective"


def _culprit(group: Sequence[RankState], ranks: int) -> str:
    first, name = group[0], ranks_text(group) if ranks > 1 else "the training"
    have = "has" if len(group) == 1 else "have"
    if first.missing and not first.category and not first.place:
        return f"{name} {first.missing}"
    missing = f" and {first.missing}" if first.missing else ""
    where = f"{first.phase}{_where(first)}" if first.category or not missing else first.place
    return f"{name} {have} been in {where} for {_longest(group):,.0f} s{missing}"


def _where(state: RankState) -> str:
    """The worker, or the line, that a rank waits in."""
    if state.category == "dataloader_next" and state.workers:
        return f" ({state.workers[0]})"
    inside = ", ".join(filter(None, (state.collective, state.place)))
    return f" ({inside})" if inside else ""


def _alike(states: Sequence[RankState]) -> Iterator[list[RankState]]:
    """Groups of ranks with the same description."""

    def key(each: RankState) -> tuple[str, ...]:
        return (each.missing, each.phase, _where(each))

    groups: dict[tuple[str, ...], list[RankState]] = {}
    for each in states:
        groups.setdefault(key(each), []).append(each)
    yield from groups.values()


def ranks_text(states: Sequence[RankState]) -> str:
    """Ranks in words, with ranges.

    Example:
        >>> ranks_text([RankState(rank) for rank in (0, 1, 2, 5)])
        'ranks 0 to 2 and 5'
    """
    return listed("rank", (each.rank for each in states))


# -- views ----------------------------------------------------------------------------------------


def report(hang: Mapping[str, Any], states: Sequence[RankState]) -> str:
    """The report of a hang as Markdown; ``hang`` is its entry in `summary.json`."""
    ended = hang.get("ended", "")
    went_on = f"; it went on at {ended}, after {hang['seconds']:,.0f} s" if ended else ""
    return "\n".join([
        "# The training stood" if ended else "# The training hangs",
        "",
        f"**{_cell(str(hang['text']))}.**",
        "",
        f"Without progress since {hang['began']}, at batch {hang['batch']:,}{went_on}.",
        "",
        "| rank | where | since | line | workers | process |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(map(_cell, _row(state)))} |" for state in states),
        "",
        "`rank{N}.stacks.txt` beside this file has the stacks of all threads and child processes.",
        "",
    ])  # fmt: skip


def _row(state: RankState) -> Iterator[str]:
    yield str(state.rank)
    yield state.missing or ", ".join(filter(None, (state.phase, state.collective)))
    yield f"{state.seconds:,.0f} s" if state.seconds else ""
    yield state.place
    yield "; ".join(state.workers)
    yield f"{state.pid} on {state.host}" if state.pid else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def page_parts(hangs: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """The section of `report.html`."""
    if hangs:
        yield Heading("Hangs")
    for each in hangs:
        seconds = f"{each['seconds']:,.0f} s"
        stood = f"stood for {seconds}" if "ended" in each else f"hangs, for {seconds} so far"
        since = f"Since {each.get('began', '?')}, at batch {each.get('batch', 0):,}."
        yield Finding("critical", stood, "", f"{each['text']}.", since)
