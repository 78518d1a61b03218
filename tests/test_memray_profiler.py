"""Memray: windows of batches become captures and flame graphs of host memory."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import memray
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from small import Records, Small, ours, trainer
from test_unchanged import outcome

from lightning_perf import ConfigError, Fixed, Memray, PerfWarning, VizTracer

MEGABYTES = 5_000_000


class Hungry(Small):
    """Allocates some megabytes in each step, under a name to look for."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eat()
        return super().training_step(batch, batch_idx)

    def eat(self) -> int:
        return len(bytearray(MEGABYTES))


def files(folder: Path) -> list[str]:
    """What lies in the folder of one run, by its path in it."""
    folder = folder / "records-version_0" / "memray"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def meals(capture: Path) -> int:
    """How often a capture saw the step's own allocation."""
    with memray.FileReader(capture) as reader:
        return sum(
            record.size >= MEGABYTES and record.stack_trace()[0][0] == "eat"
            for record in reader.get_allocation_records()
            if record.size
        )


def fit(folder: Path, *profilers: Any, model: Any = None, **options: Any) -> list[str]:
    options = {"logger": Records(), **options}
    trainer(folder, *profilers, **options).fit(model or Hungry())
    return files(folder)


def test_a_compressed_capture_is_a_gzipped_one(tmp_path: Path) -> None:
    """compress=True leaves a .bin.gz that memray reads once it is unpacked."""
    assert fit(tmp_path, Memray(schedule="first 2ba", compress=True)) == ["rank0.2.bin.gz"]
    packed = tmp_path / "records-version_0" / "memray" / "rank0.2.bin.gz"
    plain = tmp_path / "plain.bin"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert meals(plain) == 2


@pytest.mark.parametrize("compress", [False, True])
def test_a_flame_graph_lies_beside_its_capture(tmp_path: Path, compress: bool) -> None:
    """The page names the function that allocates, and loads no script from the web."""
    profiler = Memray(schedule="first 1ba", flamegraph=True, compress=compress)
    capture = "rank0.1.bin.gz" if compress else "rank0.1.bin"
    assert fit(tmp_path, profiler) == [capture, "rank0.1.html"]
    page = (tmp_path / "records-version_0" / "memray" / "rank0.1.html").read_text()
    assert "test_memray_profiler.py" in page
    assert "<script src=" not in page
    assert '<link rel="stylesheet" href="http' not in page


def test_capture_and_flame_graph_are_uploaded(tmp_path: Path, mlflow_database: str) -> None:
    """Both arrive in the run's artifacts, those of the window that ends with training included."""
    logger = MLFlowLogger("memory", tracking_uri=mlflow_database, run_name="crow")
    fit(tmp_path, Memray(schedule=Fixed(14, 2), flamegraph=True), logger=logger)
    found = MlflowClient(mlflow_database).list_artifacts(logger.run_id, "crow/memray")
    names = sorted(Path(entry.path).name for entry in found)
    assert names == ["rank0.16.bin", "rank0.16.html"]


def test_a_page_that_fails_is_told_and_its_capture_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken reporter costs the page alone, with what memray said."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    (tmp_path / "broken" / "memray").mkdir(parents=True)
    (tmp_path / "broken" / "memray" / "__main__.py").write_text("raise SystemExit('planted')")
    (tmp_path / "broken" / "memray" / "__init__.py").touch()
    with pytest.warns(PerfWarning, match=r"rank0\.1\.html was not finished.*planted"):
        found = fit(tmp_path, Memray(schedule="first 1ba", flamegraph=True))
    assert found == ["rank0.1.bin"]


def test_recorders_that_exclude_each_other_record_in_turn(tmp_path: Path) -> None:
    """The window that falls into another recorder's is left out, with one warning."""
    calls = VizTracer(schedule=Fixed(2, 4))
    with pytest.warns(PerfWarning, match="Memray cannot record while VizTracer does") as caught:
        found = fit(tmp_path, calls, Memray(schedule="every 4ba"))
    assert len(ours(caught)) == 1
    assert found == ["rank0.13.bin", "rank0.9.bin"]
    assert len(calls.saved_traces) == 1


def test_a_memray_of_the_user_s_own_goes_on(tmp_path: Path) -> None:
    """While it tracks, windows are left out with one warning and leave no file."""
    with (
        memray.Tracker(tmp_path / "theirs.bin"),
        pytest.warns(PerfWarning, match="while a memray that is not ours does") as caught,
    ):
        found = fit(tmp_path, Memray(schedule="every 3ba"))
    assert len(ours(caught)) == 1
    assert found == []
    assert meals(tmp_path / "theirs.bin") == 16


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Recording changes no loss, no weight and no draw of the random generator."""
    plain = outcome(tmp_path / "plain", logger=Records())
    watched = outcome(tmp_path / "on", Memray(schedule="every 9ba for 2ba"), logger=Records())
    assert files(tmp_path / "on")
    assert plain["losses"] == watched["losses"]
    assert torch.equal(plain["rng"], watched["rng"])
    assert all(map(torch.equal, plain["weights"], watched["weights"]))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("native_trace", "native_trace=True is no option of Memray: did you mean native_traces?"),
        ("trace_python_allocator", "did you mean trace_python_allocators?"),
        ("zzz", "zzz=True is no option of Memray; memray has file_format"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest(option: str, told: str) -> None:
    """Options of ours and of memray are suggested."""
    with pytest.raises(ConfigError) as caught:
        Memray(**{option: True})
    assert told in str(caught.value)


def test_options_reach_memray(tmp_path: Path) -> None:
    """What memray takes besides is handed over, and told in the capture."""
    fit(tmp_path, Memray(schedule="first 1ba", native_traces=True, trace_python_allocators=True))
    with memray.FileReader(tmp_path / "records-version_0" / "memray" / "rank0.1.bin") as reader:
        assert reader.metadata.has_native_traces
        assert reader.metadata.trace_python_allocators
