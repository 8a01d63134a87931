"""Traces of training steps in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Processes of a trace are kinds of components (controller, trainer, engines, workers), its threads the components. Slices
of one thread are nested or apart; those that overlap otherwise are put on further threads of the same name.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.platform.timeline import CONTROLLER, MAX_EVENTS, Part, Slice, StepEvents
from megatron_fleet.storage.local import write_atomically

FOLDER = "traces"
"""Folder of the traces in ``run.out``."""
MAX_TRACES = 20
"""Number of newest traces that are kept."""
GROUPS = (CONTROLLER, "trainer", "engines")
"""Kinds of components that come first, in this order."""
Event = dict[str, Any]


def trace_name(step: int) -> str:
    """Return the name of the trace of a step."""
    return f"step-{step:06d}.json.gz"


def write_trace(folder: Path, events: StepEvents) -> Path:
    """Write the trace of a step; the oldest ones beyond `MAX_TRACES` are removed."""
    folder.mkdir(exist_ok=True)
    path = folder / trace_name(events.step)
    text = json.dumps(trace(events), separators=(",", ":"), allow_nan=False)
    write_atomically(path, gzip.compress(text.encode(), compresslevel=4))
    for old in sorted(folder.glob("step-*.json.gz"))[:-MAX_TRACES]:
        old.unlink()
    return path


def trace(events: StepEvents) -> dict[str, Any]:
    """Return the trace as a JSON object, at most about `MAX_EVENTS` events."""
    found = {each.group for each in events.slices} | {each.group for each in events.samples}
    numbers = {group: number for number, group in enumerate((*GROUPS, *sorted(found - set(GROUPS), key=_natural)), 1)}
    start = min((_us(event.began) for event in events.slices), default=0)
    out: list[Event] = []
    for group, number in numbers.items():
        own = [each for each in events.slices if each.group == group]
        samples = [each for each in events.samples if each.group == group]
        if own or samples:
            out += _metadata(number, 0, process_name={"name": group}, process_sort_index={"sort_index": number})
            unnamed = "phases" if group == CONTROLLER else "episodes"
            out += _slices(own, number, unnamed, start, MAX_EVENTS - len(out))
        for sample in samples:
            counter = {"ph": "C", "pid": number, "tid": 0, "ts": max(_us(sample.time) - start, 0)}
            out += [counter | {"name": f"{sample.lane} {name}", "args": {name: v}} for name, v in sample.values.items()]
    other = {"step": events.step, "unix_time_of_0": start / 1e6, "dropped": events.dropped}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": out}


def _slices(slices: Sequence[Slice], process: int, unnamed: str, start: int, room: int) -> Iterator[Event]:
    """Yield the slices of one process, and their parts while there is ``room``."""
    by_lane: defaultdict[str, list[Slice]] = defaultdict(list)
    for each in slices:
        by_lane[each.lane].append(each)
    thread = 0
    for lane in sorted(by_lane, key=_natural):
        for row in rows(by_lane[lane]):
            thread += 1
            name, order = {"name": lane or unnamed}, {"sort_index": thread}
            yield from _metadata(process, thread, thread_name=name, thread_sort_index=order)
            for each in row:
                room -= 1 + len(each.parts)
                yield from _events(each, process, thread, start, each.parts if room >= 0 else ())


def _events(each: Slice, process: int, thread: int, start: int, parts: Iterable[Part]) -> Iterator[Event]:
    common = {"ph": "X", "pid": process, "tid": thread}
    begin, end = _us(each.began) - start, _us(each.began + each.seconds) - start
    yield common | {"name": each.name, "ts": begin, "dur": end - begin, "args": dict(each.arguments)}
    last = begin
    for name, began, seconds in parts:  # clocks and roundings must not make a part stick out
        first = min(max(_us(began) - start, last), end)
        last = min(max(_us(began + seconds) - start, first), end)
        yield common | {"name": name, "ts": first, "dur": last - first}


def rows(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few rows as their order of beginning allows, so that two in one row are either apart or
    one within the other. Slices with parts have a row to themselves while they last.
    """
    found: list[list[Slice]] = []
    ends: list[list[float]] = []
    for each in sorted(slices, key=lambda one: (_us(one.began), -_us(one.began + one.seconds))):
        begin, end = _us(each.began), _us(each.began + each.seconds)
        for row, open_ends in zip(found, ends, strict=True):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if not open_ends or (not each.parts and not row[-1].parts and end <= open_ends[-1]):
                break
        else:
            row, open_ends = [], []
            found.append(row)
            ends.append(open_ends)
        row.append(each)
        open_ends.append(end)
    return found


def _metadata(process: int, thread: int, **values: Mapping[str, Any]) -> list[Event]:
    return [{"ph": "M", "pid": process, "tid": thread, "name": name, "args": args} for name, args in values.items()]


def _natural(lane: str) -> tuple[str, int]:
    """Key that sorts ``rank 10`` after ``rank 9``."""
    head, _, number = lane.rpartition(" ")
    return (head, int(number)) if number.isdecimal() else (lane, 0)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
