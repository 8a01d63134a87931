"""Megatron's GPTModel that answers with log-probs of chosen tokens instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_fleet.policy.megatron.logprob import token_logprobs


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Which predictions the last stage is asked for: ``targets`` [A] at ``positions`` [A] of the row."""

    positions: torch.Tensor
    targets: torch.Tensor
    temperature: float
    chunk: int


class PolicyModel(GPTModel):
    """One pipeline stage; ``labels`` is a `LogprobQuery`, the last stage returns ``(log-probs, entropies)`` [A].

    Attributes:
        real_vocab_size: vocabulary without padding rows; set by the builder.
    """

    real_vocab_size: int

    def _postprocess(self, hidden_states: torch.Tensor, labels: LogprobQuery, **_: Any) -> Any:
        # Overrides the step after the decoder: GPTModel would compute logits of every position here.
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        tied = self.share_embeddings_and_output_weights
        return token_logprobs(
            hidden_states[:, 0].index_select(0, labels.positions),
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            labels.targets,
            vocab_size=self.real_vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=labels.temperature,
            chunk=labels.chunk,
        )
