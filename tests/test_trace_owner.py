"""Run folders: one for each run, however often its name comes again."""

import multiprocessing
from pathlib import Path

import pytest

from lightning_perf.moment import Ranks
from lightning_perf.trace.owner import MARKER, distinct_run_name

FOLDER = "{run_name}/torch_traces"


def distinct(root, identity, folder=FOLDER, run_name="owl-7", ranks=None):
    return distinct_run_name(root, folder, ranks or Ranks(), run_name, identity)


def test_runs_of_one_name_get_folders_of_their_own(tmp_path):
    """Each identity gets the first name that is free, and the same one again after a restart."""
    assert [distinct(tmp_path, run) for run in "abc"] == ["owl-7", "owl-7-2", "owl-7-3"]
    assert [distinct(tmp_path, run) for run in "cba"] == ["owl-7-3", "owl-7-2", "owl-7"]


def test_recorders_and_ranks_of_a_run_share_a_name(tmp_path):
    """Whatever stands below or above the run's name in the folder's pattern."""
    distinct(tmp_path, "another run")
    ranks = [Ranks(global_rank=n, local_rank=n, world_size=2) for n in range(2)]
    for folder in (FOLDER, "{run_name}/memray/rank{rank}"):
        assert {distinct(tmp_path, "ours", folder, ranks=each) for each in ranks} == {"owl-7-2"}
    above = "rank{rank}/{run_name}"
    # Another run of rank 0 alone, so that only rank 0 could find its folder taken.
    distinct(tmp_path, "another run", above)
    assert {distinct(tmp_path, "ours", above, ranks=each) for each in ranks} == {"owl-7-2"}


def test_names_that_are_written_alike_are_told_apart(tmp_path):
    """Two run names may render to one folder."""
    assert distinct(tmp_path, "a", run_name="a/b") == "a/b"
    assert distinct(tmp_path, "b", run_name="a_b") == "a_b-2"


@pytest.mark.parametrize("folder", ["traces", "rank{rank}/traces"])
def test_a_folder_without_the_name_is_the_user_s(tmp_path, folder):
    """The name stays, and nothing is written."""
    assert [distinct(tmp_path, run, folder) for run in "ab"] == ["owl-7", "owl-7"]
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_cut_short_ends(tmp_path):
    """Where the pattern leaves no room for numbers, the name stays as it is."""
    assert [distinct(tmp_path, run, "{run_name:.3}") for run in "ab"] == ["owl-7", "owl-7"]
    # -2 to -9 have folders of their own, -10 is cut to -1, and so is -11.
    found = [distinct(tmp_path, run, "{run_name:.7}") for run in "abcdefghijkl"]
    assert len(set(found)) == 10
    assert found[-1] == "owl-7"


def test_a_folder_that_was_there_is_taken(tmp_path):
    """Traces from before there were markers do not push a run aside."""
    (tmp_path / "owl-7" / "torch_traces").mkdir(parents=True)
    assert distinct(tmp_path, "ours") == "owl-7"
    assert (tmp_path / "owl-7" / MARKER).read_text() == "ours"


def test_a_marker_that_a_killed_run_left_empty_is_another_s(tmp_path, monkeypatch):
    """It is waited for, but not for ever."""
    monkeypatch.setattr("lightning_perf.trace.owner._PATIENCE", 0.0)
    (tmp_path / "owl-7").mkdir()
    (tmp_path / "owl-7" / MARKER).touch()
    assert distinct(tmp_path, "ours") == "owl-7-2"


def claim(root: Path, identity: str, barrier, results) -> None:
    barrier.wait()
    results.put((identity, distinct(root, identity)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_start_together_agree(tmp_path):
    """Ranks of one run find one name, and runs of one name different ones, at the same moment."""
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(6), fork.Queue()
    processes = [
        fork.Process(target=claim, args=(tmp_path, run, barrier, results)) for run in "aabbcc"
    ]
    for process in processes:
        process.start()
    found = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert sorted(name for _, name in found) == ["owl-7", "owl-7-2", "owl-7-3"]
    assert {identity for identity, _ in found} == set("abc")
