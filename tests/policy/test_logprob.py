"""Chunked log-probs and entropy against plain log-softmax."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron_fleet.policy.megatron")

import torch

from megatron_fleet.policy.megatron.logprob import token_logprobs


class OneRank:
    """The process group of a single tensor-parallel rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def plain(hidden, weight, targets, temperature):
    logp = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(count=23, width=8, vocab=50, padding=3, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator, requires_grad=True)
    weight = (scale * torch.randn(vocab + padding, width, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocab, (count,), generator=generator)
    return hidden, weight, targets, vocab


def chunked(hidden, weight, targets, vocab, temperature=1.0, chunk=7):
    return token_logprobs(
        hidden, weight, targets, vocab_size=vocab, group=OneRank(), temperature=temperature, chunk=chunk
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("use_entropy", [False, True])
def test_values_and_gradients(temperature, chunk, use_entropy):
    hidden, weight, targets, vocab = inputs()
    factors = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))

    def backward(logprob, entropy):
        total = (logprob * factors[0]).sum() + ((entropy * factors[1]).sum() if use_entropy else 0.0)
        return torch.autograd.grad(total, (hidden, weight))

    expected = plain(hidden, weight[:vocab], targets, temperature)
    got = chunked(hidden, weight, targets, vocab, temperature, chunk)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    for a, b in zip(backward(*got), backward(*expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_padding_is_no_part_of_the_distribution():
    hidden, weight, targets, vocab = inputs(padding=3)
    with torch.no_grad():
        weight[vocab:] = 1e4
    logprob, _ = chunked(hidden, weight, targets, vocab)
    without, _ = chunked(hidden, weight[:vocab], targets, vocab)
    assert torch.equal(logprob, without)
    logprob.sum().backward()
    assert not weight.grad[vocab:].any() and weight.grad[:vocab].any()


def test_extreme_logits_stay_finite():
    hidden, weight, targets, vocab = inputs(scale=1e4)
    logprob, entropy = chunked(hidden, weight, targets, vocab)
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprob).all() and (entropy >= -1e-5).all()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_nothing_trained():
    hidden, weight, targets, vocab = inputs(count=0)
    logprob, entropy = chunked(hidden, weight, targets, vocab)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == (0,) and not weight.grad.any()


def test_bfloat16_weights_get_float32_logprobs():
    hidden, weight, targets, vocab = inputs()
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    logprob, _ = chunked(*low, targets, vocab)
    logprob.sum().backward()
    expected, _ = plain(hidden, weight[:vocab], targets, 1.0)
    assert logprob.dtype == torch.float32 and low[1].grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprob, expected.float(), rtol=0.05, atol=0.05)
