"""Run folders: one per run, also for runs of the same name."""

import multiprocessing
import os
from pathlib import Path

import pytest

from lightning_perf.core.progress import Ranks
from lightning_perf.files import limited
from lightning_perf.traces.writer import MARKER, RunFolder, distinct_name

FOLDER = "{run_name}/torch_traces"


def run_folder(root, identity, folder=FOLDER, run_name="owl-7", ranks=None):
    return RunFolder(root, folder, ranks or Ranks(), run_name, identity)


def claimed(root, *args, **kwargs):
    """The folder of a claim, relative to the root."""
    return run_folder(root, *args, **kwargs).claim().relative_to(root).as_posix()


def distinct(identity, run_name="owl-7"):
    """The folder of a run that was not the first of its name."""
    return f"{distinct_name(run_name, identity)}/torch_traces"


def test_folder_creates_nothing(tmp_path):
    """Before the first claim there is no folder, and its owner is open."""
    ours, theirs = run_folder(tmp_path, "ours"), run_folder(tmp_path, "theirs")
    assert ours.folder == theirs.folder == tmp_path / "owl-7/torch_traces"
    assert not list(tmp_path.iterdir())
    theirs.claim()
    assert ours.folder == ours.claim() == tmp_path / distinct("ours")
    assert theirs.folder == tmp_path / "owl-7/torch_traces"


def test_a_claimed_folder_does_not_change(tmp_path):
    """A run keeps the folder that it has claimed, even if the marker is deleted."""
    claimed(tmp_path, "another run")
    ours = run_folder(tmp_path, "ours")
    ours.claim()
    (tmp_path / "owl-7" / MARKER).unlink()
    assert ours.claim() == ours.folder == tmp_path / distinct("ours")


def test_ranks_without_a_common_file_system_agree(tmp_path):
    """The second name depends on the identity only, not on other folders."""
    for node in "ab":
        for other in range(3 if node == "a" else 1):
            claimed(tmp_path / node, f"run {other}")
    assert claimed(tmp_path / "a", "ours") == claimed(tmp_path / "b", "ours")


def test_a_run_id_is_recognised():
    """The name has the first characters of an MLflow run id, and a hash of other identities."""
    run_id = "3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c"
    assert distinct_name("owl-7", run_id) == "owl-7-3f2a1b0c"
    assert len(distinct_name("owl-7", "logs/owl-7")) == len("owl-7-") + 8
    assert distinct_name("a name drawn for this run", "a name drawn for this run").endswith("run")


def test_a_marker_that_cannot_be_written_is_removed(tmp_path):
    """On a full disk, there is neither an empty marker nor a part of one."""
    with limited(2), pytest.raises(OSError, match="too large"):
        claimed(tmp_path, "ours")
    assert list((tmp_path / "owl-7").iterdir()) == []


def test_runs_of_one_name_get_different_folders(tmp_path):
    """The first has the plain name, others have their identity in it, also after a restart."""
    first, *others = [claimed(tmp_path, run) for run in "abc"]
    assert first == "owl-7/torch_traces"
    assert others == [distinct("b"), distinct("c")]
    assert [claimed(tmp_path, run) for run in "cba"] == [distinct("c"), distinct("b"), first]


def test_recorders_and_ranks_of_a_run_share_a_name(tmp_path):
    """This holds for folders above and below the run's name in the pattern."""
    claimed(tmp_path, "another run")
    ranks = [Ranks(global_rank=n, local_rank=n, world_size=2) for n in range(2)]
    name = distinct_name("owl-7", "ours")
    for rank in ranks:
        assert claimed(tmp_path, "ours", ranks=rank) == f"{name}/torch_traces"
        below = claimed(tmp_path, "ours", "{run_name}/memray/rank{rank}", ranks=rank)
        assert below == f"{name}/memray/rank{rank.global_rank}"
    above = "rank{rank}/{run_name}"
    # Another run of rank 0 alone, so that only rank 0 could find its folder taken.
    claimed(tmp_path, "another run", above)
    found = [claimed(tmp_path, "ours", above, ranks=each) for each in ranks]
    assert found == [f"rank0/{name}", f"rank1/{name}"]


def test_names_that_render_alike_get_different_folders(tmp_path):
    """Two run names may render to the same folder name."""
    assert claimed(tmp_path, "a", run_name="a/b") == "a_b/torch_traces"
    assert claimed(tmp_path, "b", run_name="a_b") == distinct("b", "a_b")


@pytest.mark.parametrize("folder", ["traces", "rank{rank}/traces", "{run_name:.3}"])
def test_a_folder_without_the_run_name_is_unchanged(tmp_path, folder):
    """Such a folder belongs to the user: it is neither renamed nor marked."""
    assert claimed(tmp_path, "a", folder) == claimed(tmp_path, "b", folder)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_marker_is_claimed(tmp_path):
    """Folders of versions without markers can be used."""
    (tmp_path / "owl-7" / "torch_traces").mkdir(parents=True)
    assert claimed(tmp_path, "ours") == "owl-7/torch_traces"
    assert (tmp_path / "owl-7" / MARKER).read_text() == "ours"


@pytest.mark.parametrize(
    "prepare",
    [
        Path.touch,
        Path.mkdir,
        os.mkfifo,
        lambda marker: marker.symlink_to("/dev/null"),
        lambda marker: marker.symlink_to("nowhere"),
    ],
    ids=["empty", "folder", "pipe", "device", "dangling link"],
)
def test_an_unusable_marker_belongs_to_another_run(tmp_path, prepare, monkeypatch):
    """The run takes its other name at once: this is the training thread."""
    (tmp_path / "owl-7").mkdir()
    prepare(tmp_path / "owl-7" / MARKER)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr("threading.Event.wait", lambda *args: pytest.fail("it waits"))
    assert claimed(tmp_path, "ours") == distinct("ours")
    assert len(list((tmp_path / "owl-7").iterdir())) == 1


def test_a_marker_has_its_content_from_the_first_moment(tmp_path, monkeypatch):
    """A run that is killed meanwhile leaves no empty marker."""
    seen = []
    link = os.link

    def watched(source, target):
        seen.append((os.path.lexists(tmp_path / "owl-7" / MARKER), Path(source).read_text()))
        link(source, target)

    monkeypatch.setattr(os, "link", watched)
    assert claimed(tmp_path, "ours") == "owl-7/torch_traces"
    assert seen == [(False, "ours")]


def race(root: Path, identity: str, barrier, results) -> None:
    barrier.wait()
    results.put((identity, claimed(root, identity)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_concurrent_processes_agree(tmp_path):
    """Ranks of one run find one folder, and runs of one name find different ones."""
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(6), fork.Queue()
    processes = [
        fork.Process(target=race, args=(tmp_path, run, barrier, results)) for run in "aabbcc"
    ]
    for process in processes:
        process.start()
    found = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    first = next(run for run, folder in found if folder == "owl-7/torch_traces")
    others = {(run, distinct(run)) for run in set("abc") - {first}}
    assert found == {(first, "owl-7/torch_traces")} | others
