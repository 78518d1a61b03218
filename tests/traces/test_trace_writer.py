"""The trace writer: the steps from a recording to an uploaded file, and their failures."""

import errno
import gzip
import itertools
import json
import os
import re
import threading
import time
import weakref
from dataclasses import replace

import pytest
from helpers.pending import read_pending
from helpers.recordings import CONTENT, PATIENCE, Server, after, files, record, tried

from lightning_perf.background import Worker
from lightning_perf.core.progress import Ranks, Timestamp
from lightning_perf.errors import ConfigError, PerfWarning, WarningDigest
from lightning_perf.files import NotRegularError, compress, place
from lightning_perf.traces import uploads
from lightning_perf.traces.names import TakenNames
from lightning_perf.traces.uploads import (
    NotHere,
    PendingUpload,
    Target,
    append_pending,
    taken_pending,
)
from lightning_perf.tracking.mlflow import MlflowRun


@pytest.mark.parametrize(
    ("stage", "path"), [("train", "rank0.5.json"), ("validate", "validate/rank0.5.json")]
)
def test_a_recording_is_placed_and_uploaded(make_writer, worker, tmp_path, stage, path):
    """The file has its documented local and remote name; no other file is left."""
    server = Server()
    written = record(make_writer(targets=[Target(server)]), stage=stage)
    assert worker.drain(PATIENCE)
    assert written == tmp_path / "run/traces" / path
    assert files(tmp_path) == [f"run/traces/{path}"]
    assert written.read_bytes() == CONTENT
    assert server.files == {f"run/traces/{path}": CONTENT}


def test_a_recording_is_compressed(make_writer, worker, tmp_path):
    """With `compress`, both names end with .gz and the content is unchanged."""
    server = Server()
    written = record(make_writer(targets=[Target(server)], compress=True))
    assert worker.drain(PATIENCE)
    assert files(tmp_path) == ["run/traces/rank0.5.json.gz"]
    assert gzip.decompress(written.read_bytes()) == CONTENT
    assert list(server.files) == ["run/traces/rank0.5.json.gz"]


def test_equal_recordings_give_equal_files(make_writer, worker, monkeypatch):
    """Compressed files contain no time and no name."""
    monkeypatch.setattr(time, "time", itertools.count(1e9, 3600.0).__next__)
    writer = make_writer(compress=True)
    first, second = record(writer, batch=1), record(writer, batch=2)
    assert worker.drain(PATIENCE)
    assert first.read_bytes() == second.read_bytes()


def test_nothing_is_uploaded_without_a_remote_name(make_writer, worker):
    """remote_file_name=None disables the upload."""
    server = Server()
    written = record(make_writer(targets=[Target(server)], remote_file_name=None))
    assert worker.drain(PATIENCE)
    assert written.exists()
    assert server.attempts == 0


def test_prepare_completes_the_file_on_the_worker(make_writer, worker):
    """`prepare` runs on the worker thread, before the file is inspected."""
    writer, threads = make_writer(), []
    spooled = writer.spool("train")

    def export():
        threads.append(threading.current_thread().name)
        spooled.write_bytes(CONTENT)

    written = writer.write(spooled, Timestamp(), "train", export)
    assert worker.drain(PATIENCE)
    assert threads == ["test worker"]
    assert written.read_bytes() == CONTENT


def test_prepare_is_released(make_writer, worker):
    """Neither the writer nor an idle worker keeps references to `prepare`."""

    class Export:
        def __call__(self):
            pass

    export = Export()
    alive = weakref.ref(export)
    writer = make_writer(targets=[Target(Server())])
    record(writer, prepare=export)
    del export
    assert worker.drain(PATIENCE)
    assert writer.saved_traces
    assert alive() is None


def test_spools_are_new_hidden_paths_with_the_suffix(make_writer, tmp_path):
    """Each spool is a unique hidden path beside the traces, with the suffix of `filename`."""
    writers = (
        make_writer(filename="a.{batch}.json.gz", compress=True),
        make_writer(filename="b{batch:06d}"),
    )
    spools = [writer.spool(stage) for writer in writers for stage in ("train", "train", "test")]
    assert len(set(spools)) == 6
    assert {spool.suffix for spool in spools[:3]} == {".json"}
    assert {spool.suffix for spool in spools[3:]} == {""}
    assert all(spool.name.startswith(".") and not spool.exists() for spool in spools)
    assert {spool.parent for spool in spools} == {
        tmp_path / "run/traces",
        tmp_path / "run/traces/test",
    }


def test_spool_raises_if_the_folder_cannot_be_created(make_writer, tmp_path):
    """A file in place of the folder raises NotADirectoryError with its path."""
    (tmp_path / "run").write_text("a file in the folder's place")
    with pytest.raises(NotADirectoryError, match="run"):
        make_writer().spool("train")
    with pytest.raises(NotADirectoryError, match="run"):
        make_writer(identity="ours").spool("train")


# Overwriting


def test_later_traces_are_refused(make_writer, worker):
    """A new run in the folder of a longer run gets an error with the file and a remedy."""
    record(make_writer(), batch=6)
    assert worker.drain(PATIENCE)
    now = {"train": Timestamp(batch=5)}
    with pytest.raises(FileExistsError, match=r"rank0\.6\.json .*overwrite=True.*resume"):
        make_writer().check(now)
    with pytest.raises(FileExistsError, match=r"rank0\.6\.json"):
        make_writer().check({"validate": Timestamp(), **now})
    make_writer(overwrite=True).check(now)
    make_writer(ranks=Ranks(global_rank=1, world_size=2)).check(now)
    make_writer().check({"validate": Timestamp(batch=5)})


def test_a_resume_from_an_older_checkpoint_keeps_later_traces(make_writer, worker):
    """One warning names the first later file, and no file is replaced."""
    first = after(worker, record(make_writer(), batch=6, content=b"first"))
    record(make_writer(), batch=7, stage="validate")
    assert worker.drain(PATIENCE)
    writer = make_writer()
    with pytest.warns(PerfWarning, match=r"rank0\.6\.json was written after") as caught:
        writer.check({"train": Timestamp(batch=4), "validate": Timestamp()}, resumes=True)
    assert len(caught) == 1
    second = after(worker, record(writer, batch=6, content=b"second"))
    assert second.name == "rank0-2.6.json"
    assert (first.read_bytes(), second.read_bytes()) == (b"first", b"second")


def test_a_taken_name_gets_a_number(make_writer, worker, tmp_path):
    """Without `overwrite` a trace never replaces another one, locally or on the server."""
    server = Server()
    record(make_writer(filename="last.pt.json"), content=b"an earlier run's")
    assert worker.drain(PATIENCE)
    writer = make_writer(
        filename="last.pt.json",
        remote_file_name="traces/last.pt.json",
        targets=[Target(server)],
        num_traces_to_keep=0,
    )
    record(writer, content=b"first")
    record(writer, content=b"second")
    assert worker.drain(PATIENCE)
    assert server.files == {"traces/last-2.pt.json": b"first", "traces/last-3.pt.json": b"second"}
    assert (tmp_path / "run/traces/last.pt.json").read_bytes() == b"an earlier run's"


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_another_process_that_takes_the_name_first_keeps_its_trace(
    make_writer, worker, tmp_path, monkeypatch, compressed, links
):
    """Two trainings of one name and version lose no trace, also without links between files."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.open(tmp_path, os.O_WRONLY))
    server, name = Server(), "rank0.5.json.gz" if compressed else "rank0.5.json"
    writer = make_writer(
        compress=compressed, remote_file_name="r/{rank}.json", targets=[Target(server)]
    )
    other = tmp_path / "run/traces" / name
    record(writer, prepare=lambda: other.write_bytes(b"the other's"))
    assert worker.drain(PATIENCE)
    assert files(tmp_path) == sorted(f"run/traces/{each}" for each in (name, f"rank0-2{name[5:]}"))
    assert other.read_bytes() == b"the other's"
    assert [path.partition(".")[0] for path in server.files] == ["r/0-2"]


def test_a_name_with_a_number_is_given_once(tmp_path):
    """A trace that is named as another one with its number gets a number itself, and vice versa."""
    take = TakenNames().take  # nothing is on the disk: all are still on their way
    assert [take(tmp_path / name, 9) for name in ("a.json", "a.json", "a-2.json")] == [1, 2, 2]
    assert [take(tmp_path / name, 9) for name in ("b-2.json", "b.json", "b.json")] == [1, 1, 3]


def test_two_recorders_never_share_a_name(make_writer, worker, tmp_path):
    """Names of two recorders of a run that render alike are given once, before a file is there."""
    paths = [record(make_writer(filename=name)) for name in ("rank{rank}.5.json", "rank0.5.json")]
    assert [path.name for path in paths] == ["rank0.5.json", "rank0-2.5.json"]
    assert worker.close(PATIENCE)
    assert files(tmp_path) == ["run/traces/rank0-2.5.json", "run/traces/rank0.5.json"]


def test_too_many_files_cost_no_page_on_the_training_thread(make_writer, tmp_path):
    """Beyond the queue's capacity pages are left out, and recordings are placed as they are."""
    full, made = Worker("full", capacity=0), []
    pages = make_writer(filename="rank0.{batch}.html", optional=True, file_worker=full)
    recordings = make_writer(compress=True, file_worker=full)
    with pytest.warns(PerfWarning, match="rank0.5.html was not made: too many files wait"):
        assert pages.write(pages.spool("train"), Timestamp(batch=5), "train", made.append) is None
    assert record(recordings).name == "rank0.5.json"
    assert files(tmp_path) == ["run/traces/rank0.5.json"]
    assert not made


def test_overwrite_replaces(make_writer, worker, tmp_path):
    """With `overwrite` a trace replaces one of the same name, also in `saved_traces`."""
    writer = make_writer(filename="last.json", overwrite=True, num_traces_to_keep=1)
    record(writer, batch=1, content=b"first")
    written = record(writer, batch=2, content=b"second")
    assert worker.drain(PATIENCE)
    assert files(tmp_path) == ["run/traces/last.json"]
    assert written.read_bytes() == b"second"
    assert writer.saved_traces == [(Timestamp(batch=2), [written])]


# Uploading


def test_a_failed_upload_is_retried(make_writer, worker, tmp_path):
    """The file is uploaded after three failed attempts, without a warning."""
    server = Server(failures=3)
    record(make_writer(targets=[Target(server)]))
    assert worker.drain(PATIENCE)
    assert server.attempts == 4
    assert list(server.files) == ["run/traces/rank0.5.json"]
    assert read_pending(tmp_path) == []


def test_a_failed_upload_is_listed(make_writer, worker, tmp_path):
    """After the last attempt the file stays, with one warning and one entry without secrets."""
    server = Server(99, "PUT https://me:hunter2@host/bucket?X-Signature=hunter2 failed")
    run = MlflowRun("https://me:hunter2@host/mlflow", "abc")
    writer = make_writer(targets=[Target(server, run.address)], num_traces_to_keep=0)
    with pytest.warns(PerfWarning) as warned:
        written = after(worker, record(writer))
    assert server.attempts == 4
    assert [str(written) in str(warning.message) for warning in warned] == [True]
    assert read_pending(tmp_path) == [
        PendingUpload(
            path=str(written),
            remote="run/traces/rank0.5.json",
            run_name="run",
            error="ConnectionError: PUT https://host/bucket failed",
            target={"tracking_uri": "https://host/mlflow", "run_id": "abc"},
        )
    ]
    assert written.read_bytes() == CONTENT
    (line,) = (tmp_path / "pending_uploads.jsonl").read_text().splitlines()
    assert json.loads(line)["path"] == str(written)
    assert "hunter2" not in line
    assert "hunter2" not in str(warned[0].message)


def test_only_failed_targets_are_retried(make_writer, worker, tmp_path):
    """A target that has the file gets it once; only the other is retried and listed."""
    one, other = Server(), Server(failures=2)
    targets = [Target(one, {"run_id": "one"}), Target(other, {"run_id": "other"})]
    writer = make_writer(targets=targets)
    after(worker, record(writer, 1))
    assert (one.attempts, other.attempts) == (1, 3)
    assert one.files == other.files
    other.failures = 99
    with pytest.warns(PerfWarning, match=r"rank0\.2\.json"):
        after(worker, record(writer, 2))
    assert [entry.target for entry in read_pending(tmp_path)] == [{"run_id": "other"}]
    assert one.attempts == 2


@pytest.mark.parametrize("order", [1, -1])
def test_a_target_of_another_process_leaves_retries_to_the_others(
    make_writer, worker, tmp_path, order
):
    """W&B takes no file of this rank, and MLflow fails twice: MLflow is tried a third time."""
    mlflow = Server(failures=2)

    def wandb(path, remote):
        raise NotHere("the W&B run belongs to rank 0's process")

    targets = [Target(mlflow, {"run_id": "mlflow"}), Target(wandb, {"run_id": "wandb"})][::order]
    with pytest.warns(PerfWarning, match="not uploaded"):
        after(worker, record(make_writer(targets=targets)))
    assert mlflow.attempts == 3
    assert [entry.target["run_id"] for entry in read_pending(tmp_path)] == ["wandb"]


def test_an_unfinished_upload_is_listed_for_each_failed_target(make_writer, worker, tmp_path):
    """Closing lists the targets that the first attempt did not reach."""
    targets = [Target(Server(99 * (name != "b")), {"run_id": name}) for name in "abc"]
    writer = make_writer(targets=targets, backoff=(3600.0,))
    record(writer)
    tried(worker)
    with pytest.warns(PerfWarning, match="the run ended first"):
        writer.close()
    assert [entry.target["run_id"] for entry in read_pending(tmp_path)] == ["a", "c"]


def test_an_upload_that_cannot_be_listed_is_a_warning(make_writer, worker, tmp_path):
    """If the list cannot be written, the warning names the file and the error."""
    (tmp_path / "pending_uploads.jsonl").mkdir()
    with pytest.warns(
        PerfWarning, match=r"rank0\.5\.json; the list of pending uploads could not .*Error"
    ):
        after(worker, record(make_writer(targets=[Target(Server(99))], backoff=())))


def test_traces_behind_a_hanging_upload_are_placed(make_writer, worker, tmp_path):
    """Closing places the traces that wait behind it and lists all of them."""
    reached, gate = threading.Event(), threading.Event()

    def hang(path, remote):
        reached.set()
        gate.wait(PATIENCE)

    writer = make_writer(targets=[Target(hang)], compress=True)
    spooled = writer.spool("train")
    first = record(writer, batch=1)
    assert reached.wait(PATIENCE)
    second = writer.write(
        spooled, Timestamp(batch=2), "train", lambda: spooled.write_bytes(CONTENT)
    )
    assert not worker.close(0.01)
    with pytest.warns(PerfWarning, match="not uploaded"):
        writer.close()
    assert {entry.path for entry in read_pending(tmp_path)} == {str(first), str(second)}
    assert gzip.decompress(second.read_bytes()) == CONTENT
    gate.set()
    assert worker.drain(PATIENCE)
    assert len(read_pending(tmp_path)) == 2


def test_a_late_upload_keeps_the_listed_file(make_writer, worker, tmp_path):
    """In the mirror of a store, a file that was listed before its upload ended is not deleted."""
    reached, gate = threading.Event(), threading.Event()

    def hang(path, remote):
        reached.set()
        gate.wait(PATIENCE)

    target = Target(hang)
    writer = make_writer(mirror=lambda name, replaces: (target, f"bucket/{name}"))
    written = record(writer)
    assert reached.wait(PATIENCE)
    with pytest.warns(PerfWarning, match="not uploaded"):
        writer.close()
    gate.set()
    assert worker.drain(PATIENCE)
    assert [entry.path for entry in read_pending(tmp_path)] == [str(written)]
    assert written.read_bytes() == CONTENT


def test_closing_twice_does_nothing(make_writer, worker, tmp_path):
    """A writer without waiting traces closes without a warning, any number of times."""
    writer = make_writer(targets=[Target(Server())])
    record(writer)
    assert worker.drain(PATIENCE)
    writer.close()
    writer.close()
    assert files(tmp_path) == ["run/traces/rank0.5.json"]


def test_a_closed_worker_places_the_file_on_the_calling_thread(make_writer, worker, tmp_path):
    """The file is placed at once; its upload is listed, with a warning."""
    assert worker.close(PATIENCE)
    server = Server()
    with pytest.warns(PerfWarning, match="too many files wait.*rank0.5.json"):
        written = record(make_writer(targets=[Target(server)]))
    assert written.read_bytes() == CONTENT
    assert server.attempts == 0
    assert [entry.path for entry in read_pending(tmp_path)] == [str(written)]


def test_a_closed_worker_prunes_on_the_calling_thread(make_writer, worker, tmp_path):
    """Without an upload, the file is placed and older ones are deleted, without a warning."""
    assert worker.close(PATIENCE)
    writer = make_writer(num_traces_to_keep=1)
    for batch in (1, 2):
        record(writer, batch)
    assert files(tmp_path) == ["run/traces/rank0.2.json"]


def test_write_returns_none_if_the_file_cannot_be_placed(make_writer, worker):
    """If the worker is closed and the recording is empty, there is no path."""
    assert worker.close(PATIENCE)
    with pytest.warns(PerfWarning, match="wrote nothing"):
        assert record(make_writer(), content=b"") is None


# Failures before the upload


@pytest.mark.parametrize("content", [b"", None])
def test_an_empty_recording_is_a_warning(make_writer, worker, tmp_path, content):
    """A missing or empty file gives one warning; no file is uploaded or left."""
    server = Server()
    writer = make_writer(targets=[Target(server)])
    spooled = writer.spool("train")
    if content is not None:
        spooled.write_bytes(content)
    with pytest.warns(PerfWarning, match=r"wrote nothing for .*rank0\.5\.json") as warned:
        after(worker, writer.write(spooled, Timestamp(batch=5), "train"))
    assert len(warned) == 1
    assert files(tmp_path) == []
    assert server.attempts == 0
    assert writer.saved_traces == []


@pytest.mark.parametrize("compress", [True, False])
def test_a_file_that_cannot_be_placed_is_kept(make_writer, worker, tmp_path, compress):
    """One warning says where the recording is, and nothing is raised."""
    server = Server()
    writer = make_writer(
        targets=[Target(server)], compress=compress, filename="{stage}/{batch}.json"
    )
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/train").write_text("a file in the folder's place")
    with pytest.warns(PerfWarning, match=r"was not finished.*Error.*see .*\.spool-rank0") as warned:
        after(worker, record(writer))
    assert len(warned) == 1
    (spooled,) = (tmp_path / "run/traces").glob(".*")
    assert spooled.read_bytes() == CONTENT
    assert server.attempts == 0


def test_an_older_file_is_not_shown_as_the_new_one(make_writer, worker):
    """As the summary so far, which stays if the disk is full at the end of the run."""
    writer = make_writer(overwrite=True, filename="summary.json")
    after(worker, record(writer))

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.warns(PerfWarning, match="the file there is the state of an earlier moment"):
        after(worker, writer.write(writer.spool("train"), Timestamp(batch=9), "train", full))


def test_a_failing_prepare_is_a_warning(make_writer, worker, tmp_path):
    """An exception of `prepare` is a warning, also on the calling thread."""
    digest = WarningDigest()
    writer = make_writer(digest=digest)

    def export():
        raise RuntimeError("no events")

    with pytest.warns(PerfWarning, match="RuntimeError: no events"):
        assert after(worker, record(writer, prepare=export)) is not None
    assert worker.close(PATIENCE)
    assert record(writer, prepare=export) is None
    with pytest.warns(PerfWarning, match="1 more traces were not finished"):
        digest.summarize()
    assert writer.saved_traces == []


def test_what_a_tool_leaves_of_an_empty_recording_is_removed(make_writer, worker, tmp_path):
    """On a full disk torch leaves a part of the trace beside the path that it was given."""

    def cut():
        spooled.with_name(f"{spooled.name}.tmp").write_bytes(b"{")

    spooled = (writer := make_writer()).spool("train")
    with pytest.warns(PerfWarning, match="the recorder wrote nothing"):
        after(worker, writer.write(spooled, Timestamp(batch=5), "train", cut))
    assert files(tmp_path) == []


# Keeping and pruning


@pytest.mark.parametrize(
    ("keep", "left"), [(-1, [1, 2, 3]), (5, [1, 2, 3]), (2, [2, 3]), (1, [3]), (0, [])]
)
def test_the_latest_files_are_kept(make_writer, worker, tmp_path, keep, left):
    """The oldest uploaded files are deleted until `num_traces_to_keep` remain."""
    server = Server()
    writer = make_writer(targets=[Target(server)], num_traces_to_keep=keep)
    paths = {batch: record(writer, batch) for batch in (1, 2, 3)}
    assert worker.drain(PATIENCE)
    assert files(tmp_path) == [f"run/traces/rank0.{batch}.json" for batch in left]
    assert writer.saved_traces == [(Timestamp(batch=batch), [paths[batch]]) for batch in left]
    assert len(server.files) == 3


def test_only_uploaded_files_are_deleted(make_writer, worker, tmp_path):
    """A file whose upload failed stays when newer ones are deleted."""
    writer = make_writer(targets=[Target(Server(failures=1))], num_traces_to_keep=0, backoff=())
    with pytest.warns(PerfWarning, match="not uploaded"):
        after(worker, [record(writer, 1), record(writer, 2)])
    assert files(tmp_path) == ["pending_uploads.jsonl", "run/traces/rank0.1.json"]


def test_a_file_between_two_attempts_is_not_deleted(make_writer, worker, tmp_path):
    """Pruning skips a file that waits for its retry; it alone is listed, in case of a SIGKILL."""
    server = Server(failures=1)
    writer = make_writer(targets=[Target(server)], num_traces_to_keep=1, backoff=(3600.0,))
    record(writer, 1)
    record(writer, 2)
    tried(worker)
    listed, *traces = files(tmp_path)
    assert traces == ["run/traces/rank0.1.json", "run/traces/rank0.2.json"]
    assert json.loads((tmp_path / listed).read_text())["path"] == str(tmp_path / traces[0])
    assert worker.close(PATIENCE)
    assert len(server.files) == 2
    assert files(tmp_path) == ["run/traces/rank0.2.json"]


@pytest.mark.parametrize("changes", [{"remote_file_name": None, "targets": [Target(Server())]}, {}])
def test_the_only_copy_is_never_deleted(make_writer, worker, tmp_path, changes):
    """Without an upload, `num_traces_to_keep=0` still keeps the latest file."""
    writer = make_writer(num_traces_to_keep=0, **changes)
    record(writer, 1)
    record(writer, 2)
    assert worker.drain(PATIENCE)
    assert files(tmp_path) == ["run/traces/rank0.2.json"]
    assert writer.saved_traces == []


def test_saved_traces_are_listed_by_global_rank(make_writer, worker):
    """This rank's path is at its index; other ranks are None."""
    writer = make_writer(ranks=Ranks(global_rank=2, world_size=4))
    written = record(writer, 7)
    assert worker.drain(PATIENCE)
    assert writer.saved_traces == [(Timestamp(batch=7), [None, None, written, None])]


@pytest.mark.parametrize("field", ["folder", "filename", "remote_file_name"])
def test_format_strings_are_checked(make_writer, field):
    """An invalid format string is refused at construction, even without an upload."""
    with pytest.raises(ConfigError, match=f"{field}='{{nonsense}}'"):
        make_writer(**{field: "{nonsense}"})


# Atomic files and the list of pending uploads


@pytest.mark.parametrize("move", [compress, place])
def test_a_failed_move_changes_nothing(tmp_path, monkeypatch, move):
    """An error such as a full disk keeps source and target and leaves no partial file."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(CONTENT)
    target.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        move(source, target)
    assert files(tmp_path) == ["source", "target"]
    assert (source.read_bytes(), target.read_bytes()) == (CONTENT, b"old")


def test_a_folder_in_place_of_the_target_is_an_error(tmp_path):
    """Errors other than EXDEV are raised, and the source is kept."""
    (tmp_path / "target").mkdir()
    (tmp_path / "source").write_bytes(CONTENT)
    with pytest.raises(NotRegularError):
        place(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "source").read_bytes() == CONTENT


def listed(number):
    """An entry of the list."""
    return PendingUpload(f"/{number}", "é", "run", "why", {"run_id": "x"})


def test_the_list_of_pending_uploads_is_revised(tmp_path):
    """Entries are replaced, removed or kept; an empty list has no file."""
    entries = [listed(number) for number in range(3)]
    for entry in entries:
        append_pending(tmp_path, entry)
    assert read_pending(tmp_path) == entries
    changed = replace(entries[1], error="gone")
    with taken_pending(tmp_path) as left:
        first, second, _ = left
        del left[first]
        left[second] = changed
    assert read_pending(tmp_path) == [changed, entries[2]]
    with taken_pending(tmp_path) as left:
        left.clear()
    assert files(tmp_path) == []
    assert read_pending(tmp_path) == []


def test_an_interrupted_revision_loses_no_entry(tmp_path, monkeypatch):
    """Entries stay listed if a revision is interrupted, and the next revision removes them."""
    for number in range(3):
        append_pending(tmp_path, listed(number))

    def interrupted(root, entry):
        if entry == listed(1):
            raise KeyboardInterrupt
        append_pending(root, entry)

    with monkeypatch.context() as patch:
        patch.setattr(uploads, "append_pending", interrupted)
        with pytest.raises(KeyboardInterrupt), taken_pending(tmp_path):
            pass
    assert {entry.path for entry in read_pending(tmp_path)} == {"/0", "/1", "/2"}
    with taken_pending(tmp_path) as left:
        left.clear()
    assert files(tmp_path) == []


def test_entries_that_a_training_adds_during_a_revision_stay(tmp_path):
    """No entry is lost while one process appends to the list and another one revises it."""
    entries = [listed(number) for number in range(50)]
    appending = threading.Thread(
        target=lambda: [append_pending(tmp_path, entry) for entry in entries]
    )
    appending.start()
    while appending.is_alive():
        with taken_pending(tmp_path):
            pass
    assert {entry.path for entry in read_pending(tmp_path)} == {entry.path for entry in entries}


@pytest.mark.parametrize("line", ['{"path": "/a", "rem', '{"path": "/a"}', "[]", "7"])
def test_a_damaged_line_stays(tmp_path, line):
    """A damaged line is a warning that shows it, and stays listed; other lines are read."""
    entry = PendingUpload("/0", "0", "run", "why")
    path = tmp_path / "pending_uploads.jsonl"
    append_pending(tmp_path, entry)
    with path.open("a") as file:
        file.write(f"\n{line}\n{line}")
    message = rf"{path} has damaged lines.* begins with {re.escape(repr(line))}"
    with pytest.warns(PerfWarning, match=message):
        assert read_pending(tmp_path) == [entry]
    with pytest.warns(PerfWarning, match=message), taken_pending(tmp_path) as left:
        left.clear()
    assert path.read_text() == f"{line}\n"
    path.unlink()
    append_pending(tmp_path, entry)
    assert read_pending(tmp_path) == [entry]
