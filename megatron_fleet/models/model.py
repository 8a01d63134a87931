"""Framework-independent description of a model's architecture. Pure data: no torch, no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base frequency.
        kind: ``default``; ``yarn`` (Peng et al. 2023, arXiv:2309.00071); ``llama3`` (Llama 3.1's frequency bands).
        factor: context extension factor; 1 for ``default``.
        original_context: context length before the extension, in tokens; ``None`` for ``default``.
        beta_fast, beta_slow: bounds of YaRN's ramp, in rotations over the original context.
        mscale, mscale_all_dim: DeepSeek's YaRN attention scales; ``None`` where the configuration has none and YaRN's
            default temperature, 0.1 · ln(factor) + 1, applies.
        low_freq_factor, high_freq_factor: bounds of Llama 3's frequency bands.
    """

    theta: float
    kind: Literal["default", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_context: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The language model of a checkpoint.

    Attributes:
        layers, hidden, vocab, ffn, context: number of transformer layers, hidden size, vocabulary size, size of a dense
            feed-forward layer, longest context in tokens (``None``: unknown; no computation depends on it).
        tied: the output head shares the word embedding.
        heads: query heads.
        groups, head: number of key-value heads and head size (grouped-query attention).
        qkv_bias, qk_norm, rotary_fraction: biases on the query, key and value projections; RMS norms on query and key
            (for latent attention: on the compressed query and key-value); rotated fraction of a head.
        kv_lora, q_lora, nope, rotated, value: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): ranks of the
            compressed key-value and query, sizes of a head's unrotated and rotated parts and of its value.
            ``kv_lora=None`` means grouped-query attention; ``q_lora=None`` an uncompressed query.
        output_gate: the attended values are multiplied by a sigmoid gate, one per element (Qiu et al. 2025,
            arXiv:2505.06708).
        linear_layers: whether each layer is a Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464), which replaces
            attention; empty for a model without such layers.
        linear_key_heads, linear_value_heads, linear_key_head, linear_value_head, linear_convolution: heads and head
            sizes of a Gated DeltaNet, and the width of its causal convolution in tokens.
        zero_centered_norms: the model's norms multiply by 1 + weight.
        experts, experts_per_token, expert_ffn: routed experts (0 = none), routed experts per token, size of one expert.
        shared_ffn: total size of the shared experts; 0 = none.
        shared_gate: the shared experts' output is multiplied by a sigmoid gate, one per token.
        moe_layers: whether each layer has experts; empty for a dense model.
        router_score, router_bias, renormalise, routing_scale: score function applied to the router logits; per-expert
            bias used only for selection; whether selected scores are normalised by their sum; factor applied to them.
        expert_groups, top_groups: group-limited routing; 1 and 1 = none.
        mtp: number of multi-token prediction layers after the last layer.
    """

    layers: int
    hidden: int
    vocab: int
    ffn: int
    context: int | None
    heads: int
    norm_eps: float
    rope: Rope
    tied: bool = False
    groups: int | None = None
    head: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_fraction: float = 1.0
    kv_lora: int | None = None
    q_lora: int | None = None
    nope: int | None = None
    rotated: int | None = None
    value: int | None = None
    output_gate: bool = False
    linear_layers: tuple[bool, ...] = ()
    linear_key_heads: int | None = None
    linear_value_heads: int | None = None
    linear_key_head: int | None = None
    linear_value_head: int | None = None
    linear_convolution: int | None = None
    zero_centered_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    moe_layers: tuple[bool, ...] = ()
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    renormalise: bool = True
    routing_scale: float = 1.0
    expert_groups: int = 1
    top_groups: int = 1
    mtp: int = 0

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora is not None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (0-based) has experts; an MTP layer is like the last layer."""
        return bool(self.moe_layers) and self.moe_layers[min(layer, self.layers - 1)]

    def is_linear(self, layer: int) -> bool:
        """Whether a layer (0-based) is a Gated DeltaNet; an MTP layer never is."""
        return bool(self.linear_layers) and layer < self.layers and self.linear_layers[layer]

    @property
    def uniform(self) -> bool:
        """Whether all layers are of one kind; Megatron then stacks them into one tensor per parameter."""
        return len(set(self.moe_layers)) <= 1 and not self.linear_layers
