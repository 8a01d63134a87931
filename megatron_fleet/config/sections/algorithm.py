"""Section `algorithm`: advantages, losses, reward shaping, corrections."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.names import NameOrPath, is_path
from megatron_fleet.config.sections.base import Rule, Section

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


CutShort = Literal["generation_truncated", "context_overflow", "max_turns", "timeout", "no_action"]
"""Outcomes (agents/trajectory.py) of episodes that were cut off rather than ended by the policy."""


class KLConfig(Section):
    coef: float = Field(0.0, ge=0, description="0: no reference model, no reference pass.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Per-token estimate of KL(π‖π_ref) (Schulman 2020). A value of k3 is at most 10, as in other "
        "trainers.",
    )


CLIP_BOUNDS: dict[str, tuple[float, float]] = {
    "ppo_clip": (0.2, 0.2),  # Schulman et al. 2017 §6.1
    "gspo": (3e-4, 4e-4),  # Zheng et al. 2025 §5.1
    "gmpo": (1 - math.exp(-0.4), math.exp(0.4) - 1),  # Zhao et al. 2025
    "cispo": (1.0, 4.0),  # no lower bound as in MiniMax-M1, the upper one as in SkyRL
    "importance_weighted": (0.5, 4.0),  # IcePop's ratios from 0.5 to 5
}
"""Defaults of algorithm.clip_low and clip_high; losses without an entry do not clip."""


CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "token_tis": (0.0, 2.0),  # verl, SkyRL
    "sequence_tis": (0.0, 5.0),  # SkyRL
    "icepop": (0.5, 5.0),  # Ring-1T
    "geometric_mask": (0.99, 1.01),  # SkyRL
    "outlier_mask": (1e-4, 100.0),  # SkyRL
}
"""Defaults of algorithm.correction.low and high; a low of 0 means no bound."""


def _spelt(bounds: dict[str, tuple[float, float]], side: int) -> str:
    return ", ".join(f"{name} {pair[side]:g}" for name, pair in bounds.items() if pair[side] > 0)


class CorrectionConfig(Section):
    kind: Literal["off", "token_tis", "sequence_tis", "icepop", "geometric_mask", "outlier_mask"] = Field(
        "off",
        description="Correction for engine and trainer giving a token different probabilities: none, truncated "
        "importance weights per token or sequence, or masked tokens or sequences (algorithms/corrections.py).",
    )
    low: float | None = Field(
        None, gt=0, le=1, description=f"Smallest ratio that is kept; null: {_spelt(CORRECTION_BOUNDS, 0)}."
    )
    high: float | None = Field(
        None, ge=1, description=f"Largest ratio that is kept, or the cap; null: {_spelt(CORRECTION_BOUNDS, 1)}."
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio, with the defaults of ``kind``, which is not ``off``."""
        low, high = CORRECTION_BOUNDS[self.kind]
        return low if self.low is None else self.low, high if self.high is None else self.high


class OverlongConfig(Section):
    """algorithm.reward_shaping=overlong: a penalty on long episodes (DAPO, arXiv:2503.14476 eq. 13)."""

    limit: int | None = Field(
        None, ge=1, description="Sampled tokens of an episode at which the whole penalty applies."
    )
    buffer: int = Field(4096, ge=1, description="Tokens before the limit over which the penalty grows from 0.")
    penalty: float = Field(1.0, gt=0, description="Maximum subtracted from the reward.")


ADVANTAGE_NAMES = ("grpo", "grpo_no_std", "leave_one_out")
GROUP_FILTER_NAMES = ("with_signal", "none")
REWARD_SHAPING_NAMES = ("none", "overlong")
LOSS_NAMES = ("ppo_clip", "gspo", "gmpo", "sapo", "cispo", "reinforce", "importance_weighted")


class AlgorithmConfig(Section):
    advantage: Annotated[str, NameOrPath(ADVANTAGE_NAMES)] = Field(
        "grpo", description="Baseline and scale within a group of known rewards (algorithms/advantages.py)."
    )
    loss: Annotated[str, NameOrPath(LOSS_NAMES)] = Field(
        "ppo_clip", description="Policy term of the loss (algorithms/policy_terms.py has the formulas)."
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description=f"Ratios are bounded by 1 - clip_low; null: {_spelt(CLIP_BOUNDS, 0)}."
    )
    clip_high: float | None = Field(
        None, gt=0, description=f"Ratios are bounded by 1 + clip_high; null: {_spelt(CLIP_BOUNDS, 1)}."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="ppo_clip: bound on the ratio for negative advantages; null: off."
    )
    tau_positive: float = Field(1.0, gt=0, description="sapo: temperature of the gate for positive advantages.")
    tau_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate for negative advantages.")
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="Global normaliser of the summed loss."
    )
    reduction_constant: float = Field(
        1024.0, gt=0, description="Dr. GRPO's constant: the largest number of action tokens."
    )
    masked_outcomes: tuple[CutShort, ...] = Field(
        ("generation_truncated", "context_overflow"),
        description="Outcomes of episodes that train no token though their reward counts for their group: what was cut "
        "short says little of what it would have become (DAPO's overlong filtering, arXiv:2503.14476 §3.4).",
    )
    reward_shaping: Annotated[str, NameOrPath(REWARD_SHAPING_NAMES)] = Field(
        "none",
        description="Changes the known rewards of a group before advantages are made of them; metrics of rewards show "
        "them unchanged (algorithms/groups.py).",
    )
    group_filter: Annotated[str, NameOrPath(GROUP_FILTER_NAMES)] = Field(
        "with_signal",
        description="Groups to train on: those whose known rewards differ, or all (algorithms/groups.py).",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Bonus on the entropy of the policy; 0 = off.")
    overlong: OverlongConfig = OverlongConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio: 1 − clip_low and 1 + clip_high, with the defaults of ``loss``, which clips.

        Raises:
            UserError: ``loss`` is the user's own, which has no defaults, and they are not set.
        """
        defaults = CLIP_BOUNDS.get(self.loss, (self.clip_low, self.clip_high))
        low, high = (d if v is None else v for d, v in zip(defaults, (self.clip_low, self.clip_high), strict=True))
        if low is None or high is None:
            raise UserError(
                f"algorithm.loss={self.loss} asks for the bounds of ratios; set algorithm.clip_low and "
                f"algorithm.clip_high."
            )
        return 1 - low, 1 + high


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
