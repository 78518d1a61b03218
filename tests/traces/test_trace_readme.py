"""The text beside the traces that says how to open them."""

import pytest
from helpers.recordings import CONTENT, Server, after, files, record

from lightning_perf.core.progress import Ranks, Timestamp
from lightning_perf.errors import PerfWarning
from lightning_perf.traces import Target

TEXT = "Drop the files on https://ui.perfetto.dev.\n"


def test_it_lies_beside_the_first_trace_here_and_there(make_writer, worker, tmp_path):
    """Once, at the root that all stages share, whatever stage is recorded first."""
    server = Server()
    writer = make_writer(readme=TEXT, targets=[Target(server)])
    assert files(tmp_path) == []
    for stage in ("validate", "train", "train"):
        record(writer, stage=stage)
    assert after(worker, files)(tmp_path) == [
        "run/traces/README.md",
        "run/traces/rank0-2.5.json",
        "run/traces/rank0.5.json",
        "run/traces/validate/rank0.5.json",
    ]
    assert (tmp_path / "run/traces/README.md").read_text() == TEXT
    assert server.files["run/traces/README.md"] == TEXT.encode()
    assert server.attempts == 4


def test_all_ranks_write_the_same(make_writer, worker, tmp_path):
    """Each rank that records leaves it, and finds it there."""
    server = Server()
    for rank in (1, 0):
        ranks = Ranks(global_rank=rank, world_size=2)
        record(make_writer(readme=TEXT, targets=[Target(server)], ranks=ranks))
    assert after(worker, files)(tmp_path / "run/traces") == [
        "README.md",
        "rank0.5.json",
        "rank1.5.json",
    ]


def test_it_counts_neither_as_a_trace_nor_as_a_conflict(make_writer, worker, tmp_path):
    """Pruning leaves it, and a run that starts again does not stumble over it."""
    writer = make_writer(readme=TEXT, targets=[Target(Server())], num_traces_to_keep=0)
    after(worker, record(writer))
    assert files(tmp_path) == ["run/traces/README.md"]
    make_writer(filename="{run_name}.md", run_name="READ").check({"train": Timestamp()})


def test_a_file_of_the_user_s_stays(make_writer, worker, tmp_path):
    """It is neither replaced nor sent as ours."""
    server = Server()
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/README.md").write_text("mine")
    after(worker, record(make_writer(readme=TEXT, targets=[Target(server)])))
    assert (tmp_path / "run/traces/README.md").read_text() == "mine"
    assert list(server.files) == ["run/traces/rank0.5.json"]


def test_the_root_of_a_target_is_the_user_s(make_writer, worker):
    """Where traces have no folder there, no README is put among what else the user keeps."""
    server = Server()
    names = {"remote_file_name": "rank{rank}.{batch}.json", "targets": [Target(server)]}
    after(worker, record(make_writer(readme=TEXT, **names)))
    assert list(server.files) == ["rank0.5.json"]


def test_what_did_not_arrive_is_tried_with_the_next_trace(make_writer, worker):
    """A target that has it does not get it again, and a failure of it is no news."""

    def refuse_once(path, remote):
        if path.suffix == ".md" and not refused:
            refused.append(remote)
            raise ConnectionError("not now")
        other(path, remote)

    refused, one, other = [], Server(), Server()
    writer = make_writer(readme=TEXT, targets=[Target(one), Target(refuse_once)])
    for batch in (1, 2):
        record(writer, batch)
    assert after(worker, list(other.files)) is not None
    assert sorted(other.files) == sorted(one.files)
    assert one.attempts == 3


def test_no_failure_of_it_hurts_the_trace(make_writer, worker, tmp_path):
    """Where it cannot be written, the trace is placed and sent all the same."""
    server = Server()
    (tmp_path / "run/traces/README.md").mkdir(parents=True)
    written = after(worker, record(make_writer(readme=TEXT, targets=[Target(server)])))
    assert written.read_bytes() == CONTENT
    assert list(server.files) == ["run/traces/rank0.5.json"]


def test_it_waits_for_a_server_that_takes_nothing(make_writer, worker, tmp_path):
    """It lies here, and is not what a dead server is asked for first."""
    server = Server(99)
    with pytest.warns(PerfWarning, match="not uploaded"):
        after(worker, record(make_writer(readme=TEXT, targets=[Target(server)], backoff=())))
    assert (tmp_path / "run/traces/README.md").exists()
    assert server.attempts == 1
