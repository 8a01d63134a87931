"""The engine protocol over real sockets, with a generator that needs no model."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from held_ports import held_ports
from waiting import HANG_S, until

from megatron_fleet.agents.token_engine import EngineLost, EngineRefused, Generation, SamplingParams
from megatron_fleet.cluster import frames, handshake
from megatron_fleet.platform.deadlines import deadline
from megatron_fleet.rollout import engine_client
from megatron_fleet.rollout.engine_client import FAR_REQUESTS, _Replica, connect
from megatron_fleet.rollout.engine_server import EngineServer

TOKEN = "secret"


def params(max_tokens: int = 4, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, max_tokens, (3, 9), seed=11)


class Echo:
    """Answers with the reversed prompt; a prompt that starts with 0 never ends, with 1 is refused, 2 and 3 fail."""

    def __init__(self, name: int = 0):
        self.name = name
        self.cancelled = 0
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.sessions: list[str] = []

    async def generate(self, prompt: list[int], sampling: SamplingParams, session: str, images=()) -> Generation:
        self.seen.append((prompt, sampling))
        self.sessions.append(session)
        if prompt[0] == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if prompt[0] == 1:
            raise ValueError("prompt too long")
        if prompt[0] == 2:
            raise EngineLost("core died")
        if prompt[0] == 3:
            raise ZeroDivisionError
        ids = np.array(prompt[::-1], np.int32)
        return Generation(ids, -ids.astype(np.float32) / 3, "stop", ((self.name, 0, len(ids)),))


@contextlib.asynccontextmanager
async def serving(engine: Echo, opened: bool = True):
    server = EngineServer(engine.generate, TOKEN)
    endpoint = await server.listen("127.0.0.1")
    if opened:
        server.open()
    yield server, endpoint
    server.close()


async def test_everything_arrives_as_sent():
    engine = Echo(7)
    async with serving(engine) as (_, endpoint):
        got = await connect([endpoint], TOKEN, HANG_S).generate([5, 151_935, 6], params(), "s")
    assert (engine.seen, engine.sessions) == ([([5, 151_935, 6], params())], ["s"])
    assert got.token_ids.dtype == np.int32 and got.token_ids.tolist() == [6, 151_935, 5]
    assert got.logprobs.dtype == np.float32
    np.testing.assert_array_equal(got.logprobs, -np.array([6, 151_935, 5], np.float32) / 3)
    assert (got.finish_reason, got.versions) == ("stop", ((7, 0, 3),))


async def test_answers_find_their_requests_when_many_share_a_connection():
    async with serving(Echo()) as (_, endpoint):
        engine = connect([endpoint], TOKEN, HANG_S)
        results = await asyncio.gather(*(engine.generate([i, i + 1], params(), str(i)) for i in range(4, 300)))
    assert [r.token_ids.tolist() for r in results] == [[i + 1, i] for i in range(4, 300)]


@pytest.mark.parametrize("token", ["", "wrong", "secret2"])
async def test_a_wrong_token_gets_nothing(token):
    engine = Echo()
    async with serving(engine) as (_, endpoint):
        with pytest.raises(EngineLost):
            await connect([endpoint], token, HANG_S).generate([5], params(), "s")
    assert engine.seen == []


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames.pack("generate", 1, b"", 1.0, 1, [], 0),
        frames.pack("hello", b"x" * frames.MAX_HELLO)[:64],
        b"\xff" * 64,
    ],
)
async def test_a_foreign_peer_is_disconnected(raw):
    engine = Echo()
    async with serving(engine) as (_, endpoint):
        host, port = endpoint.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
    assert engine.seen == []


@pytest.mark.parametrize(
    "request_",
    [
        ("generate", 0, "s", np.zeros(1, np.int32), 1.0, 1, None, 0, None, []),
        ("generate", 0, "s", np.zeros(1, np.int32), 1.0, 1, [], 0, None, 5),
        ("generate", 0, "s", np.zeros(1, np.int64), 1.0, 1, [], 0, None, []),
        ("generate", 0, "s", np.zeros((1, 1), np.int32), 1.0, 1, [], 0, None, []),
        (["generate"],),
    ],
)
async def test_a_client_that_asks_nonsense_is_disconnected(request_):
    engine = Echo()
    async with serving(engine) as (_, endpoint):
        reader, writer = await _Replica(endpoint, TOKEN, HANG_S)._dial()
        writer.write(frames.pack(*request_))
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
    assert engine.seen == []


async def test_cancelling_the_caller_stops_the_request_at_the_engine():
    engine = Echo()
    async with serving(engine) as (_, endpoint):
        pool = connect([endpoint], TOKEN, HANG_S)
        call = asyncio.create_task(pool.generate([0], params(), "s"))
        await until(lambda: engine.seen)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: engine.cancelled == 1)
        assert (await pool.generate([5], params(), "s")).token_ids.tolist() == [5]  # the connection lives on


async def test_a_long_turn_of_an_engine_that_answers_health_questions_is_not_lost(monkeypatch):
    monkeypatch.setattr(engine_client, "HEALTH_SHARE", 1e-5)
    answers = []
    heard = asyncio.Event.set
    monkeypatch.setattr(asyncio.Event, "set", lambda event: (answers.append(event), heard(event))[1])
    engine = Echo()
    async with serving(engine) as (_, endpoint):
        pool = connect([endpoint], TOKEN, HANG_S)
        call = asyncio.create_task(pool.generate([0], params(), "s"))
        (replica,) = pool._replicas
        await until(lambda: answers.count(replica._heard) > 5)
        assert not call.done() and engine.cancelled == 0
        call.cancel()


async def test_an_engine_that_answers_no_health_question_is_lost():
    async def serve(reader, writer):
        assert await handshake.admit(reader, writer, TOKEN) == ["client"]
        asked = [(await frames.read(reader))[0] for _ in range(2)]
        assert asked == ["generate", "health"]
        await reader.read()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        lost = rf"^engine {endpoint} did not answer within 0\.2 s \(rollout\.engine\.health_timeout_s\)$"
        with pytest.raises(EngineLost, match=lost):
            await connect([endpoint], TOKEN, 0.2).generate([5], params(), "s")


async def test_an_engine_that_takes_no_connection_is_lost():
    async with await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineLost, match="did not answer within"):
            await connect([endpoint], TOKEN, 0.1).generate([5], params(), "s")


async def test_what_waits_for_an_engine_that_was_replaced_is_lost_though_its_connection_stays():
    silent, second = Echo(1), Echo(2)
    async with serving(silent) as (_, before), serving(second) as (_, now):
        pool = connect([before], TOKEN, HANG_S)
        call = asyncio.create_task(pool.generate([0], params(), "s"))
        await until(lambda: silent.seen)
        pool.moved(before, now)
        with pytest.raises(EngineLost, match=f"engine {before} closed the connection"):
            await call
        assert (await pool.generate([5], params(), "s")).versions == ((2, 0, 1),)


async def test_refused_and_lost_are_told_apart():
    async with serving(Echo()) as (_, endpoint):
        pool = connect([endpoint], TOKEN, HANG_S)
        with pytest.raises(EngineRefused, match="prompt too long"):
            await pool.generate([1], params(), "a")
        with pytest.raises(EngineLost, match="core died"):
            await pool.generate([2], params(), "a")
        with pytest.raises(EngineLost, match="ZeroDivisionError"):
            await pool.generate([3], params(), "a")


async def test_requests_wait_for_an_engine_that_is_not_open_yet():
    engine = Echo()
    async with serving(engine, opened=False) as (server, endpoint):
        call = asyncio.create_task(connect([endpoint], TOKEN, HANG_S).generate([5], params(), "s"))
        await asyncio.sleep(0.1)
        assert not call.done() and engine.seen == []
        server.open()
        assert (await call).token_ids.tolist() == [5]


async def test_a_dead_engine_fails_everything_in_flight_and_is_found_again_at_its_new_address():
    first = Echo(1)
    with held_ports(1) as (port,):
        relay, endpoint = _Relay(port), f"127.0.0.1:{port}"
        async with serving(first) as (_, target):
            await relay.listen(target)
            pool = connect([endpoint], TOKEN, HANG_S)
            calls = [asyncio.create_task(pool.generate([0, i], params(), str(i))) for i in range(5)]
            await until(lambda: len(first.seen) == 5)
            relay.cut()
            results = await asyncio.gather(*calls, return_exceptions=True)  # long before the deadline of a request
            assert [str(lost) for lost in results] == [f"engine {endpoint} closed the connection"] * 5
            await until(lambda: first.cancelled == 5)  # the engine does not go on for a client that is gone
            with pytest.raises(EngineLost, match="not reachable"):
                await pool.generate([5], params(), "x")
        async with serving(Echo(2)) as (_, target):
            pool.moved(endpoint, target)
            assert (await pool.generate([5], params(), "x")).versions == ((2, 0, 1),)


async def test_a_session_stays_and_new_ones_go_where_there_is_room():
    engines = [Echo(0), Echo(1)]
    async with serving(engines[0]) as (_, a), serving(engines[1]) as (_, b):
        pool = connect([a, b], TOKEN, HANG_S)
        homes = {s: (await pool.generate([5], params(), s)).versions[0][0] for s in map(str, range(64))}
        assert {0, 1} == set(homes.values())  # idle replicas share new sessions
        for session, home in homes.items():
            assert (await pool.generate([6], params(), session)).versions[0][0] == home
        busy = asyncio.create_task(pool.generate([0], params(), "busy"))
        await until(lambda: [0] in [p for e in engines for p, _ in e.seen])
        loaded = next(i for i, e in enumerate(engines) if [0] in [p for p, _ in e.seen])
        for session in map(str, range(100, 120)):
            assert (await pool.generate([5], params(), session)).versions[0][0] == 1 - loaded
        busy.cancel()


class Leaver(Echo):
    """Samples one token, and no more once it is told to leave."""

    def __init__(self):
        super().__init__(1)
        self.leave = asyncio.Event()

    async def generate(self, prompt, sampling, session, images=()):
        self.seen.append((prompt, sampling))
        await self.leave.wait()
        return Generation(np.array([20], np.int32), np.array([-1.0], np.float32), "interrupted", ((1, 0, 1),))


async def test_the_rest_of_a_turn_of_an_engine_that_leaves_is_sampled_by_another():
    leaving, other = Leaver(), Echo(7)
    async with serving(leaving) as (server, first), serving(other) as (_, second):
        pool = connect([first], TOKEN, HANG_S)
        turn = asyncio.create_task(pool.generate([9, 8], params(4), "s"))
        await until(lambda: leaving.seen)
        pool.moved("", second)
        assert (await pool.generate([5], params(), "another")).versions == ((7, 0, 1),)  # where there is room
        pool.leaves(first)
        finishing = asyncio.create_task(server.finish())
        await asyncio.sleep(0.05)
        assert not finishing.done()
        leaving.leave.set()
        await finishing  # its engine may end now
        pool.moved(first, "")
        got = await turn
    assert other.seen[-1][0] == [9, 8, 20] and other.seen[-1][1].max_tokens == 3
    assert got.token_ids.tolist() == [20, 20, 8, 9] and got.versions == ((1, 0, 1), (7, 1, 4))
    assert got.interruptions == 1


async def test_turns_wait_while_all_engines_have_left_and_what_waits_for_a_lost_one_is_lost():
    async with serving(Echo(1)) as (_, first), serving(Echo(2)) as (_, second):
        pool = connect([first], TOKEN, HANG_S)
        lost = asyncio.create_task(pool.generate([0], params(), "a"))
        await until(lambda: pool._replicas[0].in_flight == 1)
        await until(lambda: pool._replicas[0]._writer is not None)
        pool.moved(first, "")
        with pytest.raises(EngineLost):
            await lost
        async with deadline(0.3):
            waiting = asyncio.create_task(pool.generate([5], params(), "a"))
            await asyncio.sleep(0.6)  # longer than the deadline
            assert not waiting.done()
            pool.moved("", second)
            assert (await waiting).versions == ((2, 0, 1),)


@pytest.mark.parametrize(
    "answer", [["done", []], ["done", 0, None, b"", "stop", [], None], ["lost", {}], ["refused", 0], ["done"]]
)
async def test_an_engine_that_answers_nonsense_is_lost(answer):
    async def serve(reader, writer):
        await handshake.admit(reader, writer, TOKEN)
        await frames.read(reader)
        writer.write(frames.pack(*answer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineLost, match="closed the connection"):
            await connect([endpoint], TOKEN, HANG_S).generate([5], params(), "s")


async def test_near_engines_are_preferred_until_they_are_clearly_busier():
    engines = [Echo(0), Echo(1)]
    async with serving(engines[0]) as (_, far), serving(engines[1]) as (_, near):
        far = far.replace("127.0.0.1", "localhost")  # as if on another host
        pool = connect([far, near], TOKEN, HANG_S, host="127.0.0.1")
        for session in map(str, range(16)):
            assert (await pool.generate([5], params(), session)).versions[0][0] == 1
        busy = [asyncio.create_task(pool.generate([0], params(), f"busy {i}")) for i in range(FAR_REQUESTS)]
        await until(lambda: len(engines[1].seen) == 16 + len(busy))
        late = [(await pool.generate([5], params(), f"late {i}")).versions[0][0] for i in range(16)]
        assert 0 in late
        for request in busy:
            request.cancel()
        nowhere_near = connect([far, near], TOKEN, HANG_S, host="10.0.0.9")
        homes = [(await nowhere_near.generate([5], params(), s)).versions[0][0] for s in map(str, range(32))]
        assert set(homes) == {0, 1}


class _Relay:
    """A TCP relay on a fixed port whose connections can be cut, as a killed engine's are."""

    def __init__(self, port: int):
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def listen(self, target: str) -> None:
        host, port = target.split(":")

        async def relay(reader, writer):
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            self._writers += [writer, there_writer]
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

        self._server = await asyncio.start_server(relay, "127.0.0.1", self._port)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)


class Sleeper(Echo):
    """Samples two tokens, then sleeps; asked again, it says the rest."""

    def __init__(self):
        super().__init__()
        self.awake = asyncio.Event()

    async def generate(self, prompt, sampling, session, images=()):
        self.seen.append((prompt, sampling))
        if len(self.seen) > 1:
            await self.awake.wait()
        count = 2 if len(self.seen) == 1 else sampling.max_tokens
        ids = np.arange(count, dtype=np.int32) + 10 * len(self.seen)
        inputs = len(prompt) + count - 1 - sampling.routing_start
        routing = np.full((inputs, 1, 2), len(self.seen), np.uint8)
        reason = "interrupted" if len(self.seen) == 1 else "length"
        return Generation(ids, -ids.astype(np.float32), reason, ((len(self.seen), 0, count),), routing)


async def test_a_turn_goes_on_after_the_sleep_of_its_engine_and_its_deadline_stands_still():
    engine = Sleeper()
    async with serving(engine) as (server, endpoint):
        client = connect([endpoint], TOKEN, HANG_S)
        asked = SamplingParams(1.0, 5, (3, 9), seed=11, routing_start=1)
        server.tell(asleep=True)
        async with deadline(0.5):
            turn = asyncio.create_task(client.generate([5, 6, 7], asked, "s"))
            await until(lambda: len(engine.seen) == 2)
            await asyncio.sleep(1.0)  # longer than the deadline
            server.tell(asleep=False)
            engine.awake.set()
            got = await turn
    (prompt, first), (longer, rest) = engine.seen
    assert (prompt, first) == ([5, 6, 7], asked)
    assert longer == [5, 6, 7, 10, 11] and rest.max_tokens == 3 and rest.seed not in (None, 11)
    assert rest.routing_start == 5 - 1, "of two tokens the last one was no input yet"
    assert got.token_ids.tolist() == [10, 11, 20, 21, 22] and got.logprobs.tolist() == [-10, -11, -20, -21, -22]
    assert got.versions == ((1, 0, 2), (2, 2, 5)) and got.finish_reason == "length"
    assert got.routing is not None and got.routing[:, 0, 0].tolist() == [1] * 3 + [2] * 3
    assert (got.interruptions, got.recomputed) == (1, 5)


async def test_the_deadline_goes_on_when_the_engine_is_awake_or_lost():
    engine = Sleeper()
    async with serving(engine) as (server, endpoint):
        client = connect([endpoint], TOKEN, HANG_S)
        server.tell(asleep=True)
        with pytest.raises(TimeoutError):
            async with deadline(0.3):
                turn = asyncio.create_task(client.generate([5], SamplingParams(1.0, 5, (), 1, 0), "s"))
                await until(lambda: len(engine.seen) == 2)
                server.tell(asleep=False)
                await turn
