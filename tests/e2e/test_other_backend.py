"""Whole runs with a trainer and a sampler of the user's own, without ranks and devices (examples/my_trainer.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from whole_runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(number=0, of=2)]

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARD = """
def vowels(text, task):
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))
"""


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    (tmp_path / "vowels_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{tmp_path}", prepend=":")
    rows = [{"task_key": f"write-{i}", "env_key": "letters", "prompt": f"Write {i} vowels."} for i in range(8)]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    return (
        *("policy.trainer=my_trainer:Unigram", "rollout.sampler=my_sampler:Unigram", "algorithm.loss=reinforce"),
        *("env=python", "env.reward=vowels_reward:vowels", "data=file", f"data.tasks={tmp_path / 'tasks.json'}"),
        *("policy.optimizer.lr=300", "policy.optimizer.schedule=constant", "policy.optimizer.min_lr=0"),
        *("rollout.thinking=false", "rollout.sampling.max_tokens_per_turn=32", "rollout.engine.probe_interval=1"),
        *(
            "algorithm.kl.coef=0",
            "algorithm.masked_outcomes=[]",
            "checkpoint.export.last=false",
            "eval=none",
            "rollout.samples_per_prompt=8",
        ),
    )


def test_a_run_learns_and_resumes_to_the_bit(tmp_path, overrides):
    whole = Run(tmp_path / "whole", (*overrides, "run.steps=8"))
    whole.finish()
    whole.assert_nothing_left()
    rows = whole.metrics()
    rewards = [row["reward/avg_raw_reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1, rewards
    assert all(row["policy/probe_difference"] < 1e-6 for row in rows)
    halves = Run(tmp_path / "halves", (*overrides, "run.steps=5"))
    halves.finish()
    resumed = Run(tmp_path / "halves", (*overrides, "run.steps=8"))
    resumed.finish()
    assert resumed.facts() == whole.facts()
