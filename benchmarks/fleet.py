"""Measures ``lightning-perf runs`` with 1,000 runs in a real MLflow server on sqlite.

    python benchmarks/fleet.py

Prints the requests of the command, its time, and the CPU time that it and the server took: on a
machine that does other work as well, only the CPU time can be compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from mlflow import MlflowClient

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.fleet import add_run, copy_run, summary_of  # noqa: E402
from helpers.servers import free_port, start_mlflow, stop_mlflow  # noqa: E402

RUNS, SHOWN = 1000, 20
#: Counts the requests of the command, in its own process.
COUNTED = """
import atexit, sys
import requests
sent, send = [], requests.Session.send
def counted(*args, **options):
    sent.append(args[1].path_url)
    return send(*args, **options)
requests.Session.send = counted
atexit.register(lambda: print("requests:", len(sent), file=sys.stderr))
from lightning_perf.cli import main
main()
"""


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and of those that it has started."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Fill the server, run the command and print what it took."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        server = start_mlflow(folder, port)
        try:
            address = f"http://127.0.0.1:{port}"
            client = MlflowClient(address)
            verdict = {"code": "input-bound", "severity": "critical", "share": 0.25}
            summary = summary_of("run", verdicts=[verdict | {"culprit": "training DataLoader"}])
            shares = {"input-bound": 0.25}
            first = add_run(
                client, "0", "run", hours=2000, shares=shares, summary=summary, folder=folder
            )
            copy_run(folder / "server.db", first, RUNS - 1)
            for number in range(1, SHOWN):  # copies have no files
                client.log_artifact(f"{number:032x}", str(folder / "summary.json"))
            before, began = cpu_seconds(server.pid), time.perf_counter()
            command = [sys.executable, "-c", COUNTED, "runs", address]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
            seconds, after = time.perf_counter() - began, cpu_seconds(server.pid)
            used = os.times()
            print(done.stderr.strip())
            print(f"{seconds:.1f} s, at a load of {os.getloadavg()[0]:.1f}")
            children = used.children_user + used.children_system
            print(f"CPU time: command {children:.1f} s, server {after - before:.1f} s")
        finally:
            stop_mlflow(server)


if __name__ == "__main__":
    main()
