"""Fuzzes all that reads text or files of others, guided by coverage (atheris).

    python benchmarks/fuzz.py [--seconds 60] [--only trace]

Each target may raise the errors that are documented for it, and nothing else; it may not take 10 s
or 2 GB. Each runs in a process of its own, from the seeds below. The table shows the inputs that
were tried; an input that fails is kept in the folder that is named, with the traceback above it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import atheris
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

#: The option of the processes that fuzz.
CHILD = "--folder"
MEASURED = atheris.instrument_imports(include=["lightning_perf"])

with MEASURED if CHILD in sys.argv else nullcontext():
    from helpers.pending import read_pending
    from helpers.small import Records, Small, trainer
    from test_hostile_input import CONFIG, TRACE

    from lightning_perf import ConfigError, Time, always_on
    from lightning_perf.callbacks.factory import from_environment
    from lightning_perf.cli import Failure
    from lightning_perf.cli.runs import _looks, compare
    from lightning_perf.core.progress import Ranks, Timestamp
    from lightning_perf.schedule import as_schedule
    from lightning_perf.traces import combine
    from lightning_perf.traces.events import TraceError
    from lightning_perf.traces.names import file_format, run_values, time_values
    from lightning_perf.traces.summary import summarize, tables
    from lightning_perf.traces.uploads import FILE_NAME
    from lightning_perf.traces.writer import RunFolder
    from lightning_perf.tracking.runs import read_folder
    from lightning_perf.tracking.summary import SummaryError, description, panel

#: Words that inputs are made of, besides the parts of the seeds.
WORDS = (
    "every ", "first ", "at ", " for ", "ba", "ep", "sp", "tok", "dur", "sec", "step", "{rank}",
    "{run_name}", "{batch:09}", "{x.y}", "..", "!!python/object/apply:os.mkdir", "class_path",
    "init_args", "callbacks", "1e999", "null", "NaN", "traceEvents", "windows", "timings", "args",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Something that reads bytes, and valid ones from which mutation starts."""

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Iterable[bytes]


def text(content: bytes) -> str:
    """Any text: what is no UTF-8 is replaced."""
    return content.decode(errors="replace")


def targets(folder: Path) -> dict[str, Target]:
    """All targets; they write below a folder."""
    run, damaged = folder / "run", folder / "damaged"
    if not run.exists():
        trainer(folder, always_on(show_summary=False), logger=Records()).fit(Small())
        (folder / "records-version_0").rename(run)
    damaged.mkdir(exist_ok=True)

    def name(content: bytes) -> None:
        pattern, _, run_name = text(content).partition("\n")
        values = run_values(run_name, Ranks()) | time_values(Timestamp(batch=3))
        rendered = file_format(pattern).render(values | {"stage": "train"})
        place = RunFolder(folder, "{run_name}/x", Ranks(), run_name, "id").folder
        assert place.resolve().is_relative_to(folder.resolve())
        assert (place / rendered).resolve().is_relative_to(place.resolve())

    def configuration(content: bytes) -> None:
        path = damaged / "config.yaml"
        path.write_bytes(content)
        from_environment(str(path))

    def trace(content: bytes) -> None:
        path = damaged / "rank0.3.json"
        path.write_bytes(content)
        with suppress(TraceError):
            tables(summarize(path))
        traces = combine.find_window(damaged)
        for each in traces:
            combine.read_head(each)
        combine.check(traces)
        combine.write(traces, folder / "all.json.gz")

    def summary(content: bytes) -> None:
        (damaged / "summary.json").write_bytes(content)
        found = read_folder(damaged)
        Console(file=io.StringIO()).print(panel(found.summary))
        description(found.summary)
        next(_looks(str(damaged), None))
        with redirect_stdout(io.StringIO()):
            compare(str(damaged), [str(run)], threshold="5%")

    def uploads(content: bytes) -> None:
        (damaged / FILE_NAME).write_bytes(content)
        read_pending(damaged)

    refused = (ConfigError,)
    times = (b"10ep", b"1h20m40s", b"0.7dur", b"93874tok", b"12.5sec")
    schedules = (b"every 100ba for 3ba", b"first 5ba", b"at 0.5dur", b"1h20m", b"always")
    names = (b"rank{rank}.{batch}.json\nowl", b"{stage}/{epoch}-{total_wct}\n../up")
    events = json.dumps(TRACE).encode()
    entry = {"path": "gone", "remote": "a", "run_name": "r", "error": "e", "target": {"store": "x"}}
    return {
        "time": Target(lambda c: Time.from_timestring(text(c)), (*refused, TypeError), times),
        "schedule": Target(lambda c: as_schedule(text(c)), refused, schedules),
        "name": Target(name, refused, names),
        "configuration": Target(configuration, refused, (json.dumps(CONFIG).encode(),)),
        "trace": Target(trace, (TraceError,), (events, gzip.compress(events))),
        "summary": Target(
            summary, (SummaryError, Failure), ((run / "summary.json").read_bytes(),)
        ),
        "uploads": Target(uploads, (), (json.dumps(entry).encode(),)),
    }  # fmt: skip


def fuzz(name: str, folder: Path, seconds: int) -> None:
    """Fuzz one target in this process, which ends with it."""
    warnings.simplefilter("ignore")
    target, corpus = targets(folder)[name], folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in WORDS))

    def one(content: bytes) -> None:
        with suppress(*target.refusals):
            target.read(content)

    limits = (f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=20000")
    options = (f"-dict={folder}/words", f"-artifact_prefix={folder}/", "-print_final_stats=1")
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    """Fuzz each target and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--only", help="one target")
    parser.add_argument(CHILD, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        fuzz(args.only, args.folder, args.seconds)
    table, failed = Table("target", "inputs", "outcome"), False
    with tempfile.TemporaryDirectory() as scratch:
        names = [args.only] if args.only else list(targets(Path(scratch)))
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        child = (sys.executable, __file__, "--only", name, CHILD, str(folder))
        done = subprocess.run(
            [*child, "--seconds", str(args.seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        tried = re.findall(r"number_of_executed_units: *(\d+)", done.stdout)
        outcome = "no failure"
        if done.returncode:
            failed, outcome = True, f"failed: {folder}"
            print(done.stdout[-4000:])
        table.add_row(name, f"{int(tried[-1]):,}" if tried else "", outcome)
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
