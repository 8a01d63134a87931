"""Whatever a verifier does, its episode's reward becomes unknown and the next verifier runs."""

import asyncio
import re

import pytest
from waiting import HANG_S

from megatron_fleet.embedded_fleet import verifier_client
from megatron_fleet.embedded_fleet.tasks import EmbeddedSession, generate
from megatron_fleet.embedded_fleet.verifier_client import Limits, VerifierClient

SESSION = EmbeddedSession(generate(seed=2, per_env=2)[1])
GOOD = SESSION.task.verifier_code


@pytest.fixture
async def client():
    client = VerifierClient(Limits(cpu_s=1, wall_s=HANG_S))
    yield client
    client.close()


@pytest.fixture
async def hasty(monkeypatch):
    """A client that waits for a verifier a moment, and for its host as long as it takes."""
    monkeypatch.setattr(verifier_client, "GRACE_S", HANG_S)
    client = VerifierClient(Limits(cpu_s=1, wall_s=0.5))
    yield client
    client.close()


async def ask(client, code=GOOD, answer=None, conversation=None, current=None):
    current = SESSION.world.current() if current is None else current
    return await client.verify(code, SESSION.world.seed, current, answer, conversation)


def body(*lines):
    return "def validate_task(env, final_answer=None):\n" + "\n".join(f"    {line}" for line in lines)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["while True: pass"], "CPU"),
        (["x = [0] * 10**10"], "MemoryError"),
        (["x = []", "while True: x.append(bytes(10**6))"], "MemoryError"),
        (["raise ValueError('no such table')"], "no such table"),
        (["import sys", "sys.exit(0)"], "SystemExit"),
        (["import os", "os._exit(0)"], "without a verdict"),
        (["import os", "os.abort()"], "without a verdict"),
        (["import os", "return os.fork() * 0 + 1"], "PermissionError"),
        (["import os", "os.system('sleep 60')", "return final_answer"], "NoneType"),
        (["import _thread", "_thread.start_new_thread(print, ())"], "start new thread"),
        (["import socket", "socket.socket()"], "PermissionError"),
        (["import ctypes"], "a verifier cannot import ctypes"),
        (["import _ctypes"], "a verifier cannot import _ctypes"),
        (["open('/etc/hostname')"], "PermissionError"),
        (["open('made', 'w')"], "PermissionError"),
        (["import os, signal", "os.kill(os.getppid(), signal.SIGKILL)", "return 1"], "PermissionError|no verdict"),
        (["return None"], "NoneType"),
        (["return '1'"], "str"),
        (["return {'score': 1}"], "dict"),
        (["return float('nan')"], "nan"),
        (["return validate_task(env)"], "RecursionError"),
        (["class E(Exception):", "    def __str__(self): raise self", "raise E()"], "E"),
        (["return env.db('other')"], "KeyError"),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
async def test_misbehaviour_is_unknown_and_survived(client, lines, reason):
    reward = await ask(client, body(*lines))
    assert reward.value is None
    assert re.search(reason, reward.reason)
    assert (await ask(client)).value == 0.0


def writing(text):
    """A verifier that writes to the pipe of its verdict itself, whose number it can guess."""
    tries = ["for fd in range(3, 256):", f"    try: os.write(fd, {text!r})", "    except OSError: pass"]
    return body("import os", *tries, "os._exit(0)")


@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "-1e999", "NaN", "Infinity", "1e31", "true", '"1"', "[1]", "{}", "[" * 1500, "1, "]
)
async def test_a_made_up_verdict_is_a_number_or_unknown(client, value):
    reward = await ask(client, writing(f'{{"value": {value}, "reason": "mine"}}'.encode()))
    assert reward.value is None and reward.reason.startswith("verifier")
    assert (await ask(client)).value == 0.0


async def test_a_made_up_reason_is_cut(client):
    reward = await ask(client, writing(b'{"value": 7, "reason": "' + b"x" * 3000 + b'"}'))
    assert (reward.value, reward.reason) == (7.0, "x" * 500)
    for text in (b"7", b"[7]", b'{"value": 7}', b"\xff", b"x" * 10**6):
        assert (await ask(client, writing(text))).value is None


async def test_a_host_that_is_no_longer_itself_gives_no_verdict(client, monkeypatch):
    """Whatever it says, `verify` does not raise."""
    for said in ({"value": 10**400, "reason": ""}, {"value": "x", "reason": ""}, {}, [], None):

        async def answer(request, said=said):
            return said

        monkeypatch.setattr(client, "_ask", answer)
        reward = await ask(client)
        assert reward.value is None and "gave no verdict" in reward.reason


async def test_a_verifier_that_waits_ends_at_its_deadline(hasty):
    reward = await ask(hasty, body("import time", "time.sleep(3600)"))
    assert (reward.value, reward.reason) == (None, "verifier ran past its deadline of 0.5 s")


async def test_code_that_is_no_verifier(client):
    for code, reason in (("validate_task(", "SyntaxError"), ("x = 1", "neither"), ("raise OSError('x')", "OSError")):
        reward = await ask(client, code)
        assert (reward.value, reason in reward.reason) == (None, True)


async def test_broken_databases_are_unknown(client):
    reward = await ask(client, current=b"not a database")
    assert reward.value is None


async def test_verdicts(client):
    owner = SESSION.world.query("SELECT agent FROM tickets WHERE agent != 'none'")[0][0]
    assert (await ask(client, body("return True"))).value == 1.0
    assert (await ask(client, body("return 0.25"))).value == 0.25
    assert (await ask(client, body("print('x' * 10**7)", "return 1"))).value == 1.0
    assert (
        await ask(client, body("import re, json, datetime", "return len(env.db('seed').query('SELECT 1'))"))
    ).value == 1
    seen = body("return int(final_answer == 'ab')")
    assert (await ask(client, seen, answer="ab")).value == 1.0
    talk = "def verify(env, conversation=None):\n    return len(conversation)"
    assert (await ask(client, talk, conversation=[{"role": "user"}] * 3)).value == 3.0
    params = body("return len(env.db('current').query('SELECT * FROM tickets WHERE agent = ?', (final_answer,)))")
    assert (await ask(client, params, answer=owner)).value >= 1


async def test_it_sees_no_environment_and_an_empty_directory(client, monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "s")
    assert (await ask(client, body("import os", "return len(os.environ)"))).value == 0.0


@pytest.mark.slow
async def test_many_at_once_do_not_disturb_each_other(client):
    codes = [body("while True: pass") if i % 10 == 0 else body(f"return {i}") for i in range(40)]
    rewards = await asyncio.gather(*(ask(client, code) for code in codes))
    assert [r.value for r in rewards] == [None if i % 10 == 0 else float(i) for i in range(40)]


async def test_a_killed_host_is_replaced(client):
    assert (await ask(client)).value == 0.0
    client._host.kill()
    client._host.wait()
    assert (await ask(client)).value == 0.0
