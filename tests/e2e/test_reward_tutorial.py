"""The tutorial "A question and a Python reward", its commands as they are printed, from an empty folder.

`tests/docs_site/test_tutorials.py` has them in CI, with a dry run in the place of the training.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=3)]

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "learn" / "your-reward.md").read_text(), re.DOTALL)[0]


def test_the_reward_rises(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "engine").symlink_to(sys.prefix)
    done = subprocess.run(
        ["bash", "-ec", COMMANDS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    out = tmp_path / "mine" / "runs" / "quickstart"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["pass_at_1_before"] < 0.5 < 0.8 < summary["pass_at_1_after"]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/avg_raw_reward"] for step in steps if "reward/avg_raw_reward" in step]
    assert len(rewards) == 10 and rewards[-1] > rewards[0] + 0.3
    assert "tool calls of environment" not in done.stdout
    (prompt,) = (out / "prompts").iterdir()
    assert "Answer the user.<|im_end|>" in prompt.read_text()
