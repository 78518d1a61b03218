"""What a run costs: hours and energy, and money and CO2 by the user's factors alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.command import call, exit_code
from helpers.fake_nvml import FakeGpu, install
from helpers.small import Small, trainer
from helpers.windows import window_of
from torch import Tensor

from lightning_perf import Diagnosis, PerfWarning, SpeedMonitor, Suite, SystemMetrics, Timings
from lightning_perf.cgroup import usable_cpus
from lightning_perf.core.cost import cost_of, energy
from lightning_perf.run import compat
from lightning_perf.tracking.summary import read_summary, rows

PRICE, CO2 = "LIGHTNING_PERF_PRICE_PER_GPU_HOUR", "LIGHTNING_PERF_KG_CO2_PER_KWH"


@pytest.fixture(autouse=True)
def _no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE, raising=False)
    monkeypatch.delenv(CO2, raising=False)


class Slow(Small):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.06)
        return super().training_step(batch, batch_idx)


def summary_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("summary.json")
    return dict(read_summary(path))


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> dict[str, Any]:
    """The summary of a training that takes the fake GPUs for its own."""
    install(monkeypatch, *gpus)
    monkeypatch.setattr(compat, "GPUS", ("cpu",))
    trainer(folder, Suite([SystemMetrics(0.1), Timings()]), log_every_n_steps=2).fit(Slow())
    return summary_of(folder)


def test_the_power_of_all_gpus_is_integrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs of 250 W and 150 W draw 400 J in each second that was sampled."""
    gpus = FakeGpu("GPU-a"), FakeGpu("GPU-b", power=150_000)
    found = trained(tmp_path, monkeypatch, *gpus)
    whole = found["stages"]["train"]["whole_run"]
    seconds = sum(whole["timings"].values())
    cost = found["cost"]
    assert cost["device"] == "GPU"
    assert cost["hours"] == pytest.approx(seconds / 3600)  # one rank
    assert cost["kwh"] * 3.6e6 <= 400 * (seconds + 0.5)
    assert cost["kwh"] * 3.6e6 == pytest.approx(400 * seconds, rel=0.4)
    assert "money" not in cost
    assert "kg_co2" not in cost


def test_power_that_is_unknown_at_the_end_gives_no_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of GPUs without the sensor, nor a part of the run's."""
    gpu = FakeGpu("GPU-a")
    gpu.values["power"] = install(monkeypatch).NVMLError_NotSupported()
    assert "kwh" not in trained(tmp_path, monkeypatch, gpu)["cost"]
    columns = {"system/gpu_slot_0/gpu_power": [500.0, 0.0], "system/gpu_slot_1/gpu_power": [5.0, 0]}
    assert energy(window_of(columns)) == 505.0
    columns["system/gpu_slot_1/gpu_power"] = [float("nan"), 0.0]
    assert energy(window_of(columns)) == 0.0


def test_a_run_on_cpus_costs_core_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all cores that it may use; idle GPUs of the machine are not its own, and have no price."""
    install(monkeypatch, FakeGpu("GPU-a"))
    monkeypatch.setenv(PRICE, "2.5")
    monkeypatch.setenv(CO2, "0.4")
    trainer(tmp_path, SpeedMonitor(), SystemMetrics(0.1)).fit(Slow())
    found = summary_of(tmp_path)
    seconds = found["stages"]["train"]["whole_run"]["seconds"]
    hours = pytest.approx(usable_cpus() * seconds / 3600)
    assert found["cost"] == {"device": "core", "hours": hours}


def test_each_verdict_has_its_part(tmp_path: Path) -> None:
    """By its share of the time, in a real run and by hand."""
    trainer(tmp_path, Diagnosis(terminal=False), max_epochs=3).fit(Small())
    found = summary_of(tmp_path)
    shares = {each["code"]: each["share"] for each in found["verdicts"] if each["share"]}
    parts = found["cost"].get("verdicts", [])
    assert shares == pytest.approx({p["code"]: p["hours"] / found["cost"]["hours"] for p in parts})
    verdicts = [{"code": "input-bound", "share": 0.25}, {"code": "healthy", "share": 0.0}]
    window = window_of({"system/gpu_slot_0/gpu_power": [7.2e6]})
    assert cost_of(window, "GPU", 4 * 3600.0, verdicts) == {
        "device": "GPU", "hours": 4.0, "kwh": 2.0,
        "verdicts": [{"code": "input-bound", "hours": 1.0, "kwh": 0.5}],
    }  # fmt: skip


def test_money_and_co2_have_the_factors_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the file by the environment, and in a report by its options, which take precedence."""
    monkeypatch.setenv(PRICE, "3600")
    found = trained(tmp_path, monkeypatch, FakeGpu("GPU-a"))
    cost = found["cost"]
    assert cost["money"] == pytest.approx(3600 * cost["hours"])
    assert "(3600 per GPU hour)" in dict(rows(found)[0])["cost"]
    (folder,) = (path.parent for path in tmp_path.rglob("summary.json"))
    options = ("--price-per-gpu-hour", "7200", "--kg-co2-per-kwh", "0.5")
    priced = json.loads(call(capsys, "report", str(folder), *options, "--json")[1])["cost"]
    assert priced["money"] == pytest.approx(7200 * cost["hours"])
    assert priced["kg_co2"] == pytest.approx(0.5 * cost["kwh"])
    assert "kg CO2" in call(capsys, "report", str(folder), *options)[1]
    for text in ("dear", "-1", "nan", "inf", "1e300"):
        assert exit_code("report", str(folder), "--price-per-gpu-hour", text) == 2
        assert f"{text} is not a number from 0 on" in capsys.readouterr().err


def test_a_factor_that_is_none_warns_and_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has begun when it is read."""
    monkeypatch.setenv(PRICE, "two")
    with pytest.warns(PerfWarning, match="PRICE_PER_GPU_HOUR='two' is not a number from 0 on"):
        found = trained(tmp_path, monkeypatch, FakeGpu("GPU-a"))
    assert "money" not in found["cost"]
    assert found["cost"]["hours"] > 0
