"""Gated DeltaNet layers of vLLM's CPU build in float32, on vLLM's own caches of windows and states.

vLLM 0.32's core computes in bfloat16 only, with log-probs 5e-2 to 2e-1 from the trainer's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as stock
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from megatron_fleet.models.qwen3_5.modules.delta_rule import convolve_on, gated_delta_rule, unit_length

_bfloat16_core = stock.cpu_gdn_attention_core


def install() -> None:
    """Replace vLLM's core. Idempotent; before the first model, whose layers register the core as an operator."""
    stock.cpu_gdn_attention_core = _core


# vLLM reads these annotations, evaluated, as the operator's schema.
def _core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Compute ``core_attn_out`` ``[T, heads, V]``, in place, from ``mixed_qkv`` ``[T, C]`` and ``a``, ``b``
    ``[T, heads]``."""
    if mixed_qkv.dtype != torch.float32:
        _bfloat16_core(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a profiling run
        return
    batch = context.attn_metadata[layer.prefix]
    windows, states = layer.kv_cache
    if not is_conv_state_dim_first():
        windows = windows.transpose(1, 2)
    key, value = layer.head_k_dim, layer.head_v_dim
    states = states.view(*states.shape[:2], key, value)
    widths = [n // layer.tp_size for n in (layer.key_dim, layer.key_dim, layer.value_dim)]
    decay = -layer.A_log.float().exp() * F.softplus(a + layer.dt_bias)
    for i in range(batch.num_decodes + batch.num_prefills):
        here = slice(*batch.non_spec_query_start_loc[i : i + 2].tolist())
        slot = batch.non_spec_state_indices_tensor[i]
        window, state = windows[slot], states[slot].float()
        if i >= batch.num_decodes and not batch.has_initial_state[i]:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        mixed, window = convolve_on(mixed_qkv[here], layer.conv1d.weight, window)
        q, k, v = mixed.split(widths, -1)
        q, k, v = q.unflatten(-1, (-1, key)), k.unflatten(-1, (-1, key)), v.unflatten(-1, (-1, value))
        q, k = (unit_length(x).repeat_interleave(layer.num_v_heads // layer.num_k_heads, 1) for x in (q, k))
        out, state = gated_delta_rule(q, k, v, decay[here], b[here].sigmoid(), state)
        windows[slot], states[slot], core_attn_out[here] = window, state, out
