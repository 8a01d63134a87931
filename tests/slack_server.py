"""A server with the part of Slack's Web API that the project uses: real HTTP, requests checked against what Slack
publishes (docs.slack.dev/reference/methods, /reference/block-kit), blocks also by Slack's own classes."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from slack_sdk.models.blocks import Block

TOKEN = "xoxb-1234-5678-" + "abcdefghijkl"
CHANNEL, CHANNEL_ID = "#training-runs", "C0TRAINING1"
FORM, JSON = "application/x-www-form-urlencoded", "application/json"
BOOLEAN = {True, False, "1", "0", "true", "false"}
METHODS: dict[str, tuple[set[str], set[str], set[str]]] = {
    # Required and optional arguments besides the token, and content types.
    "auth.test": (set(), set(), {FORM, JSON}),
    "chat.postMessage": (
        {"channel"},
        {"text", "blocks", "thread_ts", "unfurl_links", "unfurl_media", "mrkdwn", "reply_broadcast", "metadata"},
        {FORM, JSON},
    ),
    "files.getUploadURLExternal": ({"filename", "length"}, {"alt_txt", "snippet_type"}, {FORM}),
    "files.completeUploadExternal": (
        {"files"},
        {"channel_id", "channels", "thread_ts", "initial_comment", "blocks"},
        {FORM, JSON},
    ),
}

Fault = Callable[["_Handler"], bool]
"""Answers a request instead of the server, or returns ``False``: then the server answers."""


@dataclass
class SlackServer:
    """What was posted, and what was wrong with requests.

    Attributes:
        messages: of the channel, in order; those with a file have its bytes as ``file``.
        problems: sentences about requests that Slack would not take as they are.
        faults: each is for one request, in order.
    """

    token: str = TOKEN
    scopes: str = "chat:write,files:write"
    channels: dict[str, str] = field(default_factory=lambda: {CHANNEL: CHANNEL_ID, CHANNEL_ID: CHANNEL_ID})
    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    uploads: dict[str, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    posts: int = 0

    def texts(self) -> list[str]:
        return [message["text"] for message in self.messages]

    def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Slack's answer to arguments that are in order."""
        if method == "auth.test":
            return {"ok": True, "url": "https://team.slack.com/", "team": "T", "user": "bot", "user_id": "U1"}
        if method == "files.getUploadURLExternal":
            number = f"F{len(self.uploads)}"
            self.uploads[number] = (arguments, b"")
            return {"ok": True, "upload_url": f"{self.url}upload/{number}", "file_id": number}
        if method == "files.completeUploadExternal":
            return self._complete(arguments)
        return self._post(arguments)

    def _post(self, arguments: dict[str, Any]) -> dict[str, Any]:
        channel = self.channels.get(arguments["channel"])
        if channel is None:
            return {"ok": False, "error": "channel_not_found"}
        blocks = arguments.get("blocks", [])
        blocks = json.loads(blocks) if isinstance(blocks, str) else blocks
        if not blocks and not arguments.get("text"):
            return {"ok": False, "error": "no_text"}
        self._check_blocks(blocks)
        return self._append(channel, arguments.get("thread_ts"), arguments.get("text", ""), blocks=blocks)

    def _complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        files = json.loads(arguments["files"]) if isinstance(arguments["files"], str) else arguments["files"]
        for file in files:
            if not {"id"} <= file.keys() <= {"id", "title", "highlight_type"} or file["id"] not in self.uploads:
                return {"ok": False, "error": "file_not_found"}
            asked, content = self.uploads[file["id"]]
            if len(content) != int(asked["length"]):
                self.problems.append(f"{len(content)} bytes were uploaded, {asked['length']} were announced")
        channel = arguments.get("channel_id", "")
        if not re.fullmatch(r"[CGD][A-Z0-9]{8,}", channel):
            return {"ok": False, "error": "invalid_channel"}
        if channel not in self.channels:
            return {"ok": False, "error": "channel_not_found"}
        content = self.uploads[files[0]["id"]][1]
        self._append(channel, arguments.get("thread_ts"), arguments.get("initial_comment", ""), file=content)
        return {"ok": True, "files": [{"id": file["id"], "title": file.get("title", "")} for file in files]}

    def _append(self, channel: str, thread: str | None, text: str, **more: Any) -> dict[str, Any]:
        if thread is not None and thread not in {m["ts"] for m in self.messages if m["thread_ts"] is None}:
            return {"ok": False, "error": "thread_not_found"}
        if len(text) > 4000:
            self.problems.append(f"a text of {len(text)} characters; Slack advises at most 4,000")
        self.posts += 1
        stamp = f"1700000000.{self.posts:06}"
        self.messages.append({"channel": channel, "ts": stamp, "thread_ts": thread, "text": text, **more})
        return {"ok": True, "channel": channel, "ts": stamp, "message": {"text": text, "ts": stamp}}

    def _check_blocks(self, blocks: list[dict[str, Any]]) -> None:
        if len(blocks) > 50:
            self.problems.append(f"{len(blocks)} blocks")
        for block, parsed in zip(blocks, Block.parse_all(blocks), strict=True):
            parsed.validate_json()  # lengths of headers and fields
            if parsed.to_dict() != block:
                self.problems.append(f"{block} has what Slack's {type(parsed).__name__} has not")
            text = block["text"]
            if not 1 <= len(text["text"]) <= (150 if block["type"] == "header" else 3000):
                self.problems.append(f"the text of a {block['type']} has {len(text['text'])} characters")
            if text["type"] == "mrkdwn" and re.search(r"<(?![@#!]?[A-Z]|https?:)|&(?!amp;|lt;|gt;)", text["text"]):
                self.problems.append(f"unescaped: {text['text']!r}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    slack: SlackServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        method = self.path.removeprefix("/api/")
        self.slack.methods.append(method.split("/")[0])
        if self.slack.faults and self.slack.faults.popleft()(self):
            return
        if method.startswith("upload/"):
            number = method.removeprefix("upload/")
            self.slack.uploads[number] = (self.slack.uploads[number][0], body)
            self.answer(200, b"OK - 1", "text/plain")
            return
        self.answer(200, json.dumps(self._called(method, body)).encode(), scopes=self.slack.scopes)

    def _called(self, method: str, body: bytes) -> dict[str, Any]:
        if method not in METHODS:
            return {"ok": False, "error": "unknown_method"}
        required, optional, types = METHODS[method]
        kind = self.headers["Content-Type"].split(";")[0].strip()
        if kind not in types:
            return {"ok": False, "error": "invalid_form_data"}
        arguments = json.loads(body) if kind == JSON else dict(parse_qsl(body.decode(), keep_blank_values=True))
        authorization = self.headers["Authorization"]
        if "token" in arguments or not authorization:
            self.slack.problems.append(f"{method}: the token belongs into the header Authorization")
            return {"ok": False, "error": "not_authed"}
        if authorization != f"Bearer {self.slack.token}":
            return {"ok": False, "error": "invalid_auth"}
        if not required <= arguments.keys() <= required | optional:
            self.slack.problems.append(f"{method}: arguments {sorted(arguments)}")
            return {"ok": False, "error": "invalid_arguments"}
        wrong = [k for k, v in arguments.items() if k.startswith("unfurl") and v not in BOOLEAN]
        wrong += [k for k, v in arguments.items() if k in ("thread_ts", "text") and not isinstance(v, str)]
        if wrong:
            self.slack.problems.append(f"{method}: {wrong} have values of another type")
        return self.slack.call(method, arguments)

    def answer(self, status: int, body: bytes, kind: str = JSON, scopes: str | None = None, **headers: str) -> None:
        """Send a response; ``headers`` with ``_`` for ``-``."""
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **({"X-OAuth-Scopes": scopes} if scopes is not None else {}),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def rate_limited(seconds: str) -> Fault:
    """As Slack answers when an app calls too often."""

    def fault(request: _Handler) -> bool:
        request.answer(429, b'{"ok":false,"error":"ratelimited"}', Retry_After=seconds)
        return True

    return fault


def unavailable(request: _Handler) -> bool:
    """As a proxy answers before a service that is down."""
    request.answer(503, b"<html>Service Unavailable</html>", "text/html")
    return True


def cut(request: _Handler) -> bool:
    """Close the connection without an answer."""
    request.close_connection = True
    return True


def refusing(error: str) -> Fault:
    """Slack's own refusal."""

    def fault(request: _Handler) -> bool:
        request.answer(200, json.dumps({"ok": False, "error": error}).encode())
        return True

    return fault


def held(until: threading.Event) -> Fault:
    """Answer only after the event."""

    def fault(_: _Handler) -> bool:
        until.wait()
        return False

    return fault


@contextlib.contextmanager
def slack_server(port: int = 0) -> Iterator[SlackServer]:
    """Serve on loopback within; the requests must all be in order at the end."""
    slack = SlackServer()
    handler = type("Handler", (_Handler,), {"slack": slack})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    slack.url = f"http://127.0.0.1:{server.server_port}/api/"
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    try:
        yield slack
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
    assert slack.problems == []
