"""Requests to an endpoint over real HTTP: retries, pauses, refusals, the key; and the first question."""

import asyncio
import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

pytest.importorskip("openai")

from chat_server import MODEL, ChatServer, error, serving
from held_ports import held_ports
from refusing_proxy import refusing_proxy
from starlette.responses import JSONResponse, PlainTextResponse
from waiting import HANG_S

from megatron_fleet.agents import chat_client as module
from megatron_fleet.agents import chat_probe
from megatron_fleet.agents.chat_client import ChatClient, ChatParams, Dialect, PromptTooLong, Usage
from megatron_fleet.agents.chat_probe import probe
from megatron_fleet.agents.token_engine import EngineLost, EngineRefused
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.evaluation import EndpointConfig

KEY = "sk-a-secret"
SAID = {"content": "hi"}
PARAMS = ChatParams(0.5, 40, 11)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(chat_probe, "PAUSE_S", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def endpoint(server, **changes):
    return EndpointConfig(**({"url": server.url, "model": MODEL, "max_retries": 2} | changes))


@contextlib.asynccontextmanager
async def asking(server, timeout_s=HANG_S, dialect=None, **changes):
    """A function that sends one request; its ``failures`` are what was told on the way."""
    with serving(server):
        client = ChatClient(endpoint(server, **changes), timeout_s, dialect)
        failures = []

        async def ask(params=PARAMS):
            messages = [{"role": "user", "content": "hello"}]
            return await client.complete(messages, (), params, lambda *told: failures.append(told))

        ask.failures, ask.client = failures, client
        try:
            yield ask
        finally:
            await client.close()


async def test_what_is_sent_and_what_comes_back():
    """Every sampling parameter, so that a server's own defaults do not decide."""
    server = ChatServer(lambda number, body: SAID)
    async with asking(server, extra_body='{"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": false}}') as ask:
        answer = await ask()
        ask.client.dialect = Dialect("max_completion_tokens", frozenset({"seed", "top_k", "top_p"}))
        await ask()
    first, second = server.bodies
    assert first == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "max_tokens": 40,
        "seed": 11,
        "top_p": 0.9,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert second["top_p"] == 0.9 and "seed" not in second and "top_k" not in second
    assert "max_tokens" not in second and second["max_completion_tokens"] == 40
    assert (answer.message["content"], answer.finish_reason, answer.usage) == ("hi", "stop", Usage(10, 7, 0))
    assert server.keys == {KEY}


@pytest.mark.parametrize(
    "failure",
    [
        error(429, "slow down"),
        error(503, "loading"),
        PlainTextResponse("<html>proxy</html>"),
        JSONResponse({"error": {"message": "upstream"}}),
        JSONResponse({"choices": []}),
    ],
)
async def test_what_may_pass_is_tried_again(failure):
    server = ChatServer(lambda number, body: failure if number < 2 else SAID)
    async with asking(server) as ask:
        assert (await ask()).message["content"] == "hi"
        assert len(ask.failures) == 2 and ask.client.dead is None
        assert all(seconds > 0 for _, seconds in ask.failures)


@pytest.mark.parametrize("key", ["sk-é", "sk\n1"])
def test_a_key_that_cannot_be_sent_is_refused(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match="OPENAI_API_KEY: the key contains a character that an HTTP header cannot hold"):
        ChatClient(EndpointConfig(url="http://endpoint/v1", model=MODEL), HANG_S)


@pytest.mark.slow
@pytest.mark.parametrize("dated", [False, True])
async def test_the_pause_is_the_one_that_the_endpoint_asks_for(dated):
    def refuse(number, body):
        if number:
            return SAID
        until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return error(429, "slow down", {"retry-after": until if dated else "0.7"})

    async with asking(ChatServer(refuse)) as ask:
        began = time.monotonic()
        await ask()
        assert time.monotonic() - began > 0.65
        assert ask.failures[0][0] == "429: slow down" and ask.failures[0][1] > 0.65


async def test_an_endpoint_that_answers_nobody_is_dead_and_one_that_answers_others_is_not():
    server = ChatServer(lambda number, body: error(500, "broken") if body["temperature"] else SAID)
    async with asking(server, max_retries=4) as ask:
        lost, fine = await asyncio.gather(ask(), ask(ChatParams(0.0, 40)), return_exceptions=True)
        assert isinstance(lost, EngineLost) and "in 5 tries: 500: broken" in str(lost)
        assert fine.message["content"] == "hi" and ask.client.dead is None
        with pytest.raises(EngineLost, match="in 5 tries"):
            await ask()
        assert ask.client.dead == "the endpoint does not answer: 500: broken"
        sent = len(server.bodies)
        with pytest.raises(EngineLost, match="does not answer"):
            await ask(ChatParams(0.0, 40))
        assert len(server.bodies) == sent


async def test_a_server_that_is_gone_and_one_that_hangs_are_told_apart():
    given_up = threading.Event()
    server = ChatServer(lambda number, body: (given_up.wait(HANG_S), SAID)[1])
    async with asking(server, timeout_s=0.1, max_retries=0) as ask:
        with pytest.raises(EngineLost, match=r"no answer within 0\.1 s"):
            await ask()
        given_up.set()
    with held_ports(1) as (port,):
        client = ChatClient(EndpointConfig(url=f"http://127.0.0.1:{port}/v1", model=MODEL, max_retries=0), HANG_S)
        with pytest.raises(EngineLost, match="connection"):
            await client.complete([], (), PARAMS, lambda *told: None)


async def test_a_proxy_of_the_environment_is_for_other_networks(monkeypatch):
    with refusing_proxy(502) as asked:
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
        async with asking(ChatServer(lambda number, body: SAID)) as ask:
            assert (await ask()).message["content"] == "hi" and asked == []
        with pytest.raises(UserError, match=r"^eval\.endpoint\.url=http://api\.example\.org/v1: .*socksio"):
            ChatClient(EndpointConfig(url="http://api.example.org/v1", model=MODEL), HANG_S)
        monkeypatch.delenv("all_proxy")
        monkeypatch.delenv("ALL_PROXY")
        client = ChatClient(EndpointConfig(url="http://api.example.org/v1", model=MODEL, max_retries=0), HANG_S)
        with pytest.raises(EngineLost, match=r"502: .* through the proxy http://127\.0\.0\.1:\d+ of the environment"):
            await client.complete([], (), PARAMS, lambda *told: None)
        await client.close()


@pytest.mark.parametrize(
    ("refusal", "kind", "words", "dead"),
    [
        (error(400, "This model's maximum context length is 8 tokens."), PromptTooLong, "8 tokens", False),
        (error(400, "too long", code="context_length_exceeded"), PromptTooLong, "too long", False),
        (error(400, "unknown tool schema"), EngineRefused, r"refuses \(400\): unknown tool schema", False),
        (error(403, "moderated"), EngineRefused, "moderated", False),
        (error(401, "key revoked"), EngineLost, "key revoked", True),
        (error(404, "no such model"), EngineLost, "no such model", True),
        (error(429, "pay", code="insufficient_quota"), EngineLost, "pay", True),
    ],
)
async def test_what_will_not_pass_is_not_tried_again(refusal, kind, words, dead):
    server = ChatServer(lambda number, body: refusal)
    async with asking(server) as ask:
        with pytest.raises(kind, match=words):
            await ask()
        assert len(server.bodies) == 1 and ask.failures == []
        assert (ask.client.dead is not None) == dead


async def test_a_key_that_the_endpoint_repeats_is_told_to_nobody():
    server = ChatServer(lambda number, body: SAID, key="another")
    async with asking(server) as ask:
        with pytest.raises(EngineLost, match=r"Incorrect API key provided: \*\*\*") as lost:
            await ask()
        assert KEY not in str(lost.value) + str(ask.client.dead)


async def ask_first(server, temperatures=(0.7, 0.0), max_tokens=1000, **changes):
    with serving(server):
        return await probe(endpoint(server, **changes), HANG_S, temperatures, max_tokens)


async def test_the_first_question_is_asked_as_episodes_will_ask():
    server = ChatServer(lambda number, body: SAID, key=KEY)
    assert await ask_first(server) == Dialect()
    assert [(b["temperature"], b["max_tokens"], len(b["tools"])) for b in server.probed] == [(0.7, 256, 1), (0, 256, 1)]
    assert server.bodies == []


async def test_the_first_question_finds_the_dialect():
    def picky(body):
        if "seed" in body:
            return error(422, "extra fields not permitted: seed")
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return error(400, message, param="max_tokens", code="unsupported_parameter")
        return None

    server = ChatServer(lambda number, body: SAID, probes=picky)
    assert await ask_first(server) == Dialect("max_completion_tokens", frozenset({"seed"}))
    assert len(server.probed) == 4


@pytest.mark.parametrize(
    "says", ["Unrecognized request arguments supplied: min_p, top_k", "extra fields", "seed, top_p"]
)
async def test_sampling_parameters_that_are_refused_are_left_out_and_told(says):
    unknown = {"seed", "top_p"} if "top_p" in says else {"top_k", "min_p"}
    server = ChatServer(lambda number, body: SAID, probes=lambda body: error(400, says) if unknown & {*body} else None)
    dialect = await ask_first(server)
    assert len(server.probed) == 3 and server.probed[-1]["frequency_penalty"] == 0
    assert unknown <= dialect.refused <= {*unknown, "repetition_penalty"}
    assert dialect.left_to_server({"min_p": 0.1}) == sorted(dialect.refused - {"seed", "min_p"})


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (error(403, "not yours"), r"the key in OPENAI_API_KEY is refused \(403: not yours\)"),
        (error(429, "pay", code="insufficient_quota"), r"no quota left \(429: pay\)"),
        (
            error(400, "temperature must be 1", param="temperature"),
            r"rollout\.sampling\.temperature=0\.7: org/model does not accept",
        ),
        (error(400, '"auto" tool choice requires --enable-auto-tool-choice'), "does not accept tools .* tool calling"),
        (error(400, "no thanks."), r"refuses a request to model org/model \(400: no thanks\); change"),
        (error(503, "loading"), r"no answer in 3 tries \(503: loading\)"),
        (error(429, "tomorrow", {"retry-after": "86400"}), r"no answer in 1 tries \(429: tomorrow\)"),
    ],
)
async def test_the_first_question_stops_what_cannot_work(refusal, words):
    server = ChatServer(lambda number, body: SAID, probes=lambda body: refusal)
    with pytest.raises(UserError, match=words):
        await ask_first(server)


async def test_greedy_that_is_refused_names_its_own_switch():
    server = ChatServer(
        lambda number, body: SAID, probes=lambda body: None if body["temperature"] else error(400, "temperature is 0")
    )
    with pytest.raises(
        UserError, match=r"eval\.greedy=true: org/model does not accept temperature=0 .* set it to false"
    ):
        await ask_first(server)


async def test_a_wrong_key_a_missing_key_and_an_unknown_model(monkeypatch):
    with pytest.raises(UserError, match=r"the key in OPENAI_API_KEY is refused \(401: .*\*\*\*\)") as refused:
        await ask_first(ChatServer(lambda number, body: SAID, key="another"))
    assert KEY not in str(refused.value)
    with pytest.raises(UserError, match=r"org/other: http.* does not have this model .* it has org/model\."):
        await ask_first(ChatServer(lambda number, body: SAID), model="org/other")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="a key is needed, and OPENAI_API_KEY is not set"):
        await ask_first(ChatServer(lambda number, body: SAID, key=KEY))
    await ask_first(ChatServer(lambda number, body: SAID))
