"""The first prompt of each environment, once."""

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.telemetry.prompt_log import PromptLog


def episode(env: str, first: int, started: bool = True) -> Trajectory:
    ids = np.arange(first, first + 4, dtype=np.int32) if started else np.empty(0, np.int32)
    spans = (Span("prompt", 0, 3, 0), Span("action", 3, 4, 0, 1)) if started else ()
    mask = np.arange(len(ids)) == 3
    return Trajectory("t", env, 0, 0, ids, mask, -1.0 * mask, spans, 1.0, "", Outcome.COMPLETED)


def test_one_prompt_for_each_environment(tmp_path):
    folder = tmp_path / "prompts"
    log = PromptLog(folder, lambda ids: " ".join(map(str, ids)))
    log.write([Group(0, "t", "desk", [episode("desk", 0, started=False)])])
    assert not folder.exists()
    log.write([Group(0, "t", "desk", [episode("desk", 10), episode("desk", 20)])])
    log.write([Group(0, "t", "a/b", [episode("a/b", 30)]), Group(1, "t", "desk", [episode("desk", 40)])])
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"desk.txt": "10 11 12", "a_b.txt": "30 31 32"}
    PromptLog(folder, lambda ids: "again").write([Group(0, "t", "desk", [episode("desk", 10)])])
    assert (folder / "desk.txt").read_text() == "again"
