"""The gated delta rule in chunks is the recurrence that defines it, and no sequence sees another."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from megatron_fleet.models.qwen3_5.modules import delta_rule  # noqa: E402

LENGTHS = (1, 63, 64, 65, 130)


def recurrence(q, k, v, g, beta):
    """The definition, token by token."""
    state, out = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[2] ** 0.5)
    return torch.stack(out)


def inputs(tokens, decay=1.0, dtype=torch.float32, key=16, value=24, heads=3):
    random = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k = (delta_rule.unit_length(normal(tokens, heads, key)) for _ in "qk")
    g, beta = -decay * F.softplus(normal(tokens, heads)), normal(tokens, heads).sigmoid()
    return [x.to(dtype) for x in (q, k, normal(tokens, heads, value), g, beta)]


@pytest.mark.parametrize("decay", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunks_are_the_recurrence(tokens, decay):
    exact = inputs(tokens, decay, torch.float64)
    expected = recurrence(*exact)
    assert (delta_rule.gated_delta_rule(*exact)[0] - expected).abs().max() < 1e-12
    single, _ = delta_rule.gated_delta_rule(*inputs(tokens, decay))
    assert single.dtype == torch.float32 and (single - expected).abs().max() < 1e-6


@pytest.mark.parametrize("cuts", [(1,), (64,), (65, 66), (129,)])
def test_a_sequence_may_be_computed_in_parts(cuts):
    """As engines do: the prompt first, then token by token."""
    exact = inputs(130, 0.3, torch.float64)
    whole, last = delta_rule.gated_delta_rule(*exact)
    state, out = None, []
    for first, end in zip((0, *cuts), (*cuts, 130), strict=True):
        part, state = delta_rule.gated_delta_rule(*(x[first:end] for x in exact), state)
        out.append(part)
    assert (torch.cat(out) - whole).abs().max() < 1e-12 and (state - last).abs().max() < 1e-12
    x, weight = torch.randn(130, 6), torch.randn(6, 1, 4)
    window, out = torch.zeros(6, 3), []
    for first, end in zip((0, *cuts), (*cuts, 130), strict=True):
        part, window = delta_rule.convolve_on(x[first:end], weight, window)
        out.append(part)
    torch.testing.assert_close(torch.cat(out), delta_rule.convolve(x, weight, (130,)))
    assert torch.equal(window, x[-3:].t())


def test_gradients():
    exact = [x.requires_grad_() for x in inputs(70, 0.3, torch.float64, key=3, value=2, heads=1)]
    assert torch.autograd.gradcheck(delta_rule.gated_delta_rule, exact, fast_mode=True)


def test_a_sequence_is_computed_as_if_alone():
    parts = [inputs(n) for n in LENGTHS]
    rest = 5
    packed = [
        torch.cat([*pieces, pieces[0].new_ones(rest, *pieces[0].shape[1:])]) for pieces in zip(*parts, strict=True)
    ]
    found = delta_rule.packed_rule(*packed, LENGTHS).split([*LENGTHS, rest])
    for part, out in zip(parts, found, strict=False):
        assert torch.equal(out, delta_rule.gated_delta_rule(*part)[0])
    assert not found[-1].any()


def test_the_window_of_the_convolution_begins_with_zeros():
    x, weight = torch.randn(20, 6), torch.randn(6, 1, 4)
    found = delta_rule.convolve(x, weight, (7, 2, 8))
    start = 0
    for length in (7, 2, 8):
        for t in range(length):
            taps = [x[start + t - back] * weight[:, 0, 3 - back] for back in range(4) if back <= t]
            torch.testing.assert_close(found[start + t], F.silu(sum(taps)))
        start += length
    assert not found[17:].any()


def test_without_a_gpu_the_operators_are_pytorchs():
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    assert delta_rule.kernels() == (delta_rule.convolve, delta_rule.packed_rule)


def test_heads_that_share_a_key_are_heads_with_equal_keys():
    q, k, v, g, beta = inputs(40, heads=6)
    q, k = q[:, ::3], k[:, ::3]
    wide = (x.repeat_interleave(3, dim=1) for x in (q, k))
    assert torch.equal(
        delta_rule.packed_rule(q, k, v, g, beta, (40,)), delta_rule.packed_rule(*wide, v, g, beta, (40,))
    )


@pytest.mark.parametrize(
    ("capability", "triton", "fault"),
    [((9, 0), "3.6.0", "Triton 3.6.0 computes wrong"), ((9, 0), "3.4.0", "Triton 3.4.0 computes wrong"),
     ((9, 0), "3.7.1", None), ((9, 0), "3.3.1", None), ((10, 0), "3.6.0", None)],
)  # fmt: skip
def test_kernels_with_wrong_gradients_are_not_used(capability, triton, fault, monkeypatch):
    """fla itself refuses them only in the first backward pass."""
    monkeypatch.setattr(delta_rule.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(delta_rule.metadata, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    delta_rule.fla_fault.cache_clear()
    found = delta_rule.fla_fault()
    assert (found or "").startswith(fault or "") and (found is None) == (fault is None)
    assert delta_rule.is_slow() == (fault is not None)
    delta_rule.fla_fault.cache_clear()


def test_flas_kernels_share_the_boundaries_of_a_micro_batch(monkeypatch):
    """fla remembers by the identity of the boundaries what it derives from them, and reads them on the host."""
    given = []

    def convolve(x, weight, *, activation, cu_seqlens, cu_seqlens_cpu):
        given.append((cu_seqlens, cu_seqlens_cpu))
        return x, None

    def rule(q, k, v, *, g, beta, cu_seqlens, cu_seqlens_cpu):
        given.append((cu_seqlens, cu_seqlens_cpu))
        return v, None

    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", SimpleNamespace(causal_conv1d=convolve))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=rule))
    for ends, lengths in (([0, 4, 7], (4, 3)), ([0, 4, 6, 7], (4, 2))):
        lengths = delta_rule.Lengths(lengths)
        for _ in range(2):
            delta_rule._fla_convolve(torch.randn(7, 4), torch.randn(4, 1, 4), lengths)
            delta_rule._fla_rule(*inputs(7), lengths)
        (device, host), *others = given
        assert device.tolist() == host.tolist() == ends and device.dtype == host.dtype == torch.int64
        assert len(others) == 3 and all(a is device and b is host for a, b in others)
        given.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 200)])
def test_flas_kernels_are_pytorchs_operators(lengths):
    """Values and gradients, in bfloat16 up to its rounding; the micro-batch ends with tokens of no sequence."""
    if delta_rule.fla_fault() is not None:
        pytest.skip(delta_rule.fla_fault())
    packed = [torch.cat(pieces) for pieces in zip(*(inputs(n, key=64, value=64) for n in (*lengths, 7)), strict=True)]
    x, weight = torch.randn(sum(lengths) + 7, 48), torch.randn(48, 1, 4)
    used, lengths = slice(sum(lengths)), delta_rule.Lengths(lengths)
    found = []
    for convolve, rule in (delta_rule.kernels(), delta_rule.Kernels(delta_rule.convolve, delta_rule.packed_rule)):
        # As in a model of bfloat16: decay and strength are float32.
        given = [tensor.to("cuda", torch.bfloat16) for tensor in (*packed[:3], x, weight)] + [
            y.cuda() for y in packed[3:]
        ]
        given = [tensor.requires_grad_() for tensor in given]
        out, mixed = rule(*given[:3], *given[5:], lengths)[used], convolve(*given[3:5], lengths)[used]
        (out.float().square().sum() + mixed.float().square().sum()).backward()
        found.append([out, mixed, *(tensor.grad for tensor in given)])
    assert delta_rule.kernels() != (delta_rule.convolve, delta_rule.packed_rule)
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).abs().max() < 0.02 * other.float().abs().max()
