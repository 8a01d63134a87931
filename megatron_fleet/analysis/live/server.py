"""``mfleet report RUN --serve``: a page of a run that updates while the run goes on.

Everything that is served, the scripts included, asks for the token that the address in the terminal has; the browser
keeps it as a cookie. The server only reads, and no request names a file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.analysis.failures import CATEGORIES
from megatron_fleet.analysis.live import view
from megatron_fleet.analysis.live.follow import KINDS, RunFollower, Wanted
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.telemetry.charts import STYLE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST, PORT = "127.0.0.1", 8470
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_LISTED = 2000
"""Trajectories that one answer lists."""
NICE = 10
"""The page gives way to the run, when both are on one machine."""
LOOK_S = 1.0
"""Least seconds between two looks at the run's folder, however many pages ask."""
REFUSED = "This page needs the address with the token that `mfleet report --serve` printed.\n"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PARTS = {
    "/live.css": ("text/css", ("report.css", "live.css")),
    "/icon.svg": ("image/svg+xml", ("icon.svg",)),
    "/live.js": ("text/javascript", ("parts.js", "live.js")),
}
"""Path → media type, and the files of the page that it consists of."""


class TokenGuard:
    """ASGI middleware that answers 403 without the token, and adds ``HEADERS`` to every answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        """``cookie``: its name; browsers do not separate those of two ports of a host."""
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope)
        given = request.query_params.get("token", "")
        app: ASGIApp
        if request.url.path == "/" and given and self._equals(given):
            app = RedirectResponse("/", 303)
            app.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
        elif self._equals(request.cookies.get(self._cookie, "")):
            app = self._app
        else:
            app = PlainTextResponse(REFUSED, 403)
        await app(scope, receive, with_headers)

    def _equals(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


class LivePage:
    """Answers of the server."""

    def __init__(self, follower: RunFollower) -> None:
        self._follower = follower
        self._looked = float("-inf")
        self._charts: tuple[int, bytes] = (-1, b"")

    def app(self, token: str, cookie: str) -> ASGIApp:
        """Return the application behind the guard."""
        routes = [
            Route("/", self.page),
            *(Route(path, self.part) for path in PARTS),
            Route("/data/now", self.now),
            Route("/data/charts", self.charts),
            Route("/data/trajectories", self.trajectories),
            Route("/data/trajectory/{kind}-{step:int}-{line:int}", self.trajectory),
            Route("/data/image/{digest}", self.image),
        ]
        handlers: Any = {UserError: _explain}
        app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)], exception_handlers=handlers)
        return TokenGuard(app, token, cookie)

    def page(self, request: Request) -> Response:
        """The page itself, without anything of the run."""
        text = _text("live.html")
        options = "".join(f"<option>{outcome}</option>" for outcome in Outcome)
        return _tagged(request, text.replace("{{ outcomes }}", options).encode(), "text/html")

    def part(self, request: Request) -> Response:
        """Style or script."""
        kind, names = PARTS[request.url.path]
        content = "".join(map(_text, names))
        return _tagged(request, ((STYLE if kind == "text/css" else "") + content).encode(), kind)

    def now(self, request: Request) -> Response:
        """State, tables, timeline and alerts; versions of the rest."""
        with self._follower.lock:
            if time.monotonic() - self._looked >= LOOK_S:
                self._follower.look()
                self._looked = time.monotonic()
        return _json(request, view.now(self._follower, time.time()))

    def charts(self, request: Request) -> Response:
        """Curves, drawn once per change of the metrics."""
        with self._follower.lock:
            version = self._follower.metrics.version
            if self._charts[0] != version:
                self._charts = version, json.dumps(view.curves(self._follower)).encode()
            content = self._charts[1]
        return _tagged(request, content, "application/json")

    def trajectories(self, request: Request) -> Response:
        """Newest trajectories that match the filter of the query."""
        query = request.query_params
        wanted = Wanted(
            kind=query.get("kind", ""),
            step=_count(query, "step"),
            env=query.get("env", ""),
            outcome=query.get("outcome", ""),
            reward=query.get("reward", ""),
            text=query.get("text", ""),
        )
        found = self._follower.search(wanted, min(_count(query, "limit") or 100, MOST_LISTED))
        rows = [view.listed(row) for row in found.rows]
        return _json(request, {"rows": rows, "more": found.more, "searched_to": found.searched_to})

    def trajectory(self, request: Request) -> Response:
        """One trajectory with its messages and tokens."""
        place = request.path_params
        found = self._follower.episode(place["kind"], place["step"], place["line"]) if place["kind"] in KINDS else None
        if found is None:
            raise HTTPException(404, "There is no such trajectory (any more).")
        row, record = found
        labels = {category.key: category.label for category in CATEGORIES}
        return _json(request, {"row": view.listed(row), "record": record, "labels": labels})

    def image(self, request: Request) -> Response:
        """An image of a trajectory, encoded again as a small JPEG."""
        content = self._follower.image(request.path_params["digest"])
        if content is None:
            raise HTTPException(404, "There is no such image.")
        return _tagged(request, content, "image/jpeg")


def serve(folder: Path, host: str = HOST, port: int = PORT) -> None:
    """Serve the page of the run in ``folder`` until the process is stopped. ``port``: 0 = any free one.

    Raises:
        UserError: the folder cannot be read, or the address cannot be used.
    """
    import uvicorn

    follower = RunFollower(folder)
    follower.look()
    token = secrets.token_urlsafe(32)
    with _listen(host, port) as sock:
        port = sock.getsockname()[1]
        app = LivePage(follower).app(token, f"mfleet_{port}")
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        say(f"mfleet: the live page of {folder} is at http://{shown}:{port}/?token={token}")
        if host in LOOPBACK:
            say(f"mfleet: from another machine: ssh -L {port}:{host}:{port} {socket.gethostname()}; Ctrl-C ends it")
        else:
            say("mfleet: whoever has this address can read the run, and nothing encrypts what is sent; Ctrl-C ends it")
        os.nice(NICE)
        # No log of requests, as the first one has the token.
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, ws="none", lifespan="off",
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[sock])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port={port}: ports are 0 to 65535; 0 takes a free one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port={port} is in use on {host}; name another one, or 0 for any free one.") from None
        why = (error.strerror or str(error)).partition(" (while attempting")[0]  # which `create_server` adds
        raise UserError(f"--host={host} --port={port} cannot be listened on ({why}); name another one.") from None


def _text(name: str) -> str:
    return (resources.files("megatron_fleet.analysis") / "page" / name).read_text(encoding="utf-8")


def _count(query: QueryParams, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name} must be a whole number from 0.")
    return int(text)


def _json(request: Request, value: Any) -> Response:
    # Escaped, because texts of a run may have unpaired surrogates.
    return _tagged(request, json.dumps(value, allow_nan=False).encode(), "application/json")


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    """Answer 304 to who has this content already."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    if Headers(scope=request.scope).get("if-none-match", "").removeprefix("W/") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(content, media_type=kind, headers={"ETag": tag})


def _explain(_request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error).encode("utf-8", "replace"), 500)
