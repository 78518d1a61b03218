"""Windows of batches: the behaviour of the base class, with each profiler."""

from __future__ import annotations

import gzip
import json
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import memray
import pytest
import torch
from helpers.small import Records, Small, left_in, ours, trainer

from lightning_perf import (
    Always,
    At,
    ConfigError,
    Cyclic,
    Fixed,
    Memray,
    OnSignal,
    OnSlowBatch,
    PerfWarning,
    Profiler,
    PyTorch,
    Stages,
    Suite,
    VizTracer,
)

MEAL = 5_123_456


class Hungry(Small):
    """Calls ``eat`` once per batch in each stage, which every profiler records."""

    def eat(self) -> int:
        with torch.profiler.record_function("eat"):
            return len(bytearray(MEAL))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eat()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.eat()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.eat()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eat()
        return super().predict_step(batch, batch_idx)


class Failing(Hungry):
    """Raises in its fourth batch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise self.error("planted")
        return super().training_step(batch, batch_idx)


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def ranges(path: Path) -> int:
    return sum(event["name"] == "eat" for event in events(path))


def calls(path: Path) -> int:
    return sum(event["name"].startswith("Hungry.eat") for event in events(path))


def meals(path: Path) -> int:
    with memray.FileReader(path) as reader:
        return sum(
            record.size == MEAL + 1  # a bytearray ends in a zero
            for record in reader.get_allocation_records()
        )


@dataclass(frozen=True)
class Recorder:
    """A profiler, and a function that counts the batches in one of its files."""

    kind: Callable[..., Profiler]
    folder: str
    suffix: str
    batches: Callable[[Path], int]

    def found(self, root: Path) -> dict[str, int]:
        """Number of batches in each file of the run."""
        folder = root / "records-version_0" / self.folder
        return {
            str(path.relative_to(folder)).removesuffix(self.suffix): self.batches(path)
            for path in sorted(folder.rglob(f"*{self.suffix}"))
        }

    def fit(self, root: Path, *profilers: Profiler, **options: Any) -> dict[str, int]:
        trainer(root, *profilers, logger=Records(), **options).fit(Hungry())
        return self.found(root)


TORCH = Recorder(PyTorch, "torch_traces", ".pt.trace.json.gz", ranges)
# A summary takes a separate process.
CAPTURE = partial(Memray, summary=False)


@pytest.fixture(
    params=[
        TORCH,
        Recorder(VizTracer, "viztracer", ".json.gz", calls),
        pytest.param(Recorder(CAPTURE, "memray", ".bin", meals), marks=pytest.mark.slow),
    ],
    ids=["PyTorch", "VizTracer", "Memray"],
)
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return request.param


@pytest.mark.parametrize(
    "names",
    [{"filename": "{batch}.out.gz"}, {"filename": "{batch}.out", "remote_file_name": "a.gz"}],
)
def test_a_name_that_ends_in_gz_is_a_gzipped_file(
    tmp_path: Path, recorder: Recorder, names: dict[str, str]
) -> None:
    """Whatever `compress` says, and whether the local or the remote name ends so."""
    profiler = recorder.kind(schedule="first 2ba", compress=False, **names)
    recorder.fit(tmp_path, profiler)
    packed = tmp_path / "records-version_0" / recorder.folder / "2.out.gz"
    plain = tmp_path / f"plain{recorder.suffix}"
    content = packed.read_bytes()
    plain.write_bytes(content if plain.name.endswith(".gz") else gzip.decompress(content))
    assert recorder.batches(plain) == 2


@pytest.mark.parametrize(
    ("schedule", "options", "files"),
    [
        pytest.param(None, {}, {"rank0.5": 4}, id="default"),
        pytest.param("every 6ba for 2ba", {}, {"rank0.8": 2, "rank0.14": 2}, id="interval"),
        pytest.param(
            Cyclic(wait=1, warmup=1, active=2, repeat=3),
            {},
            {"rank0.4": 2, "rank0.8": 2, "rank0.12": 2},
            id="three cycles",
        ),
        pytest.param(
            Cyclic(wait=0, warmup=0, active=2, repeat=0),
            {"limit_train_batches": 6},
            {"rank0.2": 2, "rank0.4": 2, "rank0.6": 2},
            id="back to back",
        ),
        pytest.param(Fixed(15, 3), {"max_epochs": 2}, {"rank0.18": 3}, id="across epochs"),
        pytest.param(Fixed(4, 9), {"limit_train_batches": 6}, {"rank0.6": 2}, id="stage ends"),
        pytest.param(Fixed(4, 9), {"max_steps": 7}, {"rank0.7": 3}, id="max_steps"),
        pytest.param(
            Fixed(2, 4) & Stages("train"),
            {"val_check_interval": 4, "limit_val_batches": 2, "limit_train_batches": 8},
            {"rank0.4": 2, "rank0.6": 2},
            id="validation within",
        ),
    ],
)
def test_windows_become_files(
    tmp_path: Path, schedule: Any, options: Any, files: dict[str, int]
) -> None:
    """Each window is one file with exactly its batches, named by the completed batches."""
    assert TORCH.fit(tmp_path, PyTorch(schedule=schedule), **options) == files


def test_long_windows_are_cut_into_files_of_bounded_size(
    tmp_path: Path, recorder: Recorder
) -> None:
    """The window continues in the next file after batches_per_trace batches."""
    profiler = recorder.kind(schedule=Always(), batches_per_trace=6)
    assert recorder.fit(tmp_path, profiler) == {"rank0.6": 6, "rank0.12": 6, "rank0.16": 4}


def test_one_callback_serves_all_stages(tmp_path: Path, recorder: Recorder) -> None:
    """Validation inside of fit, test and predict write to subfolders."""
    profiler = recorder.kind(schedule="first 2ba")
    run = trainer(tmp_path, profiler, logger=Records(), limit_val_batches=4)
    model = Hungry()
    run.fit(model)
    run.test(model, verbose=False)
    run.predict(model)
    stages = ("", "validate/", "test/", "predict/")
    assert recorder.found(tmp_path) == {f"{stage}rank0.2": 2 for stage in stages}


def test_one_callback_serves_two_fits(tmp_path: Path, recorder: Recorder) -> None:
    """A second trainer's fit records like the first one, into its own folder; both are listed."""
    profiler = recorder.kind(schedule="every 8ba")
    for number, folder in enumerate((tmp_path / "first", tmp_path / "second"), 1):
        assert recorder.fit(folder, profiler) == {"rank0.9": 1}
        assert [stamp.batch for stamp, _ in profiler.saved_traces] == [9] * number


def test_a_second_fit_of_a_trainer_keeps_counting(tmp_path: Path, recorder: Recorder) -> None:
    """Batches are counted from the end of the first fit."""
    run = trainer(tmp_path, recorder.kind(schedule="every 10ba"), logger=Records())
    model = Hungry()
    run.fit(model)
    run.fit_loop.max_epochs = 2
    run.fit(model)
    assert recorder.found(tmp_path) == {"rank0.11": 1, "rank0.21": 1, "rank0.31": 1}


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_closes_the_open_window(
    tmp_path: Path, recorder: Recorder, error: type[BaseException]
) -> None:
    """The file is complete, and the tool can be used again."""
    run = trainer(tmp_path / "failed", recorder.kind(schedule=Always()), logger=Records())
    with pytest.raises((error, SystemExit)):
        run.fit(Failing(error))
    assert recorder.found(tmp_path / "failed") == {"rank0.3": 3}
    assert recorder.fit(tmp_path / "next", recorder.kind(schedule="every 8ba")) == {"rank0.9": 1}


def test_a_recorder_that_fails_to_stop_closes_its_schedule(tmp_path: Path) -> None:
    """If stopping fails after an exception, the signal handler is still released."""

    class Stuck(Profiler):
        def record(self, path: Path, context: Any, warmup: int) -> Any:
            yield None
            raise RuntimeError("stuck")

    signalled = OnSignal()
    with pytest.warns(PerfWarning, match="stuck"), pytest.raises(ValueError, match="planted"):
        trainer(tmp_path, Stuck(schedule=Always() | signalled)).fit(Failing(ValueError))
    assert signalled._handler is None


def test_two_of_one_kind_record_in_turn(tmp_path: Path, recorder: Recorder) -> None:
    """Windows that do not overlap are all recorded; of overlapping ones the second is skipped."""
    apart = [recorder.kind(schedule=Fixed(2, 3)), recorder.kind(schedule=Fixed(8, 2), folder="b")]
    assert recorder.fit(tmp_path / "apart", *apart) == {"rank0.5": 3}
    assert len(apart[1].saved_traces) == 1
    clashing = [
        recorder.kind(schedule=Fixed(2, 9)),
        recorder.kind(schedule="every 3ba", folder="b"),
    ]
    with pytest.warns(PerfWarning, match="while another .* does: give them different") as caught:
        assert recorder.fit(tmp_path / "clashing", *clashing) == {"rank0.11": 9}
    assert len(ours(caught)) == 1
    assert [stamp.batch for stamp, _ in clashing[1].saved_traces] == [13, 16]


@pytest.mark.parametrize("late_first", [False, True], ids=["in order", "the later one first"])
def test_adjacent_windows_are_all_recorded(tmp_path: Path, late_first: bool) -> None:
    """A window may start where another profiler's ends, in any order of the callbacks."""
    early, late = PyTorch(schedule="first 3ba"), VizTracer(schedule="at 3ba for 2ba")
    profilers = [late, early] if late_first else [early, late]
    trainer(tmp_path, *profilers, limit_train_batches=6).fit(Small())
    assert [path.name for path in left_in(tmp_path)] == [
        "rank0.3.pt.trace.json.gz",
        "rank0.5.json.gz",
    ]


@pytest.mark.parametrize("late_first", [False, True], ids=["in order", "the later one first"])
def test_a_warm_up_takes_no_batch_from_another_window(tmp_path: Path, late_first: bool) -> None:
    """A window that has no time to warm up opens without, and nothing is missing."""
    early, late = VizTracer(schedule="at 3ba"), PyTorch(schedule="at 4ba")
    profilers = [late, early] if late_first else [early, late]
    trainer(tmp_path, *profilers, limit_train_batches=6).fit(Small())
    assert [path.name for path in left_in(tmp_path)] == [
        "rank0.5.pt.trace.json.gz",
        "rank0.4.json.gz",
    ]


def test_a_profiler_that_ends_another_ones_window_leaves_its_time_out_once(tmp_path: Path) -> None:
    """The batch after the end of a window takes no negative time."""

    class SlowToStop(Profiler):
        def record(self, path: Path, context: Any, warmup: int) -> Any:
            yield None
            time.sleep(0.2)
            path.write_text("stopped")

    early, late = SlowToStop(schedule="first 3ba"), SlowToStop(schedule="at 3ba", folder="b")
    trainer(tmp_path, late, early, limit_train_batches=6).fit(Small())
    ((stamp, _),) = late.saved_traces
    assert stamp.batch_wct > 0


def test_validation_may_be_recorded_by_an_earlier_callback(tmp_path: Path) -> None:
    """The training window of the later callback ends before validation begins."""
    inner = VizTracer(schedule=Stages("validate") & Always())
    outer = PyTorch(schedule=Stages("train") & Always())
    limits = {"limit_train_batches": 4, "limit_val_batches": 2, "val_check_interval": 2}
    trainer(tmp_path, inner, outer, **limits).fit(Small())
    traces = [f"rank0.{batch}.pt.trace.json.gz" for batch in (2, 4)]
    calls = [f"rank0.{batch}.json.gz" for batch in (2, 4)]
    assert [path.name for path in left_in(tmp_path)] == [*traces, *calls]


def test_two_of_one_kind_need_different_names(tmp_path: Path, recorder: Recorder) -> None:
    """The error says which arguments to change."""
    twins = [recorder.kind(schedule=Fixed(2, 1)), recorder.kind(schedule=Fixed(8, 2))]
    with pytest.raises(
        ConfigError, match=r"also that of another .* of this Trainer: give .* `filename` or"
    ):
        recorder.fit(tmp_path, *twins)
    with pytest.raises(ConfigError, match="another `filename`"):
        recorder.fit(tmp_path, Suite(twins))
    suffix = recorder.suffix.removesuffix(".gz")
    other = recorder.kind(schedule=Fixed(8, 2), filename=f"second{{rank}}.{{batch}}{suffix}")
    assert recorder.fit(tmp_path, twins[0], other) == {"rank0.3": 1, "second0.10": 2}


@pytest.mark.parametrize(
    ("schedule", "known"),
    [
        (Fixed(100, 2), None), ("every 1000ba", 1000), ("at 900ba for 2ep", 900), ("at 2ep", None),
        (Cyclic(wait=16, warmup=4, active=2), 20), ("every 100000sp", None),
        ("every 3600sec", None), (At("50ba", lasting="1ep") & Stages("train"), 50),
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_without_a_window_warns(
    tmp_path: Path, schedule: Any, known: int | None
) -> None:
    """One warning at the end of training says before which batch there is none, if it is known."""
    with pytest.warns(PerfWarning, match="recorded nothing: training ended after 16 b") as caught:
        trainer(tmp_path, PyTorch(schedule=schedule), logger=Records()).fit(Small())
    (message,) = ours(caught)
    assert message.endswith(f", nor does one before batch {known}." if known else ") opened.")


class Stopwatch(Profiler):
    """Records nothing but that it was called."""

    def record(self, path: Path, context: Any, warmup: int) -> Any:
        path.write_text("a batch")
        yield None


class Stop(L.Callback):
    """Ends training before the first windows of the schedules that the documentation shows."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 5


ROOT = Path(__file__).parents[2]
TEXTS = {
    text.strip()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*.yaml")]
    for texts in re.findall(
        r'["`]((?:every|at|first) [\w.% ]+|\d+ba|always|never)["`]|schedule: (\w[\w.% ]*)',
        page.read_text(),
    )
    for text in texts
    if re.match(r"(every|at|first) [\d.]+\w|\d\d+ba$|every \w+$|always|never", text)
}


def test_the_documented_schedules_are_found() -> None:
    """Those of the README, the quickstart and the configurations are among them."""
    assert len(TEXTS) >= 30
    assert {"at 50% for 3ba", "every 100 batches for 3 batches", "at 0.5dur for 3ba"} <= TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("text", sorted(TEXTS))
def test_a_documented_schedule_warns_if_training_ends_before_it(tmp_path: Path, text: str) -> None:
    """Whatever the unit of its length is: there is a file or a warning, but for "never"."""
    watch, options = Stopwatch(text), {"max_epochs": 100, "limit_val_batches": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, watch, Stop(), logger=Records(), **options).fit(Small())
    assert bool(watch.saved_in_run) == text.startswith(("first", "always"))
    assert len(ours(caught)) == (not watch.saved_in_run and text != "never")


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("never", {}),
        (OnSignal("SIGUSR2"), {}),
        (OnSlowBatch(factor=1000.0), {}),
        (Stages("test") & Always(), {}),
        ("every 1000ba", {"fast_dev_run": True}),
        ("every 1000ba", {"limit_train_batches": 0}),
        ("first 1ba", {}),
    ],
    ids=str,
)
def test_a_schedule_that_waits_for_an_event_does_not_warn(
    tmp_path: Path, schedule: Any, options: dict[str, Any]
) -> None:
    """Triggers, schedules for other stages and trial runs may end without a window."""
    trainer(tmp_path, PyTorch(schedule=schedule), logger=Records(), **options).fit(Small())
