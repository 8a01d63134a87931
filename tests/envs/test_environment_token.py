"""The run's own environment server, reachable from other hosts: who does not know its secret gets nothing."""

import asyncio
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("openenv")

from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.embedded_fleet.tasks import generate
from megatron_fleet.envs.base import EnvLost
from megatron_fleet.envs.embedded_server import EmbeddedFleet
from megatron_fleet.envs.registry import environment_token, make_environment, no_answer

TASK = generate(seed=3, per_env=1)[0]
TOKEN = environment_token("the run's token")


@pytest.fixture
def fleet(tmp_path):
    fleet = EmbeddedFleet()
    # Every address of 127.0.0.0/8 is this machine; another one than usual shows that the host is obeyed.
    fleet.start(EnvConfig(start_timeout_s=HANG_S), tmp_path / "env.log", host="127.0.0.2", token=TOKEN)
    yield fleet
    fleet.stop()


@pytest.mark.slow
def test_the_secret_is_asked_for_everywhere(fleet):
    assert fleet.url.startswith("http://127.0.0.2:")

    async def reset(token: str) -> str:
        environment = make_environment(EnvConfig(), fleet.url, token=token)
        try:
            return (await environment.reset(TASK)).content
        finally:
            await environment.close()

    assert asyncio.run(reset(TOKEN)) == TASK.prompt
    for wrong in ("", "the run's token", TOKEN[:-1]):
        with pytest.raises(EnvLost, match="403"):
            asyncio.run(reset(wrong))
    for page in ("/schema", "/health", "/"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(fleet.url + page, timeout=HANG_S)
    assert no_answer(fleet.url, HANG_S) is None  # it answers: that is all the controller asks

    command = Path(f"/proc/{fleet.pid}/cmdline").read_text()
    assert TOKEN not in command
    fleet.restart()
    assert asyncio.run(reset(TOKEN)) == TASK.prompt
    with pytest.raises(EnvLost, match="403"):
        asyncio.run(reset("wrong"))


@pytest.mark.slow
def test_nobody_gets_the_port_of_a_server_that_is_restarted(fleet):
    host, port = fleet.url.removeprefix("http://").split(":")
    os.kill(fleet.pid, signal.SIGKILL)
    while fleet.ended() is None:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.bind((host, int(port)))
    fleet.restart()
    assert no_answer(fleet.url, HANG_S) is None


def test_the_secret_does_not_give_away_the_runs():
    assert environment_token("another run's token") != TOKEN and "token" not in TOKEN
