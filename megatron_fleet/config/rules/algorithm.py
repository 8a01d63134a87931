"""Validation rules for `algorithm`: losses, reward shaping and corrections."""

from __future__ import annotations

from megatron_fleet.config.extension import is_path
from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import CLIP_BOUNDS, CORRECTION_BOUNDS, Config


def _loss(c: Config) -> str | None:
    a = c.algorithm
    if is_path(a.loss):
        return None  # a user's own loss may read any key
    idle = [key for key in ("clip_low", "clip_high") if getattr(a, key) is not None and a.loss not in CLIP_BOUNDS]
    if a.dual_clip is not None and a.loss != "ppo_clip":
        idle.append("dual_clip")
    if idle:
        return f"algorithm.{idle[0]}={getattr(a, idle[0]):g} has no effect with algorithm.loss={a.loss}; remove it."
    return None


def _overlong(c: Config) -> str | None:
    overlong, shaping = c.algorithm.overlong, c.algorithm.reward_shaping
    if is_path(shaping):
        return None  # a user's own shaping may read any key
    if shaping != "overlong":
        if overlong.limit is None:
            return None
        return (
            f"algorithm.overlong.limit={overlong.limit} has no effect with algorithm.reward_shaping={shaping}; set the "
            f"second to overlong, or remove the first."
        )
    if overlong.limit is None:
        return "algorithm.reward_shaping=overlong needs algorithm.overlong.limit; set it."
    if overlong.buffer > overlong.limit:
        return (
            f"algorithm.overlong.buffer={overlong.buffer} is above algorithm.overlong.limit={overlong.limit}: even an "
            f"episode without a token would be punished; lower the first."
        )
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


def _stale_samples_are_weighed(c: Config) -> str | None:
    a, staleness = c.algorithm, c.rollout.max_staleness
    if staleness == 0 or a.loss == "importance_weighted" or is_path(a.loss) or a.correction.kind != "off":
        return None
    return (
        f"rollout.max_staleness={staleness} with algorithm.loss={a.loss} and algorithm.correction.kind=off trains on "
        f"samples of up to {staleness} updates ago as if they were new, by which a policy can collapse; set "
        f"algorithm=importance_weighted, or algorithm.correction.kind to a correction."
    )


RULES: tuple[Rule, ...] = (
    _loss,
    _overlong,
    _correction,
    _stale_samples_are_weighed,
)
