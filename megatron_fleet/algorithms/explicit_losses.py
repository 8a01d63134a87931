"""The losses of `algorithms.losses` in numpy, each with its gradient written out: for a trainer elsewhere, which
returns log-probs and takes a weight for each token. Free of torch.

Formulas and notation are those of `policy_terms`, `corrections` and `kl`. The entropy is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.loss_metrics import MAX_K3, MAX_LOG_RATIO
from megatron_fleet.config.schema import AlgorithmConfig, CorrectionConfig

Sums = dict[str, float]


@dataclass(frozen=True)
class TrainedTokens:
    """The ``A`` trained tokens of some data, in their order; float64 ``[A]`` unless noted. See `LossInputs`."""

    logprobs: np.ndarray
    loss_scale: np.ndarray
    scaled_advantages: np.ndarray
    behaviour: np.ndarray
    sequence: np.ndarray
    """int64 ``[A]``: index of the Datum."""
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> TrainedTokens:
        """Args: ``logprobs``: of the current policy, ``[T]`` for each Datum."""

        def trained(values: Sequence[np.ndarray]) -> np.ndarray:
            kept = [np.asarray(v, np.float64)[d.loss_mask] for v, d in zip(values, data, strict=True)]
            return np.concatenate([np.zeros(0), *kept])

        counts = [int(np.count_nonzero(d.loss_mask)) for d in data]
        return cls(
            logprobs=trained(logprobs),
            loss_scale=np.repeat([float(d.loss_scale) for d in data], counts),
            scaled_advantages=trained([d.scaled_advantages for d in data]),
            behaviour=trained([d.behaviour_logprobs for d in data]),
            sequence=np.repeat(np.arange(len(data)), counts),
            arrays={name: trained([d.arrays[name] for d in data]) for name in (data[0].arrays if data else ())},
        )

    @property
    def old_logprobs(self) -> np.ndarray:
        return self.arrays.get("proximal", self.logprobs)

    def sequence_sums(self, values: np.ndarray) -> np.ndarray:
        """Sums of ``values`` over each sequence, at each of its tokens ``[A]``."""
        return np.bincount(self.sequence, weights=values, minlength=1)[self.sequence]

    def sequence_means(self, values: np.ndarray) -> np.ndarray:
        """Means of ``values`` over each sequence, at each of its tokens ``[A]``."""
        return self.sequence_sums(values) / self.sequence_sums(np.ones_like(values))

    @cached_property
    def log_ratio(self) -> np.ndarray:
        """log π/π_old, bounded."""
        return bounded(self.logprobs - self.old_logprobs)

    @cached_property
    def ratio_slope(self) -> np.ndarray:
        """∂(π/π_old)/∂log π: the ratio, 0 where `log_ratio` is at its bound."""
        return np.exp(self.log_ratio) * is_inside(self.logprobs - self.old_logprobs)


@dataclass(frozen=True, slots=True)
class Term:
    """Policy term: J_t ``[A]``, its derivative by its own token's log π ``[A]``, and metric sums."""

    gain: np.ndarray
    slope: np.ndarray
    sums: Sums


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of some data.

    Attributes:
        value: the SUM over trained tokens.
        gradient: its derivative by the log-prob of each trained token, float64 ``[A]``.
        sums: metric sums, by the names of `algorithms.losses`, without the entropy's.
    """

    value: float
    gradient: np.ndarray
    sums: Sums


def explicit_loss(algo: AlgorithmConfig, x: TrainedTokens) -> Loss:
    """Compute the loss of `losses.make_loss` and its gradient; ``algo.loss`` is built in and ``entropy_coef`` is 0."""
    term = TERMS[algo.loss](x, algo)
    gain, slope, sums = term.gain, term.slope, dict(term.sums)
    if algo.correction.kind != "off":
        weight, corrected = _correction(x, algo.correction)
        gain, slope, sums = weight * gain, weight * slope, sums | corrected
    value = -float(gain.sum())
    sums |= {"policy_loss": value, **_common_sums(x)}
    gradient = -slope
    if algo.kl.coef > 0:
        assert "reference" in x.arrays, "a KL term needs reference log-probs in every Datum"
        kl, kl_slope = _kl(x.logprobs - x.arrays["reference"], algo.kl.estimator)
        kl_loss = algo.kl.coef * float((x.loss_scale * kl).sum())
        value += kl_loss
        gradient = gradient + algo.kl.coef * x.loss_scale * kl_slope
        sums |= {"kl_loss": kl_loss, "kl": float(kl.sum())}
        if algo.kl.estimator == "k3":
            sums["kl_clamped"] = count(kl >= MAX_K3)
    return Loss(value, gradient, sums)


def bounded(log_ratio: np.ndarray) -> np.ndarray:
    """``[A]`` → ``[A]``, so that exponentials are finite in float32."""
    return log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def is_inside(log_ratio: np.ndarray) -> np.ndarray:
    """Whether `bounded` leaves a value as it is, and its gradient: bool ``[A]``."""
    return np.abs(log_ratio) <= MAX_LOG_RATIO


def count(where: np.ndarray) -> float:
    return float(np.count_nonzero(where))


def _ppo_clip(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    ratio, w = np.exp(x.log_ratio), x.scaled_advantages
    term = _clipped(ratio, x.ratio_slope, x, algo)
    if algo.dual_clip is None:
        return Term(term.gain, term.slope, term.sums | {"clipped_dual": 0.0})
    bound = algo.dual_clip * w
    dual = (w < 0) & (ratio > algo.dual_clip)
    capped = (w < 0) & (term.gain < bound)
    sums = term.sums | {"clipped_dual": count(dual)}
    return Term(np.where(capped, bound, term.gain), np.where(capped, 0.0, term.slope), sums)


def _gspo(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    ratio = np.exp(x.sequence_means(x.log_ratio))
    return _clipped(ratio, ratio, x, algo)


def _gmpo(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    smallest, largest = algo.ratio_bounds
    log_smallest, log_largest = math.log(smallest) if smallest > 0 else -math.inf, math.log(largest)
    good, log_ratio, w = x.scaled_advantages > 0, x.log_ratio, x.scaled_advantages
    used = np.where(good, np.minimum(log_ratio, log_largest), np.maximum(log_ratio, log_smallest))
    ratio = np.exp(x.sequence_means(used))
    sums = {
        "clipped_low": count((w < 0) & (log_ratio < log_smallest)),
        "clipped_high": count((w > 0) & (log_ratio > log_largest)),
        "ratio": float(ratio.sum()),
    }
    moves = (used == log_ratio) & is_inside(x.logprobs - x.old_logprobs)
    return Term(ratio * w, ratio * w * moves, sums)


def _cispo(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    smallest, largest = algo.ratio_bounds
    ratio = np.exp(x.log_ratio)
    slope = x.scaled_advantages * ratio.clip(smallest, largest)
    return Term(slope * x.logprobs, slope, _outside_sums(ratio, smallest, largest))


def _reinforce(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    return Term(x.scaled_advantages * x.logprobs, x.scaled_advantages, {})


def _importance_weighted(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    smallest, largest = algo.ratio_bounds
    difference = x.logprobs - x.behaviour
    unknown = np.isnan(difference)
    ratio = np.where(unknown, 0.0, np.exp(bounded(np.where(unknown, 0.0, difference))))
    kept = ~unknown & (ratio >= smallest) & (ratio <= largest)
    gain = np.where(kept, ratio * x.scaled_advantages, 0.0)
    sums = _outside_sums(ratio, smallest, largest) | {"clipped_low": count(unknown | (ratio < smallest))}
    return Term(gain, gain * is_inside(np.where(unknown, 0.0, difference)), sums)


def _sapo(x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    ratio, w = np.exp(x.log_ratio), x.scaled_advantages
    tau = np.where(w > 0, algo.tau_positive, algo.tau_negative)
    with np.errstate(over="ignore"):  # the gate is 0 or 1 there
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return Term(w * gate * 4 / tau, w * 4 * gate * (1 - gate) * x.ratio_slope, {"ratio": float(ratio.sum())})


TERMS: dict[str, Callable[[TrainedTokens, AlgorithmConfig], Term]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "cispo": _cispo,
    "reinforce": _reinforce,
    "importance_weighted": _importance_weighted,
}


def _clipped(ratio: np.ndarray, slope: np.ndarray, x: TrainedTokens, algo: AlgorithmConfig) -> Term:
    """Minimum of the unclipped and the clipped objective; ``slope``: ∂ratio/∂log π."""
    smallest, largest = algo.ratio_bounds
    w = x.scaled_advantages
    free, held = ratio * w, ratio.clip(smallest, largest) * w
    sums = {
        "clipped_low": count((w < 0) & (ratio < smallest)),
        "clipped_high": count((w > 0) & (ratio > largest)),
        "ratio": float(ratio.sum()),
    }
    return Term(np.minimum(free, held), np.where(free <= held, slope * w, 0.0), sums)


def _outside_sums(ratio: np.ndarray, smallest: float, largest: float) -> Sums:
    return {
        "clipped_low": count(ratio < smallest),
        "clipped_high": count(ratio > largest),
        "ratio": float(ratio.sum()),
    }


def _correction(x: TrainedTokens, correction: CorrectionConfig) -> tuple[np.ndarray, Sums]:
    """c_t ``[A]``, and metric sums; see `corrections.correction_weights`."""
    low, high = correction.bounds
    log_low, log_high = (math.log(low) if low else -math.inf), math.log(high)
    log_ratio = x.old_logprobs - x.behaviour

    def outside(values: np.ndarray) -> np.ndarray:
        return ~((values >= log_low) & (values <= log_high))  # so that NaN is outside

    if correction.kind in ("token_tis", "sequence_tis"):
        used = log_ratio if correction.kind == "token_tis" else x.sequence_sums(log_ratio)
        weight = np.where(np.isnan(used), 0.0, np.minimum(np.exp(np.minimum(used, log_high)), high))
        touched = ~(used <= log_high)
    elif correction.kind == "icepop":
        touched = outside(log_ratio)
        weight = np.where(touched, 0.0, np.exp(np.where(touched, 0.0, log_ratio)))
    elif correction.kind == "geometric_mask":
        touched = outside(x.sequence_means(log_ratio))
        weight = np.where(touched, 0.0, 1.0)
    else:
        touched = x.sequence_sums(outside(log_ratio).astype(np.float64)) > 0
        weight = np.where(touched, 0.0, 1.0)
    return weight, {
        "correction_weight": float(weight.sum()),
        "correction_weight_squared": float(np.square(weight).sum()),
        "corrected_tokens": count(touched),
        "corrected_sequences": float(len(np.unique(x.sequence[touched]))),
        "sequences": float(len(np.unique(x.sequence))),
    }


def _kl(d: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """KL estimates ``[A]`` and their slopes; ``d``: log π − log π_ref. See `kl.kl_estimate`."""
    if estimator == "k3":
        near = bounded(d)
        kl = np.expm1(-near) + near
        return np.minimum(kl, MAX_K3), np.where((kl <= MAX_K3) & is_inside(d), -np.expm1(-near), 0.0)
    return {"k1": d, "k2": d**2 / 2}[estimator], d


def _common_sums(x: TrainedTokens) -> Sums:
    """Token count, and the distance between the behaviour policy μ and π; see `losses`."""
    difference = x.logprobs - x.behaviour
    unknown = np.isnan(difference)
    log_ratio = np.where(unknown, 0.0, bounded(np.where(unknown, 0.0, difference)))
    excess = np.expm1(-log_ratio)
    return {
        "tokens": float(len(log_ratio)),
        "mismatch_unknown": count(unknown),
        "mismatch_k1": -float(log_ratio.sum()),
        "mismatch_k3": float((np.expm1(log_ratio) - log_ratio).sum()),
        "mismatch_excess": float(excess.sum()),
        "mismatch_excess_squared": float(np.square(excess).sum()),
    }
