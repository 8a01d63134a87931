"""Sections `model`, `precision`, `parallel` and `policy`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.names import NameOrPath
from megatron_fleet.config.remote_model import remote_model
from megatron_fleet.config.sections.base import MAX_TOKENS, Rule, Section
from megatron_fleet.config.sections.hosted import HOSTED

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config

WITH_RANKS = "megatron"
"""The trainer that has ranks on the hosts of the run."""


class ModelConfig(Section):
    path: str = Field(
        description="HF folder: config.json, tokenizer.json, safetensors. Or an id on the Hugging Face hub, "
        "`organisation/name` or `organisation/name@revision`, or an HF folder in a bucket, s3://… or gs://…, which are "
        "downloaded once per host."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Data type of the forward pass and of the engines; float32 on CPU."
    )
    family: Annotated[str, NameOrPath(())] | None = Field(
        None,
        description="Model family of your own (examples/my_family.py); null: one of megatron_fleet/models, by the "
        "model_type of config.json.",
    )

    @property
    def folder(self) -> str:
        """The model's folder here; that of a remote model exists once `weights.fetch.cache.fetch` has made it."""
        remote = remote_model(self.path)
        return self.path if remote is None else str(remote.folder(os.environ))


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
    first_stage_layers: int | None = Field(None, ge=1, description="Layers of the first pipeline rank; null: even.")
    last_stage_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline rank; null: even.")
    context: int = Field(1, ge=1, description="Context-parallel size: ranks that share the tokens of each sequence.")
    expert: int = Field(1, ge=1, description="Expert-parallel size: ranks that share the experts of a layer.")
    expert_tensor: int | None = Field(
        None, ge=1, description="Tensor-parallel size of experts; null: `tensor`, or 1 with expert > 1."
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
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, decoupled (AdamW).")
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


DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Sizes of a group of ranks for which DeepEP has settings (``Buffer.get_dispatch_config``)."""


class RouterConfig(Section):
    """Routers of a mixture of experts, and the way of tokens to the experts."""

    dtype: Literal["float32", "float64"] = Field("float32", description="Type of router logits and scores.")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Step of each expert's routing bias towards equal load, per update (balancing without an "
        "auxiliary loss, DeepSeek-V3); 0: biases stay.",
    )
    dispatcher: Literal["auto", "alltoall", "deepep"] = Field(
        "auto",
        description="How ranks exchange tokens with parallel.expert above 1. deepep: kernels of the package deep_ep, "
        "whose buffers stay on the GPU; auto: deepep where it is installed and supports layout and types, else an "
        "all-to-all.",
    )


Recompute = (
    Literal["none", "full"]
    | Annotated[int, Field(ge=1)]
    | tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"], ...]
)
"""Activations recomputed in the backward pass: those of whole layers (all, or the first N of a model chunk), or of the
named parts of layers."""


class SafetyConfig(Section):
    """Handling of suspicious updates. An update with a non-finite loss or gradient is always skipped."""

    spike_factor: float | None = Field(
        10.0, gt=1, description="Warn when the gradient norm exceeds this multiple of the running median; null: off."
    )
    mismatch_kl: float | None = Field(
        0.05,
        gt=0,
        description="Warn when policy/mismatch_kl of a step, the distance of the engines' policy from the trainer's, "
        "exceeds this; null: off. Usual are 1e-5 to 1e-3 for dense models in bfloat16, and up to 0.1 for mixtures of "
        "experts.",
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
    trainer: Annotated[str, NameOrPath((WITH_RANKS, HOSTED))] = Field(
        WITH_RANKS,
        description="Trainer of the policy. megatron: Megatron-Core, in ranks that the run starts and that `parallel` "
        "lays out. hosted: a service that trains adapters, see `hosted`.",
    )
    micro_batch_tokens: int = Field(
        ge=64, le=MAX_TOKENS, description="Maximum number of tokens in a micro-batch; sequences are packed into it."
    )
    recompute: Recompute = Field(
        "none",
        description="Recompute activations instead of keeping them: none, full, a list of parts, or a number of whole "
        "layers, the first ones of each pipeline stage (with parallel.virtual above 1, of each model chunk).",
    )
    logprob_chunk: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Positions whose logits exist at one time; null: 4096 on CUDA devices, 1024 on CPUs.",
    )
    updates_per_batch: int = Field(
        1, ge=1, description="Optimizer steps per rollout batch; above 1, π_old is computed by a pass of its own."
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of each rank. null: 1, but on CUDA devices with an optimizer in host memory "
        "(offload_fraction above 0) an equal share of the host's cores.",
    )
    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="auto: layers of Transformer Engine on CUDA devices, where it must be installed, and PyTorch's on "
        "CPUs. torch: PyTorch's everywhere; slower on CUDA devices, and without FP8.",
    )
    overlap: bool | None = Field(
        None,
        description="Reduce gradients over data- and context-parallel ranks, part by part, while the last "
        "micro-batch's backward pass still runs; with updates_per_batch above 1 also gather updated parameters while "
        "the next forward pass runs. null: with GPUs yes, on CPUs no.",
    )
    optimizer: OptimizerConfig
    router: RouterConfig = RouterConfig()
    safety: SafetyConfig = SafetyConfig()
    lora: LoraConfig = LoraConfig()
    gradient_metrics: GradientMetricsConfig = GradientMetricsConfig()
    fake_quant: Literal["none", "int4_experts"] = Field(
        "none",
        description="int4_experts: routed experts compute with their weights rounded to INT4 (groups of 32).",
    )

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """Parts of layers that are recomputed; empty where whole layers are, or nothing is."""
        return self.recompute if isinstance(self.recompute, tuple) else ()


def _optimizer(c: Config) -> str | None:
    o = c.policy.optimizer
    if not all(0 <= beta < 1 for beta in o.betas):
        return f"policy.optimizer.betas={list(o.betas)}: both must be at least 0 and below 1."
    if o.min_lr > o.lr:
        return f"policy.optimizer.min_lr={o.min_lr:g} is above policy.optimizer.lr={o.lr:g}; lower the first."
    if o.min_lr and o.schedule == "constant":
        return f"policy.optimizer.min_lr={o.min_lr:g} has no effect with schedule=constant; choose linear or cosine."
    return None


def _fp8(c: Config) -> str | None:
    p, recipe = c.precision, f"precision.recipe={c.precision.recipe}"
    if not p.fp8:
        for key in ("bf16_layers_at_start", "bf16_layers_at_end", "fp8_param_gather"):
            if value := getattr(p, key):
                return f"precision.{key}={value} has no effect with {recipe}; remove it or choose an FP8 recipe."
        return None
    if c.model.dtype != "bfloat16":
        return f"{recipe} computes the rest in bfloat16, not in model.dtype={c.model.dtype}; set model.dtype=bfloat16."
    if p.recipe == "fp8_delayed" and (p.bf16_layers_at_start or p.bf16_layers_at_end):
        return (
            f"{recipe} cannot leave layers out of FP8; set precision.bf16_layers_at_start=0 and "
            f"precision.bf16_layers_at_end=0, or choose another recipe."
        )
    return None


def _kernels(c: Config) -> str | None:
    if c.policy.kernels != "torch":
        return None
    for key, value, plain in (
        ("precision.recipe", c.precision.recipe, "model_dtype"),
        ("policy.recompute", "[moe_act]" if "moe_act" in c.policy.recomputed_parts else "", ""),
    ):
        if value != plain:
            return (
                f"{key}={value} needs the layers of Transformer Engine, and policy.kernels=torch leaves them out; set "
                f"policy.kernels=auto or change the other."
            )
    return None


def _fp8_param_gather(c: Config) -> str | None:
    p = c.precision
    if p.fp8_param_gather and p.recipe == "fp8_blockwise":
        return (
            "precision.fp8_param_gather=true with precision.recipe=fp8_blockwise: weights in blocks cannot be cut into "
            "shards or filled in parts; choose fp8_tensorwise or leave it false."
        )
    if p.fp8_param_gather and p.recipe != "fp8_delayed" and c.policy.optimizer.offload_fraction:
        return (
            f"precision.fp8_param_gather=true with policy.optimizer.offload_fraction="
            f"{c.policy.optimizer.offload_fraction:g} works with precision.recipe=fp8_delayed alone; give up one."
        )
    return None


def _bfloat16_only(c: Config) -> str | None:
    if c.model.dtype == "bfloat16":
        return None
    for key, value, plain in (
        ("precision.gradients", c.precision.gradients, "float32"),
        ("policy.optimizer.moments", c.policy.optimizer.moments, "float32"),
        ("policy.optimizer.offload_fraction", c.policy.optimizer.offload_fraction, 0),
    ):
        if value != plain:
            return (
                f"{key}={value} needs model.dtype=bfloat16, and it is {c.model.dtype}; change one (without it, "
                f"{key}={plain})."
            )
    return None


def _moments(c: Config) -> str | None:
    o = c.policy.optimizer
    if o.moments == "float32":
        return None
    if o.offload_fraction:
        return (
            f"policy.optimizer.moments={o.moments} with policy.optimizer.offload_fraction={o.offload_fraction:g}: "
            f"moments in host memory are float32; set one of them to its default."
        )
    # bfloat16 has 8 significant bits: a decay by less than half of the last one is always rounded away.
    if max(o.betas) > 1 - 2**-8:
        return (
            f"policy.optimizer.moments={o.moments} cannot hold a moment that decays by {1 - max(o.betas):.2g} a step; "
            f"lower policy.optimizer.betas={list(o.betas)} to at most 0.99 or set policy.optimizer.moments=float32."
        )
    return None


def _adapters(c: Config) -> str | None:
    lora = c.policy.lora
    if lora.rank == 0 and lora.export == "adapters":
        return "policy.lora.export=adapters needs policy.lora.rank above 0; set it."
    if lora.rank == 0:
        return None
    if lora.targets == ("experts",):
        return (
            "policy.lora.targets=[experts] leaves ranks without dense parameters to train; add attention: "
            "policy.lora.targets=[attention,experts]."
        )
    if rate := c.policy.router.bias_update_rate:
        return (
            f"policy.router.bias_update_rate={rate:g} would change the base model, which policy.lora.rank={lora.rank} "
            f"keeps as it is; set policy.router.bias_update_rate=0."
        )
    return None


def _deepep(c: Config) -> str | None:
    if c.policy.router.dispatcher != "deepep":
        return None
    ranks = c.parallel.expert * c.parallel.expert_tensor_size
    for key, value, needed in (
        ("model.dtype", c.model.dtype, "bfloat16"),
        ("policy.router.dtype", c.policy.router.dtype, "float32"),
    ):
        if value != needed:
            return f"policy.router.dispatcher=deepep needs {key}={needed}, and it is {value}; change one of them."
    if ranks not in DEEPEP_RANKS:
        sizes = ", ".join(map(str, DEEPEP_RANKS))
        return (
            f"policy.router.dispatcher=deepep with parallel.expert × parallel.expert_tensor = {ranks} ranks: it "
            f"supports {sizes}; change the layout or set policy.router.dispatcher=auto."
        )
    return None


def _overlap(c: Config) -> str | None:
    if not c.policy.overlap or c.parallel.data * c.parallel.context > 1:
        return None
    return (
        "policy.overlap=true has no effect with parallel.data × parallel.context = 1, whose gradients are not reduced; "
        "raise one of them or remove it."
    )


def _int4_experts(c: Config) -> str | None:
    if c.policy.fake_quant == "none":
        return None
    if c.policy.lora.rank and "experts" in c.policy.lora.targets:
        return (
            "policy.fake_quant=int4_experts with experts in policy.lora.targets: merged experts would leave the INT4 "
            "grid; take experts out of the targets or set policy.fake_quant=none."
        )
    if c.precision.fp8:
        return (
            f"policy.fake_quant=int4_experts with precision.recipe={c.precision.recipe}: FP8 would round the INT4 "
            f"values once more; set precision.recipe=model_dtype or policy.fake_quant=none."
        )
    return None


def _gradient_metrics(c: Config) -> str | None:
    every = c.policy.gradient_metrics.every
    if not every or not c.precision.fp8_param_gather:
        return None
    return (
        f"policy.gradient_metrics.every={every} with precision.fp8_param_gather=true: it cannot look at weights that "
        f"are stored in FP8; set policy.gradient_metrics.every=0 or precision.fp8_param_gather=false."
    )


RULES: tuple[Rule, ...] = (
    _optimizer,
    _fp8,
    _kernels,
    _fp8_param_gather,
    _bfloat16_only,
    _moments,
    _adapters,
    _deepep,
    _overlap,
    _int4_experts,
    _gradient_metrics,
)
