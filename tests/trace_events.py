"""Checks of traces against the Trace Event Format ("Trace Event Format" by Google, JSON object format)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace and check it."""
    found = json.loads(gzip.decompress(path.read_bytes()), parse_constant=_no_constant)
    check_trace(found)
    return found


def check_trace(found: dict[str, Any]) -> None:
    """Assert that every event has the fields of its phase, that threads are named, and that slices nest."""
    assert set(found) <= {"traceEvents", "displayTimeUnit", "otherData"} and found["displayTimeUnit"] in ("ms", "ns")
    slices: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int, event
        match event["ph"]:
            case "M":
                key, kind = METADATA[event["name"]]
                assert type(event["args"][key]) is kind and "ts" not in event, event
                named.add((event["name"], event["pid"], event["tid"]))
            case "X":
                assert type(event["ts"]) is int and type(event["dur"]) is int, event
                assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event.get("args", {}), dict), event
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
            case "C":
                assert type(event["ts"]) is int and event["ts"] >= 0, event
                assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values()), event
            case other:
                raise AssertionError(f"no phase of ours: {other}")
    for (process, thread), own in slices.items():
        assert {("process_name", process, 0), ("thread_name", process, thread)} <= named
        _check_nesting(own)


def _check_nesting(own: list[tuple[int, int, str]]) -> None:
    open_ends: list[int] = []
    for begin, end, name in sorted(own, key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{name} sticks out of what it is in"
        open_ends.append(end)


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")
