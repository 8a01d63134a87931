"""A loss of your own: `mfleet train algorithm.loss=my_loss:asymmetric_clip` (see README.md)."""

from __future__ import annotations

import torch

from megatron_fleet.algorithms.loss_inputs import LossInputs, bounded_log_ratio, count
from megatron_fleet.algorithms.policy_terms import TermResult
from megatron_fleet.config.schema import AlgorithmConfig

LOWEST, HIGHEST = 0.8, 1.28


def asymmetric_clip(inputs: LossInputs, algorithm: AlgorithmConfig) -> TermResult:
    """J_t = min(ρ·w, clip(ρ, 0.8, 1.28)·w), with bounds of this file instead of the configuration's.

    Returns:
        The objective per trained token, ``[A]``, with the advantage and the normaliser inside (both are in
        ``inputs.scaled_advantages``); its negated sum is the loss. And sums of what is to be logged: as
        ``policy/own/NAME``, the mean over tokens.
    """
    ratio = torch.exp(bounded_log_ratio(inputs.logprobs, inputs.old_logprobs()))
    clipped = ratio.clamp(LOWEST, HIGHEST)
    gain = torch.minimum(ratio * inputs.scaled_advantages, clipped * inputs.scaled_advantages)
    return gain, {"outside": count(ratio != clipped)}
