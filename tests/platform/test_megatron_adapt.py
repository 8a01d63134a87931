"""Megatron-Core works without CUDA, and nobody else notices."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from waiting import HANG_S

torch = pytest.importorskip("torch")
pytest.importorskip("megatron_fleet.trainer.megatron")

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for hosts without CUDA")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
@no_cuda
def test_only_megatron_sees_another_torch():
    code = """
import torch
before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))
import megatron_fleet.platform.megatron
import megatron.core.parallel_state as inside
assert inside.torch is not torch and inside.torch.Tensor is torch.Tensor
assert inside.torch.zeros(2, device="cuda").device.type == "cpu"
assert inside.torch.cuda.current_device() == torch.device("cpu")
for module, old in zip((torch, torch.cuda, torch.Tensor), before):
    changed = [n for n, v in old.items() if getattr(module, n, None) is not v and vars(module).get(n) is not v]
    assert not changed, changed
for call in (torch.cuda.current_device, lambda: torch.zeros(1).cuda(), lambda: torch.zeros(1, device="cuda")):
    try:
        call()
    except (AssertionError, RuntimeError):
        pass
    else:
        raise SystemExit("CUDA answered outside Megatron")
print("ok")
"""
    assert run(code) == "ok"


@pytest.mark.slow
@no_cuda
def test_too_late_is_said():
    code = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try:
    import megatron_fleet.platform.megatron
except RuntimeError as e:
    print(e)
"""
    assert "imported before" in run(code)


def test_what_is_adapted_follows_the_host(monkeypatch):
    from megatron_fleet.platform.megatron import adapt

    transformer, router = "megatron.core.transformer", "megatron.core.transformer.moe.router"
    hybrid = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    everywhere = {router, hybrid, "megatron.core.optimizer.distrib_optimizer"}
    everywhere |= {"megatron.core.models.common.embeddings.rope_utils", f"{transformer}.transformer_block"}
    modules = everywhere | {f"{transformer}.moe.moe_utils", f"{transformer}.multi_latent_attention"}
    modules |= {"megatron.core.tensor_parallel.random", "megatron.core.utils"}
    optimizer = {f"megatron.core.optimizer{part}" for part in ("", ".optimizer_config")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = everywhere | {"megatron.core.extensions.transformer_engine"}
    for installed, patched in ((None, modules | optimizer), ("apex", modules), ("transformer_engine", engine)):
        monkeypatch.setattr(adapt.importlib.util, "find_spec", lambda name, there=installed: name == there or None)
        assert adapt.needed_patches().keys() == patched


@no_cuda
def test_cuda_calls_are_answered_only_inside():
    from megatron_fleet.platform.megatron.adapt import cuda_calls_answered

    tensor = torch.zeros(2)
    with cuda_calls_answered():
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


def test_adam_equals_torch():
    from megatron_fleet.platform.megatron.adam import FusedAdam

    torch.manual_seed(0)
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mine, theirs = ([torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))] for _ in range(2))
    a, b = FusedAdam(mine, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(5):
        for x, y in zip(mine, theirs, strict=True):
            x.grad = torch.randn_like(x)
            y.grad = x.grad.clone()
        a.step()
        b.step()
    for x, y in zip(mine, theirs, strict=True):
        assert torch.equal(x, y)
    assert a.param_groups[0]["step"] == 5 and a.state[mine[0]].keys() == {"exp_avg", "exp_avg_sq"}


def test_packed_attention_is_attention_of_each_sequence():
    import megatron_fleet.platform.megatron.attention as attention

    torch.manual_seed(0)
    lengths, filler = (5, 9, 1), 3
    q = torch.randn(18, 4, 8, requires_grad=True)
    k, v = (torch.randn(18, 2, 8, requires_grad=True) for _ in range(2))
    core = attention.PackedAttention(SimpleNamespace(context_parallel_size=1), 1)
    out = core(q, k, v, packed_seq_params=attention.MicroBatchParams(lengths=lengths, filler=filler))
    assert out.shape == (18, 32) and not out[15:].any()
    start = 0
    for n in lengths:
        a, b, c = (x[start : start + n].transpose(0, 1) for x in (q, k, v))
        b, c = (x.repeat_interleave(2, 0) for x in (b, c))
        scores = (a @ b.transpose(1, 2) / 8**0.5).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
        expected = (scores.softmax(-1) @ c).transpose(0, 1).reshape(n, -1)
        torch.testing.assert_close(out[start : start + n], expected, rtol=1e-5, atol=1e-5)
        start += n
    out.sum().backward()
    assert not k.grad[15:].any() and v.grad[:15].any()


@pytest.mark.parametrize("center", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 1, 12), (5, 1, 3, 4)])
def test_norm_and_its_gradients(shape, center):
    from types import SimpleNamespace

    from megatron_fleet.platform.megatron.layers import RMSNorm, _RMSNorm

    config = {"params_dtype": torch.float32, "sequence_parallel": True, "layernorm_zero_centered_gamma": bool(center)}
    norm = RMSNorm(SimpleNamespace(**config), shape[-1], eps=1e-3)
    assert norm.weight.sequence_parallel and norm.center == center
    torch.manual_seed(0)
    weight = torch.randn(shape[-1], requires_grad=True)
    x, factor = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], center + weight, 1e-3)
    got = _RMSNorm.apply(x, weight, 1e-3, center)
    torch.testing.assert_close(got, expected)
    for a, b in zip(
        torch.autograd.grad((got * factor).sum(), (x, weight)),
        torch.autograd.grad((expected * factor).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    low = _RMSNorm.apply(x.bfloat16(), weight.bfloat16(), 1e-3, center)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("dtype", "centered", "is_cuda", "fused"),
    [
        (torch.bfloat16, False, True, True),
        (torch.bfloat16, False, False, False),
        (torch.bfloat16, True, True, False),
        (torch.float32, False, True, False),
    ],
)
def test_on_cuda_the_norm_is_pytorchs_kernel_where_that_is_exact(dtype, centered, is_cuda, fused):
    from megatron_fleet.platform.megatron.layers import RMSNorm

    config = {"params_dtype": torch.bfloat16, "sequence_parallel": False, "layernorm_zero_centered_gamma": centered}
    norm = RMSNorm(SimpleNamespace(**config), 12)
    assert norm._has_kernel(SimpleNamespace(dtype=dtype, is_cuda=is_cuda)) is fused


def test_both_norms_agree(monkeypatch):
    from megatron_fleet.platform.megatron.layers import RMSNorm

    config = {"params_dtype": torch.bfloat16, "sequence_parallel": False, "layernorm_zero_centered_gamma": False}
    norm = RMSNorm(SimpleNamespace(**config), 64, eps=1e-5)
    torch.manual_seed(0)
    torch.nn.init.normal_(norm.weight)
    x, factor = torch.randn(2, 9, 64).bfloat16().unbind()
    x.requires_grad_()
    results = []
    for fused in (False, True):
        monkeypatch.setattr(RMSNorm, "_has_kernel", lambda *_, fused=fused: fused)
        out = norm(x)
        results.append((out, *torch.autograd.grad((out * factor).sum(), (x, norm.weight))))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.dtype == torch.bfloat16
        torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)


def test_swiglu_and_its_gradient():
    from megatron_fleet.platform.megatron.layers import SwiGLU

    torch.manual_seed(0)
    x, factor = torch.randn(6, 1, 10, requires_grad=True), torch.randn(6, 1, 5)
    gate, up = x.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    got = SwiGLU()(x)
    torch.testing.assert_close(got, expected)
    (a,), (b,) = (torch.autograd.grad((y * factor).sum(), x) for y in (got, expected))
    torch.testing.assert_close(a, b)
