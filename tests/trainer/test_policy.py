"""MegatronPolicy in one process: the meaning of its verbs."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from policy_fixtures import make_batch, make_config, write_config  # noqa: E402

from megatron_fleet.algorithms.losses import make_loss, sft_loss  # noqa: E402
from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.config.schema import AlgorithmConfig, ClusterConfig, LoraConfig, ParallelConfig  # noqa: E402
from megatron_fleet.trainer.megatron.policy import MegatronPolicy  # noqa: E402


@pytest.fixture
def make_policy(tmp_path):
    """Builds policies one after the other: the process groups are per process."""
    alive = []

    def make(init="random", folder=None, lora=0, collective_timeout_s=1800.0, **settings):
        while alive:
            alive.pop().close()
        folder = folder or write_config(tmp_path / "model")
        config = make_config(folder, **settings)
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"lora": LoraConfig(rank=lora)})})
        config = config.model_copy(update={"cluster": ClusterConfig(collective_timeout_s=collective_timeout_s)})
        alive.append(MegatronPolicy(config, init=init))
        return alive[-1]

    yield make
    while alive:
        alive.pop().close()


def test_megatrons_groups_have_the_configured_time_limit(make_policy):
    make_policy(collective_timeout_s=77.0)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77


def parameters(policy):
    return {n: p.detach().clone() for n, p in policy.model_chunks[0].named_parameters()}


def gradients(policy, micro_batches, loss):
    """Gradients that one `forward_backward` adds to the buffers."""
    policy.forward_backward(micro_batches, loss)
    return {n: p.main_grad.clone() for n, p in policy.model_chunks[0].named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dialect", ["v4", "v5"])
def test_logprobs_equal_transformers(make_policy, tmp_path, tied, dialect):
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=3,
        vocab_size=511,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    hf = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path / "hf"
    hf.save_pretrained(folder)
    rope: dict = {"rope_theta": 50000.0}
    if dialect == "v5":
        rope = {"rope_theta": None, "rope_parameters": {"rope_type": "default", **rope}}
    content = {k: v for k, v in config.to_dict().items() if not k.startswith("rope")} | rope
    write_config(folder, **content)
    hf = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    batch = make_batch(count=6)
    got = make_policy("hf", folder, temperature=0.8).forward([batch[:3], batch[3:]])
    differences = []
    for datum, logprobs in zip(batch, [x for micro_batch in got for x in micro_batch], strict=True):
        tokens = torch.from_numpy(datum.token_ids).long()[None]
        with torch.no_grad():
            logp = (hf(tokens).logits[0].double() / 0.8).log_softmax(-1)
        expected = np.zeros(len(datum))
        expected[1:] = logp[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        trained = datum.loss_mask
        assert not logprobs[~trained].any()
        differences.append(np.abs(logprobs - expected)[trained])
    assert np.concatenate(differences).mean() < 1e-5
    assert np.concatenate(differences).max() < 1e-4


def test_export_is_what_transformers_computes(make_policy, tmp_path):
    policy = make_policy()
    batch = make_batch(count=2)
    policy.forward_backward([batch], sft_loss)
    policy.optim_step(1e-2)
    policy.export_hf(tmp_path / "out")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.from_numpy(batch[0].token_ids).long()[None]
    logp = (hf(tokens).logits[0] / 0.8).log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    trained = batch[0].loss_mask[1:]
    torch.testing.assert_close(torch.from_numpy(policy.forward([batch])[0][0][1:])[trained], logp[trained])


def test_packing_does_not_change_the_gradient(make_policy):
    policy = make_policy()
    batch, loss = make_batch(count=5, longest=60), make_loss(AlgorithmConfig())
    alone = gradients(policy, [[d] for d in batch], loss)
    policy.optim_step(0.0)
    policy = make_policy()
    packed = gradients(policy, [[batch[3], batch[0]], [batch[4], batch[1], batch[2]], []], loss)
    for name in alone:
        torch.testing.assert_close(packed[name], alone[name], rtol=1e-4, atol=1e-6)


def test_several_calls_before_a_step_add_up(make_policy):
    batch, loss = make_batch(count=6), make_loss(AlgorithmConfig())
    micro_batches = [batch[:3], batch[3:]]
    whole = make_policy()
    whole.forward_backward(micro_batches, loss)
    norm = whole.optim_step(1e-3).grad_norm
    expected = parameters(whole)
    parts = make_policy()
    for micro_batch in micro_batches:
        parts.forward_backward([micro_batch], loss)
    assert parts.optim_step(1e-3).grad_norm == norm
    assert all(torch.equal(v, expected[n]) for n, v in parameters(parts).items())


def test_step_clears_gradients_and_clips(make_policy):
    policy = make_policy(clip_grad=0.5)
    micro_batches, loss = [make_batch(count=3)], make_loss(AlgorithmConfig())
    first = policy.forward_backward(micro_batches, loss), policy.optim_step(0.0)
    again = policy.forward_backward(micro_batches, loss), policy.optim_step(0.0)
    assert again == first and first[1].grad_norm > 0.5 and first[1].lr == 0.0


def test_sft_lowers_its_loss(make_policy):
    policy = make_policy()
    micro_batches = [make_batch(count=4, longest=45)]
    for datum in micro_batches[0]:
        datum.scaled_advantages = (datum.loss_mask * datum.loss_scale).astype(np.float32)
    losses = []
    for _ in range(12):
        losses.append(policy.forward_backward(micro_batches, sft_loss).loss)
        policy.optim_step(3e-3)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_bfloat16_trains_on_float32_masters(make_policy, tmp_path):
    batch, loss = make_batch(count=4, longest=45), make_loss(AlgorithmConfig())
    expected = make_policy().forward([batch])[0]
    policy = make_policy(dtype="bfloat16")
    for a, b in zip(policy.forward([batch])[0], expected, strict=True):
        assert np.abs(a - b).max() < 0.2
    # Updates far below bfloat16's resolution must not be lost.
    before = parameters(policy)
    for _ in range(20):
        policy.forward_backward([batch], loss)
        policy.optim_step(2e-5)
    changed = [(v != before[n]).float().mean() for n, v in parameters(policy).items()]
    assert sum(changed) / len(changed) > 0.1
    policy.save_state(tmp_path / "saved")
    policy.forward_backward([batch], loss)
    straight = policy.optim_step(1e-3), parameters(policy)
    again = make_policy(dtype="bfloat16")
    again.load_state(tmp_path / "saved")
    again.forward_backward([batch], loss)
    assert again.optim_step(1e-3) == straight[0]
    assert all(torch.equal(v, straight[1][n]) for n, v in parameters(again).items())


def test_a_state_saved_before_the_first_update_is_whole(make_policy, tmp_path):
    batch, loss = make_batch(count=4, longest=45), make_loss(AlgorithmConfig())
    policy = make_policy()
    policy.save_state(tmp_path / "saved")
    policy.forward_backward([batch], loss)
    straight = policy.optim_step(1e-3), parameters(policy)
    again = make_policy()
    again.load_state(tmp_path / "saved")
    again.forward_backward([batch], loss)
    assert again.optim_step(1e-3) == straight[0]
    assert all(torch.equal(v, straight[1][n]) for n, v in parameters(again).items())


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (0, 2, "saved holds all parameters and policy.lora.rank is above 0; train as this run began"),
        (2, 0, "saved holds adapters alone and policy.lora.rank is 0; train as this run began"),
    ],
)
def test_states_with_and_without_adapters_are_told_apart(make_policy, tmp_path, saved, now, message):
    make_policy(lora=saved).save_state(tmp_path / "saved")
    policy = make_policy(lora=now)
    before = parameters(policy)
    with pytest.raises(UserError, match=message):
        policy.load_state(tmp_path / "saved")
    assert all(torch.equal(v, before[n]) for n, v in parameters(policy).items())


def test_a_value_of_each_trained_token_reaches_the_loss(make_policy):
    batch = make_batch(count=3, longest=45)
    for datum in batch:
        datum.arrays["own"] = np.arange(len(datum), dtype=np.int32)

    def loss(x):
        return (x.logprobs * 0).sum(), {"own": x.array("own").sum()}

    report = make_policy().forward_backward([batch[:2], batch[2:], []], loss)
    assert report.metrics["own"] == sum(np.flatnonzero(d.loss_mask).sum() for d in batch)


def test_proximal_policy_gives_ratios(make_policy):
    """After an update, π differs from the recomputed π_old, and the loss sees it."""
    policy = make_policy()
    batch, loss = make_batch(count=4, longest=45), make_loss(AlgorithmConfig())
    before = policy.forward([batch])[0]
    policy.forward_backward([batch], loss)
    policy.optim_step(1e-2)
    after = policy.forward([batch])[0]
    later = copy.deepcopy(batch)
    for datum, old in zip(later, before, strict=True):
        datum.arrays["proximal"] = old
    report = policy.forward_backward([later, []], loss)
    expected = sum(np.exp(a - b)[d.loss_mask].sum() for a, b, d in zip(after, before, batch, strict=True))
    assert report.metrics["ratio"] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["ratio"] != report.metrics["tokens"]


def test_report_counts_tokens(make_policy):
    batch = make_batch(count=3, longest=60)
    report = make_policy().forward_backward([batch, []], make_loss(AlgorithmConfig()))
    real = sum(len(d) for d in batch)
    # A micro-batch is as wide as its sequences, an empty one has one token.
    assert (report.tokens, report.padded_tokens) == (real, 1)
    assert report.metrics["tokens"] == sum(d.loss_mask.sum() for d in batch)


def test_padding_is_zero_in_every_linear_layer(make_policy):
    """So it is never the largest value, which FP8 scales follow, and its gradient is nothing."""
    policy, batch = make_policy(), make_batch(count=2, longest=60)
    policy._align = 64
    real, seen = sum(len(d) for d in batch), []

    def look(_, inputs, output) -> None:
        hidden = inputs[0]
        assert hidden.shape[0] % 64 == 0 and hidden.shape[0] > real
        assert not hidden[real:].any() and hidden[:real].any()
        seen.append(output)

    linear = [m for n, m in policy.model_chunks[0].named_modules() if n.split(".")[-1].startswith("linear_")]
    for module in linear:
        module.register_forward_hook(look)
    report = policy.forward_backward([batch], make_loss(AlgorithmConfig()))
    assert len(seen) == len(linear) == 4 * 4 and report.padded_tokens == -real % 64


def test_refusals(make_policy):
    with pytest.raises(UserError, match=r"parallel\.tensor=2 .* needs 2 processes, 1 were started"):
        make_policy(parallel=ParallelConfig(tensor=2))
    with pytest.raises(
        UserError, match=r"policy\.micro_batch_tokens=193 is not a multiple of 2, as the parallel layout"
    ):
        make_policy(parallel=ParallelConfig(tensor=2), micro_batch_tokens=193)
    with pytest.raises(ValueError, match="keep_reference"):
        make_policy().forward([[]], "reference")


def test_same_seed_same_weights(make_policy):
    first = parameters(make_policy())
    second = parameters(make_policy())
    assert all(torch.equal(v, second[n]) for n, v in first.items())
    assert first["embedding.word_embeddings.weight"].std() == pytest.approx(0.06, rel=0.05)
