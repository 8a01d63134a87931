"""Who has the devices when: the order of what leaves and what comes, refusals, restarts."""

from __future__ import annotations

import json

import pytest
from fake_trainer import PART_BYTES, FakeTrainer
from policy_fixtures import make_config, write_config

from megatron_fleet.config.schema import Config
from megatron_fleet.loop.colocation import Colocation, Phase, WrongPhase, limits, open_colocation
from megatron_fleet.loop.memory_budget import MemoryBudget, MemoryExceeded
from megatron_fleet.trainer.base import TrainerLost

RESIDUAL = 7


class FakeEngines:
    """``fail``: a call that raises once."""

    def __init__(self, calls):
        self.calls, self.fail = calls, None

    def call(self, name):
        if name == self.fail:
            self.fail = None
            raise OSError(name)
        self.calls.append(name)

    async def sleep(self):
        self.call("sleep")
        return "no memory of its own"

    async def wake(self, part):
        self.call(f"wake {part}")

    async def sync(self):
        self.call("sync")


class Setup:
    def __init__(self, folder, colocated=True):
        self.calls: list[str] = []
        self.trainer, self.engines = FakeTrainer(calls=self.calls), FakeEngines(self.calls)
        self.file = folder / "memory.json"
        budget = MemoryBudget(self.trainer, [limits(PART_BYTES, RESIDUAL)] if colocated else [], self.file)
        self.colocation = Colocation(self.trainer if colocated else None, self.engines, budget)
        self.sync = self.engines.sync

    async def begin(self):
        await self.colocation.restart(self.start)
        self.take()
        return self

    async def start(self):
        self.calls.append("start")

    def fail(self, call):
        verb = call.split()[0]
        if verb in ("offload", "onload"):
            self.trainer.fail_next(verb, OSError(call), after=int(call == TO_ENGINES[3]))
        else:
            self.engines.fail = call

    def take(self):
        """Calls since the last look, without measurements."""
        calls = [call for call in self.calls if not call.startswith("memory")]
        self.calls.clear()
        return calls


@pytest.fixture
async def setup(tmp_path):
    return await Setup(tmp_path).begin()


TO_ENGINES = [
    "offload gradients optimizer",
    "wake weights",
    "sync",
    "offload parameters gradients optimizer",
    "wake kv_cache",
]
TO_TRAINER = ["sleep", "onload parameters gradients optimizer"]


async def test_a_cycle_moves_everything_in_its_order(setup):
    for _ in range(2):
        await setup.colocation.to_engines(setup.sync)
        assert setup.take() == TO_ENGINES
        await setup.colocation.to_trainer()
        assert setup.take() == TO_TRAINER
    seconds = setup.colocation.read_seconds()
    assert seconds.keys() == {"offload", "onload", "engines_sleep", "engines_wake"}
    assert setup.colocation.read_seconds() == {}
    table = json.loads(setup.file.read_text())
    assert table["engines"] == "no memory of its own"
    held = {
        phase: {owner: found["bytes"] for owner, found in owners.items() if owner != "process"}
        for phase, owners in table["phases"].items()
    }
    offloaded = dict.fromkeys(PART_BYTES, 0)
    assert held == {"train": PART_BYTES, "sync": offloaded | {"parameters": 20}, "roll": offloaded}
    assert setup.colocation.memory()["memory/train/process"] > 0


async def test_memory_is_measured_before_a_move_and_after_it(setup):
    await setup.colocation.to_engines(setup.sync)
    assert setup.calls == [
        "memory end",
        *TO_ENGINES[:2],
        "memory begin",
        "sync",
        "memory end",
        *TO_ENGINES[3:],
        "memory begin",
    ]


async def test_nothing_moves_with_engines_on_devices_of_their_own(tmp_path):
    setup = await Setup(tmp_path, colocated=False).begin()
    colocation = setup.colocation
    await colocation.to_engines(setup.sync)
    await colocation.to_trainer()
    await colocation.to_engines(setup.sync)
    assert setup.take() == ["sync", "sync"]
    assert "memory/roll/process" in colocation.memory()
    assert colocation.read_seconds() == {}
    await colocation.restart(setup.start)
    assert setup.take() == ["start"]


async def test_orders_out_of_turn_are_refused(setup):
    with pytest.raises(WrongPhase, match="phase 'train' cannot begin in phase 'train'"):
        await setup.colocation.to_trainer()
    await setup.colocation.to_engines(setup.sync)
    setup.take()
    with pytest.raises(WrongPhase, match="phase 'sync' cannot begin in phase 'roll'"):
        await setup.colocation.to_engines(setup.sync)
    assert setup.take() == []
    await setup.colocation.to_trainer()  # a refusal changes nothing


@pytest.mark.parametrize("call", [*TO_ENGINES, *TO_TRAINER])
async def test_after_a_failure_nothing_may_follow_but_a_restart(setup, call):
    setup.fail(call)
    with pytest.raises(OSError, match=call):
        await setup.colocation.to_engines(setup.sync)
        await setup.colocation.to_trainer()
    happened = setup.take()
    # The parameters stay after a failed sync; whatever the phase, the other side must not come.
    with pytest.raises(WrongPhase):
        await setup.colocation.to_trainer()
    with pytest.raises(WrongPhase):
        await setup.colocation.to_engines(setup.sync)
    assert setup.take() == []
    setup.trainer.held = dict(PART_BYTES)  # as a new trainer has
    await setup.colocation.restart(setup.start)
    # Engines that perhaps are awake, in part or wholly, leave the devices before the new ranks come.
    woken = call.startswith("wake") or any(c.startswith("wake") for c in happened)
    asleep = not woken or "sleep" in happened
    assert setup.take() == (["start"] if asleep else ["sleep", "start"])
    await setup.colocation.to_engines(setup.sync)
    assert setup.take() == TO_ENGINES


@pytest.mark.parametrize("verb", ["memory", "offload"])
async def test_a_trainer_lost_in_a_change_is_known_as_lost(setup, verb):
    setup.trainer.fail_next(verb, TrainerLost("rank 0 died"))
    with pytest.raises(TrainerLost):
        await setup.colocation.to_engines(setup.sync)
    with pytest.raises(WrongPhase, match="after a change of phase that failed"):
        await setup.colocation.to_engines(setup.sync)


async def test_a_restart_that_fails_can_be_repeated(setup):
    await setup.colocation.to_engines(setup.sync)
    setup.take()

    async def lost():
        raise TrainerLost("rank 0 died again")

    with pytest.raises(TrainerLost):
        await setup.colocation.restart(lost)
    setup.trainer.held = dict(PART_BYTES)
    await setup.colocation.restart(setup.start)
    assert setup.take() == ["sleep", "start"]
    await setup.colocation.to_engines(setup.sync)


async def test_what_stays_behind_ends_the_run(setup):
    offload = setup.trainer.offload

    async def leaky(parts):
        await offload(parts)
        setup.trainer.held["optimizer"] = 1

    setup.trainer.offload = leaky
    with pytest.raises(MemoryExceeded, match="memory in phase sync: optimizer holds"):
        await setup.colocation.to_engines(setup.sync)
    assert "sync" not in setup.take()


@pytest.mark.parametrize("colocated", [True, False])
async def test_a_run_begins_in_train_with_the_limits_of_its_ranks(tmp_path, colocated):
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["run"]["out"] = str(tmp_path)
    tree["rollout"]["engine"]["colocated"] = colocated
    calls: list[str] = []
    engines, trainer = FakeEngines(calls), FakeTrainer(calls=calls)
    config = Config.model_validate(tree)
    colocation = await open_colocation(config.rollout.engine, config.run, trainer, engines)
    assert calls == ["memory begin"]
    await colocation.to_engines(engines.sync)
    assert ("wake weights" in calls) == colocated
    held = json.loads((tmp_path / "memory.json").read_text())["phases"]["train"]["optimizer"]
    assert held == {"bytes": 120, "limit": 120 if colocated else None, "rank": 0, "cycle": 1}


def test_limits_name_every_owner_that_must_go():
    allowed = limits(PART_BYTES, RESIDUAL)
    assert allowed[Phase.TRAIN] == {**PART_BYTES, "engine": RESIDUAL}
    both = {"gradients": 0, "optimizer": 0, "other": RESIDUAL, "communicators": RESIDUAL}
    assert allowed[Phase.SYNC] == {"parameters": 20, **both}
    assert allowed[Phase.ROLL] == {"parameters": 0, **both}
