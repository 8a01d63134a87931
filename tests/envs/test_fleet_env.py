"""Episodes in Fleet's environments, against its emulated servers; with the real FleetTaskEnv where it is importable.

``PYTHONPATH=FOLDER`` with fleet-ai/OpenEnv and what it needs in it makes all of this run through the real one.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from fleet_emulation import NEVER_S, PNG, FleetEmulation, Script
from waiting import HANG_S, until

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.env import EnvConfig, FleetConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs import fleet as fleet_module
from megatron_fleet.envs import fleet_package
from megatron_fleet.envs.base import EnvBusy, EnvLost, Image, ToolCall
from megatron_fleet.envs.fleet_package import load_fleet_task_env
from megatron_fleet.envs.registry import ServerStart, make_environment, serve

STAND_IN = Path(__file__).parent / "fleet_stand_in"
REAL = any(Path(folder, "envs", "fleet_env").is_dir() for folder in sys.path)
stand_in_only = pytest.mark.skipif(REAL, reason="the real FleetTaskEnv waits half a minute between its tries")
FLEET = FleetConfig(package=None if REAL else str(STAND_IN), ttl_s=700, settle_s=0)
TIMEOUTS = {f"{verb}_timeout_s": HANG_S for verb in ("make", "reset", "step", "verify", "close")}
CONFIG = EnvConfig(kind="fleet", fleet=FLEET, **TIMEOUTS)
CODE = "def validate_task(env, final_answer=None):\n    return 1"
TASK = Task(
    key="t1", prompt="Close ticket 7.", env_key="tickets", env_version="v0.0.1", data_key="seed", data_version="v2",
    env_variables={"LOGGED_IN_USER": "u1"}, verifier_code=CODE,
)  # fmt: skip
CLOSE = ToolCall("close_ticket", {"ticket": 7})


@pytest.fixture(scope="module")
def server():
    server = FleetEmulation()
    yield server
    server.stop()


@pytest.fixture
def emulated(server, monkeypatch):
    """The script of the emulated servers, new for each test; Fleet's client talks to it."""
    monkeypatch.setenv("FLEET_BASE_URL", server.url)
    monkeypatch.setenv("FLEET_API_KEY", "key")
    server.script = Script()
    return server.script


def impatient(**timeouts):
    return CONFIG.model_copy(update=timeouts)


async def test_an_episode(emulated):
    environment = make_environment(CONFIG, "")
    shown = await environment.reset(TASK)
    assert shown.content == TASK.prompt
    assert [t["function"]["name"] for t in shown.tools] == ["search", "close_ticket", "boom"]
    assert shown.tools[1]["function"]["parameters"]["properties"]["ticket"]["type"] == "integer"
    assert (await environment.step(ToolCall("search", {"query": "x"}))).content == '[{"id": 7}]'
    assert (await environment.step(ToolCall("search", {"query": "nothing"}))).content == "[]"
    assert (await environment.step(CLOSE)).error is None
    reward = await environment.verify("42", [{"role": "user", "content": "x"}])
    assert (reward.value, reward.details) == (1.0, {"execution_id": "x1"})
    assert await environment.verify("43", []) == reward
    await environment.close()
    await environment.close()
    (made,) = emulated.made
    assert made["env_key"] == "tickets" and made["ttl_seconds"] == 700
    assert made["env_variables"] == {"LOGGED_IN_USER": "u1"}
    assert (made["data_key"], made["data_version"]) == ("seed", "v2")
    assert emulated.executed == [{"final_answer": "42"}]
    assert len(emulated.deleted) == 1 and emulated.live == {}


@pytest.mark.parametrize(
    ("code", "answer", "passed"),
    [
        ("def validate_task(env):\n    return 1", "42", set()),
        ("def validate_task(env, final_answer=None):\n    return 1", None, set()),
        ("async def verify(env, *, final_answer):\n    return 1", "42", {"final_answer"}),
        ("async def verify(env, conversation=None):\n    return 1", "42", {"conversation"}),
        ("def verify(env, **said):\n    return 'final_answer conversation'", "42", {"final_answer"}),
    ],
)
async def test_a_verifier_is_called_with_what_it_takes(emulated, code, answer, passed):
    environment = make_environment(CONFIG, "")
    await environment.reset(replace(TASK, verifier_code=code))
    conversation = [{"role": "user", "content": "é"}]
    assert (await environment.verify(answer, conversation)).value == 0.0
    await environment.close()
    (given,) = emulated.executed
    if REAL or "**" not in code:  # the stand-in looks for the word only
        assert set(given) == passed
    if "conversation" in passed:
        assert json.loads(given["conversation"]) == conversation


UNREADABLE = {"success": True, "result": {"score": 0}}


@pytest.mark.parametrize(
    ("answers", "value", "reason"),
    [
        ([{"success": True, "result": {"score": 0.5}}], 0.5, "verified"),
        ([{"success": True, "result": {"passed": True}}], None, "not return a number"),
        ([{"success": True, "result": None}], 1.0, "verified"),
        ([{"success": True, "result": True}], 1.0, "verified"),
        ([UNREADABLE, {"success": False}], None, "verifier failed"),
        ([UNREADABLE, {"success": True, "result": {"score": 1}, "stdout": "JUDGE ERROR: x"}], None, "judge"),
    ],
)
async def test_results_that_are_no_numbers(emulated, answers, value, reason):
    emulated.verify = answers
    environment = make_environment(CONFIG, "")
    await environment.reset(TASK)
    reward = await environment.verify("42", [])
    await environment.close()
    assert reward.value == value and reason in reward.reason


@stand_in_only
@pytest.mark.parametrize(
    ("answer", "reason"),
    [({"success": False}, "Verifier failed"), ({"success": True, "result": 0, "stdout": "a\nJUDGE ERROR: b"}, "judge")],
)
async def test_a_verifier_or_judge_that_fails_is_unknown(emulated, answer, reason):
    emulated.verify = [answer]
    environment = make_environment(CONFIG, "")
    await environment.reset(TASK)
    reward = await environment.verify("42", [])
    await environment.close()
    assert reward.value is None and reason in reward.reason


async def test_a_verifier_that_does_not_answer_is_unknown(emulated):
    emulated.verify_s = NEVER_S
    environment = make_environment(impatient(verify_timeout_s=0.5), "")
    await environment.reset(TASK)
    reward = await environment.verify("42", [])
    assert reward.value is None and "0.5 s" in reward.reason
    await environment.close()
    assert len(emulated.deleted) == 1


async def test_a_task_without_a_verifier_never_starts(emulated):
    environment = make_environment(CONFIG, "")
    with pytest.raises(EnvLost, match="no verifier"):
        await environment.reset(replace(TASK, verifier_code=" "))
    await environment.close()
    assert emulated.made == []


async def test_bad_calls_never_reach_fleet(emulated):
    environment = make_environment(CONFIG, "")
    await environment.reset(replace(TASK, prompt="Use submit_final_answer."))
    for call, kind in (
        (ToolCall("search", "x"), "invalid_args"),
        (ToolCall("computer", {}), "tool_not_found"),
        (ToolCall("submit_final_answer", {"answer": "1"}), "tool_not_found"),
    ):
        assert (await environment.step(call)).error.kind == kind
    assert emulated.called == [] and emulated.executed == []
    shown = await environment.step(ToolCall("boom", {}))
    assert (shown.error.kind, shown.error.message, shown.content) == ("execution_error", "kaboom", "")
    await environment.close()


async def test_a_screen_is_an_image(emulated):
    environment = make_environment(CONFIG, "")
    shown = await environment.reset(replace(TASK, modality="computer_use"))
    assert [t["function"]["name"] for t in shown.tools] == ["computer"]
    image = Image("image/png", b"\x89PNG a screen")
    assert (shown.content, shown.images) == ("Close ticket 7.\n\n[image 1]", (image,))
    shown = await environment.step(ToolCall("computer", {"action": "click"}))
    assert (shown.content, shown.images) == ("[image 1]", (image,)) and PNG not in shown.content
    await environment.close()


@pytest.mark.parametrize(
    "refusal",
    [
        (403, {"error": {"message": "Team instance limit exceeded: instance limit is 10"}}),
        pytest.param((503, {"detail": "seed", "retryable": True}), marks=stand_in_only),
        pytest.param((429, {"detail": "Rate limit exceeded"}), marks=stand_in_only),
    ],
    ids=["limit", "retryable", "rate"],
)
async def test_no_room_now_is_busy_and_the_next_try_starts(emulated, refusal):
    emulated.make = [refusal]
    environment = make_environment(CONFIG, "")
    with pytest.raises(EnvBusy):
        await environment.reset(TASK)
    assert (await environment.reset(TASK)).content == TASK.prompt
    await environment.close()
    assert len(emulated.made) == len(emulated.deleted) == 1


async def test_a_make_that_cannot_succeed_is_lost(emulated):
    emulated.make = [(400, {"detail": "no such environment"})]
    environment = make_environment(CONFIG, "")
    with pytest.raises(EnvLost, match="no such environment"):
        await environment.reset(TASK)
    await environment.close()


async def test_a_late_make_ends_in_time_and_a_late_answer_leaves_nothing(emulated):
    emulated.make_s = NEVER_S
    environment = make_environment(impatient(make_timeout_s=0.2), "")
    with pytest.raises(EnvLost, match="make took more than"):
        await environment.reset(TASK)
    await environment.close()


async def test_deadlines_hold_although_cancellations_are_swallowed(emulated):
    emulated.list_s = NEVER_S
    environment = make_environment(impatient(reset_timeout_s=0.3), "")
    with pytest.raises(EnvLost, match="reset took more than"):
        await environment.reset(TASK)
    with pytest.raises(EnvLost):
        await environment.step(CLOSE)
    await environment.close()
    assert len(emulated.deleted) == 1


async def test_a_tool_that_hangs_costs_the_session_and_the_instance_goes(emulated):
    environment = make_environment(impatient(step_timeout_s=0.4), "")
    await environment.reset(TASK)
    emulated.call_s = NEVER_S
    with pytest.raises(EnvLost, match="close_ticket took more than"):
        await environment.step(CLOSE)
    assert (await environment.verify("1", [])).value is None
    await environment.close()
    assert len(emulated.deleted) == 1 and emulated.executed == []


@stand_in_only
async def test_a_tool_server_that_fails_is_an_error_of_the_tool(emulated, monkeypatch):
    monkeypatch.setattr(fleet_module, "CALL_MARGIN_S", HANG_S)  # it stops retrying long before the call's deadline
    environment = make_environment(CONFIG, "")
    await environment.reset(TASK)
    emulated.call_status = 500
    shown = await environment.step(CLOSE)
    assert shown.error.kind == "transport_error" and "close_ticket" in shown.error.message
    emulated.call_status = 200
    assert (await environment.step(CLOSE)).error is None
    await environment.close()


async def test_a_cancelled_episode_gives_its_instance_back_unverified(emulated):
    environment = make_environment(CONFIG, "")
    await environment.reset(TASK)
    emulated.call_s = NEVER_S
    step = asyncio.create_task(environment.step(CLOSE))
    await until(lambda: emulated.called)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await environment.close()
    assert len(emulated.deleted) == 1 and emulated.executed == []
    with pytest.raises(EnvLost):
        await environment.step(CLOSE)


@pytest.mark.slow
async def test_a_long_episode_ends_when_the_policy_ends_it(emulated):
    environment = make_environment(CONFIG, "")
    await environment.reset(TASK)
    for _ in range(52):  # FleetTaskEnv's own limit is 50
        shown = await environment.step(ToolCall("search", {"query": "x"}))
        assert shown.error is None and not shown.done
    await environment.close()


async def test_many_at_once_leave_nothing(emulated):
    async def one(number):
        environment = make_environment(CONFIG, "")
        await environment.reset(TASK)
        if number % 2:
            await environment.step(CLOSE)
        reward = await environment.verify("x", [])
        await environment.close()
        return reward.value

    assert await asyncio.gather(*map(one, range(12))) == [float(n % 2) for n in range(12)]
    assert len(emulated.made) == len(emulated.deleted) == 12


@pytest.mark.parametrize(("settle_s", "left"), [(0.0, 0.0), (0.05, 0.0), (0.3, 0.2)])
async def test_the_instance_is_left_alone_no_longer_than_needed(emulated, monkeypatch, settle_s, left):
    monkeypatch.setattr(fleet_module, "_now", iter([100.0, 100.1]).__next__)  # when it was made, and a little later
    fleet = FLEET.model_copy(update={"settle_s": settle_s})
    environment = make_environment(CONFIG.model_copy(update={"fleet": fleet}), "")
    begin = time.monotonic()
    await environment.reset(TASK)
    assert environment._env._tools.initial_wait == pytest.approx(left)
    assert time.monotonic() - begin >= left
    await environment.close()


class Older:
    """A FleetTaskEnv of another time."""

    def __init__(self, task_config, ttl_seconds=None):
        pass

    async def reset_async(self):
        pass

    def step_async(self):
        pass


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    load_fleet_task_env.cache_clear()
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(UserError, match="FLEET_API_KEY"):
        load_fleet_task_env(FLEET)
    monkeypatch.setenv("FLEET_API_KEY", "key")
    with pytest.raises(UserError, match=r"env\.fleet\.package=.*no envs/fleet_env.*pip install"):
        load_fleet_task_env(FleetConfig(package=str(tmp_path)))
    with pytest.raises(UserError, match=r"ca_file=.*no certificates"):
        load_fleet_task_env(FleetConfig(ca_file=str(Path(__file__))))
    with pytest.raises(UserError, match=r"not the FleetTaskEnv .* lacks step_async, close_async, .*max_steps"):
        fleet_package._check_interface(Older)
    monkeypatch.setattr(fleet_package.metadata, "version", lambda name: "2.3.0")
    with pytest.raises(UserError, match=r"mcp<2, but .* has mcp 2\.3\.0"):
        load_fleet_task_env(FLEET)


def test_a_run_asks_the_workers_interpreter_first(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", "key")
    folder = FLEET.package if not REAL else os.environ["PYTHONPATH"].partition(":")[0]
    start = ServerStart(EnvConfig(kind="fleet", fleet=FleetConfig(package=folder)), tmp_path / "log", sys.executable, 0)
    assert serve(start).url == ""
    start = ServerStart(
        EnvConfig(kind="fleet", fleet=FleetConfig(package=str(tmp_path))), tmp_path / "log", sys.executable, 0
    )
    with pytest.raises(UserError, match="no envs/fleet_env"):
        serve(start)


def test_a_file_of_authorities_is_the_one_that_is_read(tmp_path):
    import certifi

    bundle = Path(certifi.where()).read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    (tmp_path / "few.pem").write_text(bundle)
    program = (
        "import os, sys; from megatron_fleet.config.sections.env import FleetConfig; "
        "from megatron_fleet.envs.fleet_package import load_fleet_task_env; "
        "load_fleet_task_env(FleetConfig(package=sys.argv[1], ca_file=sys.argv[2])); "
        "import httpx; print(len(httpx.create_ssl_context().get_ca_certs()))"
    )
    command = [sys.executable, "-c", program, str(STAND_IN), str(tmp_path / "few.pem")]
    done = subprocess.run(command, env={**os.environ, "FLEET_API_KEY": "k"}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
