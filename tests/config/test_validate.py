"""Combinations that cannot work are refused, each with the keys to change."""

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load


def check(*overrides: str) -> None:
    validate.check(load(["experiment=quickstart", *overrides]))


def test_quickstart_is_accepted():
    check()


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.row_tokens=1023"], ["policy.row_tokens=1023", "rollout.max_context=1024"]),
        (
            ["rollout.sampling.max_tokens_per_turn=1024"],
            ["rollout.sampling.max_tokens_per_turn", "rollout.max_context"],
        ),
        (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature"]),
        (["env.kind=openenv", "data.tasks=x"], ["env.url"]),
        (["env.kind=openenv", "env.url=host:80", "data.tasks=x"], ["env.url=host:80", "http://"]),
        (["env.url=http://h"], ["env.url", "env.kind=openenv"]),
        (["env=openenv", "env.url=http://h"], ["data.tasks", "mfleet tasks export"]),
        (["rollout.episode_timeout_s=60"], ["rollout.engine.request_timeout_s", "rollout.episode_timeout_s"]),
        (["env.verify_timeout_s=300"], ["env.verify_timeout_s", "rollout.episode_timeout_s"]),
        (["policy.updates_per_batch=17"], ["policy.updates_per_batch", "rollout.prompts_per_step"]),
        (["parallel.data=129"], ["128 trajectories", "parallel.data=129"]),
        (["rollout.workers=2", "rollout.episodes_in_flight=1"], ["rollout.workers=2"]),
        (["policy.optimizer.betas=[0.9,1.0]"], ["policy.optimizer.betas"]),
        (["policy.optimizer.min_lr=1"], ["policy.optimizer.min_lr", "policy.optimizer.lr"]),
        (
            ["policy.optimizer.schedule=constant", "policy.optimizer.min_lr=1e-6"],
            ["policy.optimizer.min_lr", "schedule=constant"],
        ),
    ],
)
def test_impossible_combinations_are_explained(overrides, keys):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert all(key in str(caught.value) for key in keys), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.row_tokens=1024"],
        ["rollout.sampling.max_tokens_per_turn=1023"],
        ["parallel.data=128"],
        ["policy.updates_per_batch=16"],
        ["env=openenv", "env.url=http://h", "data=file", "data.tasks=x"],
    ],
)
def test_the_edge_is_accepted(overrides):
    check(*overrides)
