"""Malicious and damaged input gives clear errors, runs no code, and affects no file outside."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import exit_code
from helpers.pending import read_pending
from helpers.small import Records, Small, trainer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from lightning_perf import ConfigError, PerfWarning, always_on
from lightning_perf.callbacks.factory import from_environment
from lightning_perf.cli import Failure, runs
from lightning_perf.cli.files import upload
from lightning_perf.cli.runs import watch
from lightning_perf.core.progress import Ranks, Timestamp
from lightning_perf.files import finite
from lightning_perf.schedule import as_schedule
from lightning_perf.traces import combine
from lightning_perf.traces.events import TraceError
from lightning_perf.traces.names import file_format, run_values, time_values
from lightning_perf.traces.summary import summarize, tables
from lightning_perf.traces.uploads import (
    FILE_NAME,
    PendingUpload,
    append_pending,
)
from lightning_perf.traces.writer import RunFolder
from lightning_perf.tracking.runs import read_folder
from lightning_perf.tracking.summary import (
    SummaryError,
    _damage,
    description,
    panel,
    read_summary,
    schema,
)

fuzzed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    | st.sampled_from(["../x", "/etc/passwd", "\x00", "<script>", "[red]", 1e999, -1, 2**70])
)  # fmt: skip
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip


def spots(document: Any) -> list[tuple[Any, Any]]:
    """Each container of a document with each of its keys."""
    keys = range(len(document)) if isinstance(document, list) else list(document)
    here = [(document, key) for key in keys]
    below = [document[key] for key in keys if isinstance(document[key], dict | list)]
    return here + [spot for part in below for spot in spots(part)]


@st.composite
def mutations(draw: Any) -> Callable[[Any], Any]:
    """A function that replaces or removes some parts of a document."""
    places = draw(st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), anything), max_size=4))

    def mutate(document: Any) -> Any:
        document = copy.deepcopy(document)
        for place, removed, value in places:
            found = spots(document)
            if found:
                container, key = found[place % len(found)]
                if removed:
                    del container[key]
                else:
                    container[key] = copy.deepcopy(value)
        return document

    return mutate


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a real run."""
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, always_on(show_summary=False), logger=Records()).fit(Small())
    return folder / "records-version_0"


# -- files that are read back -------------------------------------------------------------------


def with_last(content: Any, last: int) -> Any:
    """A summary whose second window ends with another step."""
    changed = copy.deepcopy(content)
    changed["stages"]["train"]["windows"]["last"][1] = last
    return changed


@fuzzed
@given(mutations())
@example(lambda content: content | {"abstained": 1})
@example(lambda content: content | {"setup": {"versions": "x"}})
@example(lambda content: content | {"setup": {"peak_flops": "x"}})
@example(lambda content: content | {"stages": {"train": {"windows": {"batches": [1e308] * 9}}}})
@example(lambda content: content | {"cost": {"device": "{x} [red]", "hours": 1e30, "money": -1}})
@example(
    lambda content: (
        content
        | {
            "goodput": {
                "share": -1,
                "seconds": 0,
                "attempts": 9,
                "interruptions": 3,
                "losses": {"{x}": 1e30, "": -1e30},
                "advised_interval": 1e-30,
            }
        }
    )
)
@example(lambda content: content | {"setup": {"world_size": "9" * 5000}})
@example(lambda content: with_last(content, -(10**30)))
def test_a_damaged_summary_is_refused_or_shown(
    tmp_path: Path, run_folder: Path, mutate: Callable[[Any], Any]
) -> None:
    """Every view and command works for a summary that the reader accepts, else gives one line."""
    content = json.loads((run_folder / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(mutate(content)))
    whole = str(run_folder)
    page = ["report", "--html", str(tmp_path / "report.html")]
    for command in (["report"], page, ["compare", whole], ["compare", whole, "--threshold=5%"]):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = exit_code(command[0], str(tmp_path), *command[1:])
        if command is page:
            assert (tmp_path / "report.html").exists() == (code == 0)
            (tmp_path / "report.html").unlink(missing_ok=True)
        assert "Traceback" not in said.getvalue()
    try:
        run = read_folder(tmp_path)
    except SummaryError as refused:
        lines = str(refused).splitlines()
        assert len(lines) == 1
        return
    Console(file=io.StringIO()).print(panel(run.summary))
    assert isinstance(description(run.summary), str)


@fuzzed
@given(mutations())
@example(lambda content: content | {"overhead": {"share": 1e-31, "seconds": -1e-30}})
@example(lambda content: content | {"overhead": {"share": 1e30, "seconds": True}})
@example(lambda content: content | {"verdicts": [{"code": "a", "severity": "b", "rank": None}]})
@example(lambda content: content | {"setup": {"a": True, "b": None, "c": 1e-31}})
def test_other_readers_of_the_schema_agree(run_folder: Path, mutate: Callable[[Any], Any]) -> None:
    """The package jsonschema takes and refuses the same summaries as ours."""
    jsonschema = pytest.importorskip("jsonschema")
    other = jsonschema.Draft202012Validator
    other.check_schema(schema())
    whole = other.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # not 1.0
    content = finite(mutate(json.loads((run_folder / "summary.json").read_text())))
    ours = not _damage(content, schema(), "summary")
    assert (
        jsonschema.validators.extend(other, type_checker=whole)(schema()).is_valid(content) is ours
    )


class Enough(Exception):
    """Raised at the third update."""


@settings(fuzzed, max_examples=10)
@given(mutations(), st.integers())
@example(lambda content: content | {"process": []}, 1)
@example(lambda content: content | {"process": {"host": platform.node()}}, 1)
@example(lambda content: content, 2**70)
@example(lambda content: content, -1)
def test_a_damaged_live_summary_is_watched_or_refused(
    tmp_path: Path, run_folder: Path, mutate: Callable[[Any], Any], pid: int
) -> None:
    """Each view shows two updates, or the command gives the reason in one line."""
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise Enough

    content = json.loads((run_folder / "summary.json").read_text())
    content |= {"status": "running", "process": content["process"] | {"pid": pid}}
    (tmp_path / "summary.json").write_text(json.dumps(mutate(content)))
    terminal = Console(file=io.StringIO(), force_terminal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.time, "sleep", wait)
        for json_lines, console in ((False, Console()), (True, Console()), (False, terminal)):
            looks.clear()
            patch.setattr(runs, "new_console", lambda console=console: console)
            with suppress(Enough, SummaryError, Failure):
                watch(str(tmp_path), json=json_lines)


@pytest.mark.parametrize("name", ["run", "status"])
def test_a_summary_without_its_run_is_refused(tmp_path: Path, run_folder: Path, name: str) -> None:
    """The message names what is missing."""
    content = json.loads((run_folder / "summary.json").read_text())
    del content[name]
    (tmp_path / "summary.json").write_text(json.dumps(content))
    with pytest.raises(SummaryError, match=f"is damaged .its summary has no {name}"):
        read_folder(tmp_path)


@fuzzed
@given(st.binary(max_size=80))
@example(b"[" * 9_999)
@example(b'{"version": 1}')
def test_any_bytes_are_a_summary_or_a_summary_error(tmp_path: Path, content: bytes) -> None:
    """No content of the file gives another error."""
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    with pytest.raises(SummaryError):
        read_summary(path)


CALL = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1}
TRACE: dict[str, Any] = {
    "rank": 0, "world_size": 1, "batch": 3, "stage": "train", "run_name": "owl",
    "baseTimeNanoseconds": 5,
    "traceEvents": [
        CALL,
        CALL | {"name": "gloo:all_reduce", "args": {"Process Group Name": "0", "External id": 4}},
        CALL | {"name": "spin", "cat": "kernel", "args": {"External id": 4}},
        CALL | {"name": "[memory]", "ph": "i", "args": {"Device Type": 0, "Bytes": 12}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "s", "id": 7, "name": "ac2g", "ts": 1.0, "pid": 1, "tid": 1},
    ],
}  # fmt: skip


def late(trace: Any) -> Any:
    """Times that fit into 64 bits, but not their sum."""
    return trace | {"traceEvents": [CALL | {"ts": 2**63 / 1000 - 1}, CALL | {"dur": 1e16}]}


@fuzzed
@given(mutations())
@example(late)
def test_a_damaged_trace_is_read_or_refused(tmp_path: Path, mutate: Callable[[Any], Any]) -> None:
    """It is summarized and merged, or gives a TraceError."""
    path = tmp_path / "rank0.3.json"
    path.write_text(json.dumps(mutate(TRACE)))
    with suppress(TraceError):
        tables(summarize(path))
    with suppress(TraceError):
        traces = combine.find_window(tmp_path)
        for trace in traces:
            combine.read_head(trace)
        combine.check(traces)
        combine.write(traces, tmp_path / "all.json.gz")


_EVENT = (
    '{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": %d, "dur": 1, "name": "%d nccl%s"},'
)
#: Traces that are small on the disk and large in memory: pieces of their text. The last two have
#: ratios of true traces.
BOMBS: dict[str, Callable[[], Iterator[str]]] = {
    "head": lambda: chain(("{",), (f'"{i}": "{"x" * (1 << 24)}",' for i in range(40))),
    "lists": lambda: chain(('{"a": ',), repeat("[{}," + "[]," * 999_999, 20)),
    "value": lambda: chain(('{"traceEvents": [{"a": "',), repeat("x" * (1 << 20), 900)),
    "names": lambda: chain(
        ('{"traceEvents": [',),
        (_EVENT % (i, i * 7**30, "x" * 4000) for i in range(120_000)),
    ),
    "places": lambda: chain(
        ('{"traceEvents": [',),
        (
            _EVENT.replace("1,", f'"{i * 7**30}{"x" * 4000}",', 1) % (i, 0, "")
            for i in range(120_000)
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_no_trace_fills_the_memory(tmp_path: Path, kind: str) -> None:
    """Within 600 MB of address space, each is refused or read in part, without a traceback."""
    with gzip.open(tmp_path / "rank0.1.json.gz", "wt", 6) as file:
        file.writelines(BOMBS[kind]())
        file.write(_EVENT % (1, 1, "") + "{}]}")
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
from lightning_perf.cli import main
main()
"""
    combine = [["--combine", ".", "-o", "all.json"]] if kind in ("head", "places") else []
    for args in (["rank0.1.json.gz"], *combine):
        done = subprocess.run(
            [sys.executable, "-c", code, "trace", *args], cwd=tmp_path, capture_output=True,
            text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 2)
        assert not re.search("Traceback|MemoryError", done.stderr)


@fuzzed
@given(st.binary(max_size=60), st.booleans())
@example(b"[" * 9_999, False)
@example(b"{}", True)
def test_any_bytes_are_a_trace_or_an_error(tmp_path: Path, content: bytes, packed: bool) -> None:
    """Truncated gzip, deep nesting and noise give no other error."""
    path = tmp_path / "rank0.3.json"
    path.write_bytes(gzip.compress(content)[:-3] if packed else content)
    with suppress(TraceError):
        combine.read_head(*combine.find_window(tmp_path))


@fuzzed
@given(st.lists(mutations(), max_size=3), st.binary(max_size=30))
@example([], b"[" * 9_999)
def test_a_damaged_upload_list_is_read_without_the_damage(
    tmp_path: Path, mutated: list[Callable[[Any], Any]], noise: bytes
) -> None:
    """Entries hold strings; anything else is left with a warning, and the command continues."""
    good = {"path": str(tmp_path / "gone"), "remote": "a", "run_name": "r", "error": "e"}
    lines = [json.dumps(mutate(good | {"target": {"store": "file:///nowhere"}})).encode()
             for mutate in mutated]  # fmt: skip
    (tmp_path / FILE_NAME).write_bytes(b"\n".join([*lines, noise]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerfWarning)
        for entry in read_pending(tmp_path):
            texts = (entry.path, entry.remote, entry.run_name, entry.error)
            assert all(isinstance(text, str) for text in (*texts, *entry.target))
        assert upload(str(tmp_path)) in (0, 1)


def test_an_upload_list_sends_no_outside_file(tmp_path: Path) -> None:
    """A file outside of the list's folder, by its path or through a link, needs --outside."""
    (tmp_path / "secret").write_text("s")
    (folder := tmp_path / "runs").mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "own").write_text("o")
    store, names = {"store": "file:///"}, f"{tmp_path}/store"
    for path in (tmp_path / "secret", folder / "link", folder / ".." / "secret", folder / "own"):
        append_pending(folder, PendingUpload(str(path), f"{names}/{path.name}", "run", "e", store))
    append_pending(folder, PendingUpload(str(folder / "own"), "../../up", "run", "e", store))
    to = [f"file://{tmp_path}/store"]
    assert upload(str(folder), to=to) == 1
    assert not (tmp_path / "up").exists()
    assert [path.name for path in tmp_path.rglob("store/*")] == ["own"]
    assert upload(str(folder), outside=True, to=to) == 1  # the name that points outside stays
    assert {path.name for path in tmp_path.rglob("store/*")} == {"own", "secret", "link"}


# -- what is printed ----------------------------------------------------------------------------


EVIL = "owl\x1b]0;PWNED\x1b\\\x1b[2J\x9b8m\u202e"


def test_no_control_character_of_a_file_reaches_the_terminal(
    tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every command shows them escaped, in tables, messages and warnings."""
    content = json.loads((run_folder / "summary.json").read_text())
    window = content["stages"]["train"]["whole_run"]
    window["timings"] = {EVIL: sum(window["timings"].values())}
    content |= {"run": EVIL, "culprits": [{"name": EVIL, "seconds": 1.0, "share": 0.5, "calls": 1}]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps(content))
    (tmp_path / "run" / f"{EVIL.replace('/', '')}.html").touch()
    (tmp_path / "rank0.3.json").write_text(
        json.dumps({"traceEvents": [CALL | {"name": EVIL}]}, ensure_ascii=False)
    )
    (tmp_path / "damaged.json").write_text(json.dumps({"a": EVIL}, ensure_ascii=False)[:-1])
    append_pending(tmp_path, PendingUpload(f"/{EVIL}", EVIL, EVIL, EVIL, {"store": EVIL}))
    append_pending(tmp_path, PendingUpload(str(tmp_path / "rank0.3.json"), EVIL, "", "",
                                           {"tracking_uri": EVIL, "run_id": EVIL}))  # fmt: skip
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(f"{EVIL}\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    run = str(tmp_path / "run")
    for args in (
        ["report", run], ["watch", run], ["compare", run, str(run_folder)], ["report", EVIL],
        ["trace", str(tmp_path / "rank0.3.json")], ["trace", str(tmp_path / "damaged.json")],
        ["trace", "--combine", str(tmp_path), "-o", str(tmp_path / EVIL.replace("/", ""))],
        ["trace", EVIL], ["upload", str(tmp_path)], ["upload", EVIL],
    ):  # fmt: skip
        with (
            pytest.warns(PerfWarning)
            if args[0] == "upload" and args[1] != EVIL
            else (nullcontext()) as caught
        ):
            exit_code(*args)
        shown = "".join(capsys.readouterr())
        shown += "".join(str(each.message) for each in caught or ())
        assert args[0] not in ("report", "watch") or r"\x1b" in shown, args
        for control in ("\x1b]", "\x1b[2J", "\x9b", "\u202e"):
            assert control not in shown, args


# -- configuration ------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "trainer": {
        "callbacks": [
            {"class_path": "lightning_perf.SpeedMonitor", "init_args": {"window_size": 10}},
            {"class_path": "lightning_perf.Flops", "init_args": {"schedule": "every 5ba"}},
        ]
    }
}


@settings(fuzzed, max_examples=25)
@given(mutations())
def test_a_damaged_configuration_is_used_or_a_config_error(
    tmp_path: Path, mutate: Callable[[Any], Any]
) -> None:
    """The file of LIGHTNING_PERF=FILE gives no other error."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(mutate(CONFIG), allow_unicode=True))
    try:
        from_environment(str(path))
    except ConfigError as refused:
        field = refused.field
        assert field == "LIGHTNING_PERF"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jsonargparse")
@pytest.mark.parametrize(
    "text",
    [
        "callbacks: [!!python/object/apply:os.mkdir [ran]]",
        "callbacks: [{class_path: os.mkdir, init_args: {path: ran}}]",
        "callbacks: [{class_path: subprocess.Popen, init_args: {args: [mkdir, ran]}}]",
    ],
)
def test_no_code_runs_from_a_configuration(in_tmp: Path, text: str) -> None:
    """Only callbacks of this package are constructed."""
    (in_tmp / "config.yaml").write_text(text)
    with pytest.raises(ConfigError):
        from_environment("config.yaml")
    assert not (in_tmp / "ran").exists()


pieces = st.lists(
    st.sampled_from(
        ["every ", "first ", "at ", "for ", "10", "-", ".", "ba", "ep", "dur", "1h20m", " ", "%",
         "always", "never", "0.5", "\x00", "٣", "9" * 400, "{rank}", "{batch:09}", "{batch!r}",
         "{", "}", "/", "..", "\\", "C:", "~", "{run_name}", "{x.__class__}", "{rank:>99999999999}"]
    ) | st.text(max_size=4), max_size=6,
).map("".join)  # fmt: skip


@fuzzed
@given(pieces)
def test_any_text_is_a_schedule_or_a_config_error(text: str) -> None:
    """This includes time strings."""
    with suppress(ConfigError):
        as_schedule(text)


@settings(fuzzed, max_examples=150)
@given(pieces, st.text(max_size=12), st.sampled_from(["", "{run_name}/", "x/{run_name}"]))
@example("{run_name}", "../../up", "")
@example("{run_name}/a", "..", "{run_name}/")
def test_every_name_stays_in_its_folder(
    tmp_path: Path, pattern: str, run_name: str, folder: str
) -> None:
    """For any format string and run name, the file is in its folder or there is a ConfigError."""
    values = run_values(run_name, Ranks()) | time_values(Timestamp(batch=3)) | {"stage": "train"}
    try:
        name = file_format(pattern).render(values)
        place = RunFolder(tmp_path, folder or "x", Ranks(), run_name, "id").folder
    except ConfigError:
        return
    assert Path(os.path.normpath(place)).is_relative_to(tmp_path)
    assert Path(os.path.normpath(place / name)).is_relative_to(place)
    assert "\x00" not in name


# -- links of other users --------------------------------------------------------------------------


def test_the_list_of_uploads_is_not_written_through_a_link(tmp_path: Path) -> None:
    """The target of the link is unchanged."""
    (tmp_path / "theirs").write_text("")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=r"symbolic|loop|levels"):
        append_pending(tmp_path, PendingUpload("a", "b", "c", "d"))
    assert (tmp_path / "theirs").read_text() == ""


def test_files_of_recorders_have_unpredictable_names(make_writer: Any) -> None:
    """A link in a recorder's place would redirect its writes."""
    names = {make_writer().spool("train").name for _ in range(20)}
    assert len(names) == 20
    assert all(len(name.split("-")[2].split(".")[0]) == 16 for name in names)
