"""Per-token estimators of KL(π‖π_ref) and their gradients.

With d = log π(x) − log π_ref(x), x sampled from π, s = ∇log π(x) and E over x ~ π (E[s] = 0):

| name | value          | E[value]    | gradient used  | E[gradient]                                   |
|------|----------------|-------------|----------------|-----------------------------------------------|
| k1   | d              | KL(π‖π_ref) | d · s          | ∇KL(π‖π_ref), exact                           |
| k2   | d²/2           | biased      | d · s          | ∇KL(π‖π_ref), exact                           |
| k3   | e^(−d) − 1 + d | KL(π‖π_ref) | (1 − e^(−d))·s | ∇KL(π_ref‖π): same first order near π = π_ref |

Values: Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html. Gradients: Tang and Munos 2025,
arXiv:2506.09477: a value estimator with the right mean need not have the right gradient. Differentiating k1 gives s,
whose mean is 0, so a KL term built on it does nothing; here k1 keeps its value and takes the gradient of k2. k3 is
differentiated as it stands, as GRPO does (arXiv:2402.03300 eq. 4), up to a value of 10: beyond, where d < −2.6 or
d > 11, its value is 10 and its gradient 0, as in verl, SkyRL, NeMo RL and slime. Without that bound one token whose
log π fell by 12 would have 160,000 times the gradient of one that rose by 12. The means of k3 hold where no value is
clamped; ``policy/policy_kl_clamped`` is the share of tokens where one is.

These means hold when x comes from π. In later updates of one batch x comes from π_old, and they hold approximately.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_fleet.algorithms.loss_metrics import MAX_K3, MAX_LOG_RATIO


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Per-token KL estimate, float32 ``[A]``, differentiable in ``logprobs``."""
    d = logprobs - reference.detach()
    if estimator == "k3":
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (torch.expm1(-d) + d).clamp(max=MAX_K3)
    k2 = d.square() / 2
    if estimator == "k2":
        return k2
    return k2 + (d - k2).detach()  # value of k1, gradient of k2
