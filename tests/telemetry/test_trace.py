"""Traces: valid files of a bounded number, whose slices show what overlapped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import check_trace, read_trace

from megatron_fleet.platform.timeline import CONTROLLER, Sample, Slice, StepEvents
from megatron_fleet.telemetry import trace as traces
from megatron_fleet.telemetry.trace import trace, write_trace

T = 1_700_000_000.123456


def threads(found, process):
    """Names of the slices of each thread of a process, by the thread's name and number."""
    events = found["traceEvents"]
    (pid,) = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process}
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
    return [(title, [e["name"] for e in slices if e["tid"] == tid]) for tid, title in sorted(titles.items())]


def test_a_trace_shows_every_component(tmp_path):
    played = (("environment", T + 0.2, 0.3), ("generate", T + 0.5, 0.2), ("tool", T + 0.7, 9.0))
    slices = [
        Slice("trainer", "rank 10", "forward_backward", T + 3, 1.0),
        Slice("trainer", "rank 9", "forward_backward", T + 3, 1.5),
        Slice("worker 0", "", "task a", T + 0.1, 1.0, played, {"reward": 0.5, "outcome": "completed"}),
        Slice("worker 0", "", "task b", T + 0.2, 0.5),
        Slice("worker 0", "", "task c", T + 1.2, 0.5),
        Slice(CONTROLLER, "", "rollout", T, 2.0),
        Slice(CONTROLLER, "", "step 3", T, 5.0),
    ]
    samples = [Sample("engines", "engine 0", T + 1, {"running": 4.0, "kv_cache": 0.5})]
    found = read_trace(write_trace(tmp_path / "traces", StepEvents(3, slices, samples, dropped=2)))
    assert found["otherData"] == {"step": 3, "unix_time_of_0": T, "dropped": 2}
    assert threads(found, CONTROLLER) == [("phases", ["step 3", "rollout"])]
    assert threads(found, "trainer") == [("rank 9", ["forward_backward"]), ("rank 10", ["forward_backward"])]
    assert threads(found, "worker 0") == [
        ("episodes", ["task a", "environment", "generate", "tool", "task c"]),
        ("episodes", ["task b"]),
    ]
    tool, *_ = (event for event in found["traceEvents"] if event["name"] == "tool")
    assert (tool["ts"], tool["dur"]) == (700_000, 400_000)  # cut at the end of its episode
    counters = [(e["name"], e["ts"], e["args"]) for e in found["traceEvents"] if e["ph"] == "C"]
    assert counters == [
        ("engine 0 running", 1_000_000, {"running": 4.0}),
        ("engine 0 kv_cache", 1_000_000, {"kv_cache": 0.5}),
    ]


SECONDS = st.floats(0, 10, width=32)
STRETCHES = st.lists(st.tuples(SECONDS, SECONDS, st.lists(st.tuples(SECONDS, SECONDS), max_size=3)), max_size=30)


@given(STRETCHES)
def test_slices_of_a_thread_nest_whatever_overlaps(stretches):
    slices = [
        Slice("w", "", str(n), T + a, b, [(str(i), T + x, y) for i, (x, y) in enumerate(parts)])
        for n, (a, b, parts) in enumerate(stretches)
    ]
    found = trace(StepEvents(1, slices))
    check_trace(found)
    assert sum(event["ph"] == "X" for event in found["traceEvents"]) == sum(1 + len(s.parts) for s in slices)


@pytest.mark.parametrize("limit", [2, 6, 12])
def test_parts_are_left_out_where_there_are_too_many_events(monkeypatch, limit):
    monkeypatch.setattr(traces, "MAX_EVENTS", limit)
    slices = [Slice("w", "", str(n), T + n, 1.0, [("turn", T + n, 0.5)] * 3) for n in range(4)]
    found = [event for event in trace(StepEvents(1, slices))["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"] != "turn" for event in found) == 4
    assert sum(event["name"] == "turn" for event in found) <= limit


def test_the_newest_traces_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_TRACES", 2)
    for step in (9, 10, 100):
        write_trace(tmp_path, StepEvents(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010.json.gz", "step-000100.json.gz"]
