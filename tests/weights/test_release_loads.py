"""Converted checkpoints load with Transformer Engine's layer specification and Megatron's local one.

Other releases than the installed one: put the folder of an unpacked wheel first on PYTHONPATH and run
``release_loads.py`` by hand. 0.16.1, 0.17.1, 0.18.2 and 0.19.2 load all of them, but 0.19 refuses Moonlight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

from recorded_names import megatron_names

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_family_loads_under(spec, tmp_path):
    path = [HERE / "te_stub"] if spec == "te" else []
    env = {"PYTHONPATH": os.pathsep.join(map(str, [*path, HERE])), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, HERE / "release_loads.py", spec, tmp_path]
    done = subprocess.run(script, env=os.environ | env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    found = {(model, variant): result for _, model, variant, result in results}
    assert {model for model, _ in found} == set(megatron_names.MODELS)
    assert set(found.values()) == {"loaded"}
    assert ("deepseek_v3", "te_grouped") in found or spec == "local"
