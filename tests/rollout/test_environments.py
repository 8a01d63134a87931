"""The run's environment server as a component, with servers that are not there, and what counts as an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from held_ports import held_ports
from rollout_config import rollout_config
from test_collection import played, request
from waiting import HANG_S, until, wait_until

pytest.importorskip("ray")

from megatron_fleet.cluster import restarts
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.envs import embedded_server as fleets
from megatron_fleet.envs import registry
from megatron_fleet.envs.embedded_server import EmbeddedFleet
from megatron_fleet.envs.registry import ServerStart, no_answer
from megatron_fleet.rollout import components
from megatron_fleet.rollout.collector import Collector
from megatron_fleet.rollout.components import EnvironmentSlot
from megatron_fleet.rollout.requests import EnvironmentFailed


class FakeServer:
    """A server without an address that dies when it should; ``failures``: restarts that fail."""

    url = ""

    def __init__(self, failures: int = 0) -> None:
        self.reason: str | None = None
        self.failures, self.starts, self.stopped = failures, 0, False

    def ended(self) -> str | None:
        return self.reason

    def restart(self) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise UserError("the port is taken")
        self.reason = None

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.001)
    monkeypatch.setattr(components, "WATCH_INTERVAL_S", 0.01)
    server = FakeServer()
    monkeypatch.setattr(components, "serve", lambda start: server)
    return server


def slot(on_return=None, **env) -> EnvironmentSlot:
    return EnvironmentSlot(ServerStart(EnvConfig(**env), Path("env.log"), "python", 0), on_return)


async def test_a_server_that_died_is_used_again_when_everybody_knows_that_it_is_back(fake):
    knowing = asyncio.Event()
    environments = slot(knowing.wait)
    assert await environments.start() == "" and await environments.available() is None
    fake.reason, fake.failures = "its process ended with status -9", 2
    assert environments.check() == 1
    assert "being restarted: its process ended with status -9" in await environments.available()
    await until(lambda: fake.reason is None)
    serving = asyncio.create_task(environments.serving())
    await asyncio.sleep(0.05)
    assert not serving.done() and fake.starts == 3
    knowing.set()
    await asyncio.wait_for(serving, HANG_S)
    assert environments.check() == 1 and await environments.available() is None
    await environments.close()
    assert fake.stopped


async def test_a_server_that_dies_again_and_again_is_given_up_after_the_limit_of_an_outage(fake):
    environments = slot(outage_limit_s=0.5)
    await environments.start()
    fake.reason, fake.failures = "its process ended with status 1", 999
    sentence = r"died \d+ times, last: the port is taken\. It was restarted for another 0.5 s \(env\.outage_limit_s\)"
    for ask in (environments.serving, environments.available):
        with pytest.raises(EnvironmentFailed, match=sentence):
            while True:
                await asyncio.sleep(0.01)
                await asyncio.wait_for(ask(), HANG_S)
    assert fake.starts > components.MAX_RESTARTS
    await environments.close()


class WorkerOf:
    """A `WorkerSlot` whose episodes have a reward while ``server`` is alive."""

    name = "worker 0"

    def __init__(self, server: FakeServer):
        self._server = server

    async def play(self, spec):
        return played(spec, 1.0 if self._server.reason is None else None)

    async def abort(self, number):
        return None


async def test_episodes_handed_out_to_a_server_that_just_died_are_lost_with_it_and_not_retried(fake, monkeypatch):
    monkeypatch.setattr(components, "WATCH_INTERVAL_S", 0.5)  # so that the collector is first to see it
    environments = slot()
    await environments.start()
    config = rollout_config(Path("none"))
    collector = Collector(config.rollout, config.env, [], [WorkerOf(fake)], environments)
    fake.reason = "its process ended with status -9"
    result = await asyncio.wait_for(collector.collect(request(tasks=2, samples=2)), HANG_S)
    counts = result.accounting
    assert (counts.known, counts.aborted, counts.retried, environments.losses) == (4, 4, 0, 1)
    await environments.close()


async def test_a_group_whose_callback_fails_fails_alone(fake):
    environments = slot()
    await environments.start()
    worker = WorkerOf(fake)
    config = rollout_config(Path("none"), episodes_in_flight=64)
    collector = Collector(config.rollout, config.env, [], [worker], environments)

    def failing(trajectory):
        raise OSError("the disk is full")

    groups = [collector.collect(request(tasks=1, samples=3), failing if i == 1 else None) for i in range(8)]
    results = await asyncio.wait_for(asyncio.gather(*groups, return_exceptions=True), HANG_S)
    assert [type(result).__name__ for result in results] == ["CollectResult", "OSError", *["CollectResult"] * 6]
    assert all(result.accounting.known == 3 for result in results if not isinstance(result, OSError))
    await environments.close()


@pytest.fixture
def environment():
    """Variables of a server that keep its files where they are removed."""
    with tempfile.TemporaryDirectory() as folder:  # its path is short enough for a socket in it
        yield os.environ | {"TMPDIR": folder}


@pytest.mark.slow
def test_a_restart_keeps_the_address_and_ends_with_a_stop(tmp_path, episode_python, environment):
    fleet = EmbeddedFleet()
    url = fleet.start(EnvConfig(start_timeout_s=HANG_S), tmp_path / "env.log", episode_python, environment=environment)
    try:
        first = fleet.pid
        assert fleet.ended() is None and no_answer(url, HANG_S) is None
        fleet.restart()
        assert fleet.url == url and fleet.pid != first and no_answer(url, HANG_S) is None
    finally:
        fleet.stop()
    assert fleet.pid is None and "not reachable" in no_answer(url, HANG_S)
    with pytest.raises(UserError, match="stopped"):
        fleet.restart()


@pytest.mark.slow
def test_a_server_that_hangs_is_known_and_replaced(tmp_path, episode_python, environment, monkeypatch):
    monkeypatch.setattr(fleets, "PROBE_INTERVAL_S", 0.05)
    fleet = EmbeddedFleet()
    url = fleet.start(EnvConfig(start_timeout_s=HANG_S), tmp_path / "env.log", episode_python, environment=environment)
    try:
        assert fleet.ended() is None
        monkeypatch.setattr(fleets, "HUNG_S", 0.5)
        os.kill(fleet.pid, signal.SIGSTOP)
        wait_until(lambda: fleet.ended() is not None)
        assert fleet.ended() == "it gave no answer for 0.5 s"
        monkeypatch.setattr(fleets, "HUNG_S", HANG_S)
        fleet.restart()
        assert no_answer(url, HANG_S) is None and fleet.ended() is None
    finally:
        fleet.stop()


def test_a_stop_ends_a_restart_that_waits(tmp_path, episode_python, environment):
    python = tmp_path / "python"  # which starts no second server
    python.write_text(f'#!/bin/sh\nmkdir {tmp_path}/once 2>/dev/null || exec sleep 1000\nexec {episode_python} "$@"\n')
    python.chmod(0o755)
    fleet = EmbeddedFleet()
    fleet.start(EnvConfig(start_timeout_s=HANG_S), tmp_path / "env.log", python, environment=environment)
    failures = []

    def restart():
        try:
            fleet.restart()
        except UserError as error:
            failures.append(str(error))

    first, thread = fleet.pid, threading.Thread(target=restart)
    thread.start()
    wait_until(lambda: fleet.pid != first)
    fleet.stop()
    thread.join(HANG_S)
    assert not thread.is_alive() and len(failures) == 1


@contextmanager
def answering(status: int, port: int = 0):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "there"), [(200, True), (404, True), (401, True), (502, False), (503, False)])
def test_a_server_without_such_a_page_is_there_and_a_proxy_without_a_server_is_not(status, there):
    with answering(status) as url:
        assert (no_answer(url, HANG_S) is None) == there
        assert (no_answer(url.replace("http", "ws"), HANG_S) is None) == there


def test_what_listens_and_says_nothing_gives_no_answer():
    with held_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        with socket.create_server(("127.0.0.1", port)):
            assert "does not answer" in no_answer(url, 0.2)
        assert "not reachable" in no_answer(url, HANG_S)
    assert no_answer("http://", 1) is not None and no_answer("nonsense", 1) is not None


async def test_environments_elsewhere_are_asked_and_hosted_ones_are_not(monkeypatch, tmp_path):
    monkeypatch.setattr(components, "serve", registry.serve)
    monkeypatch.setattr(components, "PROBE_TIMEOUT_S", HANG_S)
    with held_ports(1) as (port,):
        with answering(200, port) as url:
            environments = EnvironmentSlot(
                ServerStart(EnvConfig(kind="openenv", url=url), tmp_path / "env.log", "python", 0)
            )
            assert await environments.start() == url and await environments.available() is None
        assert "not reachable" in await environments.available()
    await environments.close()
