"""Free ports and real MLflow servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_mlflow(folder: Path, port: int, tables: Path | None = None) -> subprocess.Popen[bytes]:
    """A real MLflow server on the loopback, with sqlite; waits until it answers.

    Args:
        folder: Of its files.
        port: One on which nothing listens.
        tables: An empty database, which is copied.
    """
    if tables is not None:
        shutil.copy(tables, folder / "server.db")
    command = [
        # From another environment, if this one has no server.
        os.environ.get("MLFLOW_SERVER_PYTHON", sys.executable), "-m", "mlflow", "server",
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/server.db",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    # Services for jobs, which are not used here, take longer to start than the server itself.
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                if b"200" in connection.recv(64):
                    return server
        except OSError:
            time.sleep(0.2)
    stop_mlflow(server)
    raise RuntimeError((folder / "server.log").read_text())


def stop_mlflow(server: subprocess.Popen[bytes]) -> None:
    """End the server and its child processes."""
    os.killpg(server.pid, 9)
    server.wait()
