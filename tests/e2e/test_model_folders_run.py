"""Every model folder that the check accepts (`model_folders.CASES`) can be trained for a step.

A folder that it refuses ends the run at its start: runs call the same check (tests/cli/test_preflight_models.py).
"""

from __future__ import annotations

import pytest
from model_folders import CASES, write
from served_models import served_config
from tiny_configs import raw_config
from whole_runs import Run

from megatron_fleet.preflight.checks import _has_amx

pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=1)]

ACCEPTED = [name for name, case in CASES.items() if case.said is None]
STEP = (
    *("run.steps=1", "eval=none", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
    *("rollout.max_context=1024", "rollout.sampling.max_turns=1", "rollout.sampling.max_tokens_per_turn=8"),
    *("algorithm.masked_outcomes=[]", "algorithm.group_filter=none"),
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_folder_trains_a_step(name, tmp_path):
    if "fp8" in name and not _has_amx():
        pytest.skip("vLLM computes in FP8 on CPUs with AMX only")
    case = CASES[name]
    made = case.made or {}
    family = made.get("family", "qwen3")
    served, own = served_config(family, "v4"), raw_config(family, "v4")
    wider = {key: value for key, value in served.items() if own.get(key) != value}  # heads that vLLM's kernels take
    folder = write(tmp_path / "model", **(wider | made))
    case.damage(folder)
    dtype = "bfloat16" if "fp8" in name else "float32"
    run = Run(tmp_path / "run", (f"model.path={folder}", f"model.dtype={dtype}", *STEP))
    run.finish()
    (row,) = run.metrics()
    assert row["accounting/episodes"] == 4 and row["policy/mismatch_kl"] < 1e-3
    run.assert_nothing_left()
