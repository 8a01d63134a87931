"""The stand-in service with a real model: adapters, states and samplers do not influence each other.

Only the nightly tests of whole runs (tests/e2e/test_hosted_equals_native.py) use it with one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinker_service import BASE_MODEL, KEY, running

tinker = pytest.importorskip("tinker")
pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("vllm")

types = tinker.types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.in_turn(number=0, of=4)]

TINY = Path(__file__).parents[2] / "assets" / "tiny"
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0)
TOKENS = [np.random.default_rng(n).integers(0, 900, n) for n in (30, 50, 70, 20)]
WEIGHTS = [
    np.random.default_rng(n + 1).normal(size=n - 1).clip(0) - 0.3 * (np.arange(n - 1) % 3 == 0)
    for n in map(len, TOKENS)
]
PROMPT = types.ModelInput.from_ints(TOKENS[0].tolist())


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        running(tmp_path_factory.mktemp("lora") / "service", "--model", str(TINY)) as service,
    ):
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("NO_PROXY", "127.0.0.1")
        made = tinker.ServiceClient(base_url=service.url)
        yield made
        made.close("success").result()


def train(client, rank=8, seed=3):
    return client.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed).result()


def data(weights=WEIGHTS, tokens=TOKENS):
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(ids[1:].astype(np.int64)),
                "weights": types.TensorData.from_numpy(values.astype(np.float32)),
            },
        )
        for ids, values in zip(tokens, weights, strict=True)
    ]


def update(run, batch=None, adam=ADAM):
    """Returns the norm of the gradient."""
    run.forward_backward(batch or data(), "cross_entropy").result()
    return run.optim_step(adam).result().metrics["grad_norm"]


def logprobs(run):
    return [row["logprobs"].to_numpy() for row in run.forward(data(), "cross_entropy").result().loss_fn_outputs]


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def sampled(sampler, seed=5):
    wanted = types.SamplingParams(max_tokens=12, seed=seed, temperature=1.0, stop=[])
    (sequence,) = sampler.sample(PROMPT, 1, wanted).result().sequences
    return list(sequence.tokens), list(sequence.logprobs)


def test_runs_of_several_ranks_train_as_if_alone(client):
    alone = []
    for rank in (8, 16):
        run = train(client, rank)
        alone.append(([update(run) for _ in range(3)], logprobs(run)))
    several = [train(client, rank) for rank in (8, 16)]
    norms = np.array([[update(run) for run in several] for _ in range(3)])
    assert norms.T.tolist() == [found for found, _ in alone]
    assert all(equal(logprobs(run), values) for run, (_, values) in zip(several, alone, strict=True))
    assert not equal(alone[0][1], alone[1][1]) and len(set(norms.flat)) == 6


def test_the_loss_is_the_weighted_sum_whatever_the_weights(client):
    run = train(client)
    values = logprobs(run)
    found = run.forward_backward(data(), "cross_entropy").result()
    expected = -sum(float((w.astype(np.float32) * lp).sum()) for w, lp in zip(WEIGHTS, values, strict=True))
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    norm = run.optim_step(ADAM).result().metrics["grad_norm"]
    zeros = [np.zeros(len(ids) - 1) for ids in TOKENS]
    for parts, tolerance in (
        ([data(WEIGHTS + zeros, TOKENS * 2)], 1e-5),  # what weighs nothing adds nothing
        ([data([-w for w in WEIGHTS])], 0),
        ([data([w * (w > 0) for w in WEIGHTS]), data([w * (w < 0) for w in WEIGHTS])], 1e-5),  # gradients add up
    ):
        other = train(client)
        for part in parts[:-1]:
            other.forward_backward(part, "cross_entropy").result()
        assert update(other, parts[-1]) == pytest.approx(norm, rel=tolerance)


def test_gradients_are_clipped_to_the_norm_of_the_request(client):
    clipped, scaled = train(client), train(client)
    norm = update(clipped, adam=ADAM.model_copy(update={"grad_clip_norm": 2.0, "eps": 0.1}))
    weights = [values * 2.0 / norm for values in WEIGHTS]
    assert update(scaled, data(weights), ADAM.model_copy(update={"eps": 0.1})) == pytest.approx(2.0, rel=1e-5)
    for ours, theirs in zip(logprobs(clipped), logprobs(scaled), strict=True):
        assert np.allclose(ours, theirs, rtol=0, atol=1e-4)


def test_a_state_goes_on_to_the_bit(client):
    run = train(client)
    update(run)
    state = run.save_state("state").result().path
    before = logprobs(run)
    norm = update(run)
    loaded = client.create_training_client_from_state_with_optimizer(state).result()
    assert equal(logprobs(loaded), before)
    assert update(loaded) == norm and equal(logprobs(loaded), logprobs(run))


def test_a_sampler_keeps_its_weights(client):
    run = train(client)
    base, samplers, expected = client.create_sampling_client(base_model=BASE_MODEL).result(), [], []
    assert sampled(base) == sampled(run.save_weights_and_get_sampling_client().result())
    for _ in range(3):
        update(run)
        samplers.append(run.save_weights_and_get_sampling_client().result())
        expected.append(sampled(samplers[-1]))
        scores = samplers[-1].compute_logprobs(types.ModelInput.from_ints(TOKENS[2].tolist())).result()
        assert np.allclose(scores[1:], logprobs(run)[2], rtol=0, atol=2e-4)
    assert len({tuple(found[1]) for found in expected}) == 3
    assert [sampled(sampler) for sampler in reversed(samplers)] == expected[::-1]
    asked = [
        (k, samplers[k].sample(PROMPT, 1, types.SamplingParams(max_tokens=12, seed=5, temperature=1.0, stop=[])))
        for k in (0, 1, 2) * 4
    ]
    assert all(list(answer.result().sequences[0].logprobs) == expected[k][1] for k, answer in asked)


def test_stops_are_those_of_the_request_or_the_model(client):
    sampler = train(client).save_weights_and_get_sampling_client().result()
    free, _ = sampled(sampler)
    wanted = types.SamplingParams(max_tokens=12, seed=5, temperature=1.0, stop=[free[3]])
    (sequence,) = sampler.sample(PROMPT, 1, wanted).result().sequences
    assert sequence.tokens == free[: free.index(free[3]) + 1] and sequence.stop_reason == "stop"
