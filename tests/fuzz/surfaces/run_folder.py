"""The folder of a run as ``mfleet report`` and ``mfleet top`` read it: configuration, metrics, state, trajectories."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import command
from run_maker import RunMaker, groups

from megatron_fleet.analysis import statistics
from megatron_fleet.telemetry.status import Alert, EngineStatus, EnvironmentStatus, PhaseStatus, RunStatus

STATUS = RunStatus(
    *("demo", "demo_1", "running", "node-0", 7),
    time=1000.0,
    started=0.0,
    step=2,
    steps=4,
    step_began=990.0,
    phases=[PhaseStatus("rollout", 990.0, None, 1, 2), PhaseStatus("to_trainer", 990.0, 1.0)],
    engines=[EngineStatus("engine 0", True, 2.0, 1.0, 0.5, 9.0)],
    environments={"forge": EnvironmentStatus(3, 2, 0.5, 4, 1, 0)},
    memory={"controller": 1 << 30, "host_used": 1 << 31, "host_total": 1 << 32},
    alerts=[Alert(990.0, "WARNING", "slow")],
)


@cache
def seeds() -> list[Any]:
    said = [("user", "do it"), ("assistant", "<think>hm</think>go"), ("tool", "Error (timeout): late"), ("tool", "{}")]
    first = groups({"t0": [0.0, 1.0], "t1": [0.0, None]}, messages=said)
    last = groups({"t0": [1.0, 1.0], "t1": [0.5, 0.0]}, metrics={"tool_calls": 3.0, "parse_errors": 1.0})
    with TemporaryDirectory() as place:
        maker = RunMaker(Path(place, "run"))
        maker.evaluate(0, first, first[:1]).train(1, last).evaluate(1, last)
        maker.train(2, groups({"a": [1.0], "b": [0.0]}, env="forge"))
        STATUS.write(maker.folder)
        files = folders.read(maker.folder)
    structured = {name: folders.structured(name, data) for name, data in files.items()}
    for number, row in enumerate(structured["metrics.jsonl"]):
        row["time"] = 1000.0 + number
    files = {name: folders.content_of(name, content) for name, content in structured.items()}
    return [structured, files, {n: f for n, f in structured.items() if "eval" not in n and "greedy" not in n}]


def check(tree: Any, folder: Path) -> bool:
    place = folder / "run"
    folders.write(place, tree)
    with patch.object(statistics, "RESAMPLES", statistics._CHUNK):
        done = command("report", place)
    assert command("top", place, "--once").status in (0, 2)
    assert not folders.left_over(folder)
    pages = [place / name for name in ("report.html", "report.md")]
    if done.status == 0:
        for page in pages:
            assert page.read_bytes().decode("utf-8")
        _check_data(pages[0].read_text(encoding="utf-8"))
    return done.status == 0


def _check_data(page: str) -> None:
    """The data of the page's script is JSON that JavaScript accepts."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is in the page's data")

    for part in page.split('<script type="application/json"')[1:]:
        json.loads(part.partition(">")[2].partition("</script>")[0], parse_constant=refuse)


WORDS = ("time", "attempt", "step", "final_answer", "spans", "messages", "tool_calls", "offsets", "accounting/episodes")
SURFACE = Surface("run_folder", 60, seeds, check, WORDS)
