"""Attention of packed sequences without Transformer Engine: one kernel call where there is one, no dense masks."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron_fleet.platform.megatron")

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right

from megatron_fleet.platform.megatron import attention
from megatron_fleet.platform.megatron.attention import (
    MicroBatchParams,
    PackedAttention,
    attend_in_one_call,
    attend_one_by_one,
    attention_parts,
    local_tokens,
)

LENGTHS, FILLER = (8, 20, 4), 4
HEADS, GROUPS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")


def tensors(value_width=WIDTH):
    torch.manual_seed(0)
    tokens = sum(LENGTHS) + FILLER
    sizes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, value_width)
    return [torch.randn(tokens, heads, width, requires_grad=True) for heads, width in sizes]


def expected(query, key, value, scale):
    """Softmax attention written out, ``[P, heads, v]``, of every sequence; zeros for the filler."""
    out = torch.zeros(len(query), HEADS, value.shape[2])
    start = 0
    for n in LENGTHS:
        q, k, v = (x[start : start + n].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
        out[start : start + n] = (scores.softmax(-1) @ v).transpose(0, 1)
        start += n
    return out


def of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
): ...


@pytest.fixture(params=["2.11", "installed"])
def flash(monkeypatch, request):
    """A stand-in for PyTorch's kernel with a release's parameters, which keeps its arguments; the mask is aligned with
    the ends, as the kernel's.
    """
    calls = []
    signature = inspect.signature(of_torch_2_11 if request.param == "2.11" else varlen.varlen_attn)
    asks = "enable_gqa" in signature.parameters

    def kernel(*given, **named):
        bound = signature.bind(*given, **named)
        return compute(*bound.args[:7], **bound.kwargs)

    kernel.__signature__ = signature

    def compute(query, key, value, query_ends, key_ends, longest_query, longest_key, **more):
        assert more.get("enable_gqa", False) == (asks and query.shape[1] != key.shape[1])
        calls.append({"longest": (longest_query, longest_key), "value": tuple(value.shape), **more})
        assert more["window_size"] == (-1, 0)
        assert query_ends.dtype == key_ends.dtype == torch.int32
        assert len(query) == query_ends[-1] and len(key) == key_ends[-1]
        lengths = [x.diff().tolist() for x in (query_ends, key_ends)]
        assert (longest_query, longest_key) == tuple(map(max, lengths))
        out = []
        for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            mask = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            scores = (q @ k.transpose(1, 2) * more["scale"]).masked_fill(~mask, -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    return calls


@pytest.mark.parametrize("kernel", [attend_one_by_one, attend_in_one_call])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value_width", [WIDTH, 8])
def test_both_kernels_give_attention_of_each_sequence(kernel, ranks, value_width, flash):
    query, key, value = tensors(value_width)
    reference = expected(query, key, value, 0.3)
    factor = torch.randn_like(reference)
    wanted = torch.autograd.grad((reference * factor).sum(), (query, key, value))
    pieces = (*LENGTHS, FILLER)
    everyone = torch.cat([torch.from_numpy(local_tokens(pieces, ranks, r)) for r in range(ranks)])
    total = torch.zeros(())
    for rank in range(ranks):
        params = MicroBatchParams(lengths=LENGTHS, filler=FILLER)
        parts = attention_parts(params, ranks, rank, CPU)
        real = sum(parts.queries)
        assert real == sum(LENGTHS) // ranks
        mine = torch.from_numpy(local_tokens(pieces, ranks, rank))[:real]
        k, v = (x[everyone] for x in (key, value))
        k, v = (x[:real] if parts.rows is None else x[parts.rows] for x in (k, v))
        out = kernel(query[mine], k, v, parts, 0.3)
        torch.testing.assert_close(out, reference[mine], rtol=1e-5, atol=1e-5)
        total = total + (out * factor[mine]).sum()
    got = torch.autograd.grad(total, (query, key, value))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(flash) == (ranks if kernel is attend_in_one_call else 0)
    assert all(call["value"][2] == WIDTH for call in flash)


def test_without_context_parallelism_masks_are_left_to_the_kernel(monkeypatch):
    seen = []
    compute = F.scaled_dot_product_attention

    def capture(*args, attn_mask, is_causal, **more):
        seen.append((attn_mask, is_causal))
        return compute(*args, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", capture)
    parts = attention_parts(MicroBatchParams(lengths=LENGTHS, filler=FILLER), 1, 0, CPU)
    attend_one_by_one(*(x[: sum(LENGTHS)] for x in tensors()), parts, 0.3)
    assert seen == [(None, True)] * len(LENGTHS)


def test_with_context_parallelism_masks_are_only_described(monkeypatch):
    """A mask of booleans has queries × keys entries, and CUDA's kernels expand it further."""
    described = []

    def describe(*sizes):
        described.append(sizes)
        return causal_lower_right(*sizes)

    monkeypatch.setattr(attention, "lower_right_mask", describe)
    parts = attention_parts(MicroBatchParams(lengths=(16,)), 2, 1, CPU)
    attend_one_by_one(torch.randn(8, HEADS, WIDTH), *(torch.randn(20, GROUPS, WIDTH) for _ in "kv"), parts, 0.3)
    assert described == [(4, 8), (4, 12)]


def test_the_module_makes_its_parts_once_for_all_layers(monkeypatch):
    made = []
    build = attention.attention_parts
    monkeypatch.setattr(attention, "attention_parts", lambda *args: made.append(args) or build(*args))
    params = MicroBatchParams(lengths=LENGTHS, filler=FILLER)
    query, key, value = tensors()
    for layer in range(3):
        core = PackedAttention(SimpleNamespace(context_parallel_size=1), layer, softmax_scale=0.3)
        out = core(query, key, value, packed_seq_params=params)
    assert len(made) == 1
    torch.testing.assert_close(out, expected(query, key, value, 0.3).flatten(1), rtol=1e-5, atol=1e-5)
    assert not out[sum(LENGTHS) :].any()


def test_a_micro_batch_of_filler_alone():
    query, key, value = tensors()
    core = PackedAttention(SimpleNamespace(context_parallel_size=1), 1)
    out = core(query, key, value, packed_seq_params=MicroBatchParams(filler=len(query)))
    assert out.shape == (len(query), HEADS * WIDTH) and not out.any()


def on_cuda(width, dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(shape=(7, 2, width), dtype=dtype, is_cuda=is_cuda)


@pytest.mark.parametrize(
    ("query", "value", "takes"),
    [
        (on_cuda(128), on_cuda(128), True),
        (on_cuda(192), on_cuda(128), True),
        (on_cuda(256), on_cuda(256), True),
        (on_cuda(128), on_cuda(192), False),
        (on_cuda(320), on_cuda(320), False),
        (on_cuda(100), on_cuda(100), False),
        (on_cuda(128, torch.float32), on_cuda(128), False),
        (on_cuda(128, is_cuda=False), on_cuda(128), False),
    ],
)
def test_which_tensors_go_to_one_call(query, value, takes):
    assert attention._takes_all_at_once(query, value) is takes
