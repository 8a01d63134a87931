"""Of losses and corrections."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import CLIP_BOUNDS, CORRECTION_BOUNDS, Config


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


RULES: tuple[Rule, ...] = (
    _loss,
    _correction,
)
