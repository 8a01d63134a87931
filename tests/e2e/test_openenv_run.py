"""Training against a server that knows nothing of this package, by its address alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_runs import Run

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1] / "envs"
DIVERSE = "rollout.sampling.temperature=1.5"
EPISODE_PYTHON = Path(sys.prefix).parent / "episode" / "bin" / "python"
SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tool_servers import Served, template_app
print(Served(template_app(Path(sys.argv[2]))).url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def url(tmp_path):
    """What ``openenv init`` writes, as it is served: it has one place, and pays 0.1 for each character that it gets."""
    command = [EPISODE_PYTHON, "-c", SERVER, TESTS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.stdin.close()


def test_a_run_learns_from_what_the_server_pays(tmp_path, url):
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
    run = Run(tmp_path / "run", ("run.steps=1", "rollout.prompts_per_step=2", "eval=none", DIVERSE, *server))
    run.finish()
    run.assert_nothing_left()
    (row,) = run.metrics()
    episodes = [json.loads(line) for line in (run.out / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    assert len(episodes) == row["accounting/episodes"] == 8
    # Whatever the policy did with its turns, the server was told its answer, or that there is none.
    assert [e["reward"] for e in episodes] == pytest.approx([0.1 * len(e["final_answer"] or "") for e in episodes])
    assert row["reward/avg_raw_reward"] == pytest.approx(np.mean([e["reward"] for e in episodes]))
    groups = [[e["reward"] for e in episodes if e["group"] == group] for group in (0, 1)]
    assert row["accounting/trained"] == sum(len(group) for group in groups if len(set(group)) > 1) > 0
    assert row["policy/grad_norm"] > 0
