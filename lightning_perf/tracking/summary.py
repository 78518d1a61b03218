"""``summary.json``: the results of a run in one file; its format, its reader and its views."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.core import cost, goodput
from lightning_perf.errors import describe, printable, shown
from lightning_perf.files import finite, read_json
from lightning_perf.traces.names import safe
from lightning_perf.units import counted, duration, flops_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from lightning_perf.diagnosis import Verdict

    #: The content of the file.
    Summary = Mapping[str, Any]
    #: A name, and its text over the whole run and over the last window.
    _Row = tuple[str, ...]

FILE_NAME, PAGE_NAME = "summary.json", "report.html"
#: The folder of the files of attempts, below that of a run.
ATTEMPTS = "attempts"
#: Names of the file: where another one has the name, it gets a number.
SUMMARIES = re.compile(r"summary(?:-\d+)?\.json")
#: The most files of a folder that are read, the latest ones.
_MOST_FILES = 100
#: The JSON Schema of the file.
SCHEMA = Path(__file__).with_name("summary.schema.json")
#: The status of a run that continues, or was killed.
RUNNING = "running"
#: Increased with each change of the format that an older reader would misread.
VERSION = 2
#: Ends a description in MLflow that we wrote, and which may be replaced.
_OURS = "<!-- lightning_perf -->"
#: Categories and costs that views show, and the minimum share of each.
_MOST_CATEGORIES, _MOST_COSTS, _LEAST_COST = 5, 3, 0.01
#: The share of our own callbacks above which fewer reports, or recordings, are advised.
_COSTLY = 0.02
#: Entries of ``throughput`` that the views show: name, format, divisor and metric.
RATES = {
    "mfu": ("MFU", "{:.3g}%", 0.01, "mfu"),
    "batches_per_sec": ("batches/s", "{:,.2f}", 1.0, "throughput/batches_per_sec"),
    "samples_per_sec": ("samples/s", "{:,.1f}", 1.0, "throughput/samples_per_sec"),
    "tokens_per_sec": ("tokens/s", "{:,.0f}", 1.0, "throughput/tokens_per_sec"),
    "flops_per_sec_per_device": (
        "TFLOP/s per device", "{:.3g}", 1e12, "throughput/device/flops_per_sec",
    ),
}  # fmt: skip


#: The rates that are bounds if FLOPs of some kernels are not counted.
_OF_FLOPS = ("mfu", "flops_per_sec_per_device")


class SummaryError(LookupError):
    """A summary that cannot be read; the message says why, in one line."""


@cache
def installed_version() -> str:
    """The version of lightning_perf, or ``"unknown"``; cached, as reading it takes 4 ms."""
    try:
        return version("lightning_perf")
    except PackageNotFoundError:  # run from its sources without installation
        return "unknown"


#: A list of numbers as `json.dumps` indents it. Strings hold no line breaks.
_NUMBERS = re.compile(r"\[\n[^\[\]{}\"]*\]")


def text_of(summary: Summary) -> str:
    """The file's text, with each list of numbers on one line."""
    indented = json.dumps(finite(summary), indent=1, default=str)
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()), indented)


# -- reading --------------------------------------------------------------------------------------

#: Sizes of numbers, so that no product or quotient of some is infinite; in the schema, too.
_LEAST, _MOST = 1e-30, 1e30
#: The types of JSON Schema, and their names in messages where these differ.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "integer": int,
    "boolean": bool, "null": type(None),
}  # fmt: skip
_NAMES = {"object": "mapping", "array": "list", "string": "text", "number": "plausible number",
          "integer": "plausible number"}  # fmt: skip


@cache
def schema() -> Mapping[str, Any]:
    """The format of the file as a JSON Schema, which other tools can use."""
    return read_json(SCHEMA)  # type: ignore[no-any-return]


def read_summary(path: Path) -> Summary:
    """Read a summary; raises `SummaryError` if there is none that this version can read."""
    try:
        content = read_json(path)
    except OSError as error:
        raise SummaryError(f"{path} cannot be read ({describe(error)})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SummaryError(f"{path} is cut short or no JSON ({describe(error)})") from error
    except ValueError as error:
        raise SummaryError(f"{path} is damaged ({error})") from error
    problem = _problem(content)
    if problem:
        raise SummaryError(f"{path} {problem}")
    return content  # type: ignore[no-any-return]


def summaries_in(
    folder: Path, run: str | None = None, unreadable: list[SummaryError] | None = None
) -> list[tuple[Path, Summary]]:
    """The summaries in a folder, of any run or of one name, with their files; the latest last.

    Those of runs that trained, and of those that still run, count as later than others; those of
    the run whose name the folder has, even more: others may be copies, kept there for comparison.
    ``unreadable`` gets why others cannot be read.
    """
    files, name = [], ""
    with suppress(OSError):  # there is no folder
        name = folder.absolute().name
        names = (path for path in folder.iterdir() if SUMMARIES.fullmatch(path.name))
        files = [(path.stat().st_mtime, path) for path in names if path.is_file()]
    found = []
    for updated, path in sorted(files)[-_MOST_FILES:]:
        try:
            summary = read_summary(path)
        except SummaryError as error:  # another tool's file may have the same name
            if unreadable is not None:
                unreadable.append(error)
            continue
        if run in (None, summary["run"]):
            own = safe(summary["run"]) in (name, name[:-9])  # as `distinct_name` has it
            found.append((own, trains(summary), updated, path, summary))
    return [(path, summary) for *_, path, summary in sorted(found, key=lambda each: each[:3])]


def trains(summary: Summary) -> bool:
    """Whether a run trained, or still runs."""
    return summary["status"] == RUNNING or "train" in summary.get("stages", {})


def _problem(content: object) -> str:
    """Why this is not a summary that the views can show; empty if it is one."""
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        return "is not a summary of lightning_perf: it has no version"
    if content["version"] > VERSION:
        return (
            f"has version {content['version']}, which is newer than this lightning_perf can read "
            f"({VERSION}). Try pip install --upgrade lightning_perf"
        )
    damage = _damage(content, schema(), "summary")
    return f"is damaged ({damage})" if damage else ""


def _damage(value: Any, form: Mapping[str, Any], name: str) -> str:
    """The first part of a value that is not as the schema says; empty if all are.

    Of JSON Schema, it knows what `SCHEMA` uses: the package jsonschema takes 0.1 s to import, and
    runs read summaries, too.
    """
    if "type" not in form:
        form = schema()["$defs"][form["$ref"].rpartition("/")[2]]
    types = form["type"] if isinstance(form["type"], list) else [form["type"]]
    if not any(_is_of(value, each) for each in types):
        return f"its {name} is not a {_NAMES[types[0]]}"
    parts: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(value, dict):
        if missing := [key for key in form.get("required", ()) if key not in value]:
            return f"its {name} has no {missing[0]}"
        known, others = form.get("properties", {}), form.get("additionalProperties")
        parts = ((shown(key), each, known.get(key, others)) for key, each in value.items())
    elif isinstance(value, list):
        parts = ((f"item {number}", each, form["items"]) for number, each in enumerate(value))
    found = (_damage(each, inner, f"{name}, {part}") for part, each, inner in parts if inner)
    return next(filter(None, found), "")


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # which is an int for Python alone
        return kind == "boolean"
    if not isinstance(value, _TYPES[kind]):
        return False
    return not (isinstance(value, int | float) and value) or _LEAST <= abs(value) <= _MOST


# -- views ----------------------------------------------------------------------------------------


def main_stage(summary: Summary) -> tuple[str, dict[str, Any]]:
    """The stage that the run is about, and its windows."""
    stages: Mapping[str, dict[str, Any]] = summary["stages"]
    name = "train" if "train" in stages else next(iter(stages), "train")
    return name, stages.get(name, {})


def standing_hang(summary: Summary) -> Mapping[str, Any] | None:
    """Return the present hang of a run, as `summary.json` has it; None if it does not hang."""
    hangs = summary.get("hangs") or [{"ended": ""}]
    return None if summary["status"] != RUNNING or "ended" in hangs[-1] else hangs[-1]


def rows(summary: Summary) -> tuple[list[tuple[str, str]], list[_Row]]:
    """The rows of the views: one value per name, and one value per name and window."""
    stage, found = main_stage(summary)
    titles = {"whole_run": "whole run", "last_window": "last window"}
    windows = {title: found[key] for key, title in titles.items() if found.get(key)}
    heads = (f"{title}\n{steps_text(w['first'], w['last'])}" for title, w in windows.items())
    figures: list[_Row] = [("", *heads)]
    for key, (name, _, _, _) in RATES.items():
        values = [window.get("throughput", {}).get(key) for window in windows.values()]
        if any(value is not None for value in values):
            cells = ("" if each is None else _rate(summary, key, each) for each in values)
            figures.append((name, *cells))
    figures += _times([*windows.values()])
    facts = [("hang", each["text"]) for each in summary.get("hangs", ())]
    facts += _facts(summary, stage, found.get("whole_run") or {})
    for name, texts in (("goodput", goodput.texts), ("cost", cost.texts)):
        if name in summary and (lines := [*texts(summary[name])]):
            facts.append((name, "\n".join(lines)))
    return facts, figures if len(figures) > 1 else []


def steps_text(first: float, last: float) -> str:
    """The steps that a window covers."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _rate(summary: Summary, key: str, value: float) -> str:
    """A rate with its unit; MFU and FLOP/s are bounds if something was not counted."""
    _, text, unit, _ = RATES[key]
    bound = key in _OF_FLOPS and summary.get("setup", {}).get("flops_not_counted")
    return f"{'>= ' if bound else ''}{text.format(value / unit)}"


def _facts(summary: Summary, stage: str, whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    setup = summary.get("setup", {})
    if summary["status"] != "finished":
        yield "status", summary["status"]
    if stage != "train":
        yield "stage", stage
    if "device" in setup:
        precision = f", {setup['precision']}" if "precision" in setup else ""
        yield "devices", f"{setup.get('world_size', 1)} x {setup['device']}{precision}"
    if "peak_flops" in setup:
        source = setup.get("peak_source", "")
        # MFU uses the peak for the mix of dtypes.
        peak = float(whole.get("peak_flops", setup["peak_flops"]))
        yield "peak", f"{peak / 1e12:.3g} TFLOP/s per device ({source})"
    if names := setup.get("flops_not_counted"):
        yield "not counted", f"{names}: MFU is a lower bound"
    if check := _cross_check(whole.get("throughput") or {}, summary.get("system") or {}):
        yield "tensor cores", check
    if flops := whole.get("flops_per_batch"):
        yield "FLOPs per batch", flops_text(flops)
    costs = [row for row in summary.get("culprits", ()) if row["share"] >= _LEAST_COST]
    lines = [
        f"{row['share']:.1%}  {row['name']} ({counted(row['calls'], 'call')})" for row in costs
    ]
    if lines:
        yield "costs by name", "\n".join(lines[:_MOST_COSTS])
    if overhead := summary.get("overhead"):
        recording = overhead.get("recording", 0.0)
        parts = {
            "reports: raise Trainer(log_every_n_steps)": overhead["share"] - recording,
            "recording: record fewer batches": recording,
        }
        costly = (f"; {part:.1%} for {less}" for less, part in parts.items() if part > _COSTLY)
        advice = "".join(costly)
        yield "lightning_perf", f"{overhead['share']:.1%} of the time{advice}"


def _cross_check(rates: Mapping[str, float], system: Mapping[str, float]) -> str:
    """Whether the counted FLOPs agree with the activity of the tensor cores; empty if unknown."""
    ofu, mfu, hfu = system.get("ofu", 0.0) / 100, rates.get("mfu"), rates.get("hfu")
    if mfu is None or hfu is None or ofu < _LEAST_OFU:  # float32 products may run elsewhere
        return ""
    text = f"{ofu:.0%} of their peak by NVML (OFU)"
    if ofu > hfu * _AGREES:
        return f"{text}: kernels run that are not counted"
    if mfu > ofu * _AGREES:
        return f"{text}: more is counted than runs, or the peak is too low"
    return f"{text}, which agrees"


#: OFU below which other units do the work, and the ratio of it to HFU within which they agree:
#: OFU covers all time and kernels that pad their operands.
_LEAST_OFU, _AGREES = 0.02, 1.3


def _times(windows: Sequence[Mapping[str, Any]]) -> Iterator[_Row]:
    """Categories by their share of time in the first window, the largest first.

    Rates are of timed batches alone, and times of everything.
    """
    if windows and any(_per_batch(window) for window in windows):
        yield "all time, with\nstart and end", *map(_per_batch, windows)
    for name in _largest(windows[0], _MOST_CATEGORIES) if windows else ():
        yield name, *(_share(window, name) for window in windows)


def _per_batch(window: Mapping[str, Any]) -> str:
    whole = sum((window.get("timings") or {}).values())
    if not whole > 0:
        return ""
    return f"{duration(whole / (window['batches'] or 1))} per batch"


def _largest(window: Mapping[str, Any], most: int) -> list[str]:
    """The categories with the most time."""
    times: Mapping[str, float] = window.get("timings") or {}
    order = sorted(times, key=times.__getitem__, reverse=True)[:most] if sum(times.values()) else []
    return [name for name in order if times[name] > 0]


def _share(window: Mapping[str, Any], name: str) -> str:
    times = window.get("timings") or {}
    seconds, whole = times.get(name, 0.0), sum(times.values())
    each = duration(seconds / (window["batches"] or 1))
    return f"{seconds / whole:6.1%}  {each} per batch" if whole > 0 else ""


def panel(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    from rich.console import Group

    parts: list[RenderableType] = [_table(part) for part in rows(summary) if part]
    if summary.get("verdicts") or summary.get("abstained"):
        from lightning_perf.diagnosis.report import panel as verdict_panel

        parts.append(verdict_panel(verdicts_of(summary), summary.get("abstained")))
    return Group(*parts)


def verdicts_of(summary: Summary) -> list[Verdict]:
    """The verdicts of the diagnosis."""
    if not (verdicts := summary.get("verdicts", ())):
        return []
    # With the rules, which take 20 ms to import: `Diagnosis` alone needs them in a run.
    from lightning_perf.diagnosis import Verdict

    names = Verdict.__dataclass_fields__.keys()  # a later version may have added others
    return [Verdict(**{name: each[name] for name in each.keys() & names}) for each in verdicts]


def _table(cells: Sequence[_Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    table.add_column(style="bold", overflow="fold")
    for _ in cells[0][1:] if cells else ():
        table.add_column(overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def headline(summary: Summary, window: str = "whole_run") -> str:
    """The run in one line, MFU first; empty if no rate is known."""
    found = (main_stage(summary)[1].get(window) or {}).get("throughput", {})
    parts = []
    for key, (name, _, _, _) in RATES.items():
        if key in found:
            value = _rate(summary, key, found[key])
            parts.append(f"{name} {value}" if key == "mfu" else f"{value} {name}")
    return " \u00b7 ".join(parts)


def progress(summary: Summary) -> str:
    """The last window in one line: step, rates, the largest categories, and serious verdicts."""
    _, windows = main_stage(summary)
    name = "last_window" if windows.get("last_window") else "whole_run"
    if not (window := windows.get(name)):
        return "no report yet"
    times = window.get("timings") or {}
    whole = sum(times.values())
    shares = [f"{each} {times[each] / whole:.0%}" for each in _largest(window, _MOST_COSTS)]
    found = verdicts_of(summary)
    serious = [f"{each.code} ({each.severity})" for each in found if each.severity != "info"]
    verdicts = dict.fromkeys(serious or [each.code for each in found[:1]])
    parts = (headline(summary, name), ", ".join(shares), ", ".join(verdicts))
    return f"step {window['last']}: {'; '.join(part for part in parts if part)}"


def description(summary: Summary) -> str:
    """The summary as Markdown for MLflow, which folds it after some lines."""
    facts, figures = rows(summary)
    first = headline(summary)
    lines = [f"**{first}**", ""] if first else []
    if verdicts := verdicts_of(summary):
        from lightning_perf.diagnosis.report import headline as verdict_headline

        for each in verdicts:
            advice = f". {each.advice}" if each.advice else ""
            lines.append(f"- {markdown(verdict_headline(each) + advice)}")
        lines.append("")
    if figures:
        head, *body = (
            [markdown(name), *(markdown(text.replace("\n", ", ")) for text in row)]
            for name, *row in figures
        )
        lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    texts = ((markdown(name), markdown(text.replace("\n", ", "))) for name, text in facts)
    lines += ["", *(f"- {name}: {text}" for name, text in texts)]
    return "\n".join([*lines, "", _OURS])


#: Characters of Markdown's syntax; an underscore within a word is plain.
_MARKUP = re.compile(r"[\\`*|\[\]]|(?<![^\W_])_|_(?![^\W_])")


def markdown(text: str) -> str:
    r"""A text, such as a stranger's name, as one line of Markdown that shows what it is.

    Example:
        >>> print(markdown("on_train_batch_end of <b>_my|own_"))
        on_train_batch_end of &lt;b>\_my\|own\_
    """
    plain = printable(text).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    return _MARKUP.sub(r"\\\g<0>", plain)


def is_ours(text: str) -> bool:
    """Whether a description was written by `description`."""
    return text.rstrip().endswith(_OURS)
