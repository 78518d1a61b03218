"""A real browser, told by the page itself when there is something to say."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser")


class Answers(ThreadingHTTPServer):
    """Serves one page, and keeps what the page posts back."""

    def __init__(self, page: str) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.page = page.encode()
        self.posted: Queue[str] = Queue()


class Asked(BaseHTTPRequestHandler):
    """One request to ``Answers``."""

    server: Answers

    def do_GET(self) -> None:
        self.answer(self.server.page)

    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Requests are no test's output."""


def said_in_a_browser(page: str, folder: Path) -> str:
    """The first text that the page posts to its server, however long the browser takes to start."""
    with Answers(page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen(
            [
                str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                f"--user-data-dir={folder / 'profile'}", f"http://127.0.0.1:{server.server_port}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return server.posted.get(timeout=120)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
