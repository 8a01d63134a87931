"""Which modules a Megatron transformer layer is made of on this host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_fleet.platform.megatron.attention import PackedAttention
from megatron_fleet.platform.megatron.layers import RMSNorm, swiglu


class TorchBackend(LocalSpecProvider):
    """Megatron's own parallel linear layers with our norm, activation and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention

    def activation_func(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return swiglu


def has_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: it is installed and there is a CUDA device for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """What `GPTModel` builds on this pipeline stage: Transformer Engine where it can run, PyTorch elsewhere."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layers = [_torch_layer()] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _torch_layer() -> ModuleSpec:
    backend = TorchBackend()
    norm, column, row = backend.layer_norm(), backend.column_parallel_linear(), backend.row_parallel_linear()
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=backend.core_attention(),
            linear_proj=row,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend=backend, use_te_activation_func=True),
            mlp_bda=get_bias_dropout_add,
            # One checkpoint format for both specifications: Transformer Engine keeps these norms inside the linears.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
