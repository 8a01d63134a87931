"""Starting environments through the gate: budget, retries, order, quarantine; and answers that no adapter expects."""

import asyncio

import pytest
from waiting import LOOP_TIME, in_simulated_time

from megatron_fleet.config.sections.env import ProvisioningConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs import provision as module
from megatron_fleet.envs.base import EnvBusy, EnvLost, EnvRefused, Observation, Reward, ToolCall
from megatron_fleet.envs.provision import Gate, Limiter, Provisioner, Quarantined

TASK = Task("t", "p", "desk", "")


class Plane:
    """A control plane and all environments it made: one start at a time, each of ``seconds``."""

    def __init__(self, seconds=0.0, resets=()):
        self.seconds, self.resets = seconds, list(resets)
        self.lock = asyncio.Lock()
        self.asked = self.most_asked = self.closed = 0
        self.calls = 0

    async def reset(self, task):
        self.calls += 1
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        try:
            answer = self.resets.pop(0) if self.resets else None
            if answer is not None:
                raise answer
            async with self.lock:
                await asyncio.sleep(self.seconds)
        finally:
            self.asked -= 1
        return Observation(task.prompt)

    async def step(self, call):
        if call.name == "odd":
            return {}["observation"]
        return Observation("ok")

    async def verify(self, final_answer, conversation):
        raise AttributeError("'str' object has no attribute 'get'")

    async def close(self):
        self.closed += 1


def provisioner(**changes):
    return Provisioner(ProvisioningConfig(**changes))


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch):
    monkeypatch.setattr(module, "time", LOOP_TIME)


@in_simulated_time
async def test_hundreds_of_starts_do_not_storm_a_slow_plane():
    plane, owner = Plane(seconds=0.01), provisioner(starts_at_once=8, quick_s=0.005)
    environments = [owner.environment("desk", plane) for _ in range(150)]
    await asyncio.gather(*(e.start(TASK) for e in environments))
    assert {(await e.reset(TASK)).content for e in environments} == {"p"}
    assert asyncio.get_running_loop().time() == pytest.approx(150 * 0.01)  # the plane is never idle
    assert plane.calls == 150
    assert plane.most_asked <= 12
    assert max(e.metrics["provision_s"] for e in environments) == pytest.approx(150 * 0.01)


@in_simulated_time
async def test_starts_pass_in_the_order_they_came():
    plane, owner, order = Plane(seconds=0.001), provisioner(starts_at_once=1, max_starts_at_once=1), []

    async def one(number):
        await owner.environment("desk", plane).start(TASK)
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(20)))
    assert order == list(range(20))


@in_simulated_time
async def test_a_busy_server_is_asked_again_and_a_broken_one_is_not():
    busy = Plane(resets=[EnvBusy("full"), EnvBusy("full")])
    environment = provisioner().environment("desk", busy)
    await environment.start(TASK)
    assert (await environment.reset(TASK)).content == "p"
    assert environment.metrics["start_retries"] == 2 and busy.calls == 3
    for failure, kind, reason in (
        (EnvLost("no image"), EnvLost, "no image"),
        (KeyError("tools"), EnvLost, "KeyError: 'tools'"),
        (EnvRefused("no desk"), EnvRefused, "no desk"),
    ):
        broken = Plane(resets=[failure])
        environment = provisioner().environment("desk", broken)
        await environment.start(TASK)
        with pytest.raises(EnvLost, match=reason) as raised:
            await environment.reset(TASK)
        assert type(raised.value) is kind
        assert broken.calls == 1


@in_simulated_time
async def test_the_budget_ends_the_waiting_and_says_why():
    plane = Plane(resets=[EnvBusy("instance limit")] * 1000)
    environment = provisioner(wait_s=10).environment("desk", plane)
    await environment.start(TASK)
    assert environment.metrics["provision_s"] == 10
    with pytest.raises(EnvLost, match=r"env\.provisioning\.wait_s.*instance limit"):
        await environment.reset(TASK)
    with pytest.raises(EnvLost):
        await environment.step(ToolCall("look", {}))


@in_simulated_time
async def test_a_pause_holds_no_place_at_the_gate(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 30.0)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: high)
    owner = provisioner(starts_at_once=1, max_starts_at_once=1)
    pausing = asyncio.create_task(owner.environment("desk", Plane(resets=[EnvBusy("full")])).start(TASK))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(1):
        await owner.environment("desk", Plane()).start(TASK)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing


@in_simulated_time
async def test_cancelled_starts_give_their_place_back():
    gate, entered = Gate(Limiter(2, 2, quick_s=1.0)), []

    async def hold():
        entered.append(1)
        await asyncio.Event().wait()

    holders = [asyncio.create_task(gate.through(hold)) for _ in range(6)]
    await asyncio.sleep(0)
    assert len(entered) == 2
    holders[3].cancel()  # waits
    holders[0].cancel()  # holds a place, which goes to the third
    await asyncio.sleep(0.01)
    assert len(entered) == 3 and gate.limiter.under_way == 2
    holders[1].cancel()
    await asyncio.sleep(0)
    holders[4].cancel()  # in the moment in which its turn came
    await asyncio.sleep(0.01)
    assert gate.limiter.under_way == 2
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    assert gate.limiter.under_way == 0 and gate.limiter.limit == 2


@pytest.mark.parametrize("first_to_go", [0, 2])
@in_simulated_time
async def test_a_place_is_not_given_to_one_who_is_leaving(first_to_go):
    gate, entered = Gate(Limiter(2, 2, quick_s=1.0)), []

    async def hold(number):
        entered.append(number)
        await asyncio.Event().wait()

    def start(number):
        return asyncio.create_task(gate.through(lambda: hold(number)))

    holders = [start(number) for number in range(4)]
    await asyncio.sleep(0)
    holders[first_to_go].cancel()
    holders[2 - first_to_go].cancel()
    await asyncio.sleep(0.01)
    assert entered == [0, 1, 3] and gate.limiter.under_way == 2
    for holder in holders:
        holder.cancel()
    ends = await asyncio.gather(*holders, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}
    assert gate.limiter.under_way == 0


@in_simulated_time
async def test_unexpected_answers_lose_the_session_and_nothing_else():
    plane = Plane()
    environment = provisioner().environment("desk", plane)
    await environment.start(TASK)
    assert (await environment.step(ToolCall("look", {}))).content == "ok"
    verdict = await environment.verify("x", [])
    assert verdict == Reward(
        None, "session lost before the verdict: AttributeError: 'str' object has no attribute 'get'"
    )
    other = provisioner().environment("desk", plane)
    await other.start(TASK)
    with pytest.raises(EnvLost, match="KeyError"):
        await other.step(ToolCall("odd", {}))
    with pytest.raises(EnvLost, match="KeyError"):
        await other.step(ToolCall("look", {}))
    await other.close()
    await other.close()
    assert plane.closed == 1


@in_simulated_time
async def test_quarantine_is_of_one_environment_and_ends(caplog):
    owner = provisioner(breaker_window=3, breaker_threshold=1, breaker_pause_s=50)
    for _ in range(3):
        owner.ended("bad", owner.admit("bad"), True, "reset took more than 9 s")
    with pytest.raises(Quarantined, match="environment bad is in quarantine"):
        owner.admit("bad")
    assert owner.gauges("bad")["breaker_open"] == 1 and owner.gauges("good")["breaker_open"] == 0
    owner.ended("good", owner.admit("good"), False, "all checks passed")
    await asyncio.sleep(51)
    owner.ended("bad", owner.admit("bad"), False, "all checks passed")
    assert owner.gauges("bad")["breaker_open"] == 0
    assert [r.getMessage() for r in caplog.records] == [
        "environment bad goes into quarantine for 50 s; last failure: reset took more than 9 s",
        "environment bad has recovered",
    ]
