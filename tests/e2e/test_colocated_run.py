"""A whole run whose trainer and engines take turns: what it learns is the same to the bit."""

import json

import pytest
from whole_runs import Run

pytestmark = pytest.mark.slow

SHORT = ("run.steps=2", "eval=none", "rollout.engine.probe_interval=1")
PARTS = ("parameters", "gradients", "optimizer")


def test_taking_turns_changes_no_number(tmp_path):
    apart = Run(tmp_path / "apart", SHORT)
    apart.finish()
    together = Run(tmp_path / "together", (*SHORT, "rollout.engine.colocated=true"))
    together.finish()
    together.assert_nothing_left()
    assert together.facts() == apart.facts()
    weights = "hf/model.safetensors"
    assert (together.out / weights).read_bytes() == (apart.out / weights).read_bytes()

    for row in together.metrics():
        assert all(row[f"timing/{name}"] > 0 for name in ("offload", "onload", "engines_sleep", "engines_wake"))
    table = json.loads((together.out / "memory.json").read_text())
    assert "frees no memory on platform 'cpu'" in table["engines"]
    held = {phase: [owners[part]["bytes"] for part in PARTS] for phase, owners in table["phases"].items()}
    parameters, gradients, optimizer = held["train"]
    # float32: the parameters are their own masters.
    assert 0 < gradients <= parameters and optimizer == pytest.approx(2 * parameters, rel=0.02)
    assert held["publish"] == [parameters, 0, 0]
    assert held["roll"] == [0, 0, 0]
