"""A real browser for the tests that look at pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_MS = 300_000
"""For a cold browser on a busy machine."""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Run Chromium; give Playwright's ``Browser``."""
    from playwright import sync_api

    sync_api.expect.set_options(timeout=TIMEOUT_MS)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=TIMEOUT_MS)
        yield running
        running.close()


@contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """Serve the page of a run as a user would; yields its address."""
    command = [sys.executable, "-m", "megatron_fleet.cli", "report", str(folder), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield re.search(r"http://\S+", server.stdout.readline())[0]  # type: ignore[index]
        finally:
            server.terminate()


class Opened:
    """A page with everything that it complained about, asked for and did not get.

    Args:
        browser: Playwright's.
        url: of the page.
        options: of the browser's context, such as ``viewport``.
    """

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.failures: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.goto(url)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # what a page was still loading when it was left
            self.failures.append(f"{request.url}: {request.failure}")
