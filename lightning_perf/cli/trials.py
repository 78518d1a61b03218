"""The command that tries changes to a training."""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from json import dumps
from math import inf
from pathlib import Path
from shlex import join
from shutil import which
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_perf.cli import Failure, check_output, print_json
from lightning_perf.diagnosis import Verdict
from lightning_perf.diagnosis.report import headline
from lightning_perf.errors import closest, describe
from lightning_perf.files import read_bytes, write_text
from lightning_perf.terminal import new_console, say
from lightning_perf.trials import advice
from lightning_perf.trials.experiment import Experiment, TrialsFailed
from lightning_perf.trials.proof import FEWEST
from lightning_perf.units import bytes_text, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning_perf.trials.experiment import Candidate, Row

#: The first line of a YAML file, by which it is known again.
_MARK = "# Written by lightning-perf try"
_HEADINGS = ("change", "predicted", "measured", "95% interval", "same training?", "memory")
#: A start that takes longer by fewer seconds is not worth a note.
_STARTUP = 5.0
#: Files named in a note.
_NAMED = 5


def try_(
    command: list[str],
    *,
    minutes: float = 15.0,
    seconds: float = 10.0,
    only: list[str] | None = None,
    output: str | None = None,
    html: str | None = None,
    keep: str | None = None,
    tracking_uri: str | None = None,
    json: bool = False,
) -> int:
    """Try changes that may make a training faster, and show what they give.

    The command is run many times, some batches each: as it is, to see why it is slow, and then
    with changes. Its loggers and checkpoints write to a temporary folder; what the script itself
    writes it writes in each trial. Write the command last: lightning-perf try python train.py.
    The exit code is 1 if the training could not be tried. Ctrl-C shows what was measured before.

    Args:
        command: The program and its arguments.
        minutes (MINUTES): The time for all trials, by default 15. They end earlier when the
            answers are clear.
        seconds (SECONDS): The time of timed batches per trial, by default 10.
        only (GROUP): Try changes of this group only, such as input, precision or compile. Can be
            repeated.
        output (FILE): Write the changes that help to this YAML file, for LightningCLI's --config.
        html (FILE): Write the results to this page.
        keep (RUN): Also send the page and the JSON to this run of MLflow, an id or a name, as
            artifacts try/try.html and try/try.json.
        tracking_uri (ADDRESS): The MLflow tracking address for --keep; by default
            MLFLOW_TRACKING_URI, or ./mlflow.db.
        json: Print JSON.
    """
    command = _checked(command, minutes=minutes, seconds=seconds)
    _check_groups(only or [])
    for file, mark in ((output, _MARK), (html, 'name="generator" content="lightning_perf"')):
        if file is not None:
            check_output(Path(file), mark.encode())
    send = _artifacts(keep, tracking_uri) if keep is not None else None
    tell = partial(say, file=sys.stderr, flush=True)
    tell(
        f"Trying {join(command)} for up to {minutes:g} minutes. Loggers and checkpoints write "
        "to a temporary folder; what the command itself writes or sends, it does in each trial."
    )
    with (
        _raised_signals(),
        closing(Experiment(command, minutes, seconds, only or [], tell)) as experiment,
    ):
        try:
            rows, best = experiment.results()
        except TrialsFailed as error:
            raise Failure(error, 1) from None
        except KeyboardInterrupt:
            rows, best = experiment.so_far()
            if rows:
                _print(_Results(experiment, rows, best, interrupted=True), json)
            raise
    found = _Results(experiment, rows, best)
    _print(found, json)
    # Afterwards: what cannot be written is not lost.
    if output is not None:  # without changes, too: an earlier file may have some
        write_text(Path(output), f"{_MARK}\n{advice.as_yaml(found.changes)}")
    if html is not None:
        write_text(Path(html), _page(found))
    if send is not None:
        _keep(found, send)
    return 0


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Let signals that end the command raise: trials are ended, and their folder is deleted."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)  # as in a shell

    names = ("SIGTERM", "SIGHUP")  # the second one not on Windows
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # Not those that nohup ignores.
    mine = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]
    try:
        for each in mine:
            signal.signal(each, leave)
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)


def _checked(command: list[str], **numbers: float) -> list[str]:
    """The command without the dashes before it."""
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise Failure("there is no command. Try lightning-perf try python train.py")
    if any(each.endswith(".ipynb") for each in command) or "jupyter" in Path(command[0]).name:
        raise Failure("notebooks cannot be tried: jupyter nbconvert --to script writes a script")
    if which(command[0]) is None:
        raise Failure(f"{command[0]} is not a program", 127)  # as in a shell
    for name, value in numbers.items():
        if not 0 < value < inf:
            raise Failure(f"--{name} {value} is not a positive number")
    return command


def _check_groups(only: Sequence[str]) -> None:
    """Refuse groups that are misspelt; packages that the training imports may add others."""
    if not only:
        return
    from lightning_perf.trials.changes import CHANGES

    known = {kind.group for kind in CHANGES}
    for name in only:
        if name not in known and (meant := closest(name, known, cutoff=0.75)):
            raise Failure(f"--only {name} is not a group of changes: do you mean {meant}?")


def _artifacts(keep: str, tracking_uri: str | None) -> Callable[[Path, str], None]:
    """The function that uploads to a run of MLflow; that there is one is asked before trials."""
    from lightning_perf.cli.files import NamedPlaces
    from lightning_perf.tracking.runs import run_in_mlflow

    places, run = NamedPlaces(tracking_uri, ()), run_in_mlflow(keep, tracking_uri)
    found = places.at(frozenset(run.address.items()))
    refused = found if isinstance(found, str) else places.refuse(found, "try")
    if isinstance(found, str) or refused:
        raise Failure(f"--keep {keep}: {refused}")
    return found.send


def _keep(found: _Results, send: Callable[[Path, str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="lightning_perf-") as folder:
        for name, text in (("try.html", _page(found)), ("try.json", dumps(found.as_dict()))):
            path = Path(folder, name)
            write_text(path, text)
            try:
                send(path, f"try/{name}")
            except Exception as error:  # MLflow raises many kinds
                raise Failure(f"--keep: {name} was not sent: {describe(error)}", 1) from error


@dataclass(frozen=True)
class _Results:
    """What an experiment has found, for all views of it."""

    experiment: Experiment
    #: Each change alone.
    rows: Sequence[Row]
    #: The best set; None if nothing helps.
    best: Row | None
    interrupted: bool = False

    @property
    def changes(self) -> Sequence[Candidate]:
        """Those of the best set."""
        return self.best.setting.changes if self.best else ()

    @property
    def shown(self) -> Sequence[Row]:
        """The rows of the table."""
        is_sum = self.best is not None and len(self.changes) > 1
        return [*self.rows, self.best] if is_sum and self.best else self.rows

    @property
    def verdicts(self) -> list[str]:
        """A line per verdict of the first run."""
        return [headline(Verdict(**each)) for each in self.experiment.first.result["verdicts"]]

    @property
    def answer(self) -> str:
        """The best set in a sentence."""
        if self.best is None or self.best.speedup is None:
            so_far = ", of the trials before the interrupt" if self.interrupted else ""
            return f"No change certainly helps and leaves the training the same{so_far}."
        found = self.best.speedup
        return (
            f"Best: {self.best.setting.name}: {found.ratio:.2f} times as fast "
            f"({found.low:.2f} to {found.high:.2f}), {self.best.same}."
        )

    @cached_property
    def script(self) -> tuple[Path, Path] | None:
        """The script, from the folder where its patch applies: programs refuse other paths."""
        named = (Path(each).resolve() for each in self.experiment.command[1:] if each[-3:] == ".py")
        path = next(filter(Path.is_file, named), None)
        if path is None:
            return None
        here = Path.cwd()
        folder = here if path.is_relative_to(here) else path.parent
        return folder, path.relative_to(folder)

    @cached_property
    def patch(self) -> str:
        """A diff of the script; empty if there is none without a doubt."""
        if self.script is None or not self.changes:
            return ""
        folder, name = self.script
        with suppress(UnicodeDecodeError):
            return advice.patch(read_bytes(folder / name).decode(), name.as_posix(), self.changes)
        return ""

    @property
    def notes(self) -> Iterator[str]:
        """What else to know, without full stops."""
        experiment = self.experiment
        yield from experiment.first.result["notes"]
        if names := experiment.written:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"the command itself wrote, in each trial: {', '.join(names[:_NAMED])}{more}"
        for row in self.rows:
            if row.startup > _STARTUP:
                yield f"{row.setting.name} takes {duration(row.startup)} longer to start"
        if few := [row.setting.name for row in self.rows if row.undecided]:
            more = "let all trials end" if self.interrupted else "raise --minutes"
            yield f"there were too few rounds to be certain of {', '.join(few)}: {more}"
        if left := [each.name for each in experiment.not_tried]:
            took = f"The first run took {duration(experiment.first.wall_seconds)}"
            more = f"raise --minutes. {took}, and a change needs about {2 * FEWEST} trials"
            yield f"there was no time to try {', '.join(left)}: {more}"
        for each in experiment.too_long:
            yield (
                f"{each.name} is not tried: its effect is seen after {each.period:,.0f} batches, "
                "which are more than the training or a trial can have"
            )
        if not (self.rows or experiment.not_tried or experiment.too_long):
            yield (
                "the verdicts suggest no change that can be tried"
                if experiment.first.result["verdicts"]
                else "the first run gave no diagnosis: it was too short, or Trainer(barebones=True)"
            )

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "command": self.experiment.command, "trials": self.experiment.count,
            "verdicts": self.experiment.first.result["verdicts"],
            "changes": [row.as_dict() for row in self.rows],
            "best": self.best and self.best.as_dict(), "lines": advice.lines(self.changes),
            "yaml": advice.as_yaml(self.changes), "patch": self.patch, "notes": [*self.notes],
        }  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    predicted = f"{row.predicted:.2f}x" if row.predicted else ""
    if row.speedup is None:
        why = f"not measured: {row.failure}" if row.failure else "there was no time"
        return row.setting.name, predicted, "", "", why, ""
    found = row.speedup
    interval = f"{found.low:.2f} to {found.high:.2f}" if found.high < inf else "too few rounds"
    memory = " -> ".join(map(bytes_text, row.memory or ()))
    # Of what is not faster, only a difference is worth telling.
    same = row.same if found.better or row.same.startswith("not") else ""
    return row.setting.name, predicted, f"{found.ratio:.2f}x", interval, same, memory


def _print(found: _Results, json: bool) -> None:
    if json:
        print_json(found.as_dict())
    else:
        _show(found)


def _show(found: _Results) -> None:
    from rich.table import Table

    console = new_console()
    for verdict in found.verdicts:
        console.print(verdict, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in found.shown:
        table.add_row(*_cells(row), style="" if row.helps else "dim")
    if not console.is_terminal:  # a log of CI is wider than rich assumes
        console.width = max(console.width, 120)
    if found.rows:
        console.print(table)
    console.print(found.answer, style="bold", soft_wrap=True)
    for line in advice.lines(found.changes):
        console.print(f"  {line}", soft_wrap=True)
    if found.patch and found.script:
        text = f"As a patch for git apply or patch -p1 in {found.script[0]}, which is not applied:"
        console.print(text, soft_wrap=True)
        say(found.patch.removesuffix("\n"))  # with its tabs, and its last empty line
    for note in found.notes:
        console.print(f"Note: {note}.", soft_wrap=True)


def _page(found: _Results) -> str:
    from lightning_perf.charts import Heading, Part, Table, page

    parts: list[Part] = [found.answer, *found.verdicts]
    if found.rows:
        cells = [_cells(row) for row in found.shown]
        parts += [Heading("What was tried"), Table(_HEADINGS, cells)]
    if lines := advice.lines(found.changes):
        parts += [Heading("What to write"), *lines]
    if found.patch:
        parts += [Heading("As a patch"), found.patch]
    parts += [f"Note: {note}." for note in found.notes]
    return page(f"Trials of {' '.join(found.experiment.command)}", parts)
