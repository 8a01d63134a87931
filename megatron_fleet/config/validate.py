"""Checks that span several keys. Each refusal names the keys, their values and the way out."""

from __future__ import annotations

from collections.abc import Callable

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import CLIP_BOUNDS, CORRECTION_BOUNDS, Config


def check(config: Config) -> None:
    """Refuse combinations that cannot work, without looking at files or machines.

    Raises:
        UserError: the first impossible combination found.
    """
    for rule in _RULES:
        if problem := rule(config):
            raise UserError(problem)


def _row_holds_episode(c: Config) -> str | None:
    if c.policy.row_tokens >= c.rollout.max_context:
        return None
    return (
        f"policy.row_tokens={c.policy.row_tokens} is below rollout.max_context={c.rollout.max_context}, so the longest "
        f"episode would not fit into a row; raise policy.row_tokens to at least {c.rollout.max_context}."
    )


def _turn_fits_context(c: Config) -> str | None:
    turn = c.rollout.sampling.max_tokens_per_turn
    if turn < c.rollout.max_context:
        return None
    return (
        f"rollout.sampling.max_tokens_per_turn={turn} leaves no room for a prompt in "
        f"rollout.max_context={c.rollout.max_context}; lower the first or raise the second."
    )


def _temperature(c: Config) -> str | None:
    if c.rollout.sampling.temperature > 0:
        return None
    return (
        "rollout.sampling.temperature=0 makes all samples of a group equal, so nothing could be learnt; set it above 0 "
        "(eval.greedy adds greedy evaluation samples)."
    )


def _env_url(c: Config) -> str | None:
    if c.env.kind == "openenv" and not c.env.url:
        return "env.kind=openenv needs the address of the server; add env.url=http://…"
    if c.env.kind == "openenv" and not str(c.env.url).startswith(("http://", "https://", "ws://", "wss://")):
        return f"env.url={c.env.url} is no address; it must begin with http://, https://, ws:// or wss://."
    if c.env.kind == "embedded" and c.env.url:
        return f"env.url={c.env.url} has no effect with env.kind=embedded; add env.kind=openenv or remove the url."
    return None


def _embedded_tasks(c: Config) -> str | None:
    if c.env.kind == "embedded" or c.data.tasks != "embedded":
        return None
    return (
        "data.tasks=embedded names the embedded fleet's tasks, but env.kind=openenv plays elsewhere; write them to a "
        "file with `mfleet tasks export FILE` and set data.tasks=FILE, or set env.kind=embedded."
    )


def _episode_outlives_its_parts(c: Config) -> str | None:
    episode = c.rollout.episode_timeout_s
    parts = {
        "rollout.engine.request_timeout_s": c.rollout.engine.request_timeout_s,
        "env.reset_timeout_s": c.env.reset_timeout_s,
        "env.step_timeout_s": c.env.step_timeout_s,
        "env.verify_timeout_s": c.env.verify_timeout_s,
    }
    name, longest = max(parts.items(), key=lambda item: item[1])
    if longest < episode:
        return None
    return (
        f"{name}={longest:g} is not below rollout.episode_timeout_s={episode:g}, so the episode would always time out "
        f"first; raise rollout.episode_timeout_s above {longest:g}."
    )


def _updates_have_groups(c: Config) -> str | None:
    if c.policy.updates_per_batch <= c.rollout.prompts_per_step:
        return None
    return (
        f"policy.updates_per_batch={c.policy.updates_per_batch} is more than "
        f"rollout.prompts_per_step={c.rollout.prompts_per_step} groups; lower the first."
    )


def _ranks_have_trajectories(c: Config) -> str | None:
    batch = c.rollout.prompts_per_step * c.rollout.samples_per_prompt // c.policy.updates_per_batch
    if batch >= c.parallel.data:
        return None
    return (
        f"One update has {batch} trajectories for parallel.data={c.parallel.data} ranks; raise "
        f"rollout.prompts_per_step or lower parallel.data."
    )


def _workers_are_busy(c: Config) -> str | None:
    if c.rollout.episodes_in_flight >= c.rollout.workers:
        return None
    return (
        f"rollout.episodes_in_flight={c.rollout.episodes_in_flight} cannot occupy "
        f"rollout.workers={c.rollout.workers} processes; lower rollout.workers."
    )


def _optimizer(c: Config) -> str | None:
    o = c.policy.optimizer
    if not all(0 <= beta < 1 for beta in o.betas):
        return f"policy.optimizer.betas={list(o.betas)}: both must be at least 0 and below 1."
    if o.min_lr > o.lr:
        return f"policy.optimizer.min_lr={o.min_lr:g} is above policy.optimizer.lr={o.lr:g}; lower the first."
    if o.min_lr and o.schedule == "constant":
        return f"policy.optimizer.min_lr={o.min_lr:g} has no effect with schedule=constant; choose linear or cosine."
    return None


def _loss(c: Config) -> str | None:
    a = c.algorithm
    idle = [key for key in ("clip_low", "clip_high") if getattr(a, key) is not None and a.loss not in CLIP_BOUNDS]
    if a.dual_clip is not None and a.loss != "ppo_clip":
        idle.append("dual_clip")
    if idle:
        return f"algorithm.{idle[0]}={getattr(a, idle[0]):g} has no effect with algorithm.loss={a.loss}; remove it."
    return None


def _correction(c: Config) -> str | None:
    correction, loss = c.algorithm.correction, c.algorithm.loss
    for key, unbounded in (
        ("low", not CORRECTION_BOUNDS.get(correction.kind, (0.0, 0.0))[0]),
        ("high", correction.kind == "off"),
    ):
        bound = getattr(correction, key)
        if bound is not None and unbounded:
            return (
                f"algorithm.correction.{key}={bound:g} has no effect with algorithm.correction.kind="
                f"{correction.kind}; remove it."
            )
    if loss == "importance_weighted" and correction.kind in ("token_tis", "sequence_tis", "icepop"):
        return (
            f"algorithm.correction.kind={correction.kind} weighs by the ratio to the sampler, which "
            f"algorithm.loss={loss} does already; set the first to off, or to geometric_mask or outlier_mask."
        )
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


def _colocated(c: Config) -> str | None:
    if c.rollout.engine.colocated and c.precision.fp8_param_gather:
        return (
            "rollout.engine.colocated=true with precision.fp8_param_gather=true: weights that are stored in FP8 cannot "
            "leave the device; set one of them to false."
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
    # bfloat16 has 8 significant bits: shrunk by less than half of the last one, a moment is rounded back for ever.
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


_RULES: tuple[Callable[[Config], str | None], ...] = (
    _row_holds_episode,
    _turn_fits_context,
    _temperature,
    _env_url,
    _embedded_tasks,
    _episode_outlives_its_parts,
    _updates_have_groups,
    _ranks_have_trajectories,
    _workers_are_busy,
    _optimizer,
    _loss,
    _correction,
    _fp8,
    _fp8_param_gather,
    _bfloat16_only,
    _moments,
    _adapters,
    _int4_experts,
    _colocated,
)
