"""Exports of a real run, equal to what the converter makes and checked in vLLM; and a run that begins from one.

The first run loads its model from the hub, the second one from the bucket with the first run's exports. The second one
has a component of the user's own of every kind, and its environment is a server that knows nothing of this package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gcs_server import GCS_BUCKET, found_by_google
from hub_server import found_by_hub_client
from whole_runs import RUN_TIMEOUT_S, Run

from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer
from megatron_fleet.telemetry.shards import Shard

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(number=0, of=2)]

TINY = Path(__file__).parents[2] / "assets" / "tiny"
CONVERTER = Path(__file__).parents[2] / "tools" / "convert" / "to_hf.py"
TESTS, EXAMPLES = Path(__file__).parents[1] / "envs", Path(__file__).parents[2] / "examples"
DIVERSE = "rollout.sampling.temperature=1.5"
SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tool_servers import Served, template_app
print(Served(template_app(Path(sys.argv[2]))).url, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def bucket():
    """URL of a bucket, which the runs can reach."""
    with found_by_google():
        yield f"gs://{GCS_BUCKET}"


@pytest.fixture(scope="module")
def exporting(tmp_path_factory, bucket):
    """A run that loads its model from a hub and exports it."""
    folder = tmp_path_factory.mktemp("exporting")
    overrides = (
        *("run.steps=1", "run.id=exported", "eval.at_start=false", "eval.at_end=false", "rollout.prompts_per_step=2"),
        *("checkpoint.export.every=1", "checkpoint.export.check=true", f"checkpoint.store.url={bucket}/runs"),
    )
    with found_by_hub_client(TINY, folder / "hf_home") as server:
        run = Run(folder / "run", (*overrides, f"model.path={server.repo}"))
        run.finish()
        yield run


@pytest.fixture(scope="module")
def store(tmp_path_factory, bucket, exporting):
    """Copy of the bucket after that run."""
    stored, folder = open_folder(bucket), tmp_path_factory.mktemp("store")
    transfer(stored, LocalFolder(folder), [Copy(name, name, size) for name, size in stored.sizes().items()])
    return folder


def files(folder: Path, *without: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in without}


def test_exports_are_what_the_converter_makes_are_checked_and_sent(exporting, store, tmp_path):
    exporting.assert_nothing_left()
    exported = exporting.out / "exports" / "step_000001"
    command = [sys.executable, CONVERTER, exporting.out / "checkpoints" / exported.name, tmp_path / exported.name]
    subprocess.run(command, check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
    assert files(exported) == files(tmp_path / exported.name)
    [sent] = store.glob("runs/*/*/exported/exports/global_step_1")
    assert files(sent, "export.json") == files(exported)
    checked = json.loads(exported.with_name(f"{exported.name}.check.json").read_text())
    assert checked["step"] == 1 and checked["tokens"] == 124 and checked["largest"] < 1e-3
    weights = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"}
    assert files(exported).keys() >= weights
    assert files(exported)["model.safetensors"] != files(TINY)["model.safetensors"]
    assert files(sent.parents[1] / "hf", "export.json") == files(exporting.out / "hf")
    assert json.loads((exporting.out / "hf.check.json").read_text())["largest"] < 1e-3
    assert exporting.metrics()[-1]["checkpoint/exports_failed"] == 0
    assert "checkpoint/export_difference" not in exporting.metrics()[0]


@pytest.fixture
def url(tmp_path, episode_python):
    """Server that ``openenv init`` writes: it has one place, and pays 0.1 for each character that it gets."""
    command = [episode_python, "-c", SERVER, TESTS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()


@pytest.mark.nightly(minutes=1)
def test_a_run_begins_from_an_export_and_trains_with_parts_of_the_users_own(bucket, store, tmp_path, url, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    [exported] = store.glob("runs/*/*/exported/hf")
    model = f"model.path={bucket}/{exported.relative_to(store)}"
    own = (
        "algorithm.loss=my_loss:asymmetric_clip",
        "algorithm.advantage=my_advantage:ranks",
        "algorithm.group_filter=my_group_filter:not_too_easy",
        "agent.kind=my_agent:one_call_at_a_time",
        "logging.own=[my_logger:Csv]",
        "rollout.engine.transport=my_transport:timed_shm",
    )
    people = ("Ana", "Ben", "Cara", "Dan", "Eve", "Finn")
    rows = [
        {"task_key": name, "env_key": "first", "prompt": f"Who helps {name}? Answer with the name."} for name in people
    ]
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps(rows))
    server = (
        "env=openenv",
        f"env.url={url}",
        "env.openenv.finish_tool=FirstAction",
        "data=file",
        f"data.tasks={tasks}",
    )
    run = Run(
        tmp_path / "run", ("run.steps=1", "rollout.prompts_per_step=2", "eval=none", DIVERSE, model, *own, *server)
    )
    output = run.finish()
    run.assert_nothing_left()
    (row,) = run.metrics()
    episodes = Shard.open(run.out / "trajectories" / "step_000001.parquet").records()
    assert len(episodes) == row["accounting/episodes"] == 8
    # The server got the final answer of each episode, or an empty text where the policy gave none.
    assert [e["reward"] for e in episodes] == pytest.approx([0.1 * len(e["final_answer"] or "") for e in episodes])
    assert row["reward/avg_raw_reward"] == pytest.approx(np.mean([e["reward"] for e in episodes]))
    groups = [[e["reward"] for e in episodes if e["group"] == group] for group in (0, 1)]
    assert row["accounting/trained"] == sum(len(group) for group in groups if len(set(group)) > 1) > 0
    assert row["policy/grad_norm"] > 0 and row["policy/own/outside"] == 0  # the first update: all ratios are 1
    assert all(e["messages"][0]["content"].startswith("Call one tool at a time") for e in episodes)
    assert (run.out / "metrics.csv").read_text().splitlines()[1].startswith("1,")
    assert "weights of version 1 took" in output
