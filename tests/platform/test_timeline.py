"""Timeline: phases of the current step, durations of the last ones, and events of traced steps only."""

from __future__ import annotations

import pytest

from megatron_fleet.platform import timeline
from megatron_fleet.platform.timeline import HISTORY, Timeline


@pytest.fixture
def line():
    made = Timeline()
    made.reset(trace_every=2)
    return made


def names(line):
    return [(phase.name, phase.seconds is None) for phase in line.phases]


def test_a_step_keeps_the_phases_that_are_still_running(line):
    with line.phase("starting"):
        pass
    with line.phase("evaluation", total=4) as phase:
        phase.done = 3
        assert names(line) == [("starting", False), ("evaluation", True)]
        line.begin_step(7)
        assert names(line) == [("evaluation", True)]
    assert (line.step, line.phases[0].done, line.phases[0].seconds is None) == (7, 3, False)


def test_failed_phases_are_no_history(line):
    with pytest.raises(OSError, match="lost"), line.phase("rollout"):
        raise OSError("lost")
    assert line.history("rollout") == [] and line.phases[0].seconds is not None
    for _ in range(HISTORY + 1):
        with line.phase("rollout"):
            pass
    assert len(line.history("rollout")) == HISTORY


def test_the_first_step_and_every_second_are_traced(line):
    """The start of the run is part of the first one."""
    with line.phase("starting"):
        pass
    traced = []
    for step in range(4, 9):  # resumed after step 4
        line.begin_step(step)
        line.add("trainer", "rank 0", f"work of {step + 1}", 1.0, 1.0)
        traced.append(line.tracing)
        if line.traced:
            events = line.traced.popleft()
            assert {each.name for each in events.slices} >= {f"step {events.step}", f"work of {events.step}"}
            assert any(each.name == "starting" for each in events.slices) == (events.step == 5)
    assert traced == [True, True, False, True, False]
    line.finish(9)
    assert not line.traced and (line.step, line.step_began, line.phases, line.tracing) == (9, None, [], False)


def test_nothing_is_traced_by_default_and_a_trace_is_bounded(line, monkeypatch):
    quiet = Timeline()
    quiet.begin_step(0)
    quiet.add("trainer", "rank 0", "forward", 1.0, 1.0)
    quiet.end_step()
    assert not quiet.traced
    monkeypatch.setattr(timeline, "MAX_EVENTS", 3)
    line.begin_step(0)
    for _ in range(5):
        line.sample("engines", "engine 0", {"running": 1.0})
    line.end_step()
    assert (len(line.traced[0].samples), line.traced[0].dropped) == (3, 3)
