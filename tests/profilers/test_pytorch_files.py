"""PyTorch: files beside a trace, and the tools that read them."""

from __future__ import annotations

import cProfile
import gzip
import json
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from helpers.pages import loaded_from_elsewhere
from helpers.small import Records, Small, left_in, ours, trainer
from lightning.pytorch.loggers import MLFlowLogger
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lightning_perf import At, ConfigError, Fixed, PerfWarning, PyTorch
from lightning_perf.background import Worker
from lightning_perf.profilers.pytorch import torch_options

pytestmark = pytest.mark.slow

MEMORY: dict[str, Any] = {
    "memory_filename": "rank{rank}.{batch}.pt.trace.memory.html",
    "with_stack": True,
    "record_shapes": True,
    "profile_memory": True,
}


def fit(
    root: Path, *callbacks: L.Callback, model: Small | None = None, **options: Any
) -> dict[str, Path]:
    """The files of a run, by name."""
    trainer(root, *callbacks, **{"logger": Records(), **options}).fit(model or Small())
    folder = root / "records-version_0" / "torch_traces"
    return {path.name: path for path in left_in(folder)}


# -- the memory timeline ------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_a_memory_timeline_beside_each_trace(tmp_path: Path, compress: bool) -> None:
    """The page shows memory by category, and works offline."""
    found = fit(tmp_path, PyTorch(schedule=Fixed(2, 2), compress=compress, **MEMORY))
    suffix = ".gz" if compress else ""
    assert list(found) == [f"rank0.4.pt.trace.json{suffix}", "rank0.4.pt.trace.memory.html"]
    page = found["rank0.4.pt.trace.memory.html"].read_text()
    assert "Memory timeline of cpu" in page
    assert "</span>Parameter</td>" in page
    assert "</span>Gradient</td>" in page
    assert not loaded_from_elsewhere(page)


def test_memory_timelines_have_their_own_artifact_name(
    tmp_path: Path, mlflow_database: str
) -> None:
    """The reference's default: torch_memory_traces, without .gz."""
    from mlflow import MlflowClient  # not where gpu tests run

    logger = MLFlowLogger("memory", tracking_uri=mlflow_database, run_name="wren")
    fit(tmp_path, PyTorch(schedule="first 1ba", **MEMORY), logger=logger)
    client = MlflowClient(mlflow_database)
    pages = client.list_artifacts(logger.run_id, "wren/torch_memory_traces")
    names = sorted(Path(entry.path).name for entry in pages)
    assert names == ["rank0.1.pt.trace.memory.html"]
    beside = client.list_artifacts(logger.run_id, "wren/torch_traces")
    names = sorted(Path(entry.path).name for entry in beside)
    assert names == ["rank0.1.pt.trace.json.gz"]


def test_a_timeline_needs_no_upload(tmp_path: Path, mlflow_database: str) -> None:
    """memory_remote_file_name=None disables the upload of the page only."""
    from mlflow import MlflowClient  # not where gpu tests run

    logger = MLFlowLogger("memory", tracking_uri=mlflow_database, run_name="rook")
    profiler = PyTorch(schedule="first 1ba", memory_remote_file_name=None, **MEMORY)
    fit(tmp_path, profiler, logger=logger)
    sent = MlflowClient(mlflow_database).list_artifacts(logger.run_id, "rook")
    assert {entry.path for entry in sent if entry.is_dir} == {"rook/torch_traces"}
    assert list(tmp_path.rglob("*.memory.html"))


def test_without_torch_s_timeline_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is complete, and no page and no part of one is left."""
    monkeypatch.delattr("torch.profiler.profiler._KinetoProfile.export_memory_timeline")
    assert not hasattr(profile, "export_memory_timeline")
    with pytest.warns(PerfWarning, match="memory.html was not finished .*timeline") as caught:
        found = fit(tmp_path, PyTorch(schedule="first 1ba", **MEMORY))
    assert len(ours(caught)) == 1
    assert list(found) == ["rank0.1.pt.trace.json.gz"]


def test_torch_does_not_warn_about_cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch warn that cycles are lost, although a window has one."""
    prepare = profile.prepare_trace

    def warning(self: profile) -> None:
        prepare(self)
        if not self.acc_events:
            warnings.warn("Profiler clears events at the end of each cycle.", stacklevel=1)

    monkeypatch.setattr(profile, "prepare_trace", warning)
    found = fit(tmp_path, PyTorch(schedule="every 6ba"))
    assert len(found) == 2


def test_the_end_of_a_window_does_not_process_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would delay training by up to ten times what it needs to stop; files need no events."""
    processed: list[None] = []
    monkeypatch.setattr(
        torch.autograd.profiler.profile,
        "_ensure_function_events",
        lambda profiler: processed.append(None),
    )
    assert len(fit(tmp_path, PyTorch(schedule="every 6ba", with_stack=True))) == 2
    assert not processed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_timeline_is_of_the_rank_s_device(tmp_path: Path) -> None:
    """On CUDA the page is about the rank's device."""
    found = fit(tmp_path, PyTorch(schedule=Fixed(2, 2), **MEMORY), accelerator="cuda")
    page = found["rank0.4.pt.trace.memory.html"].read_text()
    assert "Memory timeline of cuda:0" in page
    assert "</span>Parameter</td>" in page


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"memory_filename": "a.json"}, "memory_filename='a.json' does not end in .html"),
        ({"memory_remote_file_name": "a.json"}, "memory_remote_file_name='a.json' does not end"),
        ({"memory_filename": "{rnk}.html"}, "memory_filename='{rnk}.html' has {rnk}"),
        ({"memory_filename": "../a.html"}, "memory_filename='../a.html' leaves its folder"),
        (
            {"memory_filename": "a.html", "with_stack": True},
            "needs record_shapes=True. Try memory_filename='rank{rank}.{batch}.pt.trace.memory.html"
            "', with_stack=True, record_shapes=True, profile_memory=True.",
        ),
        (
            {"memory_filename": "a.html", "profile_memory": False},
            "needs with_stack=True and record_shapes=True and profile_memory=True",
        ),
        ({"use_gzip": True, "compress": False}, "use_gzip=True contradicts compress=False"),
        ({"activities": ["gpu"]}, "activities=['gpu'] is not a list of activities: cpu"),
        ({"activities": "cpu"}, "Try activities=['cpu', 'cuda']"),
        ({"activities": [3]}, "activities=[3] is not a list of activities"),
        (
            {"experimental_config": {"profile_all_thread": True, "verbose": True}},
            f"has an option or a value that torch {torch.__version__} does not know",
        ),
        ({"experimental_config": {"zzz": 1}}, "Try experimental_config={'verbose': True}"),
        ({"use_gzip": "no"}, "use_gzip='no' is neither True nor False"),
    ],
)
def test_invalid_values_are_refused_at_construction(options: dict[str, Any], expected: str) -> None:
    """The message has the field, the value, the problem and a valid example."""
    with pytest.raises(ConfigError) as caught:
        PyTorch(**options)
    assert expected in str(caught.value)


# -- files made of a trace -----------------------------------------------------------------------


def test_files_are_made_while_a_server_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trace and page exist at the end of the run."""
    start = Worker._start
    monkeypatch.setattr(
        Worker, "_start", lambda self: self._name == "lightning_perf" or start(self)
    )
    monkeypatch.setattr("lightning_perf.run.context.UPLOAD_TIMEOUT", {"teardown": 0.1})
    found = fit(tmp_path, PyTorch(schedule="first 1ba", **MEMORY))
    suffixes = ["json.gz", "memory.html"]
    assert list(found) == [f"rank0.1.pt.trace.{suffix}" for suffix in suffixes]


# -- names and metadata -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "rank0.1.pt.trace.json.gz"),
        ({"use_gzip": True}, "rank0.1.pt.trace.json.gz"),
        ({"use_gzip": False}, "rank0.1.pt.trace.json"),
        ({"use_gzip": True, "filename": "{batch}.pt.trace.json.gz"}, "1.pt.trace.json.gz"),
    ],
)
def test_use_gzip_is_composer_s_name_for_compress(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    """Both arguments have the same effect, and .gz is appended once."""
    assert list(fit(tmp_path, PyTorch(schedule="first 1ba", **options))) == [name]


def test_no_secret_of_the_environment_enters_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value of an environment variable is in any file."""
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted-password")
    profiler = PyTorch(schedule="first 2ba", compress=False, **MEMORY)
    found = fit(tmp_path, profiler)
    assert len(found) == 2
    assert not [path for path in found.values() if b"planted-password" in path.read_bytes()]


# -- TensorBoard --------------------------------------------------------------------------------

#: The plugin's documented rule: a worker's name, a number for its span, and the suffix.
PLUGIN = re.compile(r"^(?P<worker>.*?)(?P<span>\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def test_names_follow_tensorboard_s_pattern(tmp_path: Path) -> None:
    """Each rank is a worker and each window a span; other files do not match."""
    profiler = PyTorch(schedule="every 6ba", **MEMORY)
    matches = [PLUGIN.match(name) for name in fit(tmp_path, profiler)]
    assert len(matches) == 4
    found = [match.groups() for match in matches if match]
    assert found == [("rank0", ".13"), ("rank0", ".7")]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_s_plugin_reads_the_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_tb_profiler, if installed, reads the steps of a window."""
    pytest.importorskip("torch_tb_profiler")
    from torch_tb_profiler import consts
    from torch_tb_profiler.profiler.data import RunProfileData

    assert re.sub(r"\s|#.*", "", consts.WORKER_PATTERN.pattern) == re.sub(
        r"\?P<\w+>", "", PLUGIN.pattern
    )
    ((name, path),) = fit(tmp_path, PyTorch(schedule=Fixed(2, 3))).items()
    worker, span = consts.WORKER_PATTERN.match(name).groups()
    read = RunProfileData.parse(worker, span, str(path), str(tmp_path / "cache"))
    data = read[0] if isinstance(read, tuple) else read
    assert data.steps_names == ["2", "3", "4"]


# -- arguments of torch.profiler ----------------------------------------------------------------


def test_yaml_has_names_for_objects_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dict_kwargs reach torch.profiler: activities by name, experimental options as a mapping."""
    from lightning.pytorch.cli import LightningCLI  # not where gpu tests run

    node = {
        "class_path": "lightning_perf.PyTorch",
        "init_args": {"schedule": "first 1ba", "use_gzip": False},
        "dict_kwargs": {
            "activities": ["cpu"],
            "experimental_config": {"verbose": True},
        },
    }
    options = {"logger": False, "accelerator": "cpu", "max_steps": 2, "callbacks": [node]}
    options |= {"default_root_dir": str(tmp_path), "enable_progress_bar": False}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": options}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(config)])
    cli = LightningCLI(Small, run=False, save_config_callback=None, seed_everything_default=False)
    cli.trainer.fit(cli.model)
    (path,) = tmp_path.rglob("rank0.1.pt.trace.json")
    assert json.loads(path.read_text())["traceEvents"]


def test_activities_may_be_names_members_or_mappings() -> None:
    """All forms that torch accepts work, and names."""
    cpu, cuda = ProfilerActivity.CPU, ProfilerActivity.CUDA
    named = torch_options({"activities": ["cpu", cuda, {"CUDA": ["KERNEL"]}]})
    assert named == {"activities": [cpu, cuda, {cuda: ["KERNEL"]}]}


def test_a_profiler_with_options_pickles() -> None:
    """Spawned ranks receive the callback by pickle."""
    options: dict[str, Any] = {"experimental_config": {"verbose": True}, "activities": ["cpu"]}
    sent = pickle.loads(pickle.dumps(PyTorch(**MEMORY, **options)))
    assert sent.options == options
    assert set(sent.further_files) == {"memory_timeline"}


# -- other profilers ----------------------------------------------------------------------------


@pytest.mark.parametrize("with_stack", [False, True])
def test_stacks_are_not_recorded_beside_a_python_profiler(tmp_path: Path, with_stack: bool) -> None:
    """Beside cProfile, windows with stacks are skipped, with one warning."""
    profiler = PyTorch(schedule="every 6ba", with_stack=with_stack)
    watch = cProfile.Profile()
    watch.enable()
    try:
        if with_stack:
            with pytest.warns(PerfWarning, match="while another Python profiler") as caught:
                assert fit(tmp_path, profiler) == {}
            assert len(ours(caught)) == 1
        else:
            assert len(fit(tmp_path, profiler)) == 2
    finally:
        watch.disable()


def test_a_torch_profiler_of_the_user_continues(tmp_path: Path) -> None:
    """Windows during it are skipped, with one warning, and its trace is complete."""
    with profile(activities=[ProfilerActivity.CPU]) as own:
        with pytest.warns(PerfWarning, match="while another torch.profiler") as caught:
            assert fit(tmp_path, PyTorch(schedule="every 6ba")) == {}
        torch.ones(2).sum()
    assert len(ours(caught)) == 1
    own.export_chrome_trace(str(tmp_path / "own.json"))
    assert "aten::mse_loss" in (tmp_path / "own.json").read_text()


class Profiling(Small):
    """Starts a torch profiler of its own in two steps: in a warm-up of ours, and in a window."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step not in (4, 9):
            return super().training_step(batch, batch_idx)
        with profile(activities=[ProfilerActivity.CPU]) as own:
            loss = super().training_step(batch, batch_idx)
        self.seen.append("aten::mse_loss" in {event.key for event in own.key_averages()})
        return loss


def test_a_torch_profiler_of_the_user_may_start_in_a_window(tmp_path: Path) -> None:
    """Ours ends its recording before, with one warning, because torch would crash."""
    prepare, model = torch.autograd.profiler.profile._prepare_trace, Profiling()
    with pytest.warns(PerfWarning, match="while another torch.profiler") as caught:
        found = fit(tmp_path, PyTorch(schedule="every 4ba for 3ba" & ~At("0ba")), model=model)
    assert model.seen == [True, True]
    assert len(ours(caught)) == 1
    assert found
    assert torch.autograd.profiler.profile._prepare_trace is prepare


class Waiting(L.Callback):
    """Steps a torch profiler of its own, which warms up while a window of ours would open."""

    @override
    def on_train_start(self, *args: Any) -> None:
        phases = schedule(wait=1, warmup=4, active=2, repeat=1)
        self.own = profile(activities=[ProfilerActivity.CPU], schedule=phases)
        self.own.start()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.own.step()

    @override
    def on_train_end(self, *args: Any) -> None:
        self.own.stop()


def test_no_window_opens_while_a_torch_profiler_of_the_user_warms_up(tmp_path: Path) -> None:
    """Torch would crash in that profiler's next step."""
    other = Waiting()
    with pytest.warns(PerfWarning, match="while another torch.profiler"):
        found = fit(tmp_path, other, PyTorch(schedule="every 3ba"))
    assert "aten::mse_loss" in {event.key for event in other.own.key_averages()}
    assert found


def test_the_trace_of_a_window_with_a_page_is_complete(tmp_path: Path) -> None:
    """The other files are made from the trace that is kept."""
    found = fit(tmp_path, PyTorch(schedule=Fixed(2, 2), **MEMORY))
    trace = json.loads(gzip.decompress(found["rank0.4.pt.trace.json.gz"].read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("aten::mse_loss") == 2
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= set(names)
