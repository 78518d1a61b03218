"""Files of strangers: every reader and every writer of the package meets what is no file."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from helpers.command import exit_code
from helpers.pending import read_pending

from lightning_perf import ConfigError, files
from lightning_perf.callbacks.factory import from_environment
from lightning_perf.core.progress import Ranks
from lightning_perf.files import (
    NotRegularError,
    compress,
    files_below,
    finite,
    gzipped_whole,
    limited,
    parsed,
    place,
    read_bytes,
    walked,
    written_whole,
)
from lightning_perf.traces import combine
from lightning_perf.traces.events import TraceError
from lightning_perf.traces.summary import summarize
from lightning_perf.traces.uploads import PendingUpload, append_pending
from lightning_perf.traces.writer import RunFolder
from lightning_perf.tracking.attempts import attempts_in
from lightning_perf.tracking.fleet import in_folder
from lightning_perf.tracking.runs import folders_of
from lightning_perf.tracking.summary import SummaryError, read_summary

PACKAGE = Path(__file__).parent.parent / "lightning_perf"
#: What may be in the place of a file; each function makes it.
IN_PLACE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "kernel": lambda path: path.symlink_to("/proc/kmsg"),  # only root may, whom a read gives None
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "gone": lambda path: path.symlink_to(path.parent / "nowhere"),
    "large": lambda path: path.touch() or os.truncate(path, 1 << 40),  # type: ignore[func-returns-value]
    "deep": lambda path: path.write_text('{"traceEvents": ' + "[" * 100_000),
    "deeper": lambda path: path.write_text("[" * 500 + "]" * 500),
    "nan": lambda path: path.write_text('{"version": NaN, "traceEvents": [NaN]}'),
    "huge": lambda path: path.write_text(f'{{"version": 1{"0" * 4000}, "traceEvents": [1e999]}}'),
    "aliases": lambda path: path.write_text(
        "\n".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'])}]" for i in range(30)
        )
        + "\ncallbacks: *a29"
    ),
    "itself": lambda path: path.write_text("callbacks: &a [*a]"),
    "digits": lambda path: path.write_text("1" * 1_000_000),
}
#: Every reader of files that others may have made: the file's name, and what it may raise.
READERS: dict[str, tuple[str, Callable[[Path], object], tuple[type[Exception], ...]]] = {
    "summary": ("summary.json", read_summary, (SummaryError,)),
    "folders": ("summary.json", lambda path: folders_of(path.parent), ()),
    "runs": ("summary.json", lambda path: in_folder(path.parent, 0.0, []), ()),
    "trace": ("rank0.3.json", summarize, (TraceError, OSError)),
    "combine": (
        "rank0.3.json",
        lambda path: combine.read_head(*combine.find_window(path.parent)),
        (TraceError, OSError),
    ),
    "uploads": ("pending_uploads.jsonl", lambda path: read_pending(path.parent), (OSError,)),
    "owner": (
        ".run",
        lambda path: RunFolder(path.parents[1], "{run_name}", Ranks(), "run", "1").claim(),
        (OSError,),
    ),
    "attempts": (
        "20261125-100000.000-7.json",
        lambda path: attempts_in(path.parent, "20261125-100000.000-7") + attempts_in(path.parent),
        (),
    ),
    "configuration": ("c.yaml", lambda path: from_environment(str(path)), (ConfigError,)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::lightning_perf.PerfWarning")
@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_or_fills_the_memory(tmp_path: Path, reader: str, kind: str) -> None:
    """Whatever is in the place of a file, a reader refuses it with its own error."""
    name, read, refusals = READERS[reader]
    (folder := tmp_path / "run").mkdir()
    IN_PLACE[kind](folder / name)
    with suppress(*refusals):
        read(folder / name)


#: Every writer of files in folders that others may write to.
WRITERS: dict[str, Callable[[Path], object]] = {
    "whole": lambda path: written_whole(path).__enter__(),
    "gzipped": lambda path: gzipped_whole(path).__enter__(),
    "place": lambda path: place(source(path), path),
    "compress": lambda path: compress(source(path), path),
    "append": lambda path: append_pending(path.parent, PendingUpload("a", "b", "c", "d")),
}


def source(path: Path) -> Path:
    """A file to be moved."""
    made = path.with_name("source")
    made.write_text("content")
    return made


@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder", "loop", "gone"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_replaces_what_is_no_file(tmp_path: Path, writer: str, kind: str) -> None:
    """A device, a pipe, a folder or a link stays, and nothing else is left but the source."""
    path = tmp_path / "pending_uploads.jsonl"
    IN_PLACE[kind](path)
    before = path.lstat()
    with pytest.raises(OSError, match=r"regular|directory|symbolic|loop|levels|exists"):
        WRITERS[writer](path)
    assert (before.st_ino, before.st_mode) == (path.lstat().st_ino, path.lstat().st_mode)
    assert {each.name for each in tmp_path.iterdir()} <= {path.name, "source"}


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    """A file of the most bytes is read, a larger one is not; nesting and numbers have limits."""
    (path := tmp_path / "file").write_bytes(b"1234")
    assert read_bytes(path, 4) == b"1234"
    with pytest.raises(OSError, match="Larger than 3 bytes"):
        read_bytes(path, 3)
    assert parsed("[" * 100 + "]" * 100)
    for text in ("[" * 101 + "]" * 101, "[" * 99_999, "[NaN]", "[1e999]", "-Infinity"):
        with pytest.raises(ValueError, match=r"deeply|not a number"):
            parsed(text)
    with pytest.raises(NotRegularError):
        read_bytes(tmp_path)


def test_what_is_written_can_be_read() -> None:
    """Numbers that JSON does not have are left out of mappings, and null in lists."""
    value = {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": -float("inf"), "e": 1}}
    left = finite(value)
    assert parsed(json.dumps(left)) == left == {"b": [1.0, None], "c": {"e": 1}}


#: Modules that open files by themselves, and whose files no stranger can have made.
OWN = {
    "cgroup.py", "charts", "files.py", "flops", "profilers", "system", "timing",  # kernel, package
    "run/summary.py", "run/destination.py", "schedule/triggers.py",  # spooled files, /proc
    "traces/writer.py",  # creates the marker of a folder
}  # fmt: skip
#: Calls that open a file. `read_bytes` alone is the reader, and `path.read_bytes` is not.
OPENING = re.compile(
    r"(os\.)?open|(Path\(.*\)|\(.*\)|\w*path)\.(open|(read|write)_(text|bytes))", re.DOTALL
)


def test_files_are_opened_in_one_module() -> None:
    """Elsewhere nothing opens, reads or writes a file by itself."""
    for module in PACKAGE.rglob("*.py"):
        name = module.relative_to(PACKAGE)
        if {name.as_posix(), name.parts[0]} & OWN:
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            opens = OPENING.fullmatch(called) and "devnull" not in ast.unparse(node)
            assert not opens, f"{name}: {called}"


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder with 1900 levels of folders below it, more than Python's recursion limit."""
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1900):
        os.mkdir("a", dir_fd=place)
        place, above = os.open("a", os.O_RDONLY, dir_fd=place), place
        os.close(above)
    os.close(place)
    yield tmp_path
    subprocess.run(["rm", "-r", tmp_path / "a"], check=True)  # shutil.rmtree recurses


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("report",), 2, "there is no summary.json below"),
        (("compare", "."), 2, "there is no summary.json below"),
        (("trace", "--combine"), 2, "has no traces of ranks"),
        (("upload",), 1, "a: deeper than 100 folders; no list here was read"),
    ],
)
def test_a_deep_folder_ends_no_command(
    deep: Path, args: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is searched to some depth, with one line; `upload` says that it has not seen all."""
    assert exit_code(*args, str(deep)) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_a_search_ends_after_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until then is returned, and the error says that there is more."""
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert files_below(tmp_path).__next__().name == "file"
    assert [folder.name for folder, _ in walked(tmp_path)] == [tmp_path.name, "a", "b", "c"]
    monkeypatch.setattr(files, "MOST_ENTRIES", 5)
    errors: list[OSError] = []
    found = [folder.name for folder, names in walked(tmp_path, failed=errors.append) if names]
    assert found == [tmp_path.name, "a", "b"]
    assert [error.strerror for error in errors] == ["more than 5 files"]


def test_only_the_module_of_files_searches_subfolders() -> None:
    """Others neither recurse nor walk: they would have no limits."""
    searching = re.compile(r"\brglob\(|\bos\.f?walk\(")
    found = {path.name for path in PACKAGE.rglob("*.py") if searching.search(path.read_text())}
    assert found == {"files.py"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much is in use")
def test_memory_is_limited_beyond_what_is_in_use() -> None:
    """Otherwise a thread that starts in a large process fails, and its starter waits forever."""
    ballast = bytearray(1 << 28)
    with limited(1 << 27, "DATA"):
        thread = Thread(target=lambda: None)
        thread.start()
        thread.join()
        with pytest.raises(MemoryError):
            bytearray(1 << 28)
    assert ballast
