"""report.html: a run's page, made from the content of its summary.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call
from helpers.small import Records, Small, trainer

from lightning_perf import Diagnosis, PyTorch, Timings
from lightning_perf.tracking.page import report_page
from lightning_perf.tracking.summary import read_summary

EVIL = "</script><img src=x onerror=alert(1)>"
WHOLE = {"first": 0, "last": 9, "batches": 10, "timings": {"forward": 10.0, "validation": 5.0}}


def summary(**sections: Any) -> dict[str, Any]:
    figures = {"whole_run": WHOLE, "windows": sections.pop("windows", {})}
    return {
        "version": 2,
        "run": "r",
        "status": "finished",
        "stages": {"train": figures},
        **sections,
    }


def values_of(page: str) -> list[list[float]]:
    """The values of the chart: for each category, one per window."""
    (data,) = re.findall("data-chart='([^']*)'", page)
    return json.loads(data)["values"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("callback", [Timings, Diagnosis])
def test_each_alone_leaves_the_page(tmp_path: Path, callback: Any) -> None:
    """Timings and Diagnosis leave one page beside the summary, with where the time went."""
    trainer(tmp_path, callback(), logger=Records(), log_every_n_steps=4).fit(Small())
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.glob("[!.]*")} == {
        "summary.json",
        "report.html",
        "attempts",
    }
    page = (tmp_path / "records-version_0" / "report.html").read_text()
    assert "Where the time of a batch went" in page
    assert "lightning_perf.on_train_batch_end" in page


def test_the_file_alone_gives_the_same_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the captured steps and links to traces, and the command line makes it again."""
    capture = PyTorch(schedule="at 5ba for 3ba")
    callbacks = Timings(), Diagnosis(capture=capture, terminal=False)
    trainer(tmp_path, *callbacks, logger=Records()).fit(Small())
    folder = tmp_path / "records-version_0"
    page = (folder / "report.html").read_text()
    assert report_page(read_summary(folder / "summary.json")) == page
    for heading in ("Not diagnosed", "Callbacks and loggers", "System", "Captured steps", "Traces"):
        assert f"<h2>{heading}</h2>" in page
    (link,) = re.findall('href="(.*?)"', page)
    assert (folder / link).is_file()
    assert call(capsys, "report", str(folder), "--html", str(tmp_path / "again.html"))[0] == 0
    assert "Captured steps" in (tmp_path / "again.html").read_text()
    # FILE was forgotten, or is another one: no recording is replaced, only an earlier page.
    for path in (folder / "summary.json", *folder.rglob("*.gz")):
        before = path.read_bytes()
        for args in (["report", "--html"], ["trace", "--combine", str(folder), "-o"]):
            code, _, error = call(capsys, *args, str(path))
            assert (code, path.read_bytes()) == (2, before), error
    assert call(capsys, "report", str(folder), "--html", str(tmp_path / "again.html"))[0] == 0


@pytest.mark.parametrize(
    ("lasts", "batches", "forward", "expected"),
    [
        ([], [], [], [1.0]),
        ([3], [4], [2.0], [0.5, 8.0 / 6]),  # six batches after the last window
        ([3, 9], [4, 6], [2.0, 6.0], [0.5, 8.0 / 6]),  # 2 s after the last batch
    ],
)
def test_the_chart_has_all_time(
    lasts: list[float], batches: list[float], forward: list[float], expected: list[float]
) -> None:
    """Time after the last window is in a window of its own, or in the last one."""
    windows = {"last": lasts, "batches": batches, "timings": {"forward": forward}}
    values = values_of(report_page(summary(windows=windows)))
    assert values[0] == pytest.approx(expected, rel=1e-3)
    assert values[1][-1] > 0


def test_late_ranks_are_a_table() -> None:
    """The latest rank comes first; of many ranks several share a row."""
    ranks = {"last": [3, 9], "lateness": [[0.0, 0.0], [0.25, 0.75]]}
    page = report_page(summary(ranks=ranks))
    first, second = re.findall(r"<tr><td>(\d)</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert (first, second[0]) == (("1", "500 ms", "750 ms"), "0")
    assert 'background: rgb(219 78 16 / 33%)" title="step 3: 250 ms"' in page
    page = report_page(summary(ranks=ranks, setup={"world_size": 8}))
    assert "<td>latest of 4 from 4 on</td><td>500 ms</td>" in page


def test_links_need_no_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be deleted during the run."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    page = report_page(summary(report="owl/report.html", traces=["owl/viztracer/a b.json"]))
    assert 'viztracer/a%20b.json"' in page


def test_names_cannot_leave_their_place() -> None:
    """No text becomes a tag, and no name of a file an address elsewhere."""
    verdict = {"code": EVIL, "severity": EVIL, "advice": EVIL, "culprit": EVIL, "phase": None,
               "share": 0.5, "predicted_speedup": 2.0, "evidence": {EVIL: EVIL}}  # fmt: skip
    page = report_page(summary(
        run=EVIL, verdicts=[verdict], abstained={EVIL: EVIL}, setup={"device": EVIL},
        culprits=[{"name": EVIL, "seconds": 1.0, "calls": 1, "share": 0.1}],
        windows={"last": [3], "batches": [4], "timings": {EVIL: [1.0]}},
        capture={"missing": EVIL}, report="r/report.html", pages=["r/report.html"],
        traces=["javascript:alert(1)", f"r/{EVIL}", "//host/x", "r/../../x"],
    ))  # fmt: skip
    assert "<img" not in page
    assert page.count("<script>") == page.count("</script>") == 1
    links = re.findall('href="(.*?)"', page)
    assert len(links) == 3
    assert all(link.startswith("./") and ":" not in link for link in links)
