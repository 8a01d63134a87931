"""Chunked log-probs and entropy against plain log-softmax."""

from __future__ import annotations

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from logprob_kernel_runs import OneRank
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fleet.trainer.megatron import logprob, logprob_torch
from megatron_fleet.trainer.megatron.logprob import token_logprobs


def plain(hidden, weight, targets, temperature):
    logp = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(count=23, width=8, vocab=50, padding=3, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator, requires_grad=True)
    weight = (scale * torch.randn(vocab + padding, width, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocab, (count,), generator=generator)
    return hidden, weight, targets, vocab


def chunked(hidden, weight, targets, vocab, temperature=1.0, chunk=7, **more):
    return token_logprobs(
        hidden, weight, targets, vocab_size=vocab, group=OneRank(), temperature=temperature, chunk=chunk, **more
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


class Rank:
    """One of several threads that act as tensor-parallel ranks."""

    def __init__(self, rank, slots, barrier):
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def size(self):
        return len(self._slots)

    def rank(self):
        return self._rank

    def sum_(self, tensor):
        self._replace(tensor, lambda stack: stack.sum(0))

    def max_(self, tensor):
        self._replace(tensor, lambda stack: stack.amax(0))

    def _replace(self, tensor, reduced):
        self._slots[self._rank] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(reduced(torch.stack(self._slots)))
        self._barrier.wait()


# 53 rows on 4 ranks are 14 each with 3 of padding; 33 real ones leave the last rank 0 and the third 5.
@pytest.mark.parametrize(("vocab", "ranks"), [(50, 2), (53, 4), (33, 4)])
def test_a_vocabulary_over_ranks(monkeypatch, vocab, ranks):
    monkeypatch.setattr(logprob, "TorchCommunicator", lambda group: group)
    padding = 56 - vocab if ranks == 4 else 2
    hidden, weight, targets, _ = inputs(vocab=vocab, padding=padding, scale=5.0)
    with torch.no_grad():
        weight[vocab:] = 1e4
        # Logits near −150: a rank without any must not count as one with 0.
        hidden[:, 0], weight[:vocab, 0] = 1.0, -150.0
    factors = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))
    slots, barrier = [None] * ranks, threading.Barrier(ranks, timeout=HANG_S)

    def run(group, own_hidden, own_weight):
        got = token_logprobs(own_hidden, own_weight, targets, vocab_size=vocab, group=group, temperature=0.8, chunk=7)
        return [*got, *torch.autograd.grad((torch.stack(got) * factors).sum(), (own_hidden, own_weight))]

    shards = [part.detach().clone().requires_grad_() for part in weight.chunk(ranks)]
    assert len({len(shard) for shard in shards}) == 1
    with ThreadPoolExecutor(ranks) as pool:
        groups = [Rank(rank, slots, barrier) for rank in range(ranks)]
        copies = [hidden.detach().clone().requires_grad_() for _ in groups]
        results = list(pool.map(run, groups, copies, shards))
    expected = run(OneRank(), hidden, weight)
    for got in results:
        assert torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1])
    of_hidden, of_weight = sum(got[2] for got in results), torch.cat([got[3] for got in results])
    # The −150 magnify the rounding of a gradient that is zero.
    of_hidden[:, 0] = expected[2][:, 0] = 0.0
    for a, b in zip((*results[0][:2], of_hidden, of_weight), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_added_to_a_buffer(monkeypatch, dtype):
    monkeypatch.setattr(logprob, "WEIGHT_ROWS", 17)
    hidden, weight, targets, vocab = inputs(padding=3)
    hidden, weight = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    buffer = torch.ones(weight.shape)
    for _ in range(2):
        got, _ = chunked(hidden, weight, targets, vocab, weight_grad=buffer)
        got.sum().backward()
    leaf = weight.detach()[:vocab].requires_grad_()
    expected, _ = plain(hidden.detach(), leaf, targets, 1.0)
    (of_weight,) = torch.autograd.grad(expected.sum(), leaf)
    assert weight.grad is None and torch.equal(buffer[vocab:], torch.ones(3, 8))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close((buffer[:vocab] - 1) / 2, of_weight.float(), rtol=tolerance, atol=tolerance)


def test_a_frozen_weight_costs_no_gradient():
    hidden, weight, targets, vocab = inputs(count=6, width=30, padding=0)
    expected, _ = plain(hidden, weight, targets, 1.0)
    (of_hidden,) = torch.autograd.grad(expected.sum(), hidden)
    weight.requires_grad_(False)
    got, _ = chunked(hidden, weight, targets, vocab, chunk=2)
    with Watch() as watch:
        got.sum().backward()
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=1e-4, atol=1e-5)
    assert weight.grad is None and watch.largest < weight.numel()


class Watch(TorchDispatchMode):
    """Remembers the most elements of a result that is not a view, of any dtype and of float32."""

    def __init__(self):
        super().__init__()
        self.largest = self.largest_float32 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
                if tensor.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_positions_never_exist(monkeypatch, dtype):
    positions, vocab, width, chunk = 60, 500, 4, 20
    monkeypatch.setattr(logprob_torch, "BLOCK", 3 * vocab)
    hidden, weight, targets, _ = inputs(positions, width, vocab, padding=0)
    hidden, weight = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    with Watch() as ours:
        got = chunked(hidden, weight, targets, vocab, chunk=chunk)
        torch.stack(got).sum().backward()
    with Watch() as whole:
        torch.stack(plain(hidden, weight, targets, 1.0)).sum().backward()
    assert ours.largest == chunk * vocab and whole.largest == positions * vocab
    if dtype == torch.bfloat16:
        assert ours.largest_float32 == max(3, width) * vocab
