"""A real browser that posts the results of a page."""

from __future__ import annotations

import os
import re
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


class PageServer(ThreadingHTTPServer):
    """Serves one page and stores what it posts."""

    def __init__(self, page: str) -> None:
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.page = page.encode()
        self.posted: Queue[str] = Queue()


class PageHandler(BaseHTTPRequestHandler):
    """Handles one request to ``PageServer``."""

    server: PageServer

    def do_GET(self) -> None:
        self.respond(self.server.page)

    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.respond(b"")

    def respond(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Requests must not appear in the test output."""


def text_from_browser(page: str, folder: Path) -> str:
    """The first text that the page posts to its server; waits for the browser to start."""
    with PageServer(page) as server:
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


def without_policy(page: str) -> str:
    """A page that lets a test's own script run, too."""
    found = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n', "", page)
    assert found != page, "the page has a policy"
    return found
