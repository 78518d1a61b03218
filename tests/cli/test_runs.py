"""`lightning-perf runs`: all runs of a server or a folder, the most wasteful first."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import requests
from helpers.command import call, until
from helpers.fleet import add_run, copy_run, summary_of
from helpers.pages import loaded_from_elsewhere
from helpers.servers import free_port, start_mlflow, stop_mlflow
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from lightning_perf import always_on
from lightning_perf.core.goodput import Attempt
from lightning_perf.tracking.mlflow import job_of, use_for_artifacts
from lightning_perf.tracking.summary import text_of

HUNG = [{"began": "2026-11-25T10:00:00+0000", "seconds": 300.0, "text": "rank 3 waits"}]


def leave_attempt(
    folder: Path,
    process: dict[str, Any],
    began: float,
    seen: float,
    job: str = "",
    *,
    trained: float = 0.0,
    resumed: float = 0.0,
    run: str = "",
) -> str:
    """The file of an attempt that was killed; returns its name.

    Args:
        folder: Of the job's first attempt.
        process: Its host and process id.
        began: When it began.
        seen: Its last sign of life.
        job: Its job, if it is not the first attempt.
        trained: Seconds of its steps.
        resumed: Those before its checkpoint.
        run: The folder of its run, if it has another one.
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))
    name = f"{moment}.000-{process['pid']}"
    steps = (0.0, resumed, resumed, resumed + trained)
    own = Attempt(
        name, job or name, process["host"], process["pid"], "running", began, seen, *steps,
        *[0.0] * 5, folder=run or folder.name,
    )  # fmt: skip
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    (folder / "attempts" / f"{name}.json").write_text(json.dumps(asdict(own)))
    return name


def goodput(share: float, job: str = "") -> dict[str, Any]:
    figures = {"share": share, "seconds": 1.0, "attempts": 2, "interruptions": 1, "losses": {}}
    return figures | {"job": job}


INPUT = {"code": "input-bound", "severity": "critical", "share": 0.25, "culprit": "DataLoader"}


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow sets the variable when a test trains with its logger."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def client(in_tmp: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Of a database that the environment names: MLflow keeps one open per address."""
    shutil.copy(mlflow_tables, in_tmp)
    address = f"sqlite:///{in_tmp}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    return MlflowClient(address)  # another test may have set one for the process


@pytest.fixture
def experiment(client: MlflowClient) -> str:
    return str(client.create_experiment("vision"))


def shown(capsys: Any, *options: str) -> dict[str, dict[str, Any]]:
    """The runs by name, in the order in which they are shown."""
    code, out, err = call(capsys, "runs", *options, "--json")
    assert (code, err) == (0, "")
    return {each["run"]: each for each in json.loads(out)["runs"]}


# -- MLflow ---------------------------------------------------------------------------------------


def test_runs_are_ranked_by_wasted_device_hours(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """Verdicts, silence and goodput count; what summaries say is in the rows that are shown."""
    some = {"folder": tmp_path}
    add_run(client, experiment, "good", hours=10, shares={"gc-pauses": 0.01})
    add_run(
        client, experiment, "slow", hours=10, shares={"input-bound": 0.25, "warmup": 0.05},
        summary=summary_of("slow", verdicts=[INPUT]), **some,
    )  # fmt: skip
    add_run(client, experiment, "failed", hours=2, shares={"warmup": 0.5}, status="FAILED")
    add_run(client, experiment, "lives", hours=1, status="RUNNING")
    add_run(client, experiment, "silent", hours=1, ago=3, status="RUNNING")
    add_run(client, experiment, "forgotten", hours=1, ago=240, status="RUNNING")
    add_run(
        client, experiment, "hangs", hours=1, ago=5, status="RUNNING",
        summary=summary_of("hangs", "running", hangs=HUNG), **some,
    )  # fmt: skip
    add_run(
        client, experiment, "restarts", hours=10, shares={"warmup": 0.1},
        summary=summary_of("restarts", goodput=goodput(0.4)), **some,
    )  # fmt: skip
    found = shown(capsys)
    names = ["forgotten", "restarts", "hangs", "silent", "slow", "failed", "lives", "good"]
    assert [*found] == names
    hours = {name: round(each["device_hours"]) for name, each in found.items()}
    # One that is silent holds its 8 devices for a day at most.
    assert hours == {
        "forgotten": 8 + 8 * 24, "restarts": 80, "hangs": 8 + 8 * 5, "silent": 8 + 8 * 3,
        "slow": 80, "failed": 16, "lives": 8, "good": 80,
    }  # fmt: skip
    wasted = {name: each["wasted_device_hours"] for name, each in found.items()}
    assert wasted["restarts"] == pytest.approx(80 * 0.6)
    assert wasted["slow"] == pytest.approx(80 * 0.25)  # as its summary says
    assert wasted["failed"] == pytest.approx(16 * 0.5)
    # Without verdicts: what it waits for, logs and saves, of 14 equal times.
    assert wasted["lives"] == pytest.approx(8 * 4 / 13, rel=0.1)
    assert wasted["silent"] == pytest.approx(24 + wasted["lives"], rel=0.01)
    states = {name: each["state"] for name, each in found.items()}
    assert states["hangs"] == "hanging since 2026-11-25T10:00:00+0000"
    assert states["silent"].startswith("silent since 20")
    assert (states["lives"], states["failed"], states["slow"]) == ("running", "failed", "finished")
    assert (found["slow"]["verdict"], found["slow"]["culprit"]) == ("input-bound 25%", "DataLoader")
    assert (found["slow"]["mfu"], found["good"]["mfu"]) == (0.31, 0.1)
    assert found["restarts"]["goodput"] == 0.4
    assert found["good"]["goodput"] is None


def noted(held: float, kept: float, ago: float = 0.0, **process: Any) -> dict[str, Any]:
    """The tag of attempts that took so many hours on each device, and kept some of them."""
    return {
        "job": "x", "process": process, "seen": time.time() - ago * 3600,
        "held_seconds": held * 3600, "kept_seconds": kept * 3600, "goodput": kept / 100,
    }  # fmt: skip


def test_a_run_that_was_often_preempted_is_among_the_first(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """Its tag comes with the search: it is healthy, and has no summary or one that is old."""
    for number in range(5):
        add_run(client, experiment, f"slow {number}", hours=10, shares={"input-bound": 0.05})
    add_run(
        client, experiment, "preempted", hours=100, shares={"healthy": 0.0}, job=noted(10, 2),
        summary=summary_of("preempted", verdicts=[], goodput=goodput(0.9)), folder=tmp_path,
    )  # fmt: skip
    add_run(client, experiment, "killed", hours=100, ago=1, status="RUNNING", job=noted(5, 3, 1))
    found = shown(capsys, "--limit", "2")
    assert [*found] == ["preempted", "killed"]
    # The time in the queue is of no device.
    assert found["preempted"]["device_hours"] == pytest.approx(80)
    assert found["preempted"]["wasted_device_hours"] == pytest.approx(64)
    assert found["preempted"]["goodput"] == 0.02
    assert found["killed"]["device_hours"] == pytest.approx(8 * (5 + 1), rel=0.01)  # silent


def test_a_summary_of_an_earlier_attempt_does_not_say_what_the_next_one_does(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """It hung and was killed; the next one trains."""
    before = {"host": platform.node(), "pid": 2**22 + 1}
    for name, process in (("trains", {"host": platform.node(), "pid": os.getpid()}), ("", before)):
        add_run(
            client, experiment, name or "killed", hours=1, status="RUNNING", folder=tmp_path,
            summary=summary_of("old", "running", hangs=HUNG, process=before),
            job=noted(1, 0.5, **process),
        )  # fmt: skip
    states = {name: each["state"] for name, each in shown(capsys).items()}
    assert states == {"trains": "running", "killed": "killed"}


def test_runs_are_selected(client: MlflowClient, experiment: str, capsys: Any) -> None:
    """By database, experiment, time and number; those of other tools are left out."""
    other = client.create_experiment("language")
    run = add_run(client, experiment, "old", hours=1, ago=200)
    add_run(client, experiment, "new", hours=2)
    add_run(client, other, "other", hours=3)
    client.create_run(experiment, run_name="of another tool")
    assert [*shown(capsys)] == [*shown(capsys, "mlflow.db")] == ["other", "new", "old"]
    assert [*shown(capsys, "--experiment", "vision")] == ["new", "old"]
    assert [*shown(capsys, "--experiment", other)] == ["other"]
    assert [*shown(capsys, "--since", "7d")] == ["other", "new"]
    assert [*shown(capsys, "--limit", "1")] == ["other"]
    code, out, _ = call(capsys, "runs", "--experiment", "vision")
    assert code == 0
    assert "2 of 2 runs" in out
    assert run in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--experiment", "visio"), "there is no experiment visio. Did you mean vision?"),
        (("--since", "soon"), "--since soon is not a time, such as 2w, 7d or 12h."),
        (("--limit", "0"), "--limit 0 is below 1."),
        (("--experiment", "vision", "--since", "1h"), "there is no run of lightning_perf"),
        (("nowhere",), "nowhere is neither a folder nor an address of MLflow."),
        ((".", "--experiment", "vision"), "--experiment is of MLflow"),
        (("http://me:hunter2@127.0.0.1:1",), "http://127.0.0.1:1 does not respond"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_one_line(
    experiment: str, capsys: Any, options: tuple[str, ...], message: str
) -> None:
    """On stderr, with exit code 2 and without credentials."""
    code, out, err = call(capsys, "runs", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert "hunter2" not in err


@pytest.mark.slow
def test_a_thousand_runs_take_few_requests(
    tmp_path: Path, mlflow_tables: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Of a real server: one per 1,000 runs, and two per summary that is shown."""
    port = free_port()
    server = start_mlflow(tmp_path, port, mlflow_tables)
    try:
        client = MlflowClient(f"http://127.0.0.1:{port}")
        use_for_artifacts(f"http://127.0.0.1:{port}")
        summary = summary_of("run", verdicts=[INPUT])
        first = add_run(
            client, "0", "run", hours=2000, shares={"input-bound": 0.25}, summary=summary,
            folder=tmp_path,
        )  # fmt: skip
        copy_run(tmp_path / "server.db", first, 999)
        for number in range(1, 20):  # its copies have no files
            client.log_artifact(f"{number:032x}", str(tmp_path / "summary.json"))
        capsys.readouterr()
        sent: list[str] = []
        send = requests.Session.send

        def counted(session: Any, request: Any, **options: Any) -> Any:
            sent.append(request.path_url)
            return send(session, request, **options)

        monkeypatch.setattr(requests.Session, "send", counted)
        code, out, _ = call(capsys, "runs", f"http://127.0.0.1:{port}", "--json")
    finally:
        stop_mlflow(server)
    found = json.loads(out)
    assert (code, found["count"], len(found["runs"])) == (0, 1000, 20)
    assert {each["culprit"] for each in found["runs"]} == {"DataLoader"}
    assert [round(each["device_hours"]) for each in found["runs"]] == [
        8 * (2000 - number) for number in range(20)
    ]  # fmt: skip
    searches = [each for each in sent if each.endswith("/runs/search")]
    assert len(searches) <= 2  # 1,000 of a page may need another request for the end
    assert len(sent) <= len(searches) + 2 + 2 * 20


@pytest.mark.slow
def test_a_real_run_is_shown(client: MlflowClient, tmp_path: Path, capsys: Any) -> None:
    """With what `always_on()` has left in MLflow."""
    logger = MLFlowLogger("real", "first", os.environ["MLFLOW_TRACKING_URI"])
    trainer(tmp_path, always_on(show_summary=False), logger=logger, max_epochs=3).fit(Small())
    capsys.readouterr()
    found = shown(capsys)["first"]
    assert found["place"] == logger.run_id
    assert found["state"] == "finished"
    assert 0 < found["mfu"] < 1
    assert found["verdict"]
    assert 0 <= found["wasted_device_hours"] <= found["device_hours"] < 1


# -- hostile runs ---------------------------------------------------------------------------------

EVIL = "\x1b[2J[red]<script>alert(1)</script>" + "A" * 1000


def test_runs_of_strangers_are_shown_as_they_are(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """Controls, markup, long names, absurd numbers, damaged files and other servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.fleet.KEYS", ["mfu"])
        verdict = {"code": EVIL, "severity": EVIL, "share": 0.5, "culprit": EVIL}
        summary = summary_of(EVIL, "running", verdicts=[verdict], hangs=[{"began": EVIL}])
        add_run(
            client, experiment, EVIL[:200], hours=1, summary=summary, folder=tmp_path,
            status="RUNNING",
        )  # fmt: skip
        add_run(
            client, experiment, "odd", hours=1, summary={"version": 2, "hangs": 3},
            folder=tmp_path, metrics={"mfu": float("nan"), "timings/forward": -1e300},
        )  # fmt: skip
        add_run(client, experiment, "absurd", hours=1e9, shares={"warmup": 1e300})
    for number, change in enumerate(
        [
            {"held_seconds": -1}, {"kept_seconds": 10**400}, {"seen": "1"}, {"goodput": True},
            {"process": 3}, {"held_seconds": 1e400}, {"process": {"host": platform.node()}},
            {"kept_seconds": 1e9, "goodput": 7},
            {"process": {"host": platform.node(), "pid": 10**30, "started": "x"}},
        ]
    ):  # fmt: skip
        job = noted(1, 1) | change
        add_run(client, experiment, f"tag {number}", hours=1, status="RUNNING", job=job)
    add_run(client, experiment, "text", hours=1, job=["x"])  # type: ignore[arg-type]
    run = client.create_run(experiment, 10**17, run_name="later").info.run_id
    client.log_batch(run, [Metric("mfu", 1.0, 10**17, 0)], [Param("lightning_perf", "[[1]]")])
    elsewhere = client.create_experiment("elsewhere", "http://127.0.0.1:1/api/files")
    other = add_run(client, elsewhere, "other", hours=1)
    client.set_tag(other, "lightning_perf_summary", "summary.json")
    code, out, err = call(capsys, "runs")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    print(out)
    assert r"\x1b[2J[red]" in out
    assert out.count("A") < 2000
    page = tmp_path / "runs.html"
    assert call(capsys, "runs", "--html", str(page))[0] == 0
    assert "<script>alert" not in page.read_text()
    assert "\x1b" not in page.read_text()
    assert r"\x1b[2J[red]" in page.read_text()
    assert loaded_from_elsewhere(page.read_text()) == []
    found = shown(capsys)
    assert found["odd"]["mfu"] is None
    assert all(each["wasted_device_hours"] <= each["device_hours"] for each in found.values())


def test_a_page_of_another_is_not_replaced(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """As of all commands that write a file."""
    add_run(client, experiment, "run", hours=1)
    page = tmp_path / "mine.html"
    page.write_text("<p>mine</p>")
    code, _, err = call(capsys, "runs", "--html", str(page))
    assert code == 2
    assert "Another file is there" in err
    assert page.read_text() == "<p>mine</p>"


# -- folders --------------------------------------------------------------------------------------


def test_runs_below_a_folder(tmp_path: Path, capsys: Any) -> None:
    """At any depth, without MLflow; a process of this machine that is gone was killed."""

    def leave(folder: str, ago: float = 0.0, status: str = "finished", **sections: Any) -> None:
        path = tmp_path / folder / "summary.json"
        path.parent.mkdir(parents=True)
        path.write_text(text_of(summary_of(path.parent.name, status, **sections)))
        os.utime(path, (time.time() - ago * 3600,) * 2)

    here = {"host": platform.node(), "pid": os.getpid()}
    leave("a/b/c/d/e/slow", verdicts=[INPUT])
    leave("a/restarts", 1.0, "stopped by an exception", goodput=goodput(0.5), verdicts=[INPUT])
    leave("silent", 2.0, "running", process={"host": "elsewhere", "pid": 1})
    leave("killed", 2.0, "running", process={"host": platform.node(), "pid": 2**22 + 1}, hangs=HUNG)
    leave("lives", 0.0, "running", process=here, hangs=HUNG)
    leave("old", 100.0)
    leave("mlruns/copy")
    leave("mlartifacts/copy")
    found = shown(capsys, str(tmp_path))
    assert [*found][:3] == ["silent", "restarts", "slow"]
    assert found.keys() == {"silent", "restarts", "slow", "killed", "lives", "old"}
    assert found["restarts"]["wasted_device_hours"] == pytest.approx(4)
    assert found["silent"]["device_hours"] == pytest.approx(24, rel=0.01)
    states = {name: each["state"] for name, each in found.items()}
    assert (states["restarts"], states["killed"]) == ("failed", "killed")
    assert states["lives"] == f"hanging since {HUNG[0]['began']}"
    assert found["slow"]["place"] == str(tmp_path / "a/b/c/d/e/slow")
    assert "old" not in shown(capsys, str(tmp_path), "--since", "1d")


def test_summaries_that_cannot_be_read_are_named(tmp_path: Path, capsys: Any) -> None:
    """The first three, with the reason; the others are shown, also as JSON alone."""
    for name, text in {
        "a": "{", "b": "[]", "c": '{"version": 99}', "a\x1b[2J": "\0",
        "good": text_of(summary_of("g")),
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text)
    code, out, err = call(capsys, "runs", str(tmp_path), "--json")
    assert (code, [each["run"] for each in json.loads(out)["runs"]]) == (0, ["g"])
    assert "left out 4 files that cannot be read as a summary: " in err
    assert err.count("summary.json") == 3
    assert err.endswith(", among others\n")
    assert "\x1b" not in err
    (tmp_path / "good/summary.json").unlink()
    code, _, err = call(capsys, "runs", str(tmp_path))
    assert "left out 4 files" in err
    assert "there is no run" in err


def test_a_run_that_hangs_gives_signs_of_life(tmp_path: Path, capsys: Any) -> None:
    """Its attempt does; one that was killed, or is silent for minutes, does not hang any longer."""

    def leave(name: str, process: dict[str, Any], ago: float, beat: float | None) -> None:
        """A summary written so many hours ago, and a sign of life after it."""
        path, now, job = tmp_path / name / "summary.json", time.time(), ""
        path.parent.mkdir(parents=True)
        if beat is not None:
            began, seen = now - (ago + 1) * 3600, now - beat * 3600
            trained = seen - began if name == "trains" else 3600.0
            job = leave_attempt(path.parent, process, began, seen, trained=trained)
        hangs = [] if name == "trains" else HUNG
        figures = {"hangs": hangs, "goodput": goodput(1.0, job)}
        path.write_text(text_of(summary_of(name, "running", process=process, **figures)))
        os.utime(path, (now - ago * 3600,) * 2)

    here, gone = {"host": platform.node(), "pid": os.getpid()}, 2**22 + 1
    away = {"host": "elsewhere", "pid": 1}
    leave("killed", here | {"pid": gone}, 3.0, 1.0)
    leave("hangs", away, 3.0, 0.0)
    leave("lost", away, 3.0, 1.0)
    leave("unknown", away, 3.0, None)
    leave("trains", away, 3.0, 0.0)
    found = shown(capsys, str(tmp_path))
    states = {name: each["state"] for name, each in found.items()}
    assert states.pop("lost").startswith("lost since 20")
    hang = f"hanging since {HUNG[0]['began']}"
    assert states == {"killed": "killed", "hangs": hang, "unknown": hang, "trains": "running"}
    # An hour of training, and the time up to the last sign of life, on 8 devices.
    hours = {name: round(each["device_hours"]) for name, each in found.items()}
    assert hours == {"killed": 24, "hangs": 32, "lost": 32, "unknown": 32, "trains": 32}
    wasted = {name: round(each["wasted_device_hours"]) for name, each in found.items()}
    assert wasted == {"killed": 16, "hangs": 24, "lost": 24, "unknown": 24, "trains": 0}


def test_attempts_of_a_job_count_once_each_up_to_their_last_sign_of_life(
    tmp_path: Path, capsys: Any
) -> None:
    """Whichever folder they are in: killed ones, those that have no summary, and a copy's."""
    now = time.time() - 100 * 3600
    killed = [{"host": platform.node(), "pid": 2**22 + number} for number in range(4)]

    def summarize(folder: Path, process: dict[str, Any], job: str) -> None:
        """An hour of training was reported, and written just now, as when files are copied."""
        folder.mkdir(exist_ok=True)
        content = summary_of(folder.name, "running", process=process, goodput=goodput(0.5, job))
        (folder / "summary.json").write_text(text_of(content))

    first, resumed, hour = tmp_path / "first", tmp_path / "resumed", 3600.0
    # The first was killed after 2 hours; the next one, 3 hours later, replaced its summary.
    job = leave_attempt(first, killed[0], now, now + 2 * hour, trained=2 * hour)
    resumes = {"job": job, "resumed": 1.5 * hour}
    leave_attempt(first, killed[1], now + 5 * hour, now + 6.5 * hour, trained=1.5 * hour, **resumes)
    summarize(first, killed[1], job)
    # Two that resumed it have a folder of their own, and one of another job is there.
    for number, later in ((2, 10), (2, 15)):
        began, seen = now + later * hour, now + (later + 2) * hour
        leave_attempt(
            first, killed[number], began, seen, trained=2 * hour, run="resumed", **resumes
        )
    summarize(resumed, killed[2], job)
    leave_attempt(first, killed[3], now + 20 * hour, now + 30 * hour)
    found = shown(capsys, str(tmp_path))
    hours = {name: each["device_hours"] / 8 for name, each in found.items()}
    assert hours == {"first": pytest.approx(3.5), "resumed": pytest.approx(4)}
    # The second repeated half an hour; the third repeated 1.5 hours, and the fourth 2 hours.
    wasted = {name: each["wasted_device_hours"] / 8 for name, each in found.items()}
    assert wasted == {"first": pytest.approx(0.5), "resumed": pytest.approx(3.5)}
    assert {each["state"] for each in found.values()} == {"killed"}
    # Copies have the same attempts, beside the first one or with all others.
    shutil.copytree(first, tmp_path / "copy")
    shutil.copytree(tmp_path, tmp_path / "backup")
    _, out, _ = call(capsys, "runs", str(tmp_path), "--json")
    places = {each["place"]: each for each in json.loads(out)["runs"]}
    assert places == {str(tmp_path / name): found[name] for name in ("first", "resumed")}


def test_an_artifact_below_the_folder_is_not_another_run(tmp_path: Path, capsys: Any) -> None:
    """A summary without the run's attempts is shown only if the run is not there."""
    process, now = {"host": platform.node(), "pid": 2**22 + 1}, time.time() - 7200
    for name in ("run", "other"):
        job = leave_attempt(tmp_path / name, process, now, now + 3600, trained=3600)
        its = "run" if name == "run" else "of another job"
        content = summary_of(name, goodput=goodput(1.0, job if name == "run" else its))
        for folder in (tmp_path / name, tmp_path / "art" / its / "artifacts" / name):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(text_of(content))
    _, out, _ = call(capsys, "runs", str(tmp_path), "--json")
    places = {
        Path(each["place"]).relative_to(tmp_path).as_posix() for each in json.loads(out)["runs"]
    }
    assert places == {"run", "other", "art/of another job/artifacts/other"}
    _, out, _ = call(capsys, "runs", str(tmp_path / "art" / "run"), "--json")
    assert len(json.loads(out)["runs"]) == 1


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_report_has_its_hours(
    tmp_path: Path, capsys: Any
) -> None:
    """Up to its last sign of life, though no report has written a summary."""

    class Waits(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                time.sleep(1000)
            return super().training_step(batch, batch_idx)

    def train() -> None:
        options = {"max_epochs": 9, "logger": False, "log_every_n_steps": 50}
        trainer(tmp_path, always_on(show_summary=False), **options).fit(Waits())

    process = get_context("fork").Process(target=train)
    process.start()
    until(lambda: [*tmp_path.glob("*/attempts/*.json")] and [*tmp_path.glob("*/summary.json")])
    process.kill()
    process.join()
    (file,) = tmp_path.glob("*/attempts/*.json")
    its = json.loads(file.read_text())
    (found,) = shown(capsys, str(tmp_path)).values()
    assert found["state"] == "killed"
    assert found["device_hours"] == pytest.approx((its["seen"] - its["began"]) / 3600, rel=0.01)


def test_processes_of_containers_that_share_a_name_and_an_id(tmp_path: Path, capsys: Any) -> None:
    """Each attempt counts in the folder of its run, and a later process is not an earlier one."""
    now, hour = time.time() - 100 * 3600, 3600.0
    first = tmp_path / "1"
    process = {"host": platform.node(), "pid": os.getpid()}
    job = leave_attempt(first, process, now, now + hour, trained=hour)
    for number in (2, 3):
        began = now + 10 * number * hour
        options: dict[str, Any] = {"trained": number * hour, "resumed": hour, "run": f"{number}"}
        leave_attempt(first, process, began, began + number * hour, job, **options)
    for number in (1, 2, 3):
        path = tmp_path / f"{number}" / "summary.json"
        path.parent.mkdir(exist_ok=True)
        figures = {"process": process | {"started": float(number)}, "goodput": goodput(1.0, job)}
        path.write_text(text_of(summary_of(f"{number}", "running", **figures)))
    found = shown(capsys, str(tmp_path))
    hours = {name: round(each["device_hours"] / 8, 3) for name, each in found.items()}
    assert hours == {"1": 1, "2": 2, "3": 3}
    assert {each["state"] for each in found.values()} == {"killed"}


@pytest.mark.slow
def test_a_run_of_mlflow_that_hung_was_killed_and_waited_in_the_queue(
    mlflow_server: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Its hours are those of its processes, hangs included, on any machine; not of the queue."""
    monkeypatch.setattr("lightning_perf.run.attempts.FIRST", 0.05)
    monkeypatch.setattr("lightning_perf.run.attempts.INTERVAL", 0.1)
    monkeypatch.setattr("lightning_perf.tracking.mlflow._NOTE_INTERVAL", 0.1)
    monkeypatch.setattr("lightning_perf.tracking.mlflow._PAUSE_FACTOR", 1.0)
    run_id = str(MLFlowLogger("queue", "waits", mlflow_server).run_id)
    client, lived = MlflowClient(mlflow_server), 0.0

    class Hangs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                (tmp_path / "hangs").touch()
                time.sleep(1000)
            return super().training_step(batch, batch_idx)

    def train(root: str, module: Small) -> None:
        own = MLFlowLogger("queue", tracking_uri=mlflow_server, run_id=run_id)
        options = {"logger": own, "max_epochs": 3}
        trainer(tmp_path / root, always_on(show_summary=False), **options).fit(module)

    def is_noted() -> bool:
        """Whether it hangs, and has noted four seconds of that."""
        seen = job_of(client.get_run(run_id).data.tags).get("seen", 0.0)
        hangs = tmp_path / "hangs"
        return hangs.exists() and seen > hangs.stat().st_mtime + 4

    def found() -> dict[str, Any]:
        """The run, its hours in seconds."""
        run = shown(capsys, mlflow_server, "--experiment", "queue")["waits"]
        return {key: x * 3600 if key.endswith("hours") else x for key, x in run.items()}

    # The last one is on a machine that has no files of the others.
    for root, module in (("a", Hangs()), ("a", Small()), ("b", Small())):
        began = time.time()
        child = get_context("fork").Process(target=train, args=(root, module))
        child.start()
        if isinstance(module, Hangs):
            until(is_noted)
            child.kill()
        child.join()
        lived += time.time() - began
        if isinstance(module, Hangs):
            assert found()["state"] == "killed"
            assert 4 < found()["wasted_device_hours"] < found()["device_hours"] < lived + 0.5
            time.sleep(10.0)
    assert found()["state"] == "finished"
    files = map(json.loads, map(Path.read_text, tmp_path.glob("*/*/attempts/*.json")))
    own = sum(each["seen"] - each["began"] for each in files)
    assert found()["device_hours"] == pytest.approx(own, rel=0.02)
    # All steps of the first process were repeated, and nothing of the queue is in it.
    assert 4 < found()["wasted_device_hours"] < found()["device_hours"] < lived + 0.5


def test_a_killed_run_of_mlflow_does_not_hang(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """Its process was on this machine; of another one, nobody knows for a day."""
    states = {}
    for name, host, ago in (("here", platform.node(), 1), ("away", "x", 1), ("old", "x", 30)):
        process = {"host": host, "pid": 2**22 + 1}
        add_run(
            client, experiment, name, hours=1, ago=ago, status="RUNNING", folder=tmp_path,
            summary=summary_of(name, "running", hangs=HUNG, process=process),
        )  # fmt: skip
        found = shown(capsys)[name]
        states[name] = found["state"]
        if name == "here":  # no time since its last sign of life
            assert found["device_hours"] == pytest.approx(8, rel=0.01)
    assert states["here"] == "killed"
    assert states["away"] == f"hanging since {HUNG[0]['began']}"
    assert states["old"].startswith("lost since 20")


def test_an_evaluation_does_not_say_how_the_fit_of_a_run_of_mlflow_ended(
    client: MlflowClient, experiment: str, tmp_path: Path, capsys: Any
) -> None:
    """Lightning sets MLflow's status at the end of each function: the summary has the fit's."""
    process = {"host": platform.node(), "pid": 2**22 + 1}
    trained = summary_of("")["stages"]
    tested = trained | {"test": {"status": "stopped by an exception"}}
    for name, status, mlflow_s, stages in (
        ("test failed", "finished", "FAILED", tested),
        ("killed, then tested", "running", "FINISHED", tested),
        ("failed, then tested", "stopped by an exception", "FINISHED", tested),
        ("later fit failed", "finished", "FAILED", trained),
        ("goes on", "finished", "RUNNING", tested),
    ):
        add_run(
            client, experiment, name, hours=1, status=mlflow_s, folder=tmp_path,
            summary=summary_of(name, status, process=process, stages=stages),
            job=noted(1, 0.5, **process) if name != "goes on" else None,
        )  # fmt: skip
    assert {name: each["state"] for name, each in shown(capsys).items()} == {
        "test failed": "finished",
        "killed, then tested": "killed",
        "failed, then tested": "failed",
        "later fit failed": "failed",
        "goes on": "running",
    }


def test_the_current_folder_is_the_default(in_tmp: Path, capsys: Any) -> None:
    """Without an address of MLflow and its database."""
    (in_tmp / "run").mkdir()
    (in_tmp / "run" / "summary.json").write_text(text_of(summary_of("run")))
    assert [*shown(capsys)] == ["run"]
    code, out, _ = call(capsys, "runs")
    assert code == 0
    assert "1 of 1 run in ." in out
