"""What a writer remembers, says and needs, over very many windows and on full disks."""

import errno
import gzip
from collections import namedtuple
from pathlib import Path

import pytest
from helpers.recordings import CONTENT, PATIENCE, Server, after, files, record

from lightning_perf.background.files import written_whole
from lightning_perf.errors import PerfWarning, WarningDigest
from lightning_perf.traces import Target, read_pending


@pytest.mark.parametrize("keep", [-1, 3])
@pytest.mark.parametrize(
    ("filename", "names"), [("{batch}.json", 60), ("last.json", 1), ("{batch}.json", 5)]
)
def test_memory_of_a_writer_is_bounded(make_writer, worker, keep, filename, names):
    """A writer remembers at most `most_remembered` traces and names, however many it writes."""
    writer = make_writer(filename=filename, num_traces_to_keep=keep, most_remembered=10)
    for count in range(60):
        after(worker, record(writer, batch=count % names))
    parts = (writer, writer._layout, writer._uploads)
    held = [value for part in parts for value in vars(part).values() if isinstance(value, dict)]
    assert max(map(len, held)) <= 10
    assert len(writer.saved_traces) == (10 if keep < 0 else keep)


def test_a_free_number_is_found_without_search(make_writer, worker, monkeypatch):
    """For one name, each trace checks one path on the disk, however many came before."""
    checked = []
    monkeypatch.setattr("os.path.lexists", lambda path: checked.append(path))
    writer = make_writer(filename="last.json")
    for _ in range(100):
        record(writer)
    assert worker.drain(PATIENCE)
    assert len(checked) == len(set(checked)) == 100


def test_a_dead_server_is_told_once_and_summed_up(make_writer, worker, tmp_path):
    """The first trace is named at once, the others are counted at the end; the list has all."""
    digest = WarningDigest()
    writer = make_writer(targets=[Target(Server(99))], backoff=(), digest=digest)
    with pytest.warns(PerfWarning) as told:
        after(worker, [record(writer, batch) for batch in range(20)])
    assert ["rank0.0.json" in str(warning.message) for warning in told] == [True]
    writer.close()
    with pytest.warns(PerfWarning, match="19 more files were not uploaded; .*pending_up") as told:
        digest.summarize()
    digest.summarize()
    assert len(told) == 1
    assert len(read_pending(tmp_path)) == 20


def test_many_files_at_the_end_are_named_in_part(make_writer, worker, tmp_path):
    """One warning names the first ten of those that wait for their next attempt."""
    writer = make_writer(targets=[Target(Server(99))], backoff=(3600.0,))
    for batch in range(12):
        record(writer, batch)
    worker.call(lambda: None, PATIENCE)
    with pytest.warns(PerfWarning, match=r"rank0\.9\.json and 2 more; ") as told:
        writer.close()
    assert len(told) == 1
    assert len(read_pending(tmp_path)) == 12


def full_disk(monkeypatch):
    """Nothing that is written anew finds room; what is there can be renamed."""

    def no_room(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gzip.GzipFile, "write", no_room)


def test_what_cannot_be_compressed_stays_as_it_is(make_writer, worker, tmp_path, monkeypatch):
    """On a full disk the raw file takes its name without .gz, here and on the server."""
    full_disk(monkeypatch)
    server, digest = Server(), WarningDigest()
    writer = make_writer(
        compress=True, targets=[Target(server)], num_traces_to_keep=2, digest=digest
    )
    with pytest.warns(
        PerfWarning, match=r"rank0\.5\.json was saved without compression .*No space"
    ) as told:
        after(worker, [record(writer) for _ in range(2)])
    assert len(told) == 1
    assert files(tmp_path) == ["run/traces/rank0-2.5.json", "run/traces/rank0.5.json"]
    assert server.files == {
        "run/traces/rank0.5.json": CONTENT,
        "run/traces/rank0-2.5.json": CONTENT,
    }
    assert [path.name for _, (path,) in writer.saved_traces] == ["rank0.5.json", "rank0-2.5.json"]
    with pytest.warns(PerfWarning, match="1 more traces were saved without compression"):
        digest.summarize()


def test_where_it_had_to_be_done_at_once_the_caller_learns_the_name(
    make_writer, worker, tmp_path, monkeypatch
):
    """A raw file of an earlier run is not replaced by it, either."""
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/rank0.5.json").write_text("an earlier run's")
    full_disk(monkeypatch)
    assert worker.close(PATIENCE)
    with pytest.warns(PerfWarning, match="was saved without compression"):
        written = record(make_writer(compress=True))
    assert written == tmp_path / "run/traces/rank0-2.5.json"
    assert written.read_bytes() == CONTENT


def test_a_disk_that_is_full_is_told_once(make_writer, worker, monkeypatch):
    """Some recorders write half a file and say nothing; what there is goes on its way."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 0))
    server, digest = Server(), WarningDigest()
    writer = make_writer(targets=[Target(server)], digest=digest)
    with pytest.warns(PerfWarning, match=r"is full: rank0\.1\.json may be truncated") as told:
        after(worker, [record(writer, batch) for batch in (1, 2)])
    assert len(told) == 1
    assert len(server.files) == 2
    with pytest.warns(PerfWarning, match="1 more traces may be truncated"):
        digest.summarize()


def test_a_folder_that_goes_away_is_made_again(make_writer, worker, tmp_path):
    """Somebody may clean up while training runs: the next trace is there."""
    writer = make_writer(identity="ours")
    first = after(worker, record(writer, 1))
    for path in (first, tmp_path / "run" / ".run"):
        path.unlink()
    (tmp_path / "run/traces").rmdir()
    assert after(worker, record(writer, 2)).exists()


def test_parts_of_files_never_share_a_name(tmp_path, monkeypatch):
    """Two ranks may write one file at the same moment."""
    with written_whole(tmp_path / "a") as one, written_whole(tmp_path / "a") as other:
        assert Path(one.name) != Path(other.name)
        one.write(b"same")
        other.write(b"same")
    assert (tmp_path / "a").read_bytes() == b"same"
    assert files(tmp_path) == ["a"]
