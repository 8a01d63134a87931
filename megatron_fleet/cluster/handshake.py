"""Mutual authentication of two processes of a run by the run's token, which is never sent.

In frames of `cluster.frames`, N and N' being fresh random bytes::

    dialler   ["hello", N]
    listener  ["hello", N', HMAC(token, "listener" N N')]
    dialler   [kind, HMAC(token, "dialler" N N'), ...]      its first application frame

Mutual challenge and response with HMAC-SHA-256, as in ISO/IEC 9798-4. A foreign process that took over the port of a
dead controller or engine fails the handshake, and learns nothing that would let it impersonate one. Later frames are
not encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Any

from megatron_fleet.cluster import frames

NONCE_BYTES = 32
TIMEOUT_S = 30.0
"""Deadline of the whole exchange on the listener's side."""


class NotOfThisRun(ConnectionError):
    """The listener does not know the run's token, or did not prove it."""


class Dialler:
    """Dialling side, for any transport: send ``hello``, read the answer, put its ``proof`` in the next frame."""

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_bytes(NONCE_BYTES)

    @property
    def hello(self) -> tuple[str, bytes]:
        """First frame."""
        return "hello", self._nonce

    def proof(self, answer: list[Any] | None) -> bytes:
        """Return the proof for the listener that sent ``answer``. Raises NotOfThisRun."""
        match answer:
            case ["hello", bytes(nonce), bytes(proof)]:
                if hmac.compare_digest(proof, _proof(self._token, "listener", self._nonce, nonce)):
                    return _proof(self._token, "dialler", self._nonce, nonce)
            case None:
                raise NotOfThisRun("the server there closed the connection")
        raise NotOfThisRun("the server there does not have this run's token")


async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> bytes:
    """Authenticate the listener and return the proof for this side's first frame. Raises NotOfThisRun."""
    dialler = Dialler(token)
    writer.write(frames.pack(*dialler.hello))
    try:
        return dialler.proof(await frames.read(reader, frames.MAX_HELLO))
    except ValueError as error:
        raise NotOfThisRun(f"the server there sent {error}") from error


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> list[Any] | None:
    """Authenticate a dialler and return its first frame without the proof, ``[kind, ...]``; ``None``: it failed.

    Raises:
        ValueError: bytes that are no frame.
        TimeoutError: the exchange exceeded ``TIMEOUT_S``.
    """
    async with asyncio.timeout(TIMEOUT_S):
        hello = await frames.read(reader, frames.MAX_HELLO)
        match hello:
            case ["hello", bytes(nonce)] if len(nonce) == NONCE_BYTES:
                own = secrets.token_bytes(NONCE_BYTES)
            case _:
                return None
        writer.write(frames.pack("hello", own, _proof(token, "listener", nonce, own)))
        frame = await frames.read(reader, frames.MAX_HELLO)
    match frame:
        case [str(kind), bytes(proof), *rest]:
            if hmac.compare_digest(proof, _proof(token, "dialler", nonce, own)):
                return [kind, *rest]
    return None


def _proof(token: str, side: str, dialler: bytes, listener: bytes) -> bytes:
    return hmac.digest(token.encode(), side.encode() + dialler + listener, hashlib.sha256)
