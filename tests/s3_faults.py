"""A proxy in front of a server of S3 or GCS that does to chosen requests what networks and stores do."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from gcs_server import GCSServer
from s3_server import S3Server

DROPPED = {"connection", "expect", "keep-alive", "transfer-encoding"}
"""Headers about one connection, which are not forwarded. Signatures do not cover them."""
REASONS = {
    401: "Unauthorized",
    403: "AccessDenied",
    404: "NoSuchUpload",
    409: "ConditionalRequestConflict",
    500: "InternalError",
    503: "SlowDown",
}
PIECE = 16 << 10


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match.

    Attributes:
        kind: ``refuse``: ``status`` without the request reaching the server; ``lose``: the server does what it is
            asked, and the answer is ``status``; ``cut``: the connection is reset in the middle of the longer body, of
            the request or the answer; ``flip``: a bit of the longer body is another one; ``first``: ``act`` is called
            before the request reaches the server.
        match: regular expression of method, path and query, as ``PUT /bucket/a/b?partNumber=1``.
        retry_after: seconds of the header of this name.
    """

    kind: Literal["refuse", "lose", "cut", "flip", "first"]
    match: str
    times: int = 1
    status: int = 503
    retry_after: int | None = None
    act: Callable[[], Any] = lambda: None


class FaultyStore:
    """The proxy. ``endpoint`` is its address; ``requests`` are those that came, as `Fault.match` sees them."""

    def __init__(self, server: S3Server | GCSServer, bytes_per_s: float | None = None) -> None:
        """``bytes_per_s``: of each connection, each way."""
        self.target = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        self.bytes_per_s = bytes_per_s
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.store = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def plan(self, *faults: Fault) -> None:
        """Replace what is to happen."""
        with self._lock:
            self._faults = list(faults)
            self.requests.clear()

    def left(self) -> int:
        """Number of planned faults that have not happened."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def take(self, request: str) -> Fault | None:
        """Note a request; the fault that happens to it."""
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.match, request):
                    fault.times -= 1
                    return fault
            return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    store: FaultyStore

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _do(self) -> None:
        fault = self.server.store.take(f"{self.command} {self.path}")
        kind = None if fault is None else fault.kind
        length = int(self.headers.get("Content-Length", 0))
        if kind == "cut" and length:
            self.rfile.read(length // 2)
            self._reset()
            return
        body = b"".join(self._paced(self.rfile.read, length))
        if fault is not None and kind == "refuse":
            self._refuse(fault)
            return
        if fault is not None and kind == "first":
            fault.act()
        if kind == "flip" and body:
            body = flipped(body)
        try:
            status, reason, headers, answer = self._forward(body)
        except (OSError, http.client.HTTPException):
            self._reset()  # the server is down
            return
        if fault is not None and kind == "lose":
            self._refuse(fault)
            return
        if kind == "flip" and not body:
            answer = flipped(answer)
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in DROPPED:
                self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if kind == "cut":
            self.wfile.write(answer[: len(answer) // 2])
            self._reset()
            return
        sent = iter(range(0, len(answer), PIECE))
        list(self._paced(lambda count: self.wfile.write(answer[(at := next(sent)) : at + count]), len(answer)))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _paced(self, move: Callable[[int], Any], length: int) -> Any:
        """Yield what ``move`` returns for each piece of ``length`` bytes, as fast as the line is."""
        for at in range(0, length, PIECE):
            count = min(PIECE, length - at)
            yield move(count)
            if self.server.store.bytes_per_s is not None:
                time.sleep(count / self.server.store.bytes_per_s)

    def _forward(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.store.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in DROPPED:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return response.status, response.reason, response.getheaders(), response.read()
        finally:
            connection.close()

    def _refuse(self, fault: Fault) -> None:
        code = REASONS[fault.status]
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planned</Message></Error>".encode()
        self.send_response_only(fault.status, code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        if fault.retry_after is not None:
            self.send_header("Retry-After", str(fault.retry_after))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        """End the connection by a reset, not by an orderly end."""
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def flipped(data: bytes) -> bytes:
    """One bit in the middle is another one."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
