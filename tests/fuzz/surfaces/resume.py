"""The records of a run that is resumed: metrics, and what of trajectories and evaluations is removed or kept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of
from fuzz.surfaces import run_folder

from megatron_fleet.evaluation.dumps import EvalDumps
from megatron_fleet.storage.run_folder import ID, RunFolder
from megatron_fleet.telemetry.sinks import MetricsLog, read_metrics
from megatron_fleet.telemetry.summary import write_summary
from megatron_fleet.telemetry.trajectories import TrajectoryLog

STEP = 1
"""Step of the checkpoint that the run resumes from."""
DUMP = "dumped_evals/global_step_2_evals/all.jsonl"


@cache
def seeds() -> list[Any]:
    structured, files, _ = run_folder.seeds()
    kept = {name: content for name, content in structured.items() if not name.endswith(".parquet")}
    torn = files["metrics.jsonl"][:-20]
    return [kept | {"run.json": b'{"id": "run_0123abcd", "name": "run"}\n', DUMP: b"{}\n"}, {"metrics.jsonl": torn}, {}]


def check(tree: Any, folder: Path) -> bool:
    place = folder / "run"
    folders.write(place, tree)
    before = folders.read(place)
    try:
        with refusal_of(place):
            log = MetricsLog(place / "metrics.jsonl", STEP, started=1.0)
            TrajectoryLog(place / "trajectories", STEP)
            EvalDumps(place / "dumped_evals", str, 10, STEP)
            log.write(STEP + 1, {"reward/avg_raw_reward": 0.5, "accounting/episodes": 4})
            log.close()
            with RunFolder(place, "run") as run:
                assert ID.fullmatch(run.id)
            assert read_metrics(place / "metrics.jsonl")[-1]["step"] == STEP + 1
            json.loads(json.dumps(write_summary(place / "metrics.jsonl", place / "summary.json")))
            assert not folders.left_over(folder)
            return True
    except OSError as error:  # which the command line tells in one sentence, with the path
        assert error.filename, error
    if b"metrics.jsonl" in before:
        assert folders.read(place)["metrics.jsonl"] == before["metrics.jsonl"]
    return False


WORDS = ("metrics.jsonl", "step", "time", "attempt", "trajectories/step_000009.x", "dumped_evals/global_step_9_evals")
SURFACE = Surface("resume", 200, seeds, check, WORDS)
