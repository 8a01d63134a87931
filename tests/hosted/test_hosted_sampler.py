"""The hosted sampler, which reads handles that the trainer delivers."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from policy_fixtures import make_batch

from megatron_fleet.agents.token_engine import EngineLost, SamplingParams
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.explicit_losses import TrainedTokens
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.hosted.sampler import HostedSampler
from megatron_fleet.hosted.trainer import HostedTrainer
from megatron_fleet.loop.engine_weights import compare, probe_data
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.trainer.base import AdamParams, LossSpec

PARAMS = SamplingParams(1.0, max_tokens=12, stop_token_ids=(), seed=3)
PROMPT = [5, 6, 7]


class Pair:
    """A trainer and a sampler of one service."""

    def __init__(self, trainer, sampler):
        self.trainer, self.sampler, self.version = trainer, sampler, -1

    async def sync(self):
        self.version += 1
        await self.trainer.send_weights(self.version, {}, self.sampler.load)
        await self.sampler.finish_update(self.version)

    async def update(self, data):
        loss = LossSpec.of(AlgorithmConfig(loss="reinforce"))
        await asyncio.gather(self.trainer.forward_backward(data, loss), self.trainer.optim_step(AdamParams(0.05)))

    async def sample(self, params=PARAMS, prompt=PROMPT):
        return await self.sampler._generate(prompt, params, "episode", ())


@asynccontextmanager
async def opened(config, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.rollout.sampler.write_output_to", lambda path: None)
    monkeypatch.setattr("megatron_fleet.rollout.sampler.take_normal_priority", lambda: None)
    trainer = HostedTrainer(config)
    await trainer.start(None)
    sampler = HostedSampler(config, "secret", tmp_path / "log", "message")
    await sampler.start()
    try:
        yield Pair(trainer, sampler)
    finally:
        await trainer.close()


async def test_tokens_carry_the_version_and_log_probs_of_their_weights(make_config, tmp_path, monkeypatch):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        with pytest.raises(EngineLost, match="no weights yet"):
            await pair.sample()
        await pair.sync()
        first = await pair.sample()
        assert first.versions == ((0, 0, 12),) and first.finish_reason == "length"
        assert np.array_equal((await pair.sample()).token_ids, first.token_ids), "a seed gives the same sample"
        ids = np.array([*PROMPT, *first.token_ids], np.int32)
        ones = np.ones(len(ids), np.float32)
        data = [Datum(ids, np.arange(len(ids)) >= len(PROMPT), ones, -ones)]
        late = asyncio.create_task(pair.sample())
        await asyncio.sleep(0)  # it begins before the update, and ends with the weights with which it began
        await pair.update(data)
        await pair.sync()
        assert (await late).versions == ((0, 0, 12),)
        second = await pair.sample()
        assert second.versions == ((1, 0, 12),) and not np.array_equal(second.logprobs, first.logprobs)
        ids = np.array([*PROMPT, *second.token_ids], np.int32)
        (scored,) = await pair.sampler.score([ids])
        np.testing.assert_allclose(scored[len(PROMPT) :], second.logprobs, atol=1e-6)
        assert scored[0] == 0


async def test_trainer_and_sampler_agree_after_an_update(make_config, tmp_path, monkeypatch):
    """So the ratio of the first update of a batch is 1."""
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        await pair.update(make_batch(count=4, longest=40, vocab_size=1024))
        await pair.sync()
        data = probe_data(pair.trainer.info.vocab_size, pair.trainer.info.max_tokens)
        expected = await pair.trainer.forward(data, temperature=1.0)
        found = [await pair.sampler.score([datum.token_ids for datum in data])]
        assert compare(expected, found, 1e-6, 1) < 1e-6
        tokens = TrainedTokens.of(data, found[0])
        np.testing.assert_allclose(tokens.logprobs, np.concatenate([x[1:] for x in expected]), atol=1e-6)


async def test_a_stop_token_ends_the_turn_and_is_part_of_it(make_config, tmp_path, monkeypatch):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        whole = await pair.sample()
        stop = int(whole.token_ids[4])
        ended = await pair.sample(SamplingParams(1.0, 12, (stop, 1023), seed=3))
        assert ended.finish_reason == "stop" and ended.token_ids[-1] == stop and stop not in ended.token_ids[:-1]
        greedy = [await pair.sample(SamplingParams(0.0, 12, ())) for _ in range(2)]
        assert np.array_equal(greedy[0].token_ids, greedy[1].token_ids)


async def test_what_the_service_counted_is_in_the_statistics(make_config, tmp_path, monkeypatch):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        await pair.sample()
        counted = await pair.sampler.read_statistics()
        assert (counted.prompt_tokens, counted.generated_tokens) == (len(PROMPT), 12)
        assert (await pair.sampler.read_statistics()).generated_tokens == 0
        assert await pair.sampler.sampled_tokens() == 12
        await pair.sampler.score([np.arange(9), np.arange(4)])
        assert (await pair.sampler.read_statistics()).prompt_tokens == 13


BROKEN = {
    "no sample": ("retrieve_future Sample", {"error": "a node died", "category": "server"}),
    "cut short": ("retrieve_future Sample", "half"),
    "JSON": ("retrieve_future Sample", {"sequences": []}),
    "no such sampler": ("asample", 404),
}


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
async def test_a_sample_that_fails_is_an_engine_that_is_lost(make_config, tmp_path, monkeypatch, service, fault):
    """The episode is aborted, and played again."""
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        service.fail(*fault)
        with pytest.raises(EngineLost):
            await pair.sample()
        # Only a session that is gone is worth a new actor.
        assert await pair.sampler.usable() == (fault[0] != "asample")
        assert len((await pair.sample()).token_ids) == 12


@pytest.mark.parametrize("fault", [("asample", 429, 503, "lost"), ("retrieve_future Sample", 410, 503, 408)])
async def test_samples_that_may_still_come_are_waited_for(make_config, tmp_path, monkeypatch, service, fault):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        expected = await pair.sample()
        service.fail(*fault)
        assert np.array_equal((await pair.sample()).token_ids, expected.token_ids)


@pytest.mark.parametrize("service", [("--config", json.dumps({"spoil": kind})) for kind in ("empty", "no logprobs")],
                         indirect=True)  # fmt: skip
async def test_a_sample_without_tokens_or_log_probs_is_not_trained(make_config, tmp_path, monkeypatch):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        with pytest.raises(EngineLost, match="tokens with 0 log-probs"):
            await pair.sample()


async def test_what_the_service_refuses_is_the_requests_mistake(make_config, tmp_path, monkeypatch):
    async with opened(make_config(), tmp_path, monkeypatch) as pair:
        await pair.sync()
        with pytest.raises(ValueError, match="more than 4096"):
            await pair.sample(prompt=[1] * 4090)
        image = PlacedImage.__new__(PlacedImage)
        with pytest.raises(ValueError, match="images are not sent"):
            await pair.sampler._generate(PROMPT, PARAMS, "episode", [image])
