"""Two processes of a run find that both know its token; nobody else learns it or passes for one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from waiting import HANG_S

from megatron_fleet.cluster import frames, handshake

TOKEN = "the run's token"


class Pipe:
    """Keeps what is written, and lets another side read it."""

    def __init__(self) -> None:
        self.sent, self.reader = b"", asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.sent += data
        self.reader.feed_data(data)


@contextlib.asynccontextmanager
async def listener(token: str, to_listener: Pipe, to_dialler: Pipe) -> AsyncIterator[asyncio.Task]:
    task = asyncio.create_task(handshake.admit(to_listener.reader, to_dialler, token))
    yield task
    to_listener.reader.feed_eof()
    await asyncio.gather(task, return_exceptions=True)


async def test_both_know_the_token():
    there, back = Pipe(), Pipe()
    async with listener(TOKEN, there, back) as admitted:
        proof = await handshake.dial(back.reader, there, TOKEN)
        there.write(frames.pack("rank", proof, {"rank": 0}))
        assert await asyncio.wait_for(admitted, HANG_S) == ["rank", {"rank": 0}]
    assert TOKEN.encode() not in there.sent + back.sent


async def test_a_listener_without_the_token_is_not_believed_and_learns_nothing():
    there, back = Pipe(), Pipe()
    async with listener("a guess", there, back):
        with pytest.raises(handshake.NotOfThisRun, match="does not have this run's token"):
            await handshake.dial(back.reader, there, TOKEN)
    assert len(frames.unpack(there.sent[4:])) == 2  # the nonce and nothing else


async def test_a_listener_cannot_answer_with_what_it_was_sent():
    dialler = handshake.Dialler(TOKEN)
    _, nonce = dialler.hello
    own = dialler.proof(["hello", nonce, handshake._proof(TOKEN, "listener", nonce, nonce)])
    for answer in (["hello", nonce, own], ["hello", nonce, nonce], ["hello", nonce], ["hello", b"", ""], ["config"]):
        with pytest.raises(handshake.NotOfThisRun):
            dialler.proof(answer)


@pytest.mark.parametrize("how", ["another token", "replayed", "no proof", "no hello", "short nonce", "silent"])
async def test_a_dialler_without_the_token_is_not_admitted(how, monkeypatch):
    there, back = Pipe(), Pipe()
    async with listener(TOKEN, there, back):
        there.write(frames.pack("rank", await handshake.dial(back.reader, there, TOKEN), 5))
    recorded = there.sent
    there, back = Pipe(), Pipe()
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.1 if how == "silent" else HANG_S)
    async with listener(TOKEN, there, back) as admitted:
        if how == "another token":
            with pytest.raises(handshake.NotOfThisRun):
                await handshake.dial(back.reader, there, "a guess")
            there.write(frames.pack("rank", handshake._proof("a guess", "dialler", b"", b""), 5))
        elif how == "replayed":
            there.write(recorded)
        elif how == "no proof":
            there.write(frames.pack(*handshake.Dialler(TOKEN).hello) + frames.pack("rank"))
        elif how == "no hello":
            there.write(frames.pack("rank", TOKEN, 5))
        elif how == "short nonce":
            there.write(frames.pack("hello", b""))
        if how == "silent":
            with pytest.raises(TimeoutError):
                await admitted
        else:
            assert await asyncio.wait_for(admitted, HANG_S) is None
