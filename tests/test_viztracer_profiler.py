"""VizTracer: windows of batches become timelines of calls that their readers can open."""

from __future__ import annotations

import cProfile
import gc
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Records, Small, ours, trainer
from test_unchanged import outcome
from viztracer.vcompressor import VCompressor

from lightning_perf import (
    Always,
    ConfigError,
    Fixed,
    PerfWarning,
    PyTorch,
    RecorderBusy,
    VizTracer,
)


def traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of all finished traces below a folder, by their path in it."""
    return {
        str(path.relative_to(folder)): json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in sorted(folder.rglob("*.json.gz"))
    }


def calls(events: list[dict[str, Any]], name: str) -> int:
    """How often a function of that name was called."""
    return sum(event["name"].split(" ")[0].endswith(name) for event in events)


def fit(folder: Path, *profilers: Any, model: Any = None, **options: Any) -> dict[str, Any]:
    options = {"logger": Records(), **options}
    trainer(folder, *profilers, **options).fit(model or Small())
    return traces(folder / "records-version_0" / "viztracer")


def test_the_first_batch_s_fetch_is_in_its_window(tmp_path: Path) -> None:
    """A window opens at the end of the batch before, so that waiting for data is seen."""
    (events,) = fit(tmp_path, VizTracer(schedule=Fixed(4, 1))).values()
    assert calls(events, "_SingleProcessDataLoaderIter._next_data") == 1


def test_ranks_can_be_told_apart_in_a_merged_trace(tmp_path: Path) -> None:
    """The process has the rank's name, and the same small id wherever it runs."""
    (events,) = fit(tmp_path, VizTracer(schedule="first 1ba")).values()
    assert {event["pid"] for event in events} == {1}
    (name,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert name == "rank 0"


def test_a_compressed_trace_is_one_of_viztracer_s_own(tmp_path: Path) -> None:
    """compress=True leaves a .cvf that VizTracer decompresses."""
    assert fit(tmp_path, VizTracer(schedule="first 2ba", compress=True)) == {}
    folder = tmp_path / "records-version_0" / "viztracer"
    (path,) = folder.iterdir()
    assert path.name == "rank0.2.cvf"
    events = VCompressor().decompress(str(path))["traceEvents"]
    assert calls(events, "Small.training_step") == 2


def test_torch_s_operators_can_be_recorded_too(tmp_path: Path) -> None:
    """log_torch puts the operators beside the calls, whatever the file is called."""
    profiler = VizTracer(schedule=Fixed(2, 1), log_torch=True, filename="{batch}.trace")
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (path,) = (tmp_path / "records-version_0" / "viztracer").iterdir()
    assert path.name == "3.trace.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert calls(events, "Small.training_step") == 1
    assert calls(events, "aten::addmm")


def test_operators_do_not_fit_into_viztracer_s_own_form(tmp_path: Path) -> None:
    """The combination is refused at construction, not when the first trace is lost."""
    with pytest.raises(ConfigError, match=r"compress=True cannot hold.*Try compress=False"):
        VizTracer(log_torch=True, compress=True)


def test_the_buffer_bounds_a_file(tmp_path: Path) -> None:
    """Of more calls than tracer_entries, the last ones stay."""
    (events,) = fit(tmp_path, VizTracer(schedule=Always(), tracer_entries=100)).values()
    assert 90 < len(events) < 110


def test_recorders_that_exclude_each_other_record_in_turn(tmp_path: Path) -> None:
    """The window that falls into another recorder's is left out, with one warning."""
    torchs = PyTorch(schedule=Fixed(2, 4))
    with pytest.warns(PerfWarning, match="VizTracer cannot record while PyTorch does") as caught:
        found = fit(tmp_path, torchs, VizTracer(schedule="every 4ba"))
    assert len(ours(caught)) == 1
    assert sorted(found) == ["rank0.13.json.gz", "rank0.9.json.gz"]
    assert len(torchs.saved_traces) == 1


def test_a_profiler_of_the_user_s_own_keeps_the_hook(tmp_path: Path) -> None:
    """While cProfile runs, windows are left out with one warning, and cProfile goes on."""
    watch = cProfile.Profile()
    watch.enable()
    try:
        with pytest.warns(PerfWarning, match="while a profiler of Python's calls does") as caught:
            found = fit(tmp_path, VizTracer(schedule="every 3ba"))
        assert len(ours(caught)) == 1
        assert sys.getprofile() is not None
    finally:
        watch.disable()
    assert found == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_log_torch_is_refused_beside_lightning_s_own_profiler(tmp_path: Path) -> None:
    """Two torch profilers would empty each other's traces, so training does not start."""
    run = trainer(tmp_path, VizTracer(log_torch=True), profiler="pytorch")
    with pytest.raises(RecorderBusy, match=r"Trainer\(profiler=PyTorchProfiler.*remove one of"):
        run.fit(Small())
    assert run.global_step == 0
    del run
    gc.collect()  # Lightning's profiler raises in __del__ where it has not recorded


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Recording changes no loss, no weight and no draw of the random generator."""
    plain = outcome(tmp_path / "plain", logger=Records())
    watched = outcome(tmp_path / "on", VizTracer(schedule="every 9ba for 2ba"), logger=Records())
    assert list((tmp_path / "on").rglob("*.json.gz"))
    assert plain["losses"] == watched["losses"]
    assert torch.equal(plain["rng"], watched["rng"])
    assert all(map(torch.equal, plain["weights"], watched["weights"]))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("log_torchs", "log_torchs=True is no option of VizTracer: did you mean log_torch?"),
        ("batch_per_trace", "did you mean batches_per_trace?"),
        ("zzz", "zzz=True is no option of VizTracer; viztracer has exclude_files"),
        ("register_global", "register_global=True is no option of VizTracer"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest(option: str, told: str) -> None:
    """Options of ours and of VizTracer are suggested, and what we set ourselves is refused."""
    with pytest.raises(ConfigError) as caught:
        VizTracer(**{option: True})
    assert told in str(caught.value)


def test_a_missing_viztracer_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the set-up says how to install it."""
    monkeypatch.setattr("lightning_perf.profilers.tools.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs viztracer.*pip install viztracer"):
        fit(tmp_path, VizTracer())
