"""Exports the metrics of a run to where infrastructure looks: Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from errno import EEXIST
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.background import Worker
from lightning_perf.checks import needs, whole
from lightning_perf.errors import ConfigError, WarningDigest, describe, printable, redacted, warn
from lightning_perf.files import read_bytes, write_text
from lightning_perf.run.callback import PerfCallback
from lightning_perf.traces.names import safe

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Seconds between two writes of a textfile; and for the last metrics at the end of a run.
INTERVAL, _PATIENCE = 10.0, 5.0
#: The name of every metric begins with it, and a textfile of ours with what follows.
PREFIX, _MARK = "lightning_perf_", b"# HELP lightning_perf_"
#: The live metrics: when the last batch of any stage ended, and the optimizer steps.
LAST_STEP, STEP = "last_step_timestamp_seconds", "step"
#: Parts of a key whose number becomes a label.
_NUMBERED = re.compile(r"(?<![^/])(node|gpu)_(\d+)(?![^/])")
#: The longest name, so that OpenTelemetry takes it.
_LONGEST = 255


@lru_cache(maxsize=10_000)
def named(key: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The name of a metric, its key without numbers, and the numbers as labels.

    Example:
        >>> named("system/node_1/gpu_0/gpu_power")[::2]
        ('lightning_perf_system_node_gpu_gpu_power', (('node', '1'), ('gpu', '0')))
    """
    plain = _NUMBERED.sub(r"\1", key)
    name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", plain)
    return name[:_LONGEST], plain, tuple(_NUMBERED.findall(key))


class Series:
    """The last value of each metric of a run, and its progress, by name and labels.

    Threads of exporters read while the run's threads write.
    """

    def __init__(self, context: Run) -> None:
        # Not the run, which an exporter's thread would keep alive.
        self._progress, self._began, self._pid = context.progress, time.perf_counter(), os.getpid()
        self._values: dict[str, float] = {}
        self.run_name = context.run_name
        ranks, environment = context.ranks, os.environ
        pod = environment.get("POD_NAME", "")
        if "KUBERNETES_SERVICE_HOST" in environment:
            pod = pod or platform.node()
        labels = {
            "run": context.run_name,
            "rank": str(ranks.global_rank),
            "node": str(ranks.node_rank),
            "slurm_job": environment.get("SLURM_JOB_ID", ""),
            "pod": pod,
        }
        # Loggers name runs, some by their address.
        self.labels = {k: printable(redacted(text)) for k, text in labels.items() if text}

    def receive(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of a report."""
        self._values.update(metrics)

    def read(self) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
        """By name: the key, and labels with values. Empty in a fork, such as a loader's worker."""
        if os.getpid() != self._pid:
            return {}
        stages = self._progress.stages.values()
        age = time.perf_counter() - max(self._began, *(each.mark for each in stages))
        now = time.time()  # noqa: TID251 (Prometheus compares it with its own)
        live = {LAST_STEP: round(now - age, 3), STEP: float(self._progress.stages["train"].step)}
        # Two keys may have one name: the later one counts, since a scrape may have no series twice.
        found: dict[str, tuple[str, dict[Any, float]]] = {}
        for key, value in (self._values.copy() | live).items():
            name, plain, own = named(key)
            found.setdefault(name, (plain, {}))[1][own] = value
        return {
            name: (key, [(self.labels | dict(own), value) for own, value in points.items()])
            for name, (key, points) in found.items()
        }


class _Exporter(PerfCallback):
    """Exports from rank 0 what every logger gets, and the progress at the time of a look."""

    @override
    def prepare(self, context: Run) -> None:
        if context.ranks.global_rank != 0 or context.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        series = Series(context)
        context.on_log(partial(self.call, series.receive))
        for close in self.start(context, series):
            # A run that is freed without an end closes it, too, but not one in a forked process.
            context.on_close(weakref.finalize(context, _close_in, os.getpid(), close))

    @abstractmethod
    def start(self, context: Run, series: Series) -> Iterator[Callable[[], object]]:
        """Start to export; yields what ends it, which does not hold the run."""


def _close_in(pid: int, close: Callable[[], object]) -> None:
    if os.getpid() == pid:
        close()


class Prometheus(_Exporter):
    """Lets Prometheus read the metrics of a run: from a port, from a file, or both.

    Rank 0 exports what every logger gets, as gauges with the labels ``run``, ``rank``, ``node``,
    ``slurm_job`` and ``pod``. ``lightning_perf_last_step_timestamp_seconds``, which is read at the
    time of a scrape, finds a run that does not go on. ``docs/configuration.md`` has the names, the
    rules for alerts, and what Prometheus needs in its own configuration. A port that is taken gives
    one warning, and training continues.

    Args:
        port: Serve the metrics on this port while the run lasts; None for the file alone.
        textfile: Write the metrics to this file, whose name ends in ``.prom``, every 10 s, for node
            exporter's textfile collector. It may contain ``{run_name}``. It is removed at the end
            of the run: one that stays is of a run that was killed.
        address: The address of the machine's network at which to serve. The default can be reached
            from this machine alone, because there is no password; ``"0.0.0.0"`` serves all.

    Raises:
        ConfigError: An argument is not valid.
        ModuleNotFoundError: The package prometheus_client is not installed.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Prometheus, always_on
        >>> trainer = L.Trainer(callbacks=[always_on(), Prometheus(port=9464)], logger=False)
    """

    def __init__(
        self,
        port: int | None = 9464,
        textfile: str | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        super().__init__()
        needs("Prometheus", "prometheus_client")
        if port is None and textfile is None:
            raise ConfigError("port", port, "needs a textfile: there is nothing to export", "9464")
        self.port = None if port is None else whole("port", port, 1, "9464", 65535)
        if textfile is not None and not str(textfile).endswith(".prom"):
            problem = "does not end in .prom, as node exporter requires"
            raise ConfigError("textfile", textfile, problem, "'/var/lib/node/{run_name}.prom'")
        self.textfile = textfile
        if not isinstance(address, str) or not address:
            raise ConfigError("address", address, "is not the address of a network", "'0.0.0.0'")
        self.address = address

    @override
    def start(self, context: Run, series: Series) -> Iterator[Callable[[], object]]:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server

        registry = CollectorRegistry()
        registry.register(_Collector(series))
        if self.port is not None:
            try:
                server, _ = start_http_server(self.port, self.address, registry)
                yield partial(_stop, server)
            except (OSError, OverflowError) as error:
                warn(
                    f"Prometheus cannot read this run at {self.address}:{self.port} "
                    f"({describe(error)}). Each run of a machine needs a port of its own: try "
                    f"port={self.port + 1}, or textfile=. Training continues."
                )
        if self.textfile is not None:
            name = str(self.textfile).replace("{run_name}", safe(series.run_name))
            yield _Textfile(Path(name).absolute(), lambda: generate_latest(registry)).close


class _Collector:
    """The collector that prometheus_client calls at each scrape."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, (key, points) in self._series.read().items():
            family = GaugeMetricFamily(name, key, labels=[*points[0][0]])
            for labels, value in points:
                family.add_metric([*labels.values()], value)
            yield family


def _stop(server: Any) -> None:
    # Also the copies that forked processes hold, so that the next run gets the port; and at once.
    with suppress(OSError):
        server.socket.shutdown(socket.SHUT_RDWR)
    server.shutdown()
    server.server_close()


class _Textfile:
    """Writes a file at intervals, on a thread of its own: uploads would delay it."""

    def __init__(self, path: Path, content: Callable[[], bytes]) -> None:
        self._path, self._content = path, content
        self._worker, self._digest = Worker("lightning_perf textfile"), WarningDigest()
        self._is_ours = False
        self._worker.submit(self._write, "the textfile of Prometheus")

    def _write(self) -> None:
        path = self._path
        try:
            with suppress(FileNotFoundError):
                if not self._is_ours and not read_bytes(path).startswith(_MARK):
                    raise FileExistsError(EEXIST, "Another file is there: name a new one", path)
            write_text(path, self._content().decode())
            self._is_ours = True
        except OSError as error:
            why = describe(error)
            self._digest.once("writes", f"Prometheus: {path} is not written ({why}).")
        self._worker.submit(self._write, "the textfile of Prometheus", delay=INTERVAL)

    def close(self) -> None:
        """Remove the file, which would look like that of a run that does not go on."""
        self._worker.abandon(_PATIENCE)
        if self._is_ours:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


class OpenTelemetry(_Exporter):
    """Sends the metrics of a run to an OpenTelemetry collector, as OTLP over HTTP.

    Rank 0 sends what every logger gets, as gauges with the names and labels of `Prometheus`, on a
    thread of OpenTelemetry's SDK. The SDK's own environment variables configure it:
    ``OTEL_EXPORTER_OTLP_ENDPOINT`` (by default ``http://localhost:4318``),
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_METRIC_EXPORT_INTERVAL`` (milliseconds, by default one
    minute), ``OTEL_SERVICE_NAME`` (by default ``lightning_perf``) and others. The end of a run
    waits at most 5 s for the last metrics.

    Raises:
        ModuleNotFoundError: OpenTelemetry's SDK or its OTLP exporter is not installed.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import OpenTelemetry, always_on
        >>> trainer = L.Trainer(callbacks=[always_on(), OpenTelemetry()], logger=False)
    """

    def __init__(self) -> None:
        super().__init__()
        needs("OpenTelemetry", "opentelemetry.exporter.otlp.proto.http")

    @override
    def start(self, context: Run, series: Series) -> Iterator[Callable[[], object]]:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        ours = Resource.create({"service.name": "lightning_perf"})
        provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter())],
            ours.merge(OTELResourceDetector().detect()),  # the user's names take precedence
            shutdown_on_exit=False,
        )
        gauges = _Gauges(provider.get_meter("lightning_perf"), series)
        gauges.receive(dict.fromkeys((LAST_STEP, STEP), 0.0), 0)
        context.on_log(partial(self.call, gauges.receive))
        yield partial(_flush, provider)


class _Gauges:
    """Observable gauges, one per name, made when a metric is first logged."""

    def __init__(self, meter: Any, series: Series) -> None:
        self._meter, self._series = meter, series
        self._keys: set[str] = set()
        self._names: set[str] = set()

    def receive(self, metrics: Mapping[str, float], step: int) -> None:
        for key in metrics.keys() - self._keys:
            self._keys.add(key)
            name, plain, _ = named(key)
            if name not in self._names:
                self._names.add(name)
                observe = partial(self._observe, name)
                self._meter.create_observable_gauge(name, [observe], description=plain)

    def _observe(self, name: str, options: object) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        for labels, value in self._series.read().get(name, ("", []))[1]:
            yield Observation(value, labels)


def _flush(provider: Any) -> None:
    """Send the last metrics; a collector that does not answer is not waited for."""
    worker = Worker("lightning_perf OpenTelemetry")
    try:
        worker.call(provider.shutdown, _PATIENCE)
    except TimeoutError:
        warn(f"OpenTelemetry's collector did not take the last metrics within {_PATIENCE:g} s.")
    finally:
        worker.close(0.0)
