"""Selection of the modules of a Megatron transformer layer on this host."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_fleet.platform.megatron.attention import PackedAttention
from megatron_fleet.platform.megatron.layers import DuplicatedLinear, RMSNorm, SwiGLU


class TorchBackend(LocalSpecProvider):
    """Megatron's own parallel linear layers with our norm, activation and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention

    def activation_func(self) -> type:
        return SwiGLU


def has_transformer_engine() -> bool:
    """Whether layers use Transformer Engine: it is installed and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True, slots=True)
class MixerLayer:
    """A model family's own module in the place of attention.

    Attributes:
        make: builds its specification from the classes of a column-parallel linear layer, of its inner norms and of a
            row-parallel linear layer.
        first: name of its first linear layer, in which Transformer Engine keeps the norm before it.
    """

    make: Callable[[type, type, type], ModuleSpec]
    first: str


def layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    mixer: MixerLayer | None = None,
    pattern: Sequence[bool] = (),
) -> TransformerBlockSubmodules:
    """Layer specification of this pipeline stage for `GPTModel`: Transformer Engine where it can run, PyTorch
    elsewhere.

    The configuration decides: latent or grouped-query attention, norms of query and key, and by ``moe_layer_freq``
    which layers have experts. Without Transformer Engine experts are computed one after another.

    Args:
        vp_stage: index of one of this rank's virtual pipeline stages; ``None`` without virtual stages.
        mixer, pattern: module in the place of attention, and whether each layer of the model has it.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    if has_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if mixer is not None:
            block.layer_specs = [
                _with_mixer(spec, mixer) if pattern[layer] else spec
                for layer, spec in zip(here, block.layer_specs, strict=True)
            ]
        return block
    kinds = {
        layer: (mixer if mixer is not None and pattern[layer] else None, has_experts(config, layer)) for layer in here
    }
    specs = {kind: _torch_layer(config, *kind) for kind in set(kinds.values())}
    return TransformerBlockSubmodules(layer_specs=[specs[kinds[layer]] for layer in here], layer_norm=RMSNorm)


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer (global index from 0) is a mixture of experts."""
    if not config.num_moe_experts:
        return False
    frequency = config.moe_layer_freq
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0


def _with_mixer(layer: ModuleSpec, mixer: MixerLayer) -> ModuleSpec:
    """A Transformer Engine layer with a mixer in the place of attention.

    Its inner norms are ours, because they may be float32 between bfloat16 layers.
    """
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    changed = copy.deepcopy(layer)
    changed.submodules.self_attention = mixer.make(TELayerNormColumnParallelLinear, RMSNorm, TERowParallelLinear)
    return changed


def _torch_layer(config: TransformerConfig, mixer: MixerLayer | None, experts: bool) -> ModuleSpec:
    backend = TorchBackend()
    if mixer is not None:
        attention = mixer.make(backend.column_parallel_linear(), backend.layer_norm(), backend.row_parallel_linear())
        names = {"input_layernorm.": f"self_attention.{mixer.first}.layer_norm_"}
    elif config.multi_latent_attention:
        attention, names = _latent_attention(backend, config)
    else:
        attention, names = _attention(backend, config)
    if not experts:
        names = names | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    mlp = get_mlp_module_spec_for_backend(
        backend=backend, num_experts=config.num_moe_experts if experts else None, use_te_activation_func=True
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.layer_norm(),
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.layer_norm(),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # One checkpoint format for both specifications: Transformer Engine keeps these norms inside the linears.
            sharded_state_dict_keys_map=names,
        ),
    )


def _attention(backend: TorchBackend, config: TransformerConfig) -> tuple[ModuleSpec, dict[str, str]]:
    norm = backend.layer_norm() if config.qk_layernorm else IdentityOp
    modules = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    spec = ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=modules)
    return spec, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _latent_attention(backend: TorchBackend, config: TransformerConfig) -> tuple[ModuleSpec, dict[str, str]]:
    column = backend.column_parallel_linear()
    norm = backend.layer_norm() if config.qk_layernorm else IdentityOp
    modules = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=DuplicatedLinear,
        linear_q_up_proj=column,
        linear_kv_down_proj=DuplicatedLinear,
        linear_kv_up_proj=column,
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    spec = ModuleSpec(module=MLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=modules)
    return spec, {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
