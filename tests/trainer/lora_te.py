"""Adapters and INT4 values on Transformer Engine's layers, as far as Megatron's code around them goes.

A process of its own, started with the stand-in for Transformer Engine on its path: names and shapes are the stand-in's,
and what its layers compute is added here. Argument: the file for what each variant of a model has.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import megatron_fleet.platform.megatron  # noqa: F401  isort: skip  (before any import of megatron.core)
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from policy_fixtures import make_config

from megatron_fleet.config.schema import LoraConfig
from megatron_fleet.trainer.megatron import fake_quant, lora


def add_compute() -> None:
    """Parameters and results of Transformer Engine's layers, imitated."""

    def linear(self: Any, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.linear(x, self.weight)

    def norm_linear(self: Any, x: torch.Tensor, **_: Any) -> Any:
        normed = F.rms_norm(x.float(), x.shape[-1:], self.layer_norm_weight.float()).to(x.dtype)
        out = F.linear(normed, self.weight)
        return (out, normed) if getattr(self, "return_layernorm_output", False) else out

    def weights(self: Any) -> list[torch.Tensor]:
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def grouped(self: Any, x: torch.Tensor, m_splits: list[int], **_: Any) -> torch.Tensor:
        pairs = zip(x.split(m_splits), self._get_weight_tensors(), strict=True)
        return torch.cat([F.linear(piece, weight) for piece, weight in pairs])

    te.Linear.forward, te.LayerNormLinear.forward = linear, norm_linear
    te.GroupedLinear.forward, te.GroupedLinear._get_weight_tensors = grouped, weights


def tool() -> Any:
    file = Path(__file__).parents[2] / "tools" / "megatron_names.py"
    spec = importlib.util.spec_from_file_location("megatron_names_tool", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def merged(low: Any) -> torch.Tensor:
    return low.merged(low.weight.detach(), (0, low.weight.shape[0]))


@torch.no_grad()
def compare(chunk: Any, adapters: lora.Adapters) -> float:
    """Largest difference of an adapted linear layer from one with merged weights, relative to its output."""
    by_weight = {low.weight: low for low in lora.low_rank([adapters])}
    worst = 0.0
    for name, module in chunk.named_modules():
        own = [p for p in module.parameters(recurse=False) if p in by_weight]
        if not own or "mtp" in name:
            continue
        x = torch.randn(6, own[0].shape[1], dtype=torch.bfloat16)
        splits = [1, 0, 3, 2][: len(own)]
        out, _ = module(x, splits) if len(own) > 1 else module(x)
        if (gamma := getattr(module, "layer_norm_weight", None)) is not None:
            x = F.rms_norm(x.float(), x.shape[-1:], gamma.float()).to(x.dtype)
        pieces = zip(x.split(splits), own, strict=True) if len(own) > 1 else [(x, own[0])]
        expected = torch.cat([piece.float() @ merged(by_weight[weight]).T for piece, weight in pieces])
        adapters.enabled = False
        base, _ = module(x, splits) if len(own) > 1 else module(x)
        adapters.enabled = True
        assert isinstance(base, torch.Tensor) and base.shape == out.shape, name
        worst = max(worst, float((out.float() - expected).abs().max() / expected.abs().max()))
    return worst


def adapt(build: Any, model: str, variant: str, config: Any) -> dict[str, Any]:
    chunk = build(model, variant)
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter)
    targets = ("attention", "mlp", "experts") if "moe_intermediate_size" in config else ("attention", "mlp")
    (adapters,) = lora.attach([chunk], config, LoraConfig(rank=2, alpha=4.0, targets=targets), seed=3)
    group = parallel_state.get_data_parallel_group()
    described = {}
    for entry in adapters.describe("adapters.", group).values():
        for part in [entry] if hasattr(entry, "global_shape") else entry.build():
            described[part.key, tuple(part.global_offset)] = (tuple(part.global_shape), part.data.detach().clone())
    for low in lora.low_rank([adapters]):
        torch.nn.init.normal_(low.b)
    return {"described": described, "difference": compare(chunk, adapters)}


def quantised_experts(build: Any, names: Any) -> dict[str, torch.Tensor]:
    """A grouped layer with INT4 values: output and gradients, and those of the values themselves."""
    names.MODELS["qwen3_moe"] |= {"hidden_size": 96, "moe_intermediate_size": 64}
    chunk = build("qwen3_moe", "te_grouped")
    chunk.config.moe_ffn_hidden_size = 64
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter)
    policy = make_config(Path("none")).policy.model_copy(update={"fake_quant": "int4_experts"})
    views = fake_quant.quantise_experts([chunk], policy)
    layer = chunk.decoder.layers[0].mlp.experts.linear_fc1
    own = list(layer.parameters(recurse=False))
    assert all(p in views for p in own)
    x, splits = torch.randn(6, 96, dtype=torch.bfloat16, requires_grad=True), [1, 0, 3, 2]
    values = [fake_quant.int4_values(p.detach()).requires_grad_() for p in own]
    out, _ = layer(x, splits)
    expected = torch.cat([F.linear(a, b) for a, b in zip(x.split(splits), values, strict=True)])
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, [x, *own], upstream)
    wanted = torch.autograd.grad(expected, [x, *values], upstream)
    return {"got": [out.detach(), *got], "wanted": [expected.detach(), *wanted]}


def main() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    torch.set_num_threads(1)
    add_compute()
    names = tool()
    out: dict[Any, Any] = {}
    for model in ("qwen3", "deepseek_v3"):
        for variant in ("local", "te", "te_grouped"):
            if variant != "te_grouped" or names.is_moe(names.MODELS[model]):
                out[model, variant] = adapt(names._build, model, variant, names.MODELS[model])
    out["quantised"] = quantised_experts(names._build, names)
    torch.save(out, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
