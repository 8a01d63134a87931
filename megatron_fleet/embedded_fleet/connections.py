"""ASGI middleware: ends a session when its client is gone, injects connection faults, and checks the token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from megatron_fleet.embedded_fleet.faults import Damage

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

GRACE_S = 0.5
"""Time after the client left for a session to notice by itself."""
POLICY_VIOLATION = 1008
WENT_AWAY = 1011
"""WebSocket close code: the server met an unexpected condition (RFC 6455 §7.4.1)."""


class Connection:
    """One WebSocket, as seen by the session behind it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._damage: Damage | None = None
        self._dead = False

    def damage_next(self, damage: Damage) -> None:
        """Damage the next text frame."""
        self._damage = damage

    async def die(self) -> None:
        """Close the socket under the session; nothing is sent afterwards."""
        self._dead = True
        await self._send({"type": "websocket.close", "code": WENT_AWAY})

    async def send(self, message: Message) -> None:
        if self._dead:
            return
        if self._damage is not None and message["type"] == "websocket.send":
            message, self._damage = {**message, "text": self._damage(message["text"])}, None
        await self._send(message)


_CONNECTION: ContextVar[Connection] = ContextVar("connection")


def connection() -> Connection:
    """Return the connection of the running session. Raises LookupError outside of one."""
    return _CONNECTION.get()


class Guard:
    """Middleware that answers 401, or 403 for a WebSocket, without the token as ``Authorization: Bearer``."""

    def __init__(self, app: Application, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(shown, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})  # before it is accepted: 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


class Connections:
    """Middleware that ends a session when its client is gone, so that it cannot hold its slot and thread forever."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        own = Connection(send)
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        _CONNECTION.set(own)
        session = asyncio.create_task(_run(self._app, scope, inbox.get, own.send))
        listening = asyncio.create_task(_listen(receive, inbox))
        try:
            await asyncio.wait((session, listening), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((session,), timeout=GRACE_S)
        finally:
            listening.cancel()
            session.cancel()
            await asyncio.gather(session, listening, return_exceptions=True)
        if not session.cancelled():
            session.result()


async def _run(app: Application, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _listen(receive: Receive, inbox: asyncio.Queue[Message]) -> None:
    """Forward messages until the client has left."""
    while True:
        message = await receive()
        inbox.put_nowait(message)
        if message["type"] == "websocket.disconnect":
            return
