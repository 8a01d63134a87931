"""Exports of a real run while it goes on: equal to what the converter makes, checked in vLLM, where a run can begin.

The first run takes its model from the hub, the second one from the bucket of the first one's exports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gcs_server import GCS_BUCKET, found_by_google
from hub_server import found_by_hub_client
from whole_runs import RUN_TIMEOUT_S, Run

from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "assets" / "tiny"
CONVERTER = Path(__file__).parents[2] / "tools" / "convert" / "to_hf.py"


@pytest.fixture
def bucket():
    """URL of a bucket, which the run can reach."""
    with found_by_google():
        yield f"gs://{GCS_BUCKET}"


@pytest.fixture
def hub_id(tmp_path):
    """Name of a model on a hub, which the run asks."""
    with found_by_hub_client(TINY, tmp_path / "hf_home") as server:
        yield server.repo


def files(folder: Path, *without: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in without}


def test_exports_are_what_the_converter_makes_are_checked_sent_and_begin_a_run(tmp_path, bucket, hub_id):
    store = tmp_path / "store"
    overrides = (
        *("run.steps=2", "run.id=exported", "eval.at_start=false", "eval.at_end=false", "rollout.prompts_per_step=2"),
        *("checkpoint.export.every=1", "checkpoint.export.check=true", f"checkpoint.store.url={bucket}/runs"),
    )
    run = Run(tmp_path / "run", (*overrides, f"model.path={hub_id}"))
    run.finish()
    run.assert_nothing_left()
    stored = open_folder(bucket)
    transfer(stored, LocalFolder(store), [Copy(name, name, size) for name, size in stored.sizes().items()])
    for step in (1, 2):
        exported = run.out / "exports" / f"step_00000{step}"
        command = [sys.executable, CONVERTER, run.out / "checkpoints" / exported.name, tmp_path / exported.name]
        subprocess.run(command, check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
        assert files(exported) == files(tmp_path / exported.name)
        [sent] = store.glob(f"runs/*/*/exported/exports/global_step_{step}")
        assert files(sent, "export.json") == files(exported)
        checked = json.loads(exported.with_name(f"{exported.name}.check.json").read_text())
        assert checked["step"] == step and checked["tokens"] == 124 and checked["largest"] < 1e-3
    weights = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"}
    assert files(exported).keys() >= weights
    assert files(exported)["model.safetensors"] != files(run.out / "exports" / "step_000001")["model.safetensors"]
    at_end = f"{bucket}/{sent.parents[1].relative_to(store)}/hf"
    assert files(sent.parents[1] / "hf", "export.json") == files(run.out / "hf")
    assert json.loads((run.out / "hf.check.json").read_text())["largest"] < 1e-3
    assert run.metrics()[-1]["checkpoint/exports_failed"] == 0
    assert "checkpoint/export_difference" not in run.metrics()[0]
    begun = Run(tmp_path / "begun", ("run.steps=0", f"model.path={at_end}", "eval.at_start=false"))
    begun.finish()
    assert files(begun.out / "hf") == files(run.out / "hf", "conversion.json")
