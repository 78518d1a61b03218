"""A pytest plugin: with ``--attach FOLDER`` every Trainer in a test has our callbacks.

Their files go to the folder, because many tests list the folder in which they train.

``--outcomes FILE`` writes how each test ended, for a comparison with a run without us, and how many
batches our callbacks counted. ``--only FILE`` collects all tests, and runs those that it lists.
"""

from __future__ import annotations

import json
import shutil
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_perf import Diagnosis, Flops, SpeedMonitor, Suite, SystemMetrics, Timings
from lightning_perf.run.destination import Reporting
from lightning_perf.run.stages import Counters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attach", help="give every Trainer our callbacks, with files in a folder")
    parser.addoption("--outcomes", type=Path, help="a JSON file of how each test ended")
    parser.addoption("--only", type=Path, help="a JSON file of the tests to run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--only"):
        only = {*json.loads(file.read_text())}
        items[:] = [item for item in items if item.nodeid in only]


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--attach"):
        _attach(folder)
        config.pluginmanager.register(_CleanUp())
    # Workers of xdist report to their controller.
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes").resolve()))


def _suite() -> Suite:
    # As `always_on()`, but with a given peak, so that no test waits for a measurement, and with
    # reports in trainings of a few batches.
    peak = 1e12
    speed = SpeedMonitor(window_size=2, gpu_flops_available=peak)
    flops, diagnosis = Flops("4ba", peak_flops=peak), Diagnosis(schedule="4ba", terminal=True)
    return Suite([speed, flops, Timings(), SystemMetrics(), diagnosis], show_summary=True)


def _attach(folder: str) -> None:
    make, report = pl.Trainer.__init__, Reporting.__init__

    @wraps(make)
    def make_with_us(self: pl.Trainer, *args: Any, callbacks: Any = None, **options: Any) -> None:
        theirs = [callbacks] if isinstance(callbacks, pl.Callback) else callbacks or []
        make(self, *args, callbacks=[*theirs, _suite()], **options)

    def report_elsewhere(self: Reporting, *args: Any) -> None:
        report(self, *args)
        self._default_root = folder

    pl.Trainer.__init__ = make_with_us
    Reporting.__init__ = report_elsewhere  # type: ignore[method-assign]


class _CleanUp:
    """Removes files and threads that Lightning's tests would report as leftovers; runs before their
    fixtures end.

    After an exception our threads must end on their own. Ranks that a test spawns write our files
    into their training folder.
    """

    def __init__(self) -> None:
        self.batches = 0
        add = Counters.add

        def counted(*args: Any) -> float:
            self.batches += 1
            return add(*args)

        Counters.add = counted  # type: ignore[method-assign]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append(("batches", self.batches))
        self.batches = 0
        for thread in threading.enumerate():
            if thread.name.startswith("lightning_perf"):
                thread.join(timeout=30)
                assert not thread.is_alive(), f"{thread.name} still runs after its Trainer"
        for folder in Path().glob("run-*"):
            shutil.rmtree(folder)


class _Outcomes:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.ends: dict[str, str] = {}
        self.batches = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.batches += sum(n for name, n in report.user_properties if name == "batches")  # type: ignore[misc]
        # A test that failed in its setup or teardown stays failed.
        failed_before = self.ends.get(report.nodeid) == "failed"
        if not failed_before and (report.when == "call" or report.outcome != "passed"):
            self.ends[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps({"ends": self.ends, "batches": self.batches}))
