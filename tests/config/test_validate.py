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
        (["policy.micro_batch_tokens=1023"], ["policy.micro_batch_tokens=1023", "rollout.max_context=1024"]),
        (
            ["rollout.sampling.max_tokens_per_turn=1024"],
            ["rollout.sampling.max_tokens_per_turn", "rollout.max_context"],
        ),
        (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature"]),
        (["env.kind=openenv", "data.tasks=x"], ["env.url"]),
        (["env.kind=openenv", "env.url=host:80", "data.tasks=x"], ["env.url=host:80", "http://"]),
        (["env.url=http://h"], ["env.url", "env.kind=openenv"]),
        *(
            (["env=openenv", f"env.url='{url}'", "data.tasks=x"], ["env.url=", "no address of a server"])
            for url in ("http://[::1", "http://h:99999", "http://h:0", "http://", "ftp://h", "http://a b")
        ),
        (["env=openenv", "env.url='http://u:hidden@[::1'", "data.tasks=x"], ["holds a user or a password"]),
        (
            ["logging.mlflow.uri='http://[::1'"],
            ["logging.mlflow.uri=http://[::1", "sqlite:///FILE", "http://host:port"],
        ),
        (["env=openenv", "env.url=http://h"], ["data.tasks", "mfleet data export"]),
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
        (["algorithm.loss=reinforce", "algorithm.clip_low=0.1"], ["clip_low=0.1 has no effect", "loss=reinforce"]),
        (["algorithm=sapo", "algorithm.clip_high=0.3"], ["clip_high=0.3 has no effect", "loss=sapo"]),
        (["algorithm=dapo_clip", "algorithm.loss=gspo"], ["dual_clip=3 has no effect", "loss=gspo"]),
        (["algorithm.correction.high=2"], ["correction.high=2 has no effect", "kind=off"]),
        (
            ["algorithm.correction.kind=token_tis", "algorithm.correction.low=0.5"],
            ["correction.low=0.5 has no effect", "kind=token_tis"],
        ),
        (
            ["algorithm=importance_weighted", "algorithm.correction.kind=icepop"],
            ["kind=icepop", "loss=importance_weighted", "outlier_mask"],
        ),
        (
            ["rollout.max_staleness=2"],
            ["rollout.max_staleness=2", "algorithm.loss=ppo_clip", "algorithm=importance_weighted"],
        ),
        (["parallel.tensor=1000000007"], ["parallel.tensor=1000000007", "131072"]),
        (["rollout.engine.replicas=131073"], ["rollout.engine.replicas=131073", "131072"]),
        (["env.step_timeout_s=1e300"], ["env.step_timeout_s=1e+300"]),
        (["run.name=" + "x" * 101], ["run.name", "101 characters"]),
        (["run.name=a\x07b"], ["run.name='a\\x07b'", "control characters"]),
        (["env.openenv.finish_tool=" + "x" * 4001], ["env.openenv.finish_tool", "4001 characters"]),
        (["logging.mlflow.uri=mlruns"], ["logging.mlflow.uri=mlruns", "http://"]),
    ],
)
def test_impossible_combinations_are_explained(overrides, keys):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert all(key in str(caught.value) for key in keys), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.micro_batch_tokens=1024"],
        ["rollout.sampling.max_tokens_per_turn=1023"],
        ["parallel.data=128"],
        ["policy.updates_per_batch=16"],
        ["env=openenv", "env.url=http://h", "data=file", "data.tasks=x"],
        ["algorithm=importance_weighted", "algorithm.correction.kind=geometric_mask", "algorithm.correction.low=0.9"],
        ["algorithm=gspo", "algorithm.clip_low=1", "algorithm.correction.kind=icepop", "algorithm.correction.high=3"],
        ["algorithm=reinforce", "algorithm.correction.kind=token_tis", "algorithm.correction.high=1"],
        ["logging.mlflow.uri=https://host:5000"],
    ],
)
def test_the_edge_is_accepted(overrides):
    check(*overrides)


def test_a_password_is_refused_and_not_shown():
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        check("logging.mlflow.uri=https://me:secret@host")
    assert "secret" not in str(caught.value)
