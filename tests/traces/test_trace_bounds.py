"""What a writer remembers, says and needs, over very many windows and on full disks."""

import errno
import gzip
from collections import namedtuple
from pathlib import Path

import pytest
from helpers.recordings import CONTENT, PATIENCE, Server, after, files, record

from lightning_perf.background.files import written_whole
from lightning_perf.core.progress import Timestamp
from lightning_perf.errors import PerfWarning
from lightning_perf.traces import Target, uploads
from lightning_perf.traces.uploads import Trace, TraceIndex, read_pending


@pytest.mark.parametrize("keep", [-1, 3])
@pytest.mark.parametrize("name", ["{}.json", "last.json", "{}.json of 5 names"])
def test_what_is_remembered_is_bounded(tmp_path, monkeypatch, keep, name):
    """However many traces go through, with names of their own or ever the same one."""
    monkeypatch.setattr(uploads, "MOST_REMEMBERED", 20)
    books = TraceIndex(keep)
    for count in range(200):
        text = name.format(count % 5 if "5" in name else count)
        number = books.take(lambda n, text=text: tmp_path / f"{n}-{text}")
        trace = Trace(
            tmp_path / f".{count}", tmp_path / f"{number}-{text}", "there", Timestamp(), "train"
        )
        books.queue(trace)
        assert books.claim(trace)
        books.place(trace)
        books.settle(trace)
        if keep >= 0:
            books.expire(keep)
    held = [value for value in vars(books).values() if isinstance(value, dict)]
    assert len(held) == 5
    assert max(map(len, held)) <= 20
    assert len(books.saved) == (20 if keep < 0 else keep)


def test_a_name_that_comes_for_ever_is_found_at_once(tmp_path, monkeypatch):
    """The thousandth trace of one name asks the disk no oftener than the second."""
    asked = []
    monkeypatch.setattr("os.path.lexists", lambda path: asked.append(path))
    books = TraceIndex(-1)
    numbers = [books.take(lambda n: tmp_path / f"last-{n}.json") for _ in range(1000)]
    assert numbers == list(range(1, 1001))
    assert len(asked) == 1000


def test_a_dead_server_is_told_once_and_summed_up(make_writer, worker, tmp_path):
    """The first trace is named at once, the others are counted at the end; the list has all."""
    writer = make_writer(targets=[Target(Server(99))], backoff=())
    with pytest.warns(PerfWarning) as told:
        after(worker, [record(writer, batch) for batch in range(20)])
    assert ["rank0.0.json" in str(warning.message) for warning in told] == [True]
    with pytest.warns(PerfWarning, match="19 more files were not uploaded; .*pending_up") as told:
        writer.close()
    writer.close()
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
    server = Server()
    writer = make_writer(compress=True, targets=[Target(server)], num_traces_to_keep=2)
    with pytest.warns(PerfWarning, match=r"rank0\.5\.json was not compressed .*No space") as told:
        after(worker, [record(writer) for _ in range(2)])
    assert len(told) == 1
    assert files(tmp_path) == ["run/traces/rank0-2.5.json", "run/traces/rank0.5.json"]
    assert server.files == {
        "run/traces/rank0.5.json": CONTENT,
        "run/traces/rank0-2.5.json": CONTENT,
    }
    assert [path.name for _, (path,) in writer.saved_traces] == ["rank0.5.json", "rank0-2.5.json"]
    with pytest.warns(PerfWarning, match="1 more traces were not compressed"):
        writer.close()


def test_where_it_had_to_be_done_at_once_the_caller_learns_the_name(
    make_writer, worker, tmp_path, monkeypatch
):
    """A raw file of an earlier run is not replaced by it, either."""
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/rank0.5.json").write_text("an earlier run's")
    full_disk(monkeypatch)
    assert worker.close(PATIENCE)
    with pytest.warns(PerfWarning, match="was not compressed"):
        written = record(make_writer(compress=True))
    assert written == tmp_path / "run/traces/rank0-2.5.json"
    assert written.read_bytes() == CONTENT


def test_a_disk_that_is_full_is_told_once(make_writer, worker, monkeypatch):
    """Some recorders write half a file and say nothing; what there is goes on its way."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 0))
    server = Server()
    writer = make_writer(targets=[Target(server)])
    with pytest.warns(PerfWarning, match=r"is full: rank0\.1\.json may be cut short") as told:
        after(worker, [record(writer, batch) for batch in (1, 2)])
    assert len(told) == 1
    assert len(server.files) == 2
    with pytest.warns(PerfWarning, match="1 more traces may be cut short"):
        writer.close()


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
