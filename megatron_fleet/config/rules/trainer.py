"""Validation rules for `policy` and `precision`."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


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
    _fp8_param_gather,
    _bfloat16_only,
    _moments,
    _adapters,
    _int4_experts,
    _gradient_metrics,
)
