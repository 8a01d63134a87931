"""Training against a server that knows nothing of this package, by its address alone."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from whole_runs import Run

from megatron_fleet.telemetry.shards import Shard

pytestmark = pytest.mark.slow

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


@pytest.fixture
def url(tmp_path, episode_python):
    """Server that ``openenv init`` writes: it has one place, and pays 0.1 for each character that it gets."""
    command = [episode_python, "-c", SERVER, TESTS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()


def test_a_run_learns_from_what_the_server_pays(tmp_path, url, monkeypatch):
    """With parts of the user's own wherever a run has a place for them."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
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
    run = Run(tmp_path / "run", ("run.steps=1", "rollout.prompts_per_step=2", "eval=none", DIVERSE, *own, *server))
    output = run.finish()
    run.assert_nothing_left()
    (row,) = run.metrics()
    episodes = Shard.open(run.out / "trajectories" / "step_000001.parquet").records()
    assert len(episodes) == row["accounting/episodes"] == 8
    # Whatever the policy did with its turns, the server was told its answer, or that there is none.
    assert [e["reward"] for e in episodes] == pytest.approx([0.1 * len(e["final_answer"] or "") for e in episodes])
    assert row["reward/avg_raw_reward"] == pytest.approx(np.mean([e["reward"] for e in episodes]))
    groups = [[e["reward"] for e in episodes if e["group"] == group] for group in (0, 1)]
    assert row["accounting/trained"] == sum(len(group) for group in groups if len(set(group)) > 1) > 0
    assert row["policy/grad_norm"] > 0 and row["policy/own/outside"] == 0  # the first update: all ratios are 1
    assert all(e["messages"][0]["content"].startswith("Call one tool at a time") for e in episodes)
    assert (run.out / "metrics.csv").read_text().splitlines()[1].startswith("1,")
    assert "weights of version 1 took" in output
