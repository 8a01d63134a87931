"""Groups to train on: shaped rewards, filters, and parts of the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.algorithms.batch import Fate, build_data
from megatron_fleet.algorithms.groups import shaped_rewards
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.config.sections.algorithm import OverlongConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def trajectory(reward: float | None, turns: int, tokens: int) -> Trajectory:
    """``turns`` turns of ``tokens`` sampled tokens, behind a prompt of one."""
    action = np.arange(1 + turns * tokens) > 0
    spans = [Span("action", 1 + i * tokens, 1 + (i + 1) * tokens, i, 0) for i in range(turns)]
    shape = (action, np.zeros(len(action), np.float32), (Span("prompt", 0, 1, 0), *spans))
    return Trajectory("t", "e", 0, 0, np.arange(len(action), dtype=np.int32), *shape, reward, "", Outcome.COMPLETED)


def group(*episodes: tuple[float | None, int, int]) -> Group:
    return Group(0, "t", "e", [trajectory(*episode) for episode in episodes])


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """The path of a function ``own`` in a new module."""
    name = f"group_{abs(hash(code))}"
    (folder / f"{name}.py").write_text(f"def own(group, other): return {code}\n")
    monkeypatch.syspath_prepend(folder)
    return f"{name}:own"


def test_the_penalty_on_long_episodes_is_dapos():
    algo = AlgorithmConfig(reward_shaping="overlong", overlong=OverlongConfig(limit=100, buffer=40, penalty=0.5))
    lengths = (1, 60, 61, 80, 100, 120)
    episodes = group(*((1.0, 1, n) for n in lengths), (None, 1, 120), (-1.0, 4, 20))
    expected = [1.0, 1.0, 1 - 0.5 / 40, 0.75, 0.5, 0.5, None, -1.25]
    assert shaped_rewards(episodes, algo) == pytest.approx(expected)


def test_advantages_and_filters_see_shaped_rewards_and_records_do_not():
    algo = AlgorithmConfig(
        advantage="grpo_no_std",
        reward_shaping="overlong",
        overlong=OverlongConfig(limit=10, buffer=5),
        reduction="constant",
    )
    equal = group((1.0, 1, 5), (1.0, 1, 10))
    batch = build_data([equal], algo)
    assert batch.rewards == [[1.0, 0.0]] and batch.advantages == [0.5, -0.5]
    assert [t.reward for t in equal.trajectories] == [1.0, 1.0]
    assert build_data([equal], AlgorithmConfig()).counts[Fate.FILTERED] == 2


def test_the_example_of_a_shaping():
    algo = AlgorithmConfig(reward_shaping="my_reward_shaping:per_turn")
    assert shaped_rewards(group((1.0, 1, 3), (1.0, 4, 3), (None, 2, 3)), algo) == pytest.approx([1.0, 0.94, None])


@pytest.mark.parametrize(
    ("rewards", "kept"), [([1] * 9 + [0], True), ([1] * 19 + [0], False), ([1, 1], False), ([1, None, 0], True)]
)
def test_the_example_of_a_filter(rewards, kept):
    batch = build_data(
        [group(*((r, 1, 3) for r in rewards))], AlgorithmConfig(group_filter="my_group_filter:not_too_easy")
    )
    assert (batch.counts[Fate.TRAINED] > 0) is kept


@pytest.mark.parametrize(
    "code", ["[1.0]", "[1.0, None, 2.0]", "[1.0, 0.0, float('nan')]", "['a', 1, 1]", "None", "[0, 0, float('inf')]"]
)
def test_what_are_no_rewards_is_refused(tmp_path, monkeypatch, code):
    path = module(tmp_path, monkeypatch, code)
    with pytest.raises(UserError, match=rf"^algorithm\.reward_shaping={path} returned .* finite number for each known"):
        build_data([group((1.0, 1, 3), (0.0, 1, 3), (0.5, 1, 3))], AlgorithmConfig(reward_shaping=path))


def test_a_shaping_cannot_make_an_unknown_reward_known(tmp_path, monkeypatch):
    algo = AlgorithmConfig(reward_shaping=module(tmp_path, monkeypatch, "[1, 0.0, 0.0]"))
    assert shaped_rewards(group((0.5, 1, 3), (0.5, 1, 3), (None, 1, 3)), algo) == [1.0, 0.0, None]
    assert shaped_rewards(group((0.5, 1, 3), (float("nan"), 1, 3), (1, 1, 3)), algo) == [1.0, None, 0.0]


@pytest.mark.parametrize("code", ["1", "None", "'yes'"])
def test_what_is_no_truth_value_is_refused(tmp_path, monkeypatch, code):
    path = module(tmp_path, monkeypatch, code)
    with pytest.raises(
        UserError, match=rf"^algorithm\.group_filter={path} returned .*; it must return True or False\.$"
    ):
        build_data([group((1.0, 1, 3), (0.0, 1, 3))], AlgorithmConfig(group_filter=path))
