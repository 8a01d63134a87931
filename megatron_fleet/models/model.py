"""Framework-independent description of a model's architecture. Pure data: no torch, no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from megatron_fleet.models.fields import Fields
    from megatron_fleet.models.rules import Rule
    from megatron_fleet.models.stored_arguments import StoredArguments
    from megatron_fleet.platform.megatron.spec import MixerLayer


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


class Mixer(Protocol):
    """A family's own layer in the place of attention, with its sizes: a frozen dataclass in the family's folder.

    Attributes:
        name: name of such a layer in messages.
        variant: Megatron's name for it (``experimental_attention_variant``).
        engine: module whose function ``install`` adapts vLLM on CPU to it.
        cpu_engine: vLLM's arguments that its models need on CPU.
    """

    name: ClassVar[str]
    variant: ClassVar[str]
    engine: ClassVar[str]
    cpu_engine: ClassVar[dict[str, Any]]

    @property
    def pattern(self) -> tuple[bool, ...]:
        """Whether it takes the place of attention in each layer."""
        ...

    @classmethod
    def read(cls, fields: Fields, layers: int) -> Mixer:
        """Read it from ``config.json``. Raises UserError."""
        ...

    def write(self) -> dict[str, Any]:
        """Return the fields of ``config.json`` from which `read` reads the same."""
        ...

    @classmethod
    def from_megatron(cls, given: StoredArguments) -> Mixer:
        """Read it from the arguments of a Megatron checkpoint. Raises UserError."""
        ...

    def megatron(self) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig``."""
        ...

    def rules(self, model: Model) -> tuple[Rule, ...]:
        """Return the weight table's rules for the norm before it and its tensors."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the sizes that `rules` names in shapes."""
        ...

    def flops(self, hidden: int) -> int:
        """Return the FLOPs of one layer per token, for a hidden size."""
        ...

    @property
    def heads(self) -> tuple[str, int]:
        """Field of ``config.json`` and number of the heads that tensor parallelism distributes."""
        ...

    def widths(self) -> tuple[tuple[str, int], ...]:
        """Return name and size of each side of its matrices that tensor parallelism splits."""
        ...

    @property
    def state_bytes(self) -> int:
        """Size of one layer's state of a sequence, in an engine."""
        ...

    def layer(self) -> MixerLayer:
        """Return its module for Megatron; imports torch."""
        ...

    def advice(self) -> str | None:
        """Return what makes it faster on this host; ``None`` if nothing is missing. Imports torch."""
        ...


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
        mixer: the family's own layer in the place of attention, and where; ``None`` for attention alone.
        activation: function in the gated feed-forward layers; ``gelu_tanh`` is its approximation by a tanh.
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
    mixer: Mixer | None = None
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
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

    def has_mixer(self, layer: int) -> bool:
        """Whether the mixer takes the place of attention in a layer (0-based); in an MTP layer it never does."""
        return self.mixer is not None and layer < self.layers and self.mixer.pattern[layer]

    @property
    def uniform(self) -> bool:
        """Whether all layers are of one kind; Megatron then stacks them into one tensor per parameter."""
        return len(set(self.moe_layers)) <= 1 and self.mixer is None
