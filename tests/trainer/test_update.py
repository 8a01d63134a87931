"""`train.update`: what a batch goes through, with a real policy in one process."""

from __future__ import annotations

from itertools import chain

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.loop.train import update, with_logprobs
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


@pytest.fixture
def start(tmp_path):
    """(configuration, policy): always the same random weights; one policy at a time."""
    alive = []

    def make(policy=None, algorithm=None):
        while alive:
            alive.pop().close()
        tree = make_config(write_config(tmp_path / "model"), schedule="linear").model_dump()
        tree["run"]["steps"] = 4
        tree["policy"] |= policy or {}
        tree["algorithm"] |= algorithm or {}
        config = Config.model_validate(tree)
        alive.append(MegatronPolicy(config, init="random"))
        return config, alive[-1]

    yield make
    while alive:
        alive.pop().close()


def guard(config, policy):
    return StepGuard(config, policy, TorchCommunicator())


def batches():
    return [[make_batch(count=2, seed=seed)] for seed in (1, 2)]


def trained(values, rows):
    """One array of the values at all trained positions."""
    pairs = zip(chain(*rows), chain(*values), strict=True)
    return np.concatenate([found[datum.mask != 0] for datum, found in pairs])


def test_several_updates_measure_the_ratio_against_the_policy_before_the_first(start):
    config, policy = start({"updates_per_batch": 2})
    first, second = batches()
    before = policy.forward(second)
    policy.forward_backward(
        with_logprobs(first, "proximal_logprobs", policy.forward(first)), make_loss(config.algorithm)
    )
    policy.optim_step(1e-3)
    expected = np.exp(trained(policy.forward(second), second) - trained(before, second)).mean()

    config, policy = start({"updates_per_batch": 2})
    (one, lr_one), (two, lr_two) = update(config, policy, guard(config, policy), batches(), step=0)
    assert one.metrics["ratio"] == one.metrics["tokens"]
    assert two.metrics["ratio"] / two.metrics["tokens"] == pytest.approx(expected, abs=1e-5)
    assert abs(expected - 1) > 1e-4
    assert (lr_one.lr, lr_two.lr) == (pytest.approx(1e-3), pytest.approx(1e-3 * 6 / 7))


def test_the_kl_term_measures_from_the_weights_the_run_began_with(start):
    config, policy = start(algorithm={"kl": {"coef": 0.5, "estimator": "k2"}})
    policy.keep_reference()
    rows = batches()[:1]
    steps = guard(config, policy)
    reports = [update(config, policy, steps, rows, step)[0][0] for step in range(2)]
    assert reports[0].metrics["kl"] == 0
    assert reports[1].metrics["kl"] > 0
    assert reports[1].metrics["kl_loss"] > 0
