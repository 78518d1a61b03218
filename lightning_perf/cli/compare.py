"""``lightning-perf compare``: what became slower between runs, for people and for CI."""

from __future__ import annotations

import json as json_format
from math import isfinite
from typing import TYPE_CHECKING, Any

from lightning_perf.cli import add_tracking_uri, fail
from lightning_perf.tracking.summary import RATES
from lightning_perf.units import duration, three_digits, time_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jsonargparse import ArgumentParser

    from lightning_perf.diagnosis.compare import Change, Comparison

#: Phases and culprits that changed by a smaller share of the step are not shown, nor more of them.
_LEAST_SHARE, _MOST_ROWS = 0.002, 8


def parser() -> ArgumentParser:
    """The arguments of the command."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Compare the speed of a run with that of others. The exit code is 1 if it is "
        "slower than --threshold allows."
    )
    runs = "an MLflow run's id or name, or a folder with a summary.json"
    parser.add_argument("run", type=str, help=f"The run to judge: {runs}.")
    parser.add_argument(
        "baselines",
        type=str,
        nargs="+",
        help="The runs to compare it with, named alike. Several show how much normal runs differ.",
    )
    parser.add_argument(
        "--threshold",
        type=str,
        default=None,
        help="Exit with code 1 if a step takes longer by more than this, with 95 %% confidence: "
        "such as 5%%.",
    )
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(
    run: str, baselines: list[str], threshold: str | None, tracking_uri: str | None, json: bool
) -> int:
    """Print the comparison.

    Returns:
        The exit code: 1 if the run is slower than the threshold allows; 2 if a run cannot be read
        or nothing can be said.
    """
    from lightning_perf.diagnosis.compare import Incomparable, Measured, compare
    from lightning_perf.tracking.runs import find_run
    from lightning_perf.tracking.summary import main_stage

    try:
        limit = None if threshold is None else _fraction(threshold)
        named = [run, *baselines]
        summaries = [find_run(each, tracking_uri).summary for each in named]
        stages = [main_stage(each) for each in summaries]
        for name, (stage, _) in zip(named, stages, strict=True):
            if stage != stages[0][0]:
                raise Incomparable(f"{run} is about {stages[0][0]}, and {name} about {stage}")
        measured = [
            Measured(name, windows) for name, (_, windows) in zip(named, stages, strict=True)
        ]
        found = compare(measured[0], measured[1:])
    except (LookupError, ValueError) as error:
        return fail("compare", error)
    notes = [*found.notes, *_other_setup(named, summaries)]
    slower = None if limit is None else found.slower_than(limit)
    if json:
        content = {
            "run": run,
            "baselines": baselines,
            "threshold": limit,
            "slower": slower,
            "changes": [each.as_dict() for each in found.changes],
            "notes": notes,
        }
        print(json_format.dumps(content, indent=1))
    else:
        _show(run, baselines, found, notes)
    if limit is not None and slower is None:
        return fail("compare", "nothing can be said about the threshold: a run has too few windows")
    return int(bool(slower))


def _fraction(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"--threshold {text} is not a share, such as 5% or 0.05")
    return value


def _other_setup(names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What differs between the set-ups of the runs, besides their speed."""
    for name, summary in zip(names, summaries, strict=True):
        if summary["status"] != "finished":
            yield f"{name}: {summary['status']}"
    setups = [_flat(summary.get("setup", {})) for summary in summaries]
    for key in setups[0]:
        values = [str(setup.get(key, "unknown")) for setup in setups]
        others = sorted(set(values[1:]) - {values[0]})
        if others and key != "peak_flops":
            yield f"{key} differs: {', '.join(others)} before, {values[0]} now"


def _flat(setup: Mapping[str, Any]) -> dict[str, Any]:
    versions = setup.get("versions") or {}
    return {key: value for key, value in {**setup, **versions}.items() if key != "versions"}


# -- the view -------------------------------------------------------------------------------------


def _show(run: str, baselines: Sequence[str], found: Comparison, notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    before = baselines[0] if len(baselines) == 1 else f"{len(baselines)} runs"
    console.print(f"{run} compared with {before}: {_headline(found.slowdown)}", style="bold")
    table = Table("", "before", "now", "change", "95 % interval")
    for each in _shown(found):
        table.add_row(*_row(each, found.changes[0].before), style="" if each.certain else "dim")
    console.print(table, soft_wrap=False)
    for note in notes:
        console.print(f"Note: {note}.")


def _headline(slowdown: Change) -> str:
    change, interval, name = _percent(slowdown), _percents(slowdown), slowdown.name
    if slowdown.low is None:
        return f"{change} per {name}, noise unknown"
    if not slowdown.certain:
        return f"no change beyond the noise ({interval} per {name})"
    word = "slower" if slowdown.difference > 0 else "faster"
    each = f"{duration(slowdown.before)} -> {duration(slowdown.after)} per {name}"
    return f"{word}: {each}, {change} ({interval})"


def _shown(found: Comparison) -> Iterator[Change]:
    """All rates, and of phases and culprits those that changed most."""
    least, kinds = _LEAST_SHARE * found.changes[0].before, dict.fromkeys(("phase", "culprit"), 0)
    for each in found.changes:
        if each.kind in kinds:
            kinds[each.kind] += 1
            if abs(each.difference) < least or kinds[each.kind] > _MOST_ROWS:
                continue
        yield each


def _row(each: Change, step: float) -> tuple[str, ...]:
    if each.kind == "rate":
        text: Callable[[float], str] = _mfu if each.name == "mfu" else three_digits
        name, change, interval = RATES[each.name][0], _percent(each), _percents(each)
    else:
        text = duration
        name = {"step": "time per ", "phase": "  ", "culprit": "    "}[each.kind] + each.name
        # Of a phase or culprit, how much slower it makes the whole step.
        whole = each.before if each.kind == "step" else step
        scale, unit = time_unit(max(map(abs, (each.low or 0, each.high or 0, each.difference))))
        change = f"{each.difference * scale:+.3g} {unit} ({each.difference / whole:+.1%})"
        interval = "unknown"
        if each.low is not None and each.high is not None:
            interval = f"{each.low * scale:+.3g} to {each.high * scale:+.3g} {unit}"
    return name, text(each.before), text(each.after), change, interval


def _percent(each: Change) -> str:
    return f"{each.relative(each.difference):+.1%}"


def _percents(each: Change) -> str:
    if each.low is None or each.high is None:
        return "unknown"
    return f"{each.relative(each.low):+.1%} to {each.relative(each.high):+.1%}"


def _mfu(fraction: float) -> str:
    return f"{fraction:.3%}"
