"""The always-on set: enabled by one line, or by an environment variable without a code change."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import WIDTH, Records, Small, left_in, trainer
from helpers.small import ours as ours_among
from helpers.torch_traces import traces
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import (
    ConfigError,
    Flops,
    Memray,
    PerfWarning,
    PyTorch,
    SpeedMonitor,
    Suite,
    Timings,
    VizTracer,
    Window,
    WindowCallback,
    always_on,
)
from lightning_perf.callbacks.factory import (
    _warn_once,
    callbacks,
    callbacks_of_pytorch_lightning,
)
from lightning_perf.callbacks.suite import EnvironmentSuite

KINDS = ["SpeedMonitor", "Flops", "Timings", "SystemMetrics", "Diagnosis", "Hang"]


def names(callback: Any) -> list[str]:
    return [type(part).__name__ for part in callback.parts]


def ours(run: L.Trainer) -> list[EnvironmentSuite]:
    return [each for each in run.callbacks if isinstance(each, EnvironmentSuite)]


def test_always_on_is_one_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It measures everything with negligible overhead, and prints the summary."""
    suite, records = always_on(), Records()
    assert isinstance(suite, Suite)
    assert names(suite) == KINDS
    trainer(tmp_path, suite, logger=records, log_every_n_steps=4).fit(Small())
    assert {"mfu", "timings/forward", "time/total", "memory/rss"} <= records.keys
    assert "MFU" in capsys.readouterr().out
    trainer(tmp_path, always_on(show_summary=False)).fit(Small())
    assert capsys.readouterr().out == ""


def test_all_callbacks_report_together(tmp_path: Path) -> None:
    """A logger is called at Lightning's steps, once per step, and at the end."""
    records = Records()
    trainer(tmp_path, always_on(), logger=records, log_every_n_steps=6).fit(Small())
    *steps, _ = [step for step, _ in records.rows]
    assert steps == [5, 11, *steps[2:]]
    assert {*steps[2:]} <= {15}
    assert [step for step, _ in records.of("batch_flops")][:2] == [5, 11]


def test_loggers_get_each_meaning_once(tmp_path: Path) -> None:
    """At most 30 keys of training and a few of validation; the others can still be monitored."""
    options: dict[str, Any] = {
        "log_every_n_steps": 4, "limit_val_batches": 2, "max_epochs": 2, "num_sanity_val_steps": 0,
    }  # fmt: skip

    class Language(Small):
        def get_num_tokens_in_batch(self, batch: list[torch.Tensor]) -> int:
            return batch[0].numel()

    found = {}
    for keys in ("short", "all"):
        suite, records = Suite(always_on().callbacks, keys=keys), Records()
        stop = EarlyStopping(monitor="throughput/device/mfu", mode="max", patience=9)
        trainer(tmp_path, suite, stop, logger=records, **options).fit(Language())
        assert stop.best_score > 0
        found[keys] = {key for key in records.keys if not key.startswith(("diagnosis/", "epoch"))}
    validation = {key for key in found["short"] if key.startswith("validate/")}
    assert len(found["short"] - validation) <= 30
    assert {"mfu", "throughput/samples_per_sec", "system/node_0/cpu_util_simple"} <= found["short"]
    assert "untracked_operations" in found["short"]  # without it, mfu seems complete
    assert {"validate/mfu", "validate/throughput/batches_per_sec"} < validation
    assert len(validation) <= 6
    assert found["short"] < found["all"]
    assert {"throughput/device/mfu", "total_flops", "validate/hfu"} <= found["all"] - found["short"]


def test_keys_of_users_own_callbacks_are_kept(tmp_path: Path) -> None:
    """A Suite knows only keys of the callbacks of this package."""

    class Own(WindowCallback):
        columns = ("progress/batches",)

        def on_window(self, window: Window) -> dict[str, float]:
            return {"own/total_flops": 1.0}

    records = Records()
    run = trainer(tmp_path, Suite([Own(), Flops()]), logger=records, limit_val_batches=1)
    run.fit(Small())
    assert {"own/total_flops", "validate/own/total_flops"} <= records.keys


def test_keys_are_short_or_all() -> None:
    """Other words are refused."""
    with pytest.raises(ConfigError, match="keys='composer' is neither 'short' nor 'all'"):
        Suite([Flops()], keys="composer")


@pytest.mark.parametrize("value", ["", "0", "off", None])
def test_without_the_variable_the_entry_point_adds_nothing(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns an empty list, as Lightning expects."""
    monkeypatch.delenv("LIGHTNING_PERF", raising=False)
    if value is not None:
        monkeypatch.setenv("LIGHTNING_PERF", value)
    assert callbacks() == []


def test_the_entry_point_imports_no_large_package() -> None:
    """Without the variable it imports neither Lightning nor our callbacks."""
    code = (
        "import sys; from lightning_perf.callbacks.factory import callbacks; assert not callbacks()"
        "; print(*sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "LIGHTNING_PERF"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not {"torch", "lightning", "numpy", "lightning_perf.run"} & loaded


def test_the_value_1_enables_the_always_on_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every Trainer gets it through Lightning's entry point."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    run = trainer(tmp_path, logger=False)
    (suite,) = ours(run)
    assert names(suite) == KINDS
    run.fit(Small())
    assert list(tmp_path.rglob("summary.json"))


def test_a_wrong_argument_is_named() -> None:
    """The error has the name of the argument of `always_on`, not that of a callback in it."""
    with pytest.raises(ConfigError, match="show_summary='yes' is neither True nor False"):
        always_on(show_summary="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("installed", "base", "refused"),
    [
        ("2.6.0", str, False),
        ("2.5.2", object, False),
        ("2.5.2", str, True),
        ("2.6.1-of our company", str, False),
        ("2.5.2-of our company", str, True),
    ],
)
def test_a_trainer_that_would_refuse_them_gets_none(
    installed: str, base: type, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers of pytorch_lightning before 2.6 raise an error for callbacks of lightning."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    other = SimpleNamespace(__version__=installed, Callback=base)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)  # type: ignore[arg-type]
    if not refused:
        assert len(callbacks_of_pytorch_lightning()) == 1
    else:
        with pytest.warns(PerfWarning, match=r"ignored: pytorch_lightning 2\.5\.2"):
            assert callbacks_of_pytorch_lightning() == []
        _warn_once.cache_clear()


def test_the_entry_point_raises_for_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in for pytorch_lightning, its Trainer gets a list."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.warns(PerfWarning, match=r"continues without lightning_perf\."):
        assert callbacks_of_pytorch_lightning() == []


@pytest.mark.parametrize(
    "own", [lambda: [Flops(), SpeedMonitor(4)], lambda: [Suite([Flops(), SpeedMonitor(4)])]]
)
def test_parts_that_the_user_has_are_excluded(
    own: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user's own settings apply, alone or in a Suite; checkpoints have one key per kind."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    run = trainer(tmp_path, *own(), enable_checkpointing=True)
    run.fit(Small())
    (suite,) = ours(run)
    assert names(suite) == ["Timings", "SystemMetrics", "Diagnosis", "Hang"]
    keys = [each.state_key for each in run.callbacks]
    assert len(set(keys)) == len(keys)


def test_two_trainers_may_share_a_callback_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lightning adds entry points to the user's list, so the second Trainer gets two suites."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    shared: list[L.Callback] = [L.Callback()]
    for _ in range(2):
        run = trainer(tmp_path, callbacks=shared)
        run.fit(Small())
        assert sum(len(suite.parts) for suite in ours(run)) == len(KINDS)


YAML = """
trainer:
  callbacks:
    - class_path: lightning_perf.Timings
      init_args: {schedule: every 4ba}
    - class_path: lightning_perf.PyTorch
      init_args:
        schedule: {class_path: lightning_perf.Every, init_args: {interval: 8ba}}
"""


def test_a_file_may_name_always_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_tmp: Path
) -> None:
    """Its function is a class_path like any other, beside other callbacks and with arguments."""
    text = "- class_path: lightning_perf.always_on\n  init_args: {show_summary: false}\n"
    (in_tmp / "perf.yaml").write_text(text + "- class_path: lightning_perf.PyTorch\n")
    monkeypatch.setenv("LIGHTNING_PERF", "perf.yaml")
    (suite,) = ours(trainer(tmp_path))
    assert names(suite) == [*names(always_on()), "PyTorch"]
    assert not suite.show_summary


@pytest.mark.parametrize("form", ["trainer", "callbacks", "list"])
def test_a_file_configures_the_callbacks(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_tmp: Path
) -> None:
    """It is YAML of LightningCLI, under `callbacks` or alone. Its path may be relative."""
    lines = YAML.strip().splitlines()[{"trainer": 0, "callbacks": 1, "list": 2}[form] :]
    (in_tmp / "perf.yaml").write_text("\n".join(lines))
    monkeypatch.setenv("LIGHTNING_PERF", "perf.yaml")
    run = trainer(tmp_path, PyTorch(schedule="first 1ba"))
    (suite,) = ours(run)
    timings = suite.parts[0]
    assert isinstance(timings, Timings)
    assert str(timings.schedule) == str(Timings(schedule="every 4ba").schedule)
    run.fit(Small())
    assert names(suite) == ["Timings"]


FLOPS = "- class_path: lightning_perf.Flops\n  init_args: {%s}\n"
WRONG = {
    "missing": (None, "neither 1 nor a YAML file"),
    "no yaml": ("a: [", "cannot be used"),
    "no callbacks": ("model: {}", "without a list of callbacks"),
    "a text": ("hello", "without a list of callbacks"),
    "no list": ("callbacks: 3", "without a list of callbacks"),
    "unknown class": (
        "- class_path: lightning_perf.Flopz",
        "'lightning_perf' has no attribute 'Flopz'",
    ),
    "unknown argument": (FLOPS % "shedule: 1ba", "'shedule' is not "),
    "wrong argument": (FLOPS % "schedule: 10btch", 'Try schedule="every 100ba for 3ba"'),
    "not ours": ("- class_path: lightning.pytorch.callbacks.Timer", "Timer"),
    "twice": (2 * (FLOPS % ""), "twice"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_file_is_a_warning_that_names_the_variable(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_tmp: Path
) -> None:
    """It is one line, once, when the first Trainer is constructed; training has no callbacks."""
    content, why = WRONG[kind]
    if content is not None:
        (in_tmp / "perf.yaml").write_text(content)
    monkeypatch.setenv("LIGHTNING_PERF", "perf.yaml")
    _warn_once.cache_clear()
    with pytest.warns(PerfWarning) as caught:
        runs = [trainer(tmp_path), trainer(tmp_path)]
    (message,) = ours_among(caught)
    assert message.startswith("lightning_perf: LIGHTNING_PERF='perf.yaml' ")
    assert message.endswith("The training run continues without lightning_perf.")
    assert why in message
    assert "\n" not in message
    assert [ours(run) for run in runs] == [[], []]


def test_an_import_that_fails_does_not_end_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a package is missing or too old: one warning names it."""
    monkeypatch.setenv("LIGHTNING_PERF", "1")
    monkeypatch.setitem(sys.modules, "lightning_perf.callbacks.suite", None)
    _warn_once.cache_clear()
    with pytest.warns(PerfWarning, match="lightning_perf.callbacks.suite.*continues without"):
        assert ours(trainer(tmp_path)) == []


SCRIPT = """
import sys
import lightning as L
from helpers.small import Small, trainer
print("argument", *sys.argv[1:])
trainer("out", max_steps=8).fit(Small())
"""


@pytest.mark.slow
def test_an_unchanged_script_is_measured(in_tmp: Path) -> None:
    """A real process: `lightning-perf run` passes the arguments and leaves a summary."""
    (in_tmp / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["-m", "lightning_perf", "run", "--", sys.executable, "train.py", "--lr", "$HOME; ls"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "argument --lr $HOME; ls" in done.stdout
    assert "MFU" in done.stdout
    assert list(in_tmp.glob("out/*/summary.json"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize(
    ("named", "below", "in_traces"),
    [
        (b"caf\xe9", "caf_udce9-version_0", "caf%5Cudce9-version_0"),
        (b'"\\\n\t%s{a}\xc3\xa9', '"____s{a}\xe9-version_0', "%22%5C%0A%09%s{a}\xe9-version_0"),
    ],
    ids=["latin-1", "escaped"],
)
def test_a_name_of_any_bytes_loses_no_file(
    tmp_path: Path, named: bytes, below: str, in_traces: str
) -> None:
    """A folder and a run with such names get every file of every profiler, and whole traces."""
    folder = tmp_path / os.fsdecode(named)
    folder.mkdir()
    torch_pages = {"with_stack": True, "record_shapes": True}
    profilers = [
        PyTorch(schedule="at 2ba", memory_filename="memory.html", **torch_pages),
        VizTracer(schedule="at 5ba", patch=True),
        VizTracer(schedule="at 7ba", compress=False, folder="{run_name}/plain"),
        Memray(schedule="at 9ba", flamegraph=True),
    ]
    logger = CSVLogger(folder, name=folder.name)
    run = trainer(folder, always_on(show_summary=False), *profilers, logger=logger)
    data = TensorDataset(torch.ones(64, WIDTH), torch.ones(64, 1))
    run.fit(Small(), DataLoader(data, 4, num_workers=1))
    files = [path for path in left_in(folder) if path.name != "metrics.csv"]
    left = {path.relative_to(folder / below).as_posix() for path in files}
    assert left == {
        "plain/rank0.8.json", "report.html",
        "memray/rank0.10.bin", "memray/rank0.10.html", "memray/rank0.10.txt",
        "torch_traces/memory.html", "torch_traces/rank0.3.pt.trace.json.gz",
        "viztracer/rank0.6.json.gz",
    }  # fmt: skip
    (trace,) = traces(folder / below / "torch_traces").values()
    assert trace["run_name"] == in_traces
    assert json.loads(gzip.decompress((folder / below / "viztracer/rank0.6.json.gz").read_bytes()))
