"""Profilers refuse invalid values before training, and report values that a tool refuses."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserList
from inspect import signature
from pathlib import Path
from typing import Any

import memray
import pytest
import torch
import yaml
from helpers.configuration import parse
from helpers.outcome import outcome
from helpers.small import Records, Small, left_in, ours, trainer

from lightning_perf import (
    All,
    ConfigError,
    Every,
    Fixed,
    GlobalRank,
    MemorySnapshot,
    Memray,
    PerfWarning,
    PyTorch,
    SpeedMonitor,
    Stages,
    Suite,
    VizTracer,
)
from lightning_perf.profilers.base import Profiler
from lightning_perf.profilers.tools import has_python_profiler


@pytest.mark.parametrize(
    ("profiler", "option", "value"),
    [
        (VizTracer, "max_stack_depth", "x"),
        (VizTracer, "min_duration", "x"),
        (VizTracer, "log_gc", "no"),
        (Memray, "memory_interval_ms", "a"),
        (Memray, "memory_interval_ms", 0),
        (Memray, "file_format", "aggregated"),
        (Memray, "file_format", 1),
        (Memray, "trace_python_allocators", "no"),
        (PyTorch, "with_modules", "maybe"),
    ],
)
def test_a_bad_option_of_a_tool_is_refused_at_construction(
    profiler: Any, option: str, value: Any
) -> None:
    """The error names the option, its value and a valid example."""
    with pytest.raises(ConfigError, match="Try ") as caught:
        profiler(**{option: value})
    assert (caught.value.field, caught.value.value) == (option, value)


def test_a_suite_needs_a_list_even_for_one_callback() -> None:
    """The message shows the list."""
    with pytest.raises(ConfigError, match=r"is not a list\. Try callbacks=\[SpeedMonitor"):
        Suite(SpeedMonitor())  # type: ignore[arg-type]


def test_every_sequence_is_a_list() -> None:
    """Hydra constructs callbacks with sequences of its own, which are not lists."""
    lists: list[Any] = [[0, 1], ["train"], [GlobalRank([0, 1]), Stages(["train"])]]
    ranks, stages, parts = map(UserList, lists)
    assert All([GlobalRank(ranks), Stages(stages)]) == All(parts) == All(lists[2])  # type: ignore[arg-type]
    assert Suite(UserList([SpeedMonitor()])).callbacks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "written",
    ["aggregated_allocations", "AGGREGATED_ALLOCATIONS", memray.FileFormat.AGGREGATED_ALLOCATIONS],
)
def test_the_format_of_memray_may_be_a_name(tmp_path: Path, written: Any) -> None:
    """The name works in YAML, and the capture has the format."""
    profiler = Memray(schedule="first 1ba", summary=False, file_format=written)
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (capture,) = tmp_path.rglob("*.bin")
    with memray.FileReader(capture) as reader, pytest.raises(NotImplementedError):
        next(reader.get_allocation_records())


@pytest.mark.parametrize("option", ["include_files", "log_func_repr"])
def test_options_that_a_tool_refuses_are_reported_and_leave_no_hook(
    tmp_path: Path, option: str
) -> None:
    """Training continues without the profiler, and the warning has the options."""
    profiler = VizTracer(schedule=Fixed(2, 2), **{option: 3})
    with pytest.warns(PerfWarning) as caught:
        trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (message,) = ours(caught)
    assert option in message
    assert "report" not in message
    assert not has_python_profiler()
    assert threading.getprofile() is None


def test_a_tracer_that_fails_when_it_starts_leaves_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracer is stopped."""
    from viztracer import VizTracer as Tracer

    plain = Tracer.start

    def start(tracer: Any) -> None:
        plain(tracer)
        raise RuntimeError("planted")

    monkeypatch.setattr(Tracer, "start", start)
    with pytest.warns(PerfWarning, match="planted"):
        trainer(tmp_path, VizTracer(schedule=Fixed(2, 2)), logger=Records()).fit(Small())
    assert not has_python_profiler()
    assert threading.getprofile() is None


KINDS = [PyTorch, VizTracer, Memray, MemorySnapshot]


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_and_number_is_checked(kind: Any) -> None:
    """Values of another type are refused with the name of the argument."""
    defaults = {
        name: each.default
        for name, each in signature(kind).parameters.items()
        if isinstance(each.default, int) or name == "use_gzip"
    }
    assert {"overwrite", "compress", "num_traces_to_keep", "batches_per_trace"} <= set(defaults)
    for name, value in defaults.items():
        counts = isinstance(value, int) and not isinstance(value, bool)
        for wrong in (True, "x", 1.5, -2) if counts else ("no", 1, 0):
            with pytest.raises(ConfigError, match="Try ") as caught:
                kind(**{name: wrong})
            assert caught.value.field == name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["output_path_prefix", "folder", "filename", "remote_file_name"])
def test_every_name_is_checked(kind: Any, name: str) -> None:
    """A name must be a string."""
    with pytest.raises(ConfigError) as caught:
        kind(**{name: 3})
    assert caught.value.field == name


class Copying(Small):
    """Copies and pickles its trainer's profiler in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (profiler,) = (one for one in self.trainer.callbacks if isinstance(one, Profiler))
        self.copies += both(profiler)
        return super().training_step(batch, batch_idx)


def both(profiler: Any) -> list[Any]:
    assert yaml.dump(profiler)
    return [copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: PyTorch(schedule="every 2ba"),
        lambda: VizTracer(schedule="every 2ba", patch=True),
        lambda: Memray(schedule="every 2ba", follow_fork=True),
        lambda: MemorySnapshot(schedule="every 2ba"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no CUDA device")
def test_profilers_can_be_copied_at_any_time(tmp_path: Path, make: Any) -> None:
    """Copies made before, during and after a fit, of the Trainer too, record like the original."""
    profiler, model = make(), Copying()
    copies = both(profiler)
    trained = trainer(tmp_path, profiler, logger=Records(), limit_train_batches=5)
    trained.fit(model)
    assert copy.deepcopy(trained).global_step == 5
    torch.save(trained, tmp_path / "trainer.pt")
    copies += model.copies + both(profiler)
    assert len(copies) == 14
    assert all(each.settings() == profiler.settings() for each in copies)
    assert all(each.saved_traces == [] for each in copies)
    run = trainer(tmp_path / "copy", copies[4], logger=Records(), limit_train_batches=5)
    run.fit(Small())
    assert len(copies[4].saved_traces) == len(profiler.saved_traces)


@pytest.mark.parametrize(
    ("kind", "option", "expected"),
    [
        (Memray, "native_trace", "of Memray. Did you mean native_traces?"),
        (Memray, "trace_python_allocator", "Did you mean trace_python_allocators?"),
        (Memray, "zzz", "is not an option of Memray. It has batches_per_trace"),
        (PyTorch, "record_shape", "of PyTorch. Did you mean record_shapes?"),
        (PyTorch, "num_trace_to_keep", "Did you mean num_traces_to_keep?"),
        (PyTorch, "acc_event", "Did you mean acc_events?"),
        (PyTorch, "zzz", "is not an option of PyTorch. It has acc_events"),
        (PyTorch, "dirpath", "is not an option of PyTorch. Did you mean folder?"),
        (VizTracer, "log_torchs", "of VizTracer. Did you mean log_torch?"),
        (VizTracer, "batch_per_trace", "Did you mean batches_per_trace?"),
        (VizTracer, "zzz", "is not an option of VizTracer. It has batches_per_trace"),
        (VizTracer, "register_global", "is not an option of VizTracer"),
    ],
)
def test_an_unknown_option_gets_a_suggestion(kind: Any, option: str, expected: str) -> None:
    """Arguments of the profiler and its tool are suggested; arguments that we set are refused."""
    with pytest.raises(ConfigError) as caught:
        kind(**{option: True})
    assert str(caught.value).startswith(f"{option}=True ")
    assert expected in str(caught.value)
    assert "Try" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Memray(schedule="every 9ba for 2ba"),
        lambda: VizTracer(schedule="every 9ba for 2ba"),
        lambda: PyTorch(
            schedule="every 9ba for 2ba", with_stack=True, record_shapes=True,
            memory_filename="rank{rank}.{batch}.html",
        ),
    ],
    ids=["Memray", "VizTracer", "PyTorch"],
)  # fmt: skip
def test_training_is_bitwise_identical(tmp_path: Path, make: Any) -> None:
    """Recording changes no loss, weight or random number."""
    plain, profiler = outcome(tmp_path / "plain", logger=Records()), make()
    watched = outcome(tmp_path / "on", profiler, logger=Records())
    assert profiler.saved_traces
    assert plain["losses"] == watched["losses"]
    assert torch.equal(plain["rng"], watched["rng"])
    assert all(map(torch.equal, plain["weights"], watched["weights"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own", "tool"),
    [
        (Memray, {"flamegraph": True, "follow_fork": True}, {"trace_python_allocators": True}),
        (VizTracer, {"patch": True}, {"ignore_c_function": True}),
    ],
)
def test_yaml(tmp_path: Path, kind: Any, own: dict[str, Any], tool: dict[str, Any]) -> None:
    """Arguments of the tool are in dict_kwargs."""
    node = {
        "class_path": f"lightning_perf.{kind.__name__}",
        "init_args": {"schedule": "every 8ba for 2ba", **own},
        "dict_kwargs": tool,
    }
    (profiler,) = (c for c in parse(tmp_path, [node]).trainer.callbacks if isinstance(c, kind))
    assert profiler.schedule == Every("8ba", lasting="2ba")
    assert {name: getattr(profiler, name) for name in own} == own
    assert {name: value for name, value in profiler.options.items() if value is not None} == tool


def test_folders_may_be_paths(tmp_path: Path) -> None:
    """`output_path_prefix` and `folder` accept them as strings."""
    absolute = PyTorch(schedule="first 1ba", folder=tmp_path / "b")
    below = PyTorch(schedule="at 2ba", folder=Path("c"), output_path_prefix=tmp_path)
    trainer(tmp_path / "a", absolute, below).fit(Small())
    assert [path.parent for path in left_in(tmp_path)] == [tmp_path / "b", tmp_path / "c"]
    assert pickle.loads(pickle.dumps(below)).output_path_prefix == str(tmp_path)
