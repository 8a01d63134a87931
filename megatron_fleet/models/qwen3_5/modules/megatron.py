"""Megatron's Gated DeltaNet layer over packed micro-batches, on every host and supported release."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from megatron_fleet.models.qwen3_5.modules.delta_rule import Lengths, kernels, unit_length
from megatron_fleet.platform.device import to_device
from megatron_fleet.platform.megatron.attention import MicroBatchParams, local_tokens
from megatron_fleet.platform.megatron.spec import MixerLayer

_MEGATRON = "megatron.core.ssm.gated_delta_net"


def _no_kernel(*_: Any, **__: Any) -> None:
    raise RuntimeError("flash-linear-attention is not installed")


def _allow_without_kernels() -> None:
    """Let Megatron's layer be built without flash-linear-attention: our forward pass needs it on no host."""
    for name in (_MEGATRON, f"{_MEGATRON}.common", f"{_MEGATRON}.gdn"):  # a package from 0.19 on
        module: Any = sys.modules.get(name)
        if module is not None:
            module.HAVE_FLA = True
            for kernel in ("chunk_gated_delta_rule", "causal_conv1d", "l2norm"):
                if module.__dict__.get(kernel) is None:
                    setattr(module, kernel, _no_kernel)


_allow_without_kernels()


class PackedGatedDeltaNet(GatedDeltaNet):
    """Megatron's layer with its own forward pass.

    Parameters, their split over tensor-parallel ranks and their form in checkpoints are Megatron's. Its forward pass
    needs flash-linear-attention, and before 0.18 refuses packed sequences and context parallelism.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In bfloat16 rates of decay are off by up to 0.8 %, and a gain near 1 loses most of its digits as gain − 1.
        _to_float32(self, "A_log")
        _to_float32(self.out_norm, "weight")

    def reset_parameters(self) -> None:
        """Do nothing: every parameter is filled afterwards."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: MicroBatchParams,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map ``[P, 1, hidden]`` to the same shape, plus ``None`` in the place of Megatron's bias.

        With sequence parallelism ``P`` counts this tensor-parallel rank's tokens, with context parallelism this
        context-parallel rank's. Each of the latter computes whole sequences: tokens are all-gathered, and their
        gradients summed in the backward pass.
        """
        projected, _bias = self.in_proj(hidden_states)
        packed, operators = projected[:, 0], kernels()
        # Of all layers of the micro-batch, and of their recomputation.
        own = packed_seq_params.__dict__
        lengths: Lengths = own.setdefault("mfleet_lengths", Lengths(packed_seq_params.lengths))
        group = parallel_state.get_context_parallel_group()
        mine = None
        if group.size() > 1:
            pieces = [*lengths, *([packed_seq_params.filler] if packed_seq_params.filler else [])]
            order = [local_tokens(pieces, group.size(), rank) for rank in range(group.size())]
            packed = gather_from_sequence_parallel_region(packed, group=group)
            places = torch.from_numpy(np.argsort(np.concatenate(order)))
            packed = packed.index_select(0, to_device(places, packed.device))
            mine = to_device(torch.from_numpy(order[group.rank()]), packed.device)
        keys, values, heads = (n // self.tp_size for n in (self.qk_dim, self.v_dim, self.num_value_heads))
        mixed, gate, b, a = packed.split([2 * keys + values, values, heads, heads], dim=-1)
        mixed = operators.convolve(mixed, self.conv1d.weight, lengths)
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q, k = (unit_length(x.unflatten(-1, (-1, self.key_head_dim))) for x in (q, k))
        out = operators.rule(
            q,
            k,
            v.unflatten(-1, (-1, self.value_head_dim)),
            -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float()),
            b.float().sigmoid(),
            lengths,
        )
        if mine is not None:
            out, gate = out.index_select(0, mine), gate.index_select(0, mine)
        normed = self.out_norm(out).float() * F.silu(gate.float()).view(out.shape)
        return self.out_proj(normed.to(gate.dtype).flatten(1)[:, None])


def _to_float32(module: nn.Module, name: str) -> None:
    """Convert a parameter, keeping the attributes by which Megatron treats it."""
    parameter = module._parameters[name]
    assert parameter is not None
    wide = nn.Parameter(parameter.detach().float())
    wide.__dict__.update(parameter.__dict__)
    module._parameters[name] = wide


def _spec(column: type, norm: type, row: type) -> ModuleSpec:
    return ModuleSpec(module=PackedGatedDeltaNet, submodules=GatedDeltaNetSubmodules(column, norm, row))


LAYER = MixerLayer(_spec, first="in_proj")
"""The layer for `platform.megatron.spec.layer_spec`."""
