"""launch/torchrun/train.sh starts as many ranks as the configuration asks for, each of them `mfleet train`."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_world_is_the_configured_one(tmp_path):
    if not (ROOT / ".venv" / "engine" / "bin" / "torchrun").exists():
        pytest.skip("needs the engine environment in the project folder")
    # A model that is not there stops every rank at its first check: each says so on its own line.
    command = [ROOT / "launch/torchrun/train.sh", "experiment=quickstart", "parallel.data=2", "parallel.tensor=2"]
    command += ["parallel.expert_tensor=3"]  # no factor of the world size
    done = subprocess.run(
        [*command, f"model.path={tmp_path}"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode != 0
    # torchrun stops the others as soon as one failed; the world size itself was accepted by those that spoke.
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert 1 <= len(said) <= 4
    assert all(line.startswith(f"error: model.path={tmp_path}: config.json is missing") for line in said)
