"""Sections `precision`, `parallel` and `policy`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import MAX_TOKENS, Section


class PrecisionConfig(Section):
    """Number formats of the trainer. Master weights are always float32."""

    recipe: Literal["model_dtype", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed"] = Field(
        "model_dtype",
        description="Linear layers compute in model.dtype, or in FP8 with one scale per tensor, per block of 128, or "
        "per tensor from earlier steps.",
    )
    bf16_layers_at_start: int = Field(0, ge=0, description="Number of first layers kept out of FP8.")
    bf16_layers_at_end: int = Field(0, ge=0, description="Number of last layers kept out of FP8.")
    fp8_param_gather: bool = Field(
        False, description="Keep the weights of FP8 layers in FP8 and all-gather them in FP8."
    )
    gradients: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type in which gradients are accumulated and reduced over ranks."
    )

    @property
    def fp8(self) -> bool:
        return self.recipe != "model_dtype"


class ParallelConfig(Section):
    """Parallel layout: world size = tensor × pipeline × context × data. Experts have their own layout over the same
    ranks: expert × expert_tensor × pipeline divides the world size."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size: ranks that share each layer's matrices.")
    sequence: bool = Field(
        True,
        description="Sequence parallelism, with tensor > 1: split the activations between the matrices over tokens as "
        "well.",
    )
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel size: ranks that share the stack of layers.")
    virtual: int = Field(1, ge=1, description="Virtual pipeline: model chunks per pipeline rank, interleaved.")
    first_stage_layers: int | None = Field(None, ge=1, description="Layers of the first pipeline rank; none = even.")
    last_stage_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline rank; none = even.")
    context: int = Field(1, ge=1, description="Context-parallel size: ranks that share the tokens of each sequence.")
    expert: int = Field(1, ge=1, description="Expert-parallel size: ranks that share the experts of a layer.")
    expert_tensor: int | None = Field(
        None, ge=1, description="Tensor-parallel size of experts; none = `tensor`, or 1 with expert > 1."
    )
    data: int = Field(
        1, ge=1, description="Data-parallel size: replicas of the model, each with its share of the batch."
    )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class OptimizerConfig(Section):
    lr: float = Field(gt=0, description="Peak learning rate.")
    min_lr: float = Field(
        0.0, ge=0, description="Learning rate that a linear or cosine schedule reaches one step after the last."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled (AdamW).")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Adam's denominator offset.")
    clip_grad: float = Field(1.0, gt=0, description="Gradient clipping: a larger norm is scaled down to this one.")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which Adam's moments are kept; bfloat16 halves them (precision-aware optimizer).",
    )
    offload_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of master weights and moments kept, and updated, in host memory."
    )


class RouterConfig(Section):
    """Routers of a mixture of experts."""

    dtype: Literal["float32", "float64"] = Field("float32", description="Type of router logits and scores.")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Step of each expert's routing bias towards equal load, per update (balancing without an "
        "auxiliary loss, DeepSeek-V3); 0: biases stay.",
    )


Recompute = (
    Literal["none", "full"]
    | tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"], ...]
)
"""Activations recomputed in the backward pass: those of whole layers, or of the named parts of layers."""


class SafetyConfig(Section):
    """Handling of suspicious updates. An update with a non-finite loss or gradient is always skipped."""

    spike_factor: float | None = Field(
        10.0, gt=1, description="Warn when the gradient norm exceeds this multiple of the running median; none = off."
    )
    max_dumps: int = Field(
        2,
        ge=0,
        description="Updates that `out`/dumps may hold for `mfleet debug replay`, each as large as a checkpoint; one "
        "place is kept for an update that is not finite. 0: none.",
    )
    max_skipped_in_a_row: int = Field(
        5, ge=1, description="Stop the run after this many consecutive updates that are not finite."
    )


class LoraConfig(Section):
    """LoRA adapters on frozen layers (Hu et al. 2021, arXiv:2106.09685); each expert gets its own."""

    rank: int = Field(0, ge=0, le=65_536, description="Width of the adapters; 0: none, all parameters are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapters' output is scaled by alpha / rank.")
    targets: tuple[Literal["attention", "mlp", "experts"], ...] = Field(
        ("attention", "mlp"),
        min_length=1,
        description="Linear layers that get adapters: attention, mlp (dense layers, shared experts), experts (routed).",
    )
    export: Literal["merged", "adapters"] = Field(
        "merged", description="An export is a whole model, or the adapters alone in peft's format."
    )


class GradientMetricsConfig(Section):
    """`policy/grad:*`, see docs/reference/metrics.md: measured on samples of 64 rows and columns of layer matrices."""

    every: int = Field(
        0, ge=0, description="Updates between two measurements, counted from the start of an attempt; 0: off."
    )
    parameters: int = Field(16, ge=1, description="Number of weight matrices sampled, spread over layers and kinds.")


class PolicyConfig(Section):
    micro_batch_tokens: int = Field(
        ge=64, le=MAX_TOKENS, description="Most tokens of a micro-batch; sequences are packed into it."
    )
    recompute: Recompute = Field(
        "none", description="Recompute activations instead of keeping them: none, full, or a list of parts."
    )
    logprob_chunk: int = Field(1024, ge=1, le=MAX_TOKENS, description="Positions whose logits exist at one time.")
    updates_per_batch: int = Field(
        1, ge=1, description="Optimizer steps per rollout batch; above 1, π_old is computed by a pass of its own."
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each rank.")
    optimizer: OptimizerConfig
    router: RouterConfig = RouterConfig()
    safety: SafetyConfig = SafetyConfig()
    lora: LoraConfig = LoraConfig()
    gradient_metrics: GradientMetricsConfig = GradientMetricsConfig()
    fake_quant: Literal["none", "int4_experts"] = Field(
        "none",
        description="int4_experts: routed experts compute with their weights rounded to INT4 (groups of 32).",
    )
