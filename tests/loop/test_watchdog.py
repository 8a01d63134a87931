"""Watchdog: what is a stall, what is written about it, and how often. Phases are made older instead of waited for."""

from __future__ import annotations

import logging

import pytest

from megatron_fleet.loop.watchdog import MAX_FILES, Watchdog
from megatron_fleet.platform.alerts import FIELD
from megatron_fleet.platform.timeline import Timeline


class Dog:
    """A watchdog that counts how often it reads stacks."""

    def __init__(self, folder):
        self.line, self.folder, self.read = Timeline(), folder, 0
        self.look = Watchdog(self.line, folder, 5.0, self._stacks).look

    def _stacks(self):
        self.read += 1
        return {"node-0": "== pid 1, python, rank_0.log\nall_reduce\n", "node-1": "== pid 2\n"}

    def took(self, name, seconds, times=3):
        for _ in range(times):
            with self.line.phase(name) as phase:
                phase.since -= seconds

    def files(self):
        return sorted(self.folder.iterdir())


@pytest.fixture
def dog(tmp_path):
    return Dog(tmp_path)


def alerts(caplog):
    return [(r.alert, r.getMessage()) for r in caplog.records if hasattr(r, FIELD)]


@pytest.mark.parametrize(
    ("before", "times", "fine", "stall"),
    [(0.1, 3, 55.0, 65.0), (100.0, 3, 450.0, 550.0), (100.0, 2, 1700.0, 1900.0), (1000.0, 1, 4500.0, 5500.0)],
)
def test_a_stall_is_judged_by_the_longest_of_the_last_durations(dog, before, times, fine, stall):
    dog.took("rollout", before, times)
    with dog.line.phase("rollout") as phase:
        began = phase.since
        phase.since = began - fine
        dog.look()
        assert dog.read == 0
        phase.since = began - stall
        dog.look()
        assert dog.read == 1


def test_a_stall_is_told_once_with_the_stacks_of_all_hosts(dog, caplog):
    dog.took("policy_train", 7200.0)
    dog.line.begin_step(11)
    with dog.line.phase("step"), dog.line.phase("policy_train") as phase:
        phase.since -= 3 * 86400
        dog.look()
        dog.look()
        (file,) = dog.files()
        assert file.name.startswith("stall-2") and file.name.endswith("-policy-train.txt")
        text = file.read_text()
        what = "step 12: policy_train has taken 3 d 0 h so far, at most 2 h 0 min in the last 3 times"
        assert text.startswith(what) and "=== host node-0" in text and "all_reduce" in text and "== pid 2" in text
    ((key, message),) = alerts(caplog)
    assert key == ("stall", "policy_train") and message.startswith(what) and str(file) in message
    dog.look()
    assert caplog.records[-1].getMessage() == "step 12: policy_train ended after 3 d 0 h"
    dog.look()
    assert len(caplog.records) == 2 and dog.read == 1


def test_the_innermost_phase_is_named_and_those_around_it_are_no_further_stalls(dog):
    with dog.line.phase("sync_weights") as outer, dog.line.phase("send_weights") as inner:
        inner.since -= 2000
        dog.look()
        outer.since -= 2000
        dog.look()
    assert dog.read == 1 and dog.files()[0].name.endswith("-send-weights.txt")


def test_the_number_of_files_is_bounded(dog, monkeypatch):
    for number in range(MAX_FILES + 3):
        (dog.folder / f"stall-20250101T0000{number:02}-rollout.txt").write_text("")
    (dog.folder / "rank_0.log").write_text("")
    with dog.line.phase("rollout") as phase:
        phase.since -= 2000
        dog.look()
    names = [path.name for path in dog.files()]
    assert len(names) == MAX_FILES + 1 and "rank_0.log" in names and "stall-20250101T000010-rollout.txt" in names


def test_a_full_disk_is_told_with_the_stall(tmp_path, caplog):
    dog = Dog(tmp_path / "missing")
    with dog.line.phase("rollout") as phase, caplog.at_level(logging.WARNING):
        phase.since -= 2000
        dog.look()
    ((_, message),) = alerts(caplog)
    assert "has never ended before" in message and "could not be written" in message
