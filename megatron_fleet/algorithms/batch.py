"""Conversion of groups to training sequences: filter, advantages, a fate per trajectory, a normaliser per update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from megatron_fleet.algorithms.advantages import MIN_KNOWN, group_advantages, is_known
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.groups import keeps_group, shaped_rewards
from megatron_fleet.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group, Trajectory


class Fate(StrEnum):
    """Outcome of a collected trajectory; each has exactly one fate."""

    TRAINED = "trained"
    """It became a training sequence, or one per segment."""
    FILTERED = "filtered"
    """``algorithm.group_filter`` leaves its group out."""
    UNKNOWN = "unknown"
    """Its reward is unknown."""
    TOO_FEW_KNOWN = "too_few_known"
    """Its reward is known, but it is the only one known in its group."""
    MASKED = "masked"
    """Its reward counted for the group, but its outcome is one of ``algorithm.masked_outcomes``."""
    TOO_OLD = "too_old"
    """Its reward counted for the group, but its tokens are older than ``rollout.max_staleness``."""
    NO_TOKENS = "no_tokens"
    """Its reward counted for the group, but the policy sampled no token in it."""


@dataclass(frozen=True, slots=True)
class AgeLimit:
    """Limit of the age of a trained token.

    Attributes:
        most: weight versions between its sampling and the update.
        whole: a trajectory with older tokens is not trained on at all; otherwise only these tokens are masked.
    """

    most: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a training sequence: indices of its group in those passed to ``build_data``, of its trajectory in the
    group, and of its segment in the trajectory.
    """

    group: int
    sample: int
    segment: int = 0

    @property
    def trajectory(self) -> tuple[int, int]:
        """Group and trajectory indices, equal for all segments of a trajectory."""
        return self.group, self.sample


@dataclass(slots=True)
class Batch:
    """Training data of one step.

    Attributes:
        data: whole segments, those of a trajectory consecutive; nothing is truncated. Their ``loss_scale`` is 1, see
            `split_batch`.
        origin: aligned with ``data``.
        advantages: aligned with ``data``, before the normaliser.
        fates: aligned with the groups and their trajectories.
        rewards: aligned like ``fates``, after reward shaping; ``None`` = unknown.
        trained_tokens: tokens with a gradient in ``data``.
    """

    data: list[Datum]
    origin: list[Origin]
    advantages: list[float]
    fates: list[list[Fate]]
    rewards: list[list[float | None]]
    trained_tokens: int

    @property
    def counts(self) -> dict[Fate, int]:
        """Trajectories per fate; the values add up to the number of trajectories collected."""
        counter = Counter(fate for group in self.fates for fate in group)
        return {fate: counter[fate] for fate in Fate}


def build_data(
    groups: Sequence[Group], algo: AlgorithmConfig, version: int | None = None, limit: AgeLimit | None = None
) -> Batch:
    """Turn the groups of one step into training sequences, which `split_batch` divides among its updates.

    Args:
        version: weight version to be updated, for the ages of tokens; ``None``: everything was sampled with it.
        limit: tokens that are older have no gradient; ``None``: there are none.

    Masked trajectories contribute to their group's baseline and to nothing else. Every segment has its trajectory's
    advantage. Losses with one ratio per sequence take it per segment.
    """
    batch = Batch([], [], [], [], [], 0)
    for g, group in enumerate(groups):
        batch.rewards.append(shaped_rewards(group, algo))
        advantages = group_advantages(batch.rewards[-1], algo.advantage)
        masks = [_trained_mask(t, version, limit) for t in group.trajectories]
        batch.fates.append(_group_fates(group, batch.rewards[-1], algo, masks))
        for s, (trajectory, fate) in enumerate(zip(group.trajectories, batch.fates[-1], strict=True)):
            if fate is Fate.TRAINED:
                advantage = advantages[s] if advantages else None
                assert advantage is not None, "a trained trajectory has a known reward"
                for segment, datum in _segments(trajectory, masks[s], advantage, version):
                    batch.data.append(datum)
                    batch.origin.append(Origin(g, s, segment))
                    batch.advantages.append(advantage)
    batch.trained_tokens = sum(_tokens(d) for d in batch.data)
    assert sum(batch.counts.values()) == sum(len(g.trajectories) for g in groups)
    assert batch.counts[Fate.TRAINED] == len({origin.trajectory for origin in batch.origin})
    return batch


def split_batch(batch: Batch, parts: int, algo: AlgorithmConfig) -> list[list[Datum]]:
    """Contiguous parts for the optimizer steps, each normalised over itself so that every step has full scale.

    A trajectory is never split between parts. Parts are never empty: there are fewer when there are fewer trajectories.

    The normaliser counts trained sequences only, so excluded groups neither dilute the gradient nor change its scale;
    groups without signal that are kept (``group_filter: none``) do count, with weight 0. It gives a trajectory of
    several segments the weight that it would have in one.
    """
    owners = [origin.trajectory for origin in batch.origin]
    firsts = [i for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    cuts = np.linspace(0, len(firsts), min(parts, len(firsts)) + 1).astype(int)
    edges = [[*firsts, len(owners)][cut] for cut in cuts]
    return [_scale(batch.data[a:b], batch.origin[a:b], batch.advantages[a:b], algo) for a, b in pairwise(edges)]


def _group_fates(
    group: Group, rewards: Sequence[float | None], algo: AlgorithmConfig, masks: Sequence[np.ndarray]
) -> list[Fate]:
    enough = sum(map(is_known, rewards)) >= MIN_KNOWN
    kept = enough and keeps_group(group, rewards, algo)

    def fate(trajectory: Trajectory, mask: np.ndarray) -> Fate:
        if not is_known(trajectory.reward):
            return Fate.UNKNOWN
        if not enough:
            return Fate.TOO_FEW_KNOWN
        if not kept:
            return Fate.FILTERED
        if trajectory.outcome in algo.masked_outcomes:
            return Fate.MASKED
        if mask.any():
            return Fate.TRAINED
        return Fate.TOO_OLD if _trained_mask(trajectory).any() else Fate.NO_TOKENS

    return [fate(t, mask) for t, mask in zip(group.trajectories, masks, strict=True)]


def _trained_mask(trajectory: Trajectory, version: int | None = None, limit: AgeLimit | None = None) -> np.ndarray:
    """Mask of the sampled tokens, bool ``[T]``, without the first of a segment, which nothing predicts, and without
    what is older than ``limit``.
    """
    mask = trajectory.action_mask.copy()
    mask[[part.start for part in trajectory.segments() if part.start < part.stop]] = False
    if limit is not None and version is not None:
        old = _ages(trajectory, version) > limit.most
        mask &= ~(old.any() if limit.whole else old)
    return mask


def _segments(
    trajectory: Trajectory, trained: np.ndarray, advantage: float, version: int | None
) -> Iterator[tuple[int, Datum]]:
    """Index and Datum of each segment with trained tokens. ``trained``: mask of these, bool ``[T]``."""
    arrays = {} if version is None else {"staleness": _ages(trajectory, version)}
    extras = {} if trajectory.routing is None else {"routing": trajectory.routing}
    for number, part in enumerate(trajectory.segments()):
        if (mask := trained[part]).any():
            yield (
                number,
                Datum(
                    trajectory.token_ids[part].astype(np.int32, copy=False),
                    mask,
                    (mask * advantage).astype(np.float32),
                    np.where(mask, trajectory.behaviour_logprobs[part], 0.0).astype(np.float32),
                    arrays={name: values[part] for name, values in arrays.items()},
                    extras={name: values[part] for name, values in extras.items()},
                ),
            )


def _ages(trajectory: Trajectory, version: int) -> np.ndarray:
    """`Trajectory.ages` of each token, int32 ``[T]``; 0 at tokens that were not sampled."""
    ages = np.zeros(len(trajectory.token_ids), np.int32)
    for span, age in trajectory.ages(version):
        ages[span.start : span.end] = age
    return ages


def _scale(
    data: Sequence[Datum], origin: Sequence[Origin], advantages: Sequence[float], algo: AlgorithmConfig
) -> list[Datum]:
    """Return ``data`` with the normaliser, and the advantages times it.

    token_mean: 1 / (trained tokens of all sequences), DAPO, arXiv:2503.14476 §3.3.
    sequence_mean: 1 / (trajectories × trained tokens of this one), GRPO, arXiv:2402.03300 eq. 3.
    constant: 1 / (trajectories × constant), Dr. GRPO, arXiv:2503.20783 §3.2.
    """
    tokens: Counter[tuple[int, int]] = Counter()
    for datum, place in zip(data, origin, strict=True):
        tokens[place.trajectory] += _tokens(datum)
    scaled = []
    for datum, place, advantage in zip(data, origin, advantages, strict=True):
        denominator = {
            "token_mean": tokens.total(),
            "sequence_mean": len(tokens) * tokens[place.trajectory],
            "constant": len(tokens) * algo.reduction_constant,
        }[algo.reduction]
        scale = 1.0 / denominator
        advantages_there = (datum.loss_mask * (scale * advantage)).astype(np.float32)
        scaled.append(replace(datum, loss_scale=scale, scaled_advantages=advantages_there))
    return scaled


def _tokens(datum: Datum) -> int:
    return int(np.count_nonzero(datum.loss_mask))
