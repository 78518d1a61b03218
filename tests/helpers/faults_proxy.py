"""A proxy of a real server that fails in the mode set in a file."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from helpers.servers import free_port

#: Longer than any timeout.
_HELD = 120.0


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, timeout = True, False, 0.02
    proxy: Proxy

    def handle_error(self, *_: Any) -> None:
        """Ignore disconnected clients, which are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        mode = proxy.mode
        (proxy.folder / f"seen-{mode}").touch()
        if mode == "hang":
            proxy.released.wait(_HELD)
        elif mode == "garbage":
            self._answer(200, b"<html>Please log in.</html>", [("Content-Type", "text/html")])
        elif mode in ("500", "503") or (mode in ("403", "413") and "artifacts" in self.path):
            self._answer(int(mode), b"{}", [("Content-Type", "application/json")])
        elif mode == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        elif mode != "drop":
            self._forward(body)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815  (the library's names)

    def _forward(self, body: bytes) -> None:
        real = http.client.HTTPConnection("127.0.0.1", self.server.proxy.behind, timeout=60)
        headers = dict(self.headers.items()) | {"Connection": "close"}
        real.request(self.command, self.path, body, headers)
        answer = real.getresponse()
        lengths = ("content-length", "transfer-encoding", "connection")
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in lengths]
        self._answer(answer.status, answer.read(), kept)
        real.close()

    def _answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status)
        for key, value in [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]:
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


class Proxy:
    """Forwards requests, or fails them as its `mode` says; a training may change the mode.

    Modes: pass, down (nothing listens), hang (accepted, never answered), drop, cut (an answer in
    part), garbage (a page of HTML), 500 and 503 (for everything), 403 and 413 (for files).
    """

    def __init__(self, folder: Path, behind: int, mode: str = "pass") -> None:
        self.folder, self.behind, self.port = folder, behind, free_port()
        folder.mkdir(parents=True)
        (folder / "mode").write_text(mode)
        self.released, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def mode(self) -> str:
        return (self.folder / "mode").read_text()

    def recover(self) -> None:
        """Forward all requests from now on, including those that hang."""
        switch(self.folder, self.port, "pass")
        self.released.set()

    def close(self) -> None:
        self.released.set()
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        server: _Server | None = None
        while not self._closed.is_set():
            if self.mode == "down":
                if server is not None:
                    server.server_close()
                server = None
                time.sleep(0.02)
            elif server is None:
                server = _Server(("127.0.0.1", self.port), _Handler)
                server.proxy = self
            else:
                server.handle_request()
        if server is not None:
            server.server_close()


def switch(folder: Path, port: int, mode: str) -> None:
    """Change a proxy's mode atomically, from any process; it listens from then on."""
    (new := folder / "new").write_text(mode)
    new.replace(folder / "mode")
    deadline = time.monotonic() + 60
    while mode == "pass" and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.02)
