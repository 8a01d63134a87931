"""Values and gradients of losses, computed here from the service's log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.explicit_losses import Loss, TrainedTokens, explicit_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.names import is_path
from megatron_fleet.config.schema import AlgorithmConfig


def trained_weights(data: Sequence[Datum]) -> np.ndarray:
    """Advantage × normaliser of all trained tokens, float32 ``[A]``: the weights of a loss whose ratio is 1."""
    return np.concatenate([np.zeros(0, np.float32), *(d.scaled_advantages[d.loss_mask] for d in data)])


def loss_of(algo: AlgorithmConfig, tokens: TrainedTokens) -> Loss:
    """Compute a loss and its gradient here, from the log-probs of the service.

    Raises:
        UserError: ``algorithm.loss`` is the user's own and torch, which differentiates it, is not installed.
    """
    return differentiated(algo, tokens) if is_path(algo.loss) else explicit_loss(algo, tokens)


def differentiated(algo: AlgorithmConfig, tokens: TrainedTokens) -> Loss:
    """`loss_of` by torch, in float32 as trainer ranks do; entropies are 0, since the service returns none."""
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError(
            f"algorithm.loss={algo.loss}: a loss of your own is differentiated by torch, which this environment lacks; "
            f"install its CPU build there, or use a built-in loss."
        ) from None
    from megatron_fleet.algorithms.loss_inputs import LossInputs
    from megatron_fleet.algorithms.losses import make_loss

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    logprobs = tensor(tokens.logprobs).requires_grad_()
    value, sums = make_loss(algo)(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.zeros_like(logprobs, requires_grad=True),
            loss_scale=tensor(tokens.loss_scale),
            scaled_advantages=tensor(tokens.scaled_advantages),
            behaviour=tensor(tokens.behaviour),
            sequence=torch.tensor(tokens.sequence, dtype=torch.int64),
            sequences=int(tokens.sequence.max(initial=-1)) + 1,
            arrays={name: tensor(values) for name, values in tokens.arrays.items()},
        )
    )
    value.backward()
    gradient = np.zeros(len(tokens.logprobs)) if logprobs.grad is None else logprobs.grad.double().numpy()
    return Loss(value.item(), gradient, {name: float(total) for name, total in sums.items() if name != "entropy"})
