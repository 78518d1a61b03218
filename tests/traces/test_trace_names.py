"""Names of trace files: valid patterns, rendered names and conflicts."""

import json
import re

import pytest
from helpers import TESTS

from lightning_perf.core.progress import Ranks, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.traces.names import (
    NameFormat,
    file_format,
    folder_format,
    remote_format,
    run_values,
    time_values,
)
from lightning_perf.traces.writer import conflicts

CASES = json.loads((TESTS / "data" / "composer_cases.json").read_text())
RANKS = Ranks(global_rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2)


def cases(area):
    return [pytest.param(case, id=case["input"][-40:]) for case in CASES if case["area"] == area]


def values(run_name="run", timestamp=None, ranks=RANKS, stage="train"):
    times = time_values(timestamp or Timestamp())
    return {**run_values(run_name, ranks), **times, "stage": stage}


def test_time_variables_render():
    """Counts render as integers and wall-clock times as seconds, as in Composer."""
    now = Timestamp(
        batch=1,
        batch_in_epoch=1,
        sample=2,
        sample_in_epoch=2,
        token=3,
        token_in_epoch=3,
        total_wct=36000.0,
        epoch_wct=3000.0,
        batch_wct=5.0,
    )
    case, _ = (case for case in CASES if case["area"] == "format")
    pattern = re.sub(r"(\w+)=[\d.]+", r"\1={\1}", case["expected"])
    assert file_format(pattern).render(values(timestamp=now)) == case["expected"]


def test_run_name_and_ranks_render_in_file_names():
    """A file name may contain folders and the run's name, as in Composer's example."""
    _, case = (case for case in CASES if case["area"] == "format")
    pattern = case["input"].split()[0].replace("{extension}", "json")
    at_zero = values("awesome_training_run", ranks=Ranks())
    assert file_format(pattern).render(at_zero) == case["expected"]


def test_folder_variables_render():
    """Every folder variable renders as its value."""
    pattern = "{run_name}/{rank}-{local_rank}-{world_size}-{local_world_size}-{node_rank}"
    assert folder_format(pattern).render(run_values("run", RANKS)) == "run/3-1-4-2-1"


def test_format_specifications_apply():
    """Specifications pad numbers, round seconds and truncate run names."""
    pattern = file_format("{stage}-{batch:06d}-{total_wct:.1f}-{run_name:.3}.json")
    later = Timestamp(batch=42, total_wct=1.26)
    assert pattern.render(values("abcdef", later)) == "train-000042-1.3-abc.json"


@pytest.mark.parametrize("case", cases("trace.filename")[:1])
def test_default_names(case):
    """The default pattern gives the documented names at the documented batches."""
    pattern = file_format("rank{rank}.{batch}.pt.trace.json")
    names = [pattern.render(values(timestamp=Timestamp(batch=n), ranks=Ranks())) for n in (5, 21)]
    assert names == case["expected"]


@pytest.mark.parametrize("case", cases("trace.filename")[1:2])
def test_gz_is_appended_once(case):
    """The pattern of a compressed file ends with .gz exactly once."""
    pattern = re.search(r"filename '([^']+)'", case["input"])[1]
    for name in (pattern, case["expected"]):
        assert (
            file_format(name, gz=True).render(values(ranks=Ranks())) == "rank0.0.pt.trace.json.gz"
        )


@pytest.mark.parametrize(
    ("make", "field", "pattern", "problem"),
    [
        (folder_format, "folder", "{batch}", "variables run_name rank local_rank"),
        (file_format, "filename", "{btach}.json", "variables run_name .* batch_wct"),
        (remote_format, "remote_file_name", "/{extension}", "variables run_name"),
        (file_format, "filename", "{}.json", "variables"),
        (file_format, "filename", "{0}.json", "variables"),
        (file_format, "filename", "{run_name.__class__}", "variables"),
        (file_format, "filename", "{run_name!r}", "variables"),
        (file_format, "filename", "{batch", "not a format string"),
        (file_format, "filename", "{batch:y}", "formats batch as 'y'"),
        (file_format, "filename", "{run_name:06d}", "formats run_name"),
        (file_format, "filename", "{batch:{rank}}", "formats batch"),
        (file_format, "filename", "{batch:c}", "batch"),
        (file_format, "filename", "{batch:,}", "cannot read as a number"),
        (file_format, "filename", "{total_wct:%}", "cannot read as a number"),
        (file_format, "filename", "", "at least one character"),
        (folder_format, "folder", "  ", "at least one character"),
        (folder_format, "folder", None, "must be a format string"),
        (remote_format, "remote_file_name", 3, "must be a format string"),
        (file_format, "filename", "/tmp/{rank}.json", "leaves its folder"),
        (file_format, "filename", "C:\\{rank}.json", "leaves its folder"),
        (file_format, "filename", "../{rank}.json", "leaves its folder"),
        (file_format, "filename", "{rank}/../../a.json", "leaves its folder"),
        (file_format, "filename", "a\\..\\..\\b.json", "leaves its folder"),
        (folder_format, "folder", "{run_name}/..", "leaves its folder"),
        (file_format, "filename", "\u00fc" * 101 + "{batch}.json", "more than 200 bytes"),
        (folder_format, "folder", "{run_name}/" + "a" * 201, "more than 200 bytes"),
        (remote_format, "remote_file_name", "/../a", "leaves its folder"),
        (file_format, "filename", "traces/", "has no file name"),
        (file_format, "filename", ".", "has no file name"),
        (remote_format, "remote_file_name", "/", "at least one character"),
    ],
)
def test_invalid_patterns_are_refused(make, field, pattern, problem):
    """An invalid pattern is a ConfigError with the setting, the problem and an example."""
    with pytest.raises(ConfigError, match=problem) as error:
        make(pattern)
    assert error.value.field == field
    example = error.value.example.strip("'")
    assert make(example).render(values()) != example


def test_absolute_folders_are_allowed():
    """An absolute folder is used as it is."""
    assert folder_format("/data/{run_name}").render(run_values("a", RANKS)) == "/data/a"


def test_leading_slashes_of_remote_names_are_stripped():
    """A remote name is relative to the run's artifacts."""
    assert remote_format("//{run_name}/x.json").render(values("a")) == "a/x.json"


def test_the_path_of_a_url_is_the_remote_name():
    """The protocol and the bucket of a URL are not in the remote name."""
    pattern = remote_format("s3://bucket//{run_name}/{stage}.{batch}.json", gz=True)
    assert pattern.render(values("a/b")) == "a_b/train.0.json.gz"
    with pytest.raises(ConfigError) as error:
        remote_format("s3://bucket/{oops}")
    assert error.value.value == "s3://bucket/{oops}"


@pytest.mark.parametrize(
    ("run_name", "safe"),
    [
        ("a/b", "a_b"),
        ("a\\b", "a_b"),
        ("/etc/passwd", "_etc_passwd"),
        ("..", "_"),
        (".", "_"),
        ("...", "_"),
        ("", "_"),
        ("../..", "__.."),
        (".hidden", ".hidden"),
        ("50% #2", "50_ _2"),
        ("c:", "c_"),
        ("File:x", "File_x"),
        ("12:30", "12:30"),
        ("a\nb\x00c\x7f", "a_b_c_"),
        ("a\ud800b", "a_b"),
        ("two words", "two words"),
        ("{rank}", "{rank}"),
        ("实验-é", "实验-é"),
    ],
)
def test_run_names_cannot_leave_the_folder(run_name, safe):
    """What no folder or artifact of MLflow may have becomes an underscore, and nothing else."""
    folder = folder_format("{run_name}/traces").render(run_values(run_name, RANKS))
    assert folder == f"{safe}/traces"


@pytest.mark.parametrize("run_name", ["x" * 300, "\N{OWL}" * 64, "a/" * 200])
def test_long_run_names_are_cut_and_stay_distinct(run_name):
    """A folder's name has 200 bytes at most; names that differ at their ends stay different."""
    pattern = folder_format("{run_name}")
    names = [pattern.render(run_values(run_name + end, RANKS)) for end in ("", "a", "b")]
    assert all(190 < len(name.encode()) <= 200 for name in names)
    assert len(set(names)) == 3
    whole = "x" * 200
    assert pattern.render(run_values(whole, RANKS)) == whole


def test_specifications_cannot_add_separators():
    """Separators from fill characters or truncation become underscores, too."""
    assert file_format("{run_name:/>5}").render(values("ab")) == "___ab"
    assert file_format("a/.{run_name:.1}").render(values(".x")) == "a/._"


def parse_conflict(case):
    found = re.fullmatch(r"pattern (\S+); now ep(\d+) ba(\d+) tie(\d+); existing (\S+)", case)
    epoch, batch, token = map(int, found.group(2, 3, 4))
    now = Timestamp(epoch=epoch, batch=batch, token_in_epoch=token)
    return file_format(found[1]), now, found[5]


@pytest.mark.parametrize("case", cases("trace.conflict"))
def test_conflicts_as_in_composer(case, tmp_path):
    """Only files of a later time conflict, in Composer's test cases."""
    pattern, now, existing = parse_conflict(case["input"])
    (tmp_path / existing).touch()
    found = conflicts(pattern, run_values("run", Ranks()), tmp_path, now)
    assert found == (None if case["expected"] == "ok" else tmp_path / existing)


NOW = Timestamp(epoch=2, batch=20, batch_in_epoch=4, sample=80, step=10, total_wct=9.96)


@pytest.mark.parametrize(
    ("pattern", "existing", "conflict"),
    [
        ("rank{rank}.{batch}.json", "rank3.21.json", True),
        ("rank{rank}.{batch}.json", "rank3.20.json", False),
        ("rank{rank}.{batch}.json", "rank2.21.json", False),
        ("rank{rank}.{batch}.json", "rank3.21.json.gz", False),
        ("rank{rank}.{batch}.json", "rank3.x.json", False),
        (".{rank}.{batch}.json", ".3.21.json", False),
        ("{batch:06d}.json", "000021.json", True),
        ("{batch:6d}.json", "    21.json", True),
        ("{sample}.json", "81.json", True),
        ("{step}.json", "11.json", True),
        ("{total_wct:.0f}.json", "10.json", False),
        ("{total_wct:.0f}.json", "11.json", True),
        ("{total_wct:.2e}.json", "1.00e+02.json", True),
        ("{batch_wct}.json", "5.0.json", False),
        ("ep{epoch}-{batch_in_epoch}.json", "ep2-5.json", True),
        ("ep{epoch}-{batch_in_epoch}.json", "ep1-5.json", False),
        ("{batch_in_epoch}.json", "5.json", True),
        ("ep{epoch}/{rank}.json", "ep3/3.json", True),
        ("ep{epoch}/{rank}.json", "ep2/3.json", False),
        ("rank{rank}.json", "rank3.json", True),
        ("rank{rank}.json", "rank2.json", False),
        ("{run_name}+{stage}.json", "a_b+train.json", True),
    ],
)
def test_later_files_conflict(pattern, existing, conflict, tmp_path):
    """This rank's files later than now conflict, compared as formatted."""
    (tmp_path / existing).parent.mkdir(exist_ok=True)
    (tmp_path / existing).touch()
    fixed = {**run_values("a/b", RANKS), "stage": "train"}
    found = conflicts(NameFormat(pattern), fixed, tmp_path, NOW)
    assert found == (tmp_path / existing if conflict else None)


def test_a_missing_folder_has_no_conflicts(tmp_path):
    """The folder need not exist before the first run."""
    fixed = run_values("run", RANKS)
    assert conflicts(file_format("rank{rank}.json"), fixed, tmp_path / "new", NOW) is None
