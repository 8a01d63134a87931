"""Variant of Megatron's GPTModel that returns log-probs of chosen tokens instead of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_fleet.platform.communicator import ProcessGroup, TorchCommunicator
from megatron_fleet.trainer.megatron.logprob import token_logprobs


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Predictions of a micro-batch requested from the last stage; all index arrays are int64.

    Attributes:
        positions: ``[B]``, tokens of this context-parallel rank whose successor is requested.
        targets: ``[B]``, these successors.
        places: ``[B]``, indices of the answers in the micro-batch's list of ``[A]`` answers.
        count: A, over all context-parallel ranks.
        temperature, chunk: see `token_logprobs`.
    """

    positions: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    count: int
    temperature: float
    chunk: int


class PolicyModel(GPTModel):
    """Chunk of the model; the last one returns ``(log-probs, entropies)`` [A] of a whole micro-batch, the others hidden
    states.

    Attributes:
        real_vocab_size: vocabulary without padding rows; set by the builder.
        on_output_gradient: called in the backward pass when the gradient of `unseen_weight` is in its buffer.
    """

    real_vocab_size: int
    on_output_gradient: Callable[[], None] | None = None

    @property
    def unseen_weight(self) -> torch.Tensor | None:
        """The output weight if all of its gradient goes straight into Megatron's buffer, without autograd."""
        if not self.post_process or (self.share_embeddings_and_output_weights and self.pre_process):
            return None
        weight = self._output_weight()
        return weight if _buffer(weight) is not None else None

    def _output_weight(self) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        query: LogprobQuery,
        packed_seq_params: PackedSeqParams,
        padding: torch.Tensor,
    ) -> Any:
        """Run this context-parallel rank's tokens: ``input_ids``, ``position_ids`` int64 and ``padding`` bool (True:
        token of no sequence), ``[1, P]`` each.
        """
        if self.config.sequence_parallel:
            padding = padding.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=1)[
                parallel_state.get_tensor_model_parallel_rank()
            ]
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            # Zeros stay zero through the layers, so padding raises no FP8 scale and wins no maximum.
            embedded = embedded.masked_fill(padding.t()[:, :, None], 0.0)
        return super().forward(
            input_ids,
            position_ids,
            None,
            decoder_input=embedded,
            labels=query,
            packed_seq_params=packed_seq_params,
            padding_mask=padding if self.config.num_moe_experts else None,
        )

    def _postprocess(self, hidden_states: torch.Tensor, labels: LogprobQuery, **_: Any) -> Any:
        # Overrides the step after the decoder: GPTModel would compute logits of every position here.
        if not self.post_process:
            return hidden_states
        # Each tensor-parallel rank returns its part of the gradient; both mappings sum the parts in the backward pass.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        weight, asked = self._output_weight(), hidden_states[:, 0].index_select(0, labels.positions)
        if self.on_output_gradient is not None and asked.requires_grad:
            # The backward step of `token_logprobs` fills the buffer before it returns this gradient.
            asked.register_hook(self._call_on_output_gradient)
        logprobs, entropies = token_logprobs(
            asked,
            weight,
            labels.targets,
            vocab_size=self.real_vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=labels.temperature,
            chunk=labels.chunk,
            # Straight into Megatron's buffer, which avoids another matrix of this size.
            weight_grad=_buffer(weight) if torch.is_grad_enabled() else None,
        )
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return logprobs, entropies
        return tuple(_Spread.apply(x, labels.places, labels.count, group) for x in (logprobs, entropies))

    def _call_on_output_gradient(self, _: torch.Tensor) -> None:
        assert self.on_output_gradient is not None
        self.on_output_gradient()


def _buffer(weight: torch.Tensor) -> torch.Tensor | None:
    """Megatron's gradient buffer of a weight, if it is float32."""
    buffer = getattr(weight, "main_grad", None)
    return buffer if buffer is not None and buffer.dtype == torch.float32 else None


class _Spread(torch.autograd.Function):
    """All-gather of the answers of the context-parallel ranks: ``[B]`` → ``[A]``.

    Every rank then computes the loss of the whole micro-batch, and takes from its gradient the part of its own answers;
    so a loss may look at whole sequences, and the ranks' gradients still add up to that of one loss.
    """

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, places: torch.Tensor, count: int, group: ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        whole = mine.new_zeros(count)
        whole[places] = mine
        TorchCommunicator(group).sum_(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        (places,) = ctx.saved_tensors
        return None if grads[0] is None else grads[0][places], None, None, None
