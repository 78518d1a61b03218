"""Diagnosis(capture=...): a few steps are recorded and summarized in the report."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import RANKS, Small, trainer
from helpers.torch_traces import steps, traces
from helpers.windows import rows_of

from lightning_perf import (
    ConfigError,
    Diagnosis,
    OnVerdict,
    PerfWarning,
    PyTorch,
    Suite,
    Timings,
    Verdict,
    VizTracer,
)
from lightning_perf.callbacks.factory import from_environment
from lightning_perf.diagnosis.signals import Signals


def captured(folder: Path) -> tuple[dict[str, Any], str]:
    """The files of the run: the summary's section, and the page."""
    (path,) = folder.rglob("summary.json")
    return json.loads(path.read_text())["capture"], (path.parent / "report.html").read_text()


@pytest.mark.parametrize("hosted", [False, True])
def test_the_captured_steps_are_in_the_report(tmp_path: Path, hosted: bool) -> None:
    """Alone and in a Suite, the trace is kept and in the summary and on the page."""
    diagnosis = Diagnosis(capture=PyTorch(schedule="at 5ba for 3ba"), terminal=False)
    trainer(tmp_path, Suite([diagnosis]) if hosted else diagnosis).fit(Small())
    ((name, trace),) = traces(tmp_path).items()
    assert steps(trace) == [5, 6, 7]
    section, page = captured(tmp_path)
    assert section["steps"] == 3
    assert "device" not in section
    assert any(each["name"].startswith("aten::") for each in section["operators"])
    assert "Captured steps" in page
    assert section["operators"][0]["name"] in page
    (summary,) = tmp_path.rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["traces"] == [name]
    assert 0 < content["overhead"]["recording"] <= content["overhead"]["share"]


class ScriptedVerdicts:
    """A critical verdict from batch 60 on, and a warning before it."""

    code = "mine"

    def __call__(self, signals: Signals) -> list[Verdict]:
        return [Verdict("mine", "critical" if signals.batches >= 60 else "warning", 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capture", "first", "count"),
    [
        (PyTorch(schedule=OnVerdict("mine", lasting="2ba")), 40, 2),
        # One trace of five steps, whatever verdicts follow.
        (True, 60, 5),
    ],
)
def test_a_verdict_starts_the_capture(tmp_path: Path, capture: Any, first: int, count: int) -> None:
    """By default the first critical verdict starts it; a profiler's schedule can select others."""

    class Waits(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step % 20 == 5:
                diagnosis._context.file_worker.drain(60.0)  # type: ignore[union-attr]
            return super().training_step(batch, batch_idx)

    diagnosis = Diagnosis(
        rules=[ScriptedVerdicts()], schedule="every 20ba", capture=capture, terminal=False
    )
    run = trainer(tmp_path, diagnosis, log_every_n_steps=10, max_epochs=2)
    run.fit(Waits(batch_size=1))
    ((_, trace),) = traces(tmp_path).items()
    assert steps(trace)[0] > first
    assert len(steps(trace)) == count
    assert captured(tmp_path)[0]["steps"] == count


def test_a_capture_has_its_own_folder(tmp_path: Path) -> None:
    """It works beside a profiler of the user's own."""
    diagnosis = Diagnosis(capture=True, terminal=False)
    own = PyTorch(schedule="at 5ba for 3ba")
    trainer(tmp_path, own, diagnosis).fit(Small())
    assert len(traces(tmp_path)) == 1
    assert diagnosis.parts[0].folder == "{run_name}/diagnosis/capture"


def test_the_summary_is_of_training_not_of_validation(tmp_path: Path) -> None:
    """The default schedule records both stages; the summary is of the last trace of training."""
    diagnosis = Diagnosis(capture=PyTorch(), terminal=False)
    trainer(tmp_path, diagnosis, limit_val_batches=8).fit(Small())
    found = traces(tmp_path)
    (training,) = (trace for name, trace in found.items() if "/validate/" not in name)
    assert len(found) == 2
    assert captured(tmp_path)[0]["events"] == len(training["traceEvents"])


class Breaks(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 7:
            raise ValueError("mine")
        return super().training_step(batch, batch_idx)


def test_an_exception_keeps_the_capture(tmp_path: Path) -> None:
    """The steps before the exception are in the trace and in the report."""
    diagnosis = Diagnosis(capture=PyTorch(schedule="at 5ba for 20ba"), terminal=False)
    with pytest.raises(ValueError, match="mine"):
        trainer(tmp_path, diagnosis).fit(Breaks())
    (trace,) = traces(tmp_path).values()
    assert steps(trace)[:2] == [5, 6]
    assert captured(tmp_path)[0]["steps"] >= 2


def test_a_capture_does_not_start_during_another_recording(tmp_path: Path) -> None:
    """Only one recorder can run at a time: the capture is skipped, and the report says so."""
    diagnosis = Diagnosis(capture=PyTorch(schedule="at 5ba for 3ba"), terminal=False)
    other = VizTracer(schedule="at 2ba for 10ba")
    with pytest.warns(match="missing from the traces of PyTorch"):
        trainer(tmp_path, other, diagnosis).fit(Small())
    section, page = captured(tmp_path)
    assert section == {"missing": "no batches of training were recorded on this rank"}
    assert "no batches of training were recorded on this rank" in page


def test_a_deleted_trace_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report has the verdicts and says that the trace is missing; one warning names it."""

    class Deletes(Small):
        def on_train_end(self) -> None:
            diagnosis._context.file_worker.drain(60.0)  # type: ignore[union-attr]
            for path in tmp_path.rglob("*.pt.trace.json.gz"):
                path.unlink()

    diagnosis = Diagnosis(capture=PyTorch(schedule="at 5ba for 3ba"), terminal=False)
    trainer(tmp_path, diagnosis).fit(Deletes())
    assert "FileNotFoundError" in captured(tmp_path)[0]["missing"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "moved or deleted after they were written" in warning
    caplog.clear()


def test_a_diagnosis_that_fails_leaves_its_capture_and_others_working(tmp_path: Path) -> None:
    """The capture, which is called last at each batch, records, and the other callbacks report."""

    class Broken(Diagnosis):
        def on_window(self, window: Any) -> Any:
            raise ZeroDivisionError("planted")

    timings = Timings(schedule="1ba")
    diagnosis = Broken(capture=PyTorch(schedule="at 12ba for 2ba"), terminal=False)
    with pytest.warns(PerfWarning, match=r"Broken is off.*on_window.*planted"):
        trainer(tmp_path, timings, diagnosis, log_every_n_steps=1).fit(Small())
    assert len(traces(tmp_path)) == 1
    assert rows_of(timings)[-1][0] == 15


@pytest.mark.slow
def test_ranks_capture_their_own_steps(tmp_path: Path) -> None:
    """Each rank writes its own trace; the report summarizes the one of rank 0."""
    diagnosis = Diagnosis(capture=PyTorch(schedule="at 2ba for 3ba"), terminal=False)
    trainer(tmp_path, diagnosis, **RANKS).fit(Small())
    assert len(traces(tmp_path)) == 2
    assert captured(tmp_path)[0]["steps"] == 3


def test_without_a_capture_nothing_is_recorded(tmp_path: Path) -> None:
    """By default there is no hook per batch and no section in the report."""
    diagnosis = Diagnosis(terminal=False)
    trainer(tmp_path, diagnosis).fit(Small())
    assert not any(map(diagnosis.overrides, ("before_batch", "after_batch")))
    (path,) = tmp_path.rglob("summary.json")
    assert "capture" not in json.loads(path.read_text())


def test_a_capture_can_be_configured_and_copied(tmp_path: Path) -> None:
    """It works in the file of LIGHTNING_PERF, with pickle, and in the run's params."""
    (tmp_path / "perf.yaml").write_text(
        "callbacks:\n"
        "- class_path: lightning_perf.Diagnosis\n"
        "  init_args:\n"
        "    terminal: false\n"
        "    capture: {class_path: lightning_perf.PyTorch, init_args: {schedule: at 5ba for 3ba}}\n"
    )
    suite = from_environment(str(tmp_path / "perf.yaml"))
    assert [type(part) for part in suite.parts[0].parts] == [PyTorch]
    copied = pickle.loads(pickle.dumps(suite))
    (diagnosis,) = copied.parts
    assert diagnosis.parts[0].batches_per_trace == 20
    assert diagnosis.settings()["Diagnosis"].keys() == {"schedule", "terminal"}
    trainer(tmp_path, copied).fit(Small())
    assert captured(tmp_path)[0]["steps"] == 3


@pytest.mark.parametrize("capture", [1, "PyTorch", VizTracer(), Diagnosis()])
def test_other_captures_are_refused(capture: Any) -> None:
    """Only PyTorch traces can be summarized."""
    with pytest.raises(ConfigError, match="capture"):
        Diagnosis(capture=capture)
