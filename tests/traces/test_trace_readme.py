"""The README beside the traces that says how to open them."""

import pytest
from helpers.recordings import CONTENT, Server, after, files, record

from lightning_perf.core.progress import Ranks, Timestamp
from lightning_perf.errors import PerfWarning
from lightning_perf.traces.uploads import Target

TEXT = "Drag the files onto https://ui.perfetto.dev.\n"


def test_the_readme_is_beside_the_first_trace(make_writer, worker, tmp_path):
    """It is written and uploaded once, in the folder that all stages share."""
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


def test_all_ranks_share_one_readme(make_writer, worker, tmp_path):
    """Ranks in one folder have the same file and do not replace it."""
    server = Server()
    for rank in (1, 0):
        ranks = Ranks(global_rank=rank, world_size=2)
        record(make_writer(readme=TEXT, targets=[Target(server)], ranks=ranks))
    assert after(worker, files)(tmp_path / "run/traces") == [
        "README.md",
        "rank0.5.json",
        "rank1.5.json",
    ]


def test_the_readme_is_neither_pruned_nor_a_conflict(make_writer, worker, tmp_path):
    """Pruning keeps it, and a new run in the folder is not refused because of it."""
    writer = make_writer(readme=TEXT, targets=[Target(Server())], num_traces_to_keep=0)
    after(worker, record(writer))
    assert files(tmp_path) == ["run/traces/README.md"]
    make_writer(filename="{run_name}.md", run_name="READ").check({"train": Timestamp()})


def test_a_readme_of_the_user_stays(make_writer, worker, tmp_path):
    """An existing README is neither replaced nor uploaded."""
    server = Server()
    (tmp_path / "run/traces").mkdir(parents=True)
    (tmp_path / "run/traces/README.md").write_text("mine")
    after(worker, record(make_writer(readme=TEXT, targets=[Target(server)])))
    assert (tmp_path / "run/traces/README.md").read_text() == "mine"
    assert list(server.files) == ["run/traces/rank0.5.json"]


def test_no_readme_in_the_root_of_a_target(make_writer, worker):
    """Traces uploaded to the root of a target have no README, which is the place of the user."""
    server = Server()
    names = {"remote_file_name": "rank{rank}.{batch}.json", "targets": [Target(server)]}
    after(worker, record(make_writer(readme=TEXT, **names)))
    assert list(server.files) == ["rank0.5.json"]


def test_a_failed_readme_is_retried_with_the_next_trace(make_writer, worker):
    """All targets have it then, and a failure is not a warning."""

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


def test_a_trace_does_not_need_its_readme(make_writer, worker, tmp_path):
    """If the README cannot be written, the trace is placed and uploaded."""
    server = Server()
    (tmp_path / "run/traces/README.md").mkdir(parents=True)
    written = after(worker, record(make_writer(readme=TEXT, targets=[Target(server)])))
    assert written.read_bytes() == CONTENT
    assert list(server.files) == ["run/traces/rank0.5.json"]


def test_the_readme_is_uploaded_after_the_trace(make_writer, worker, tmp_path):
    """An unreachable server gets one attempt, for the trace."""
    server = Server(99)
    with pytest.warns(PerfWarning, match="not uploaded"):
        after(worker, record(make_writer(readme=TEXT, targets=[Target(server)], backoff=())))
    assert (tmp_path / "run/traces/README.md").exists()
    assert server.attempts == 1
