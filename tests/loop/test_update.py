"""The passes that a batch goes through, with a real trainer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

from guards import make_guard
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.config.schema import Config
from megatron_fleet.loop.update import update, with_logprobs
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import open_trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path):
    """A configuration of two updates per batch, over 4 steps."""

    def made(**sections):
        tree = make_config(write_config(tmp_path / "model"), schedule="linear").model_dump()
        tree["run"] |= {"out": str(tmp_path / "out"), "steps": 4}
        for name, changes in sections.items():
            tree[name] |= changes
        return Config.model_validate(tree)

    return made


def trained(values, data):
    """One array of the values at all trained positions."""
    return np.concatenate([found[datum.loss_mask] for datum, found in zip(data, values, strict=True)])


async def one_step(config, trainer, guard, updates, step):
    return await update(config.algorithm, config.policy, config.run, trainer, guard, updates, step)


def test_several_updates_measure_the_ratio_against_the_policy_before_the_first(make):
    config = make(policy={"updates_per_batch": 2})
    first, second = (make_batch(count=2, seed=seed) for seed in (1, 2))
    loss = LossSpec.of(config.algorithm)

    async def by_hand():
        async with open_trainer(config, "random") as trainer:
            before = await trainer.forward(second)
            await trainer.forward_backward(with_logprobs(first, "proximal", await trainer.forward(first)), loss)
            await trainer.optim_step(AdamParams.of(config.policy.optimizer, 1e-3))
            return np.exp(trained(await trainer.forward(second), second) - trained(before, second)).mean()

    async def by_update():
        async with open_trainer(config, "random") as trainer:
            return await one_step(config, trainer, make_guard(config, trainer), [first, second], 0)

    expected = asyncio.run(by_hand())
    (one, lr_one), (two, lr_two) = asyncio.run(by_update())
    assert one.metrics["ratio"] == one.metrics["tokens"]
    assert two.metrics["ratio"] / two.metrics["tokens"] == pytest.approx(expected, abs=1e-5)
    assert abs(expected - 1) > 1e-4
    assert (lr_one.lr, lr_two.lr) == (pytest.approx(1e-3), pytest.approx(1e-3 * 7 / 8))


def test_the_kl_term_measures_from_the_weights_the_run_began_with(make):
    config = make(algorithm={"kl": {"coef": 0.5, "estimator": "k2"}})
    data = make_batch(count=2, seed=1)

    async def two_steps():
        async with open_trainer(config, "random") as trainer:
            await trainer.keep_reference()
            guard = make_guard(config, trainer)
            return [(await one_step(config, trainer, guard, [data], step))[0][0] for step in range(2)]

    reports = asyncio.run(two_steps())
    assert reports[0].metrics["kl"] == 0
    assert reports[1].metrics["kl"] > 0
    assert reports[1].metrics["kl_loss"] > 0
