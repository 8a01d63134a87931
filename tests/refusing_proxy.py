"""An HTTP proxy for tests that serves nobody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@contextlib.contextmanager
def refusing_proxy(status: int = 403) -> Iterator[list[str]]:
    """Name a proxy in the environment that answers every request with ``status``; give what it was asked for."""
    asked: list[str] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(status)

        do_POST = do_PUT = do_HEAD = do_CONNECT = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server, pytest.MonkeyPatch.context() as patch:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "")  # so that what is added within is gone afterwards
        for name in VARIABLES:
            patch.setenv(name, f"http://user:secret@127.0.0.1:{server.server_address[1]}")
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()
