"""Runs made by hand, written through the real sinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.telemetry.rewards import reward_metrics
from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.trajectories import TrajectoryLog


def trajectory(
    task: str = "t0",
    env: str = "shop",
    sample: int = 0,
    reward: float | None = 0.0,
    outcome: Outcome = Outcome.COMPLETED,
    messages: list[tuple[str, str]] | None = None,
    metrics: dict[str, float] | None = None,
    ids: list[int] | None = None,
    reason: str = "verified",
) -> Trajectory:
    """Three tokens of prompt, the rest sampled with log-probs -0.5, -1.0, …"""
    tokens = np.array(ids or [5, 6, 7, 8, 9], dtype=np.int32)
    mask = np.arange(len(tokens)) >= 3
    said = messages or [("system", "rules"), ("user", "do it"), ("assistant", "<think>hm</think>ok <done>")]
    return Trajectory(
        task_key=task,
        env_key=env,
        group=0,
        sample=sample,
        token_ids=tokens,
        action_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5 * (np.arange(len(tokens)) - 2), 0).astype(np.float32),
        spans=(Span("prompt", 0, 3, 0), Span("action", 3, len(tokens), 0, 2)),
        reward=reward,
        reward_reason=reason,
        outcome=outcome,
        final_answer="42",
        metrics={"turns": 1.0, **(metrics or {})},
        messages=[{"role": role, "content": text} for role, text in said],
    )


def ended(reward: float | None) -> Outcome:
    return Outcome.VERIFIER_FAILED if reward is None else Outcome.COMPLETED


def groups(rewards: dict[str, list[float | None]], env: str = "shop", **details: Any) -> list[Group]:
    """A group per task with these rewards; an unknown one ends as ``verifier_failed``."""
    return [
        Group(
            index,
            task,
            env,
            [
                trajectory(
                    task,
                    env,
                    sample,
                    reward,
                    Outcome.VERIFIER_FAILED if reward is None else Outcome.COMPLETED,
                    **details,
                )
                for sample, reward in enumerate(own)
            ],
        )
        for index, (task, own) in enumerate(rewards.items())
    ]


def by_environment(prefix: str, whole: str, collected: list[Group]) -> dict[str, float]:
    """The reward metrics of all groups and of each environment, under the names that runs use."""
    found = {}
    for env in [whole, *sorted({g.env_key for g in collected})]:
        own = [g for g in collected if env in (whole, g.env_key)]
        found |= {
            prefix.format(env).replace("//", "/") + name: value for name, value in reward_metrics(own, 1.0).items()
        }
    return found


class RunMaker:
    """Writes a run folder step by step."""

    def __init__(self, folder: Path, name: str = "demo", model: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        config = {"run": {"name": name, "steps": 4}, "model": {"path": model}, "data": {"tasks": "tasks.json"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "split.json").write_text(
            json.dumps({"source": "tasks.json", "sha256": "ab" * 32, "train": ["a"], "eval": ["b", "c"], "retired": []})
        )
        self.metrics = MetricsLog(folder / "metrics.jsonl", None, started=1000.0)
        self.log = TrajectoryLog(folder / "trajectories", None)

    def evaluate(self, step: int, sampled: list[Group], greedy: list[Group] | None = None) -> RunMaker:
        self.metrics.write(step, by_environment("eval/{}/", "all", sampled))
        self.log.write(step, sampled, "eval")
        if greedy:
            self.log.write(step, greedy, "greedy")
        return self

    def train(self, step: int, collected: list[Group]) -> RunMaker:
        episodes = sum(len(g.trajectories) for g in collected)
        self.metrics.write(step, {**by_environment("reward/{}/", "", collected), "accounting/episodes": episodes})
        self.log.write(step, collected, "step")
        return self


def episode(**fields: Any) -> Episode:
    """An episode of an evaluation; every field may be given."""
    defaults: dict[str, Any] = {
        "kind": "eval",
        "step": 0,
        "line": 0,
        "task": "t0",
        "env": "shop",
        "sample": 0,
        "outcome": "completed",
        "reward": 1.0,
        "reason": "verified",
        "final_answer": None,
        "tokens": 10,
        "action_tokens": 4,
    }
    given = {**defaults, **fields}
    solved = None if given["reward"] is None else given["reward"] >= 1
    return Episode(**{"solved": solved, **given})
