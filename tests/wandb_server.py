"""A server that speaks W&B's protocol as far as its client needs it: GraphQL, and the stream of a run's files.

Operations and fields are those of ``core/api/graphql`` in github.com/wandb/wandb.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import socket
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Knows one key; other clients are refused.

    Attributes:
        operations: variables of each operation, by its name.
        rows: what arrived in each file of the runs, such as ``wandb-history.jsonl``.
        exit_codes: of the runs that have ended.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.operations: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.exit_codes: list[int] = []
        self._connections: list[socket.socket] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.wandb = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Go away, with all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> None:
        self._connections.append(connection)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a query or mutation."""
        self.operations[operation].append(variables)
        owner = {"id": "RW50aXR5", "name": "team"}
        project = {"id": "UHJvamVjdA==", "name": variables.get("project") or "p", "entity": owner}
        bucket = {"id": "UnVuOnYx", "name": variables.get("name") or "r", "displayName": "r", "description": None}
        bucket |= {"config": "{}", "sweepName": None, "project": project}
        bucket |= {"historyLineCount": 0, "logLineCount": 0, "eventsLineCount": 0}
        versions = {"max_cli_version": "99.0", "min_cli_version": "0.1"}
        return {
            "viewer": {"id": "VXNlcg==", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"cliVersionInfo": versions, "latestLocalVersionInfo": None, "features": []},
            "upsertBucket": {"bucket": bucket, "inserted": True},
            "model": {"bucket": None, "name": "p"},
            "project": {"run": None},
            "__type": {"inputFields": [], "fields": []},
            "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []},
        }

    def stream(self, content: dict[str, Any]) -> None:
        """Take a message of the stream of a run's files."""
        for name, chunk in (content.get("files") or {}).items():
            self.rows[name] += [json.loads(line) for line in chunk["content"]]
        if content.get("complete"):
            self.exit_codes.append(content["exitcode"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    wandb: WandbServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        self.server.wandb.opened(self.request)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        wandb, known = self.server.wandb, base64.b64encode(f"api:{self.server.wandb.key}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            return self._send({"errors": [{"message": "user is not logged in"}]}, 401)
        if self.path.startswith("/graphql"):
            asked = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            return self._send({"data": wandb.answer(found[1] if found else "", asked.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            wandb.stream(json.loads(body))
        return self._send({})

    do_GET = do_PUT = do_POST = _do

    def _send(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
