"""Who has the devices when: the order of what leaves and what comes, refusals, and a real trainer in it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

from megatron_fleet.loop.colocation import Devices, EnginesApart, Phase, Slept, TrainerStays, WrongPhase, limits
from megatron_fleet.loop.memory_budget import Ledger, MemoryExceeded, ProcessGauge
from megatron_fleet.platform.communicator import Alone

SIZES = {"parameters": 20, "gradients": 40, "optimizer": 120}
RESIDUAL = 7


class Story:
    """Records what happens in which order; ``fail`` names an event that raises once."""

    def __init__(self):
        self.events, self.fail = [], None

    def tell(self, event):
        if event == self.fail:
            self.fail = None
            raise OSError(event)
        self.events.append(event)

    def take(self):
        events, self.events = self.events, []
        return events


class FakeTrainer:
    def __init__(self, story):
        self.story, self.here, self.leak = story, dict(SIZES), 0

    def held(self):
        return self.here | {"optimizer": self.here["optimizer"] + self.leak}

    def offload(self, parts):
        self.story.tell("offload " + " ".join(parts))
        self.here |= dict.fromkeys(parts, 0)

    def onload(self, parts):
        self.story.tell("onload " + " ".join(parts))
        self.here |= {part: SIZES[part] for part in parts}


class FakeEngines:
    def __init__(self, story):
        self.story = story

    def sleep(self):
        self.story.tell("sleep")
        return Slept(lost_weights=True, kept_memory="no memory of its own")

    def wake(self, part):
        self.story.tell(f"wake {part}")


@pytest.fixture
def story():
    return Story()


def make(story, tmp_path, trainer=None, engines=None, allowed=None):
    trainer = trainer or FakeTrainer(story)
    ledger = Ledger(
        Alone(), ProcessGauge(), limits(SIZES, RESIDUAL) if allowed is None else allowed, tmp_path / "m.json"
    )
    return Devices(trainer, engines or FakeEngines(story), ledger, Alone())


TO_ENGINES = [
    "offload gradients optimizer",
    "wake weights",
    "publish",
    "offload parameters gradients optimizer",
    "wake kv_cache",
]
TO_TRAINER = ["sleep", "onload parameters gradients optimizer"]


def test_a_cycle_moves_everything_in_its_order(story, tmp_path):
    devices = make(story, tmp_path)
    for _ in range(2):
        devices.to_engines(lambda: story.tell("publish"))
        assert story.take() == TO_ENGINES
        devices.to_trainer()
        assert story.take() == TO_TRAINER
    seconds = devices.read_seconds()
    assert seconds.keys() == {"offload", "onload", "engines_sleep", "engines_wake"}
    assert devices.read_seconds() == {}
    table = json.loads((tmp_path / "m.json").read_text())
    assert table["engines"] == "no memory of its own"
    held = {
        phase: {o: row["bytes"] for o, row in owners.items() if o != "process"}
        for phase, owners in table["phases"].items()
    }
    away = dict.fromkeys(SIZES, 0)
    assert held == {"train": SIZES, "publish": away | {"parameters": 20}, "roll": away}
    assert devices.memory()["memory/train/process"] > 0


def test_borrowed_devices_go_back_with_weights(story, tmp_path):
    devices = make(story, tmp_path)
    devices.to_engines(lambda: None)
    story.take()
    with devices.borrowed(lambda: story.tell("publish")):
        story.tell("save")
    assert story.take() == [*TO_TRAINER, "save", *TO_ENGINES]


def test_engines_that_stay_awake_get_no_weights_twice(story, tmp_path):
    devices = make(story, tmp_path, TrainerStays(), EnginesApart(), allowed={})
    devices.to_engines(lambda: story.tell("publish"))
    with devices.borrowed(lambda: story.tell("publish")):
        story.tell("save")
    devices.to_trainer()
    devices.to_engines(lambda: story.tell("publish"))
    assert story.take() == ["publish", "save", "publish"]
    assert "memory/roll/process" in devices.memory()


def test_orders_out_of_turn_are_refused(story, tmp_path):
    devices = make(story, tmp_path)
    with pytest.raises(WrongPhase, match="phase 'train' cannot begin in phase 'train'"):
        devices.to_trainer()
    devices.to_engines(lambda: None)
    story.take()
    with pytest.raises(WrongPhase, match="phase 'publish' cannot begin in phase 'roll'"):
        devices.to_engines(lambda: None)
    assert story.take() == []
    devices.to_trainer()  # a refusal changes nothing


@pytest.mark.parametrize("event", [*TO_ENGINES, *TO_TRAINER])
def test_after_a_failure_nothing_may_follow(story, tmp_path, event):
    devices = make(story, tmp_path)
    story.fail = event
    with pytest.raises(OSError, match=event):
        devices.to_engines(lambda: story.tell("publish"))
        devices.to_trainer()
    happened = story.take()
    assert event not in happened
    # The parameters stay after a failed publishing; whatever the phase, the other side must not come.
    with pytest.raises(WrongPhase):
        devices.to_trainer()
    with pytest.raises(WrongPhase):
        devices.to_engines(lambda: None)
    assert story.take() == []


def test_what_stays_behind_ends_the_run(story, tmp_path):
    trainer = FakeTrainer(story)
    devices = make(story, tmp_path, trainer)
    trainer.leak = 1
    with pytest.raises(MemoryExceeded, match="memory in phase publish: optimizer holds"):
        devices.to_engines(lambda: story.tell("publish"))
    assert "publish" not in story.take()


def test_limits_name_every_owner_that_must_go():
    allowed = limits(SIZES, RESIDUAL)
    assert allowed[Phase.TRAIN] == {**SIZES, "engine": RESIDUAL}
    both = {"gradients": 0, "optimizer": 0, "other": RESIDUAL, "communicators": RESIDUAL}
    assert allowed[Phase.PUBLISH] == {"parameters": 20, **both}
    assert allowed[Phase.ROLL] == {"parameters": 0, **both}
