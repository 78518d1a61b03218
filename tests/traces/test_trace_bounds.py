"""The trace writer with very many windows and on full disks: memory, warnings, names."""

import errno
import gzip
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pending import read_pending
from helpers.recordings import CONTENT, PATIENCE, Server, after, files, record, tried

from lightning_perf.errors import PerfWarning, WarningDigest
from lightning_perf.files import written_whole
from lightning_perf.traces.uploads import Target


@pytest.mark.parametrize("keep", [-1, 3])
@pytest.mark.parametrize(
    ("filename", "names"), [("{batch}.json", 60), ("last.json", 1), ("{batch}.json", 5)]
)
def test_memory_of_a_writer_is_bounded(make_writer, worker, keep, filename, names):
    """A writer remembers at most `most_remembered` traces and names, however many it writes."""
    writer = make_writer(filename=filename, num_traces_to_keep=keep, most_remembered=10)
    for count in range(60):
        after(worker, record(writer, batch=count % names))
    assert max(dictionaries(writer)) <= 10
    assert len(writer.saved_traces) == (10 if keep < 0 else keep)


def dictionaries(value: object) -> Iterator[int]:
    """The lengths of all dictionaries in an object of this package and its parts."""
    for part in vars(value).values():
        if isinstance(part, dict):
            yield len(part)
        elif type(part).__module__.startswith("lightning_perf.traces") and hasattr(
            part, "__dict__"
        ):
            yield from dictionaries(part)


def test_a_free_number_is_found_without_search(make_writer, worker, monkeypatch):
    """For one name, each trace checks one path on the disk, however many came before."""
    checked = []
    monkeypatch.setattr("os.path.lexists", lambda path: checked.append(path))
    writer = make_writer(filename="last.json")
    for _ in range(100):
        record(writer)
    assert worker.drain(PATIENCE)
    assert len(checked) == len(set(checked)) == 100


def test_an_unreachable_server_is_one_warning_and_a_summary(make_writer, worker, tmp_path):
    """The first trace has a warning, the others are counted at the end; all are listed."""
    digest = WarningDigest()
    writer = make_writer(targets=[Target(Server(99))], backoff=(), digest=digest)
    with pytest.warns(PerfWarning) as warned:
        after(worker, [record(writer, batch) for batch in range(20)])
    assert ["rank0.0.json" in str(warning.message) for warning in warned] == [True]
    writer.close()
    with pytest.warns(PerfWarning, match="19 more files were not uploaded; .*pending_up") as warned:
        digest.summarize()
    digest.summarize()
    assert len(warned) == 1
    assert len(read_pending(tmp_path)) == 20


def test_a_warning_names_ten_files(make_writer, worker, tmp_path):
    """Of twelve files that wait at the end, one warning names ten and counts the others."""
    writer = make_writer(targets=[Target(Server(99))], backoff=(3600.0,))
    for batch in range(12):
        record(writer, batch)
    tried(worker)
    with pytest.warns(PerfWarning, match=r"rank0\.9\.json and 2 more; ") as warned:
        writer.close()
    assert len(warned) == 1
    assert len(read_pending(tmp_path)) == 12


def full_disk(monkeypatch):
    """Make writes of new content fail; renames work."""

    def no_room(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gzip.GzipFile, "write", no_room)


def test_a_full_disk_disables_compression(make_writer, worker, tmp_path, monkeypatch):
    """The raw file gets its name without .gz, locally and on the server."""
    full_disk(monkeypatch)
    server, digest = Server(), WarningDigest()
    writer = make_writer(
        compress=True, targets=[Target(server)], num_traces_to_keep=2, digest=digest
    )
    with pytest.warns(
        PerfWarning, match=r"rank0\.5\.json was saved without compression .*No space"
    ) as warned:
        after(worker, [record(writer) for _ in range(2)])
    assert len(warned) == 1
    assert files(tmp_path) == ["run/traces/rank0-2.5.json", "run/traces/rank0.5.json"]
    assert server.files == {
        "run/traces/rank0.5.json": CONTENT,
        "run/traces/rank0-2.5.json": CONTENT,
    }
    assert [path.name for _, (path,) in writer.saved_traces] == ["rank0.5.json", "rank0-2.5.json"]
    with pytest.warns(PerfWarning, match="1 more traces were saved without compression"):
        digest.summarize()


def test_write_returns_the_name_of_an_uncompressed_file(make_writer, worker, tmp_path):
    """Without a worker, the returned path is that of the raw file, which replaces none."""
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/rank0.5.json").write_text("an earlier run's")
    assert worker.close(PATIENCE)
    written = record(make_writer(compress=True))
    assert written == tmp_path / "run/traces/rank0-2.5.json"
    assert written.read_bytes() == CONTENT


def test_a_full_disk_is_one_warning(make_writer, worker, monkeypatch):
    """Files that may be truncated are uploaded, with one warning and a count."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 0))
    server, digest = Server(), WarningDigest()
    writer = make_writer(targets=[Target(server)], digest=digest)
    with pytest.warns(PerfWarning, match=r"is full: rank0\.1\.json may be truncated") as warned:
        after(worker, [record(writer, batch) for batch in (1, 2)])
    assert len(warned) == 1
    assert len(server.files) == 2
    with pytest.warns(PerfWarning, match="1 more traces may be truncated"):
        digest.summarize()


def test_a_deleted_folder_is_created_again(make_writer, worker, tmp_path):
    """The next trace is written although the folder was deleted during the run."""
    writer = make_writer(identity="ours")
    first = after(worker, record(writer, 1))
    for path in (first, tmp_path / "run" / ".run"):
        path.unlink()
    (tmp_path / "run/traces").rmdir()
    assert after(worker, record(writer, 2)).exists()


def test_partial_files_have_unique_names(tmp_path, monkeypatch):
    """Two ranks can write the same target at the same time."""
    with written_whole(tmp_path / "a") as one, written_whole(tmp_path / "a") as other:
        assert Path(one.name) != Path(other.name)
        one.write(b"same")
        other.write(b"same")
    assert (tmp_path / "a").read_bytes() == b"same"
    assert files(tmp_path) == ["a"]
