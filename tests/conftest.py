"""Fixtures of all tests: a folder for each, loggers, workers, and a real MLflow server."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import free_port, start_mlflow, stop_mlflow

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

#: Other nox sessions run these, with more packages installed.
collect_ignore = ["ecosystem", "release"]


def is_absent(package: str) -> bool:
    """Whether a package is not installed, or blocked."""
    try:
        return find_spec(package) is None
    except ValueError:  # None in sys.modules
        return True


#: Packages that only some tests need, and that are missing, as on machines lent for their GPU.
ABSENT = set(
    filter(
        is_absent,
        (
            "jsonargparse",
            "memray",
            "mlflow",
            "opentelemetry",
            "pandas",
            "prometheus_client",
            "viztracer",
            "wandb",
        ),
    )
)


def skip_without_package(
    report: pytest.CollectReport | pytest.TestReport, error: BaseException | None, path: Path
) -> None:
    """Turn a failure into a skip if its cause is that a package is not installed, or too old."""
    while error is not None and report.failed:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in ABSENT:
            report.outcome, report.longrepr = "skipped", (str(path), 0, f"{name} is not installed")
        elif str(error).startswith("flamegraph=True needs memray"):  # `nox -s minimums`
            report.outcome, report.longrepr = "skipped", (str(path), 0, str(error))
        error = error.__cause__ or error.__context__


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Skip modules that import a missing package."""
    report = yield
    excinfo = report.call.excinfo
    skip_without_package(report, excinfo and excinfo.value, collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Skip tests that use a missing package."""
    report = yield
    skip_without_package(report, call.excinfo and call.excinfo.value, item.path)
    return report


#: Fixtures that start a server or processes.
SLOW_FIXTURES = {"mlflow_server", "fork_server"}
#: The tests of promises.
PROMISED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
#: Of the cases of a slow test, the quick tier has the first one of this many.
CASES = 6


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that use slow fixtures, and the quick tier.

    It has all tests that are not slow. Of those that are, it has the ones that tests/promises.md
    names, each with some of its cases.
    """
    promised = set(PROMISED.findall(Path(config.rootpath, "tests/promises.md").read_text()))
    cases: Counter[str] = Counter()
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        name = item.nodeid.partition("[")[0]
        slow = item.get_closest_marker("slow") is not None
        if not slow or (name in promised and cases[name] % CASES == 0):
            item.add_marker("quick")
        cases[name] += 1


#: Of the tests of this process. pytest's own search for the next number lists the folders of all
#: earlier tests, which took a minute of 6,000 tests.
NUMBERS = count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each test."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}-{next(NUMBERS)}", numbered=False)


@pytest.fixture(autouse=True)
def in_tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory for each test, so that no test writes into the checkout."""
    folder = tmp_path_factory.mktemp(f"cwd{next(NUMBERS)}", numbered=False)
    monkeypatch.chdir(folder)
    # Nor reads or writes the user's cache.
    monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}-cache")
    if measure := sys.modules.get("lightning_perf.flops.measure"):
        measure.best_peak.cache_clear()
    return folder


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow without a run, to be copied: MLflow takes seconds to create one."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow-tables") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM experiments")  # the default one has a folder of its own
    return path


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_tables: Path) -> Iterator[str]:
    """The address of a real MLflow server."""
    port = free_port()
    server = start_mlflow(tmp_path_factory.mktemp("mlflow"), port, mlflow_tables)
    yield f"http://127.0.0.1:{port}"
    stop_mlflow(server)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory, mlflow_tables: Path) -> str:
    """A tracking address that needs no server."""
    path = shutil.copy(mlflow_tables, tmp_path_factory.mktemp("mlflow-sqlite"))
    return f"sqlite:///{path}"


@pytest.fixture
def worker() -> Iterator[Any]:
    """A worker whose jobs must not raise, as checked by `_no_unexpected_warning`."""
    from lightning_perf.background import Worker

    worker = Worker("test worker")
    yield worker
    assert worker.close(30.0)


@pytest.fixture
def make_writer(tmp_path: Path, worker: Any) -> Any:
    """Makes a trace writer; keyword arguments replace fields of `TraceOptions` and `TraceRun`."""
    from dataclasses import fields, replace

    from lightning_perf.core.progress import Ranks
    from lightning_perf.traces.uploads import TraceRun
    from lightning_perf.traces.writer import TraceOptions, TraceWriter

    options = TraceOptions(
        folder="{run_name}/traces",
        filename="rank{rank}.{batch}.json",
        remote_file_name="/{run_name}/traces/rank{rank}.{batch}.json",
    )
    run = TraceRun(
        worker=worker,
        file_worker=worker,
        root=tmp_path,
        ranks=Ranks(),
        run_name="run",
        backoff=(0.0, 0.0, 0.0),
    )

    def make(targets: Any = (), **changes: Any) -> TraceWriter:
        ours = {f.name: changes.pop(f.name) for f in fields(options) if f.name in changes}
        return TraceWriter(replace(options, **ours), replace(run, **changes), targets)

    return make


@pytest.fixture
def records() -> Any:
    """A Lightning logger that records all metrics."""
    from helpers.small import Records

    return Records()


def pytest_collection_finish() -> None:
    """Leave all that was imported out of collections: each took a second, also in forked ranks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _counts_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no busy machine decide which batches of a compiled module are counted."""
    if meter := sys.modules.get("lightning_perf.run.flop_meter"):
        monkeypatch.setattr(meter, "FREE_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def _no_unexpected_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test whose training logs a warning of ours, as such warnings never raise there."""
    yield
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [r.getMessage() for r in records if r.name == "lightning_perf.warnings"]


@pytest.fixture(autouse=True, scope="session")
def _quiet_lightning() -> None:
    """Keep Lightning's notices out of the output of failing tests."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Any]:
    """Starts processes without imports, by forking a process that has them."""
    from helpers.faults import ForkServer

    fork_server = ForkServer()
    yield fork_server
    fork_server.close()
