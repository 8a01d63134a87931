"""Episodes over OpenEnv's protocol: equal to in-process ones, and lost, never wrong, when anything breaks."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from waiting import HANG_S, wait_until

from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.embedded_fleet.solver import demonstrate, solve
from megatron_fleet.embedded_fleet.tasks import EmbeddedSession, generate
from megatron_fleet.embedded_fleet.tasktype import FinalAnswer
from megatron_fleet.envs.base import EnvBusy, EnvLost, ToolCall
from megatron_fleet.envs.embedded_server import EmbeddedFleet
from megatron_fleet.envs.registry import make_environment

TASKS = generate(seed=3, per_env=12)
LEDGER = next(t for t in TASKS if t.env_key == "ledger")
READ = ToolCall("list_accounts", {"owner": LEDGER.env_variables["LOGGED_IN_USER"]})
CONFIG = EnvConfig(**{f"{verb}_timeout_s": HANG_S for verb in ("start", "make", "reset", "step", "verify")})
SLOW_S = 4 * HANG_S
"""Seconds that nothing may take."""
LASTING = CONFIG.model_copy(update={"step_timeout_s": SLOW_S})
HASTY = CONFIG.model_copy(update={"step_timeout_s": 0.5})
SERVE = """
import asyncio, os, sys
from pathlib import Path
from megatron_fleet.embedded_fleet.environment import ToolFaults
from megatron_fleet.embedded_fleet.server import serve
faults = ToolFaults(delay_s=(("list_accounts", float(sys.argv[2])),), dies=("list_invoices",))
port, most = int(sys.argv[3]), int(sys.argv[4])
asyncio.run(serve(port, Path(sys.argv[1]), parent=os.getppid(), faults=faults, max_sessions=most))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    fleet = EmbeddedFleet()
    yield fleet.start(CONFIG, tmp_path_factory.mktemp("logs") / "env.log")
    fleet.stop()


class Faulty:
    """A server whose ``list_accounts`` is slow and whose ``list_invoices`` breaks."""

    def __init__(self, folder: Path, delay_s: float = 0.0, sessions: int = 8) -> None:
        # The server sets this option too; nobody else gets the port while none listens at it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port = self._reserved.getsockname()[1]
        self._ready, self._arguments = folder / f"ready-{self._port}", (str(delay_s), str(self._port), str(sessions))
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, self._ready, *self._arguments])
        wait_until(self._ready.exists, meanwhile=lambda: self.process.poll() is None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._reserved.close()


@pytest.fixture
def faulty(tmp_path):
    servers = []

    def start(**options):
        servers.append(Faulty(tmp_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


async def play(task, url, config=CONFIG):
    """The scripted solver over OpenEnv: what it saw, and the reward."""
    environment = make_environment(config, url)
    try:
        await environment.reset(task)
        seen = []
        agent = solve(task)
        turn = next(agent)
        while not isinstance(turn, FinalAnswer):
            seen.append(await environment.step(turn))
            turn = agent.send(seen[-1])
        return seen, await environment.verify(turn.text, [])
    finally:
        await environment.close()


@pytest.mark.parametrize("task", TASKS[::4], ids=lambda t: t.key)
async def test_an_episode_is_what_it_is_in_process(url, task):
    seen, reward = await play(task, url)
    assert seen == [shown for _, shown in demonstrate(task).turns[:-1]]
    assert (reward.value, reward.reason) == (1.0, "verified")


async def test_reset_shows_prompt_and_tools(url):
    environment = make_environment(CONFIG, url)
    shown = await environment.reset(LEDGER)
    assert shown.content == LEDGER.prompt
    assert shown.tools == EmbeddedSession(LEDGER).tools()
    await environment.close()


async def test_tool_failures_are_observations(url):
    environment = make_environment(CONFIG, url)
    await environment.reset(LEDGER)
    for call, kind in (
        (ToolCall("list_accounts", {}), "invalid_args"),
        (ToolCall("list_accounts", {"owner": 3}), "invalid_args"),
        (ToolCall("list_accounts", {"owner": "\ud800"}), "invalid_args"),
        (ToolCall("list_accounts", "Ana"), "invalid_args"),
        (ToolCall("rob_bank", {}), "tool_not_found"),
        (ToolCall("submit_final_answer", {"answer": "1"}), "tool_not_found"),
        (ToolCall("pay_invoice", {"invoice": "I1", "account": "\ud800"}), "execution_error"),
    ):
        shown = await environment.step(call)
        assert (shown.error.kind, shown.content, shown.done) == (kind, "", False)
    assert (await environment.step(READ)).error is None
    await environment.close()


async def test_an_unknown_verdict_is_never_zero(url):
    broken = replace(LEDGER, verifier_code="def validate_task(env, final_answer=None): return 1 // 0")
    environment = make_environment(CONFIG, url)
    await environment.reset(broken)
    reward = await environment.verify("x", [])
    assert reward.value is None
    assert "ZeroDivisionError" in reward.reason
    assert await environment.verify("x", []) == reward
    assert (await environment.step(READ)).error.message == "the episode is over"
    await environment.close()


async def test_conversation_reaches_a_verifier_that_wants_it(url):
    task = replace(LEDGER, verifier_code="def verify(env, conversation=None): return len(conversation) / 4")
    environment = make_environment(CONFIG, url)
    await environment.reset(task)
    assert (await environment.verify(None, [{"role": "user", "content": "é\n"}] * 3)).value == 0.75
    await environment.close()


async def test_an_environment_that_is_not_served(url):
    environment = make_environment(CONFIG, url)
    with pytest.raises(EnvLost, match="weather"):
        await environment.reset(replace(LEDGER, env_key="weather"))
    await environment.close()


async def test_nobody_listens():
    environment = make_environment(CONFIG, "http://127.0.0.1:9")
    with pytest.raises(EnvLost, match="connect"):
        await environment.reset(LEDGER)
    await environment.close()
    await environment.close()


@pytest.mark.slow
async def test_a_slow_tool_is_waited_for_and_a_hanging_one_is_not(faulty):
    patient = make_environment(CONFIG, faulty(delay_s=0.6).url)
    hasty = make_environment(HASTY, faulty(delay_s=SLOW_S).url)
    await patient.reset(LEDGER)
    assert (await patient.step(READ)).error is None
    await patient.close()
    await hasty.reset(LEDGER)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(EnvLost, match="list_accounts took more than"):
            await hasty.step(READ)
    # The late answer, or a new session, must not be taken for this one's.
    with pytest.raises(EnvLost):
        await hasty.step(READ)
    assert (await hasty.verify("x", [])).value is None
    await hasty.close()


@pytest.mark.slow
async def test_cancelling_stops_at_once_and_poisons(faulty):
    environment = make_environment(LASTING, faulty(delay_s=SLOW_S).url)
    await environment.reset(LEDGER)
    step = asyncio.create_task(environment.step(READ))
    await asyncio.sleep(0.2)
    step.cancel()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(asyncio.CancelledError):
            await step
        await environment.close()
    with pytest.raises(EnvLost):
        await environment.step(READ)


async def test_a_session_that_dies_is_lost(faulty):
    environment = make_environment(CONFIG, faulty().url)
    await environment.reset(LEDGER)
    with pytest.raises(EnvLost, match="broke the session"):
        await environment.step(ToolCall("list_invoices", {"vendor": "Acme"}))
    assert (await environment.verify("x", [])).value is None
    await environment.close()


@pytest.mark.slow
async def test_a_server_killed_during_a_call_and_restarted(faulty):
    server = faulty(delay_s=SLOW_S)
    waiting, idle = make_environment(LASTING, server.url), make_environment(CONFIG, server.url)
    await waiting.reset(LEDGER)
    await idle.reset(LEDGER)
    step = asyncio.create_task(waiting.step(READ))
    await asyncio.sleep(0.2)
    server.kill()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(EnvLost):
            await step
    server.start()
    with pytest.raises(EnvLost):
        await idle.step(READ)
    assert "lost" in (await idle.verify("x", [])).reason
    for environment in (waiting, idle):
        await environment.close()
    fresh = make_environment(CONFIG, server.url)
    await fresh.reset(LEDGER)
    await fresh.close()


@pytest.mark.slow
async def test_a_full_server_is_busy_until_a_session_ends(faulty):
    server = faulty(sessions=1)
    first, second = (make_environment(CONFIG, server.url) for _ in range(2))
    await first.reset(LEDGER)
    for _ in range(2):
        with pytest.raises(EnvBusy):
            await second.reset(LEDGER)
    await first.close()
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                shown = await second.reset(LEDGER)
                break
            except EnvBusy:
                await asyncio.sleep(0.05)
    assert shown.content == LEDGER.prompt
    assert (await second.step(READ)).error is None
    await second.close()


@pytest.mark.slow
async def test_256_sessions_at_once(url):
    everyone_in = asyncio.Barrier(256)

    async def one(number):
        task = TASKS[number % len(TASKS)]
        environment = make_environment(CONFIG, url)
        await environment.reset(task)
        await everyone_in.wait()
        agent = solve(task)
        turn = next(agent)
        while not isinstance(turn, FinalAnswer):
            turn = agent.send(await environment.step(turn))
        reward = await environment.verify(turn.text if number % 2 else "wrong", [])
        await environment.close()
        return task, reward.value

    outcomes = await asyncio.gather(*(one(number) for number in range(256)))
    assert all(value == 1.0 for _, value in outcomes[1::2])
    assert all(value == float(demonstrate(task).answer == "done") for task, value in outcomes[::2])


def gone(pid):
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_stop_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        fleet = EmbeddedFleet()
        fleet.start(CONFIG, tmp_path / "env.log")
        pids = [fleet.pid, *children(fleet.pid)]
        assert len(pids) == 2
        assert len(os.listdir(folder)) == 1
        fleet.stop()
        fleet.stop()
        assert all(map(gone, pids))
        assert os.listdir(folder) == []


@pytest.mark.slow
def test_the_server_may_open_a_file_for_each_session(tmp_path):
    """Shells often start programs with a limit of 1,024, which they may raise."""
    kept = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fleet = EmbeddedFleet()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        fleet.start(CONFIG, tmp_path / "env.log")
        assert resource.prlimit(fleet.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        fleet.stop()


@pytest.mark.slow
def test_the_server_ends_with_its_parent(tmp_path):
    start = (
        "import os, sys; from pathlib import Path; from megatron_fleet.config.schema import EnvConfig; "
        "from megatron_fleet.envs.embedded_server import EmbeddedFleet; "
        "f = EmbeddedFleet(); f.start(EnvConfig(start_timeout_s=float(sys.argv[2])), Path(sys.argv[1])); "
        "print(f.pid, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", start, tmp_path / "env.log", str(HANG_S)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    wait_until(lambda: gone(int(run.stdout)))


@pytest.mark.slow
def test_a_server_outlives_the_thread_that_started_it(tmp_path):
    fleet = EmbeddedFleet()
    url = asyncio.run(asyncio.to_thread(fleet.start, CONFIG, tmp_path / "env.log"))
    time.sleep(1.0)
    assert asyncio.run(play(LEDGER, url))[1].value == 1.0
    fleet.stop()


@pytest.mark.slow
def test_sigkill_of_the_server_takes_the_verifier_host_along(tmp_path):
    fleet = EmbeddedFleet()
    fleet.start(CONFIG, tmp_path / "env.log")
    hosts = children(fleet.pid)
    os.kill(fleet.pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, hosts)))
    fleet.stop()
