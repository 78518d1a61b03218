"""``report.html``: the results of a run on one page, from the content of its ``summary.json``."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_perf.charts import (
    COLOURS,
    OTHER,
    Areas,
    Bar,
    Finding,
    Heading,
    Layer,
    Links,
    Part,
    Table,
    page,
    ticks,
)
from lightning_perf.core import goodput
from lightning_perf.diagnosis.hang import page_parts
from lightning_perf.diagnosis.report import cost_text, evidence_text, severity
from lightning_perf.timing.totals import Share, folded
from lightning_perf.traces.summary import facts, tables
from lightning_perf.tracking.summary import headline, main_stage, rows, steps_text, verdicts_of
from lightning_perf.units import bytes_text, duration, rough, three_digits, time_unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_perf.tracking.summary import Summary

#: Averages of sensors, and how the page shows them.
SENSORS = {
    "cpu_util_simple": ("CPUs in use", "{:.0f}%".format),
    "cpu_iowait": ("CPUs waiting for I/O", "{:.0f}%".format),
    "process_cpu": ("CPU of this run (100% is one CPU)", "{:.0f}%".format),
    "free_memory": ("free memory", bytes_text),
    "gpu_util": ("GPUs in use", "{:.0f}%".format),
    "ofu": ("tensor cores' peak in use (OFU)", "{:.0f}%".format),
}
_TIME = "Where the time of a batch went"
#: Links of a kind at most, the latest.
_MOST_LINKS = 50


def report_page(summary: Summary) -> str:
    """The page about a run: of a summary that was read, or is being written."""
    parts = (summary["run"], headline(summary).partition(" \u00b7 ")[0], "lightning_perf")
    return page(summary["run"], _parts(summary), tab=" \u00b7 ".join(filter(None, parts)))


def _parts(summary: Summary) -> Iterator[Part]:
    stage, figures = main_stage(summary)
    whole, facts_of_run = figures.get("whole_run"), dict(rows(summary)[0])
    about = [facts_of_run.get("devices"), summary.get("ended", "").partition("T")[0], stage]
    about += [steps_text(whole["first"], whole["last"])] if whole else []
    yield " \u00b7 ".join(filter(None, about))
    if speed := headline(summary):
        yield speed
    yield from page_parts(summary.get("hangs") or ())
    for verdict in verdicts_of(summary):
        texts = cost_text(verdict), verdict.advice, evidence_text(verdict)
        yield Finding(severity(verdict), verdict.code, *texts)
    if abstained := summary.get("abstained"):
        yield Heading("Not diagnosed")
        yield from (f"{code}: {why}." for code, why in abstained.items())
    several = int((summary.get("setup") or {}).get("world_size") or 1) > 1
    for name, kept in summary["stages"].items():
        spent = (kept.get("whole_run") or {}).get("timings")
        if spent and "windows" in kept:  # not validation within a fit
            yield Heading(_TIME if name == stage else f"{_TIME}, {name}")
            if several:
                yield "Means over all ranks."
            yield _chart(kept, spent)
    if culprits := summary.get("culprits"):
        yield Heading("Callbacks and loggers, of rank 0" if several else "Callbacks and loggers")
        # A later version may have written more fields.
        yield costs([Share(*(row[name] for name in Share._fields)) for row in culprits])
    yield from _ranks(summary)
    yield from _goodput(summary.get("goodput") or {})
    yield from _system(summary)
    yield from _captured(summary.get("capture") or {})
    yield from _links(summary)


def _chart(figures: Mapping[str, Any], spent: Mapping[str, float]) -> Areas:
    """The time of a stage over its steps. What no window has is after the last one."""
    whole, windows = figures["whole_run"], figures.get("windows") or {}
    names, kept = zip(*(windows.get("timings") or {"other": []}).items(), strict=True)
    columns = zip(windows.get("last") or (), windows.get("batches") or (), *kept, strict=False)
    counts, rows, rest = 0.0, list[Row](), dict(spent)
    for last, count, *seconds in columns:
        if count > 0:
            counts += count
            rows.append((int(last), {n: s / count for n, s in zip(names, seconds, strict=True)}))
            rest |= {n: rest.get(n, 0.0) - s for n, s in zip(names, seconds, strict=True)}
    batches = whole["batches"] - counts
    before: Mapping[str, float] = {}
    if batches < 1 and rows:
        batches = count
        _, before = rows.pop()
    # Windows are rounded.
    after = {n: max(s, 0.0) / max(batches, 1) + before.get(n, 0.0) for n, s in rest.items()}
    rows.append((int(whole["last"]), after))
    return stack(sorted(rows, key=lambda row: row[0]), int(whole["first"]))


def _ranks(summary: Summary) -> Iterator[Part]:
    ranks: Mapping[str, Any] = summary.get("ranks") or {}
    steps, lateness = ranks.get("last") or (), ranks.get("lateness") or ()
    if steps and lateness and {len(row) for row in lateness} == {len(steps)}:
        yield Heading("Ranks that the others wait for")
        yield "Own work per batch, without waiting, above the median rank; the latest ranks first."
        world_size = int((summary.get("setup") or {}).get("world_size") or 1)
        yield lateness_table(steps, lateness, world_size)


def _goodput(found: Mapping[str, Any]) -> Iterator[Part]:
    """The goodput of the job, and what took the rest of its time."""
    if not (lines := [*goodput.texts(found)] if found else []):
        return
    yield Heading("Goodput over all attempts")
    yield from (f"{line[0].upper()}{line[1:]}." for line in lines if not line.startswith("lost"))
    parts = {"kept steps": found.get("kept_seconds", 0.0), **found["losses"]}
    whole = found["seconds"] or 1.0
    rows = [(goodput.called(n), rough(s), f"{s / whole:.1%}") for n, s in parts.items() if s]
    yield Table(("", "time", "share"), rows)


def _system(summary: Summary) -> Iterator[Part]:
    """What the run ran on, how fast it was, and averages of sensors."""
    known, figures = rows(summary)
    averages: Mapping[str, float] = summary.get("system") or {}
    known += [(label, text(averages[name])) for name, (label, text) in SENSORS.items()
              if name in averages]  # fmt: skip
    if figures:
        head, *body = figures
        yield Heading("Speed")
        shown = (main_stage(summary)[1].get("whole_run") or {}).get("timings") or {}  # in the chart
        body = [row for row in body if row[0] not in shown]
        yield Table([cell.replace("\n", ", ") for cell in head], body)
    yield Heading("System")
    # Costs have a table of their own.
    apart = "costs by name", "goodput"
    yield Table((), [row for row in known if row[0] not in apart])


def _captured(capture: Mapping[str, Any]) -> Iterator[Part]:
    """The summary of a captured trace, or why there is none; nothing if none was wanted."""
    if not capture:
        return
    yield Heading("Captured steps")
    if not {"events", "seconds", "steps"} <= capture.keys():
        yield f"There is no trace: {capture.get('missing', 'unknown')}."
        return
    yield Table((), list(facts(capture)))
    for title, headings, cells in tables(capture):
        yield Heading(title)
        yield Table(headings, cells)
    yield from (f"Note: {note}." for note in capture.get("notes", ()))


def _links(summary: Summary) -> Iterator[Part]:
    own = summary.get("report", "")
    folder = posixpath.dirname(own) or "."
    for kind in ("traces", "pages"):
        files = [path for path in summary.get(kind) or () if path != own]
        linked = [path for path in files[-_MOST_LINKS:] if not posixpath.isabs(path)]
        if files:
            yield Heading(kind.capitalize())
            # Absolute: otherwise it needs the current folder, which may be deleted.
            yield Links([(path, posixpath.relpath(f"/{path}", f"/{folder}")) for path in linked])
        if others := len(files) - len(linked):
            yield f"{others:,} more are listed in summary.json."


#: A step, and the mean seconds per batch of each category since the row before.
Row: TypeAlias = tuple[int, Mapping[str, float]]
Numbers: TypeAlias = NDArray[np.float64]

#: Categories with a smaller share are shown as one, with "other".
_SMALL = "other, and categories below 0.5 %"
_SMALLEST_SHARE = 0.005
#: In charts of at least `_FEWEST_ROWS`, values above `_PEAK` times this percentile are cut off.
_PEAK, _PERCENTILE, _FEWEST_ROWS = 3.0, 95, 20


def stack(rows: Sequence[Row], first: int = 0) -> Areas:
    """Arrange rows as a stacked chart, the category with the most time at the bottom.

    A category that a row lacks counts as zero. ``first`` is the first step of the first row.

    Example:
        >>> [layer.name for layer in stack([(1, {"forward": 0.1, "backward": 0.2})]).layers]
        ['backward', 'forward']
    """
    rows = rows or [(first, {})]
    first = min(first, rows[0][0])
    ends = np.array([step for step, _ in rows], dtype=float)
    steps, begins, counts = np.unique(ends, return_index=True, return_counts=True)
    # Rows of the same step share it.
    widths = (np.diff(steps, prepend=first - 1) / counts).repeat(counts)
    layers = _layers(rows, widths, begins)
    lasts = [int(step) for step in steps]
    firsts = [first, *(step + 1 for step in lasts)]
    top, cut = _top(lasts, sum((np.array(layer.values) for layer in layers), np.zeros(len(lasts))))
    mean = duration(sum(layer.amount for layer in layers))
    summary = f"{mean} per batch on average, {steps_text(first, lasts[-1])}"
    axis = ticks(first - 0.5, lasts[-1] + 0.5)
    return Areas(
        edges=[step - 0.5 for step in firsts],  # a window holds all of its steps
        windows=[steps_text(*window) for window in zip(firsts, lasts, strict=False)],
        layers=layers,
        top=top,
        unit=time_unit,
        text=duration,
        x_ticks=[(tick, f"{tick:,.0f}") for tick in axis if tick == int(tick)],
        x_label="step",
        y_label=" per batch",
        legend=("category", "per batch", "share"),
        summary=f"{summary}{cut}" if layers else "No batch was timed.",
    )


def _layers(rows: Sequence[Row], widths: Numbers, starts: NDArray[np.int_]) -> tuple[Layer, ...]:
    """Means over windows of rows that begin at ``starts``, the largest category first."""
    names = dict.fromkeys(name for _, values in rows for name in values)
    # Seconds of all steps of each row.
    spent = {
        name: widths * np.array([values.get(name, 0.0) for _, values in rows]) for name in names
    }
    total = sum(float(each.sum()) for each in spent.values())
    small = [n for n in names if n == OTHER or spent[n].sum() <= _SMALLEST_SHARE * total]
    other = sum((spent.pop(name) for name in small), np.zeros(len(rows)))
    if other.any():
        spent[OTHER if small == [OTHER] else _SMALL] = other
    sizes = np.add.reduceat(widths, starts)
    return tuple(
        Layer(
            name,
            COLOURS.get(name, COLOURS[OTHER]),
            (np.add.reduceat(seconds, starts) / sizes).tolist(),
            float(seconds.sum() / widths.sum()),
            float(seconds.sum() / total),
        )
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1].sum())
    )


def _top(steps: Sequence[int], totals: Numbers) -> tuple[float, str]:
    """The end of the y axis, and a note about peaks above it."""
    highest, usual = float(totals.max()), float(np.percentile(totals, _PERCENTILE))
    if len(totals) < _FEWEST_ROWS or highest <= _PEAK * usual:
        return highest * 1.04 or 1.0, ""
    top = _PEAK / 2 * usual
    at, points = f"{steps[int(totals.argmax())]:,}", int((totals > top).sum())
    cut = f"{points} peaks are" if points > 1 else "One peak is"
    return top, f". {cut} cut off (up to {duration(highest)}, at step {at})."


def costs(table: Sequence[Share]) -> Table:
    """Callbacks and loggers, the most costly first."""
    return Table(
        ("name", "seconds", "calls", "per call", "share of the run"),
        [
            (
                name,
                three_digits(seconds),
                f"{calls:,}",
                duration(seconds / calls) if calls else "",
                f"{share:.1%}",
            )
            for name, seconds, calls, share in sorted(folded(table), key=lambda row: -row[1])
        ],
    )


# -- how late each rank is ------------------------------------------------------------------------

#: Rows of the table, and its colour.
_MOST_RANKS, _LATE = 64, "219 78 16"


def lateness_table(
    steps: Sequence[float], lateness: Sequence[Sequence[float]], ranks: int = 0
) -> Table:
    """How much longer each rank's own work takes, over the steps; the latest rank first.

    For each window, ``steps`` has its last step. ``lateness`` has one row per rank, in seconds per
    batch above the median rank; of more ``ranks`` than rows, several share a row.
    """
    values = np.array(lateness, dtype=float).clip(min=0.0)
    top, means = float(values.max()) or 1.0, values.mean(axis=1)
    each = -(-max(ranks, len(values)) // len(values))
    rows = []
    for row in np.argsort(-means, kind="stable")[:_MOST_RANKS].tolist():
        times, width = values[row].tolist(), 1 / len(steps)
        parts = [
            (width, f"rgb({_LATE} / {time / top:.0%})", f"step {step:,.0f}: {duration(time)}")
            for step, time in zip(steps, times, strict=True)
        ]
        name = f"{row * each}" if each == 1 else f"latest of {each} from {row * each} on"
        rows.append((name, duration(float(means[row])), duration(max(times)), Bar(parts)))
    return Table(("rank", "on average", "at most", "over the steps"), rows)
