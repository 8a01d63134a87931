"""Routing replay: the engine's expert choices are used again, with the scores of the current router.

Replaying the choice removes the largest difference between engine and trainer of a mixture of experts (Ma et al. 2025,
arXiv:2510.11370, "R3"): a token near a tie takes other experts after the smallest rounding. Scores come from the live
router, so its gradient flows, and nothing else changes: Megatron asks an object at each router for the experts of a
call (``router_replay``), gathers their scores itself, without the expert bias, and normalises them.

The answer of such an object must belong to the micro-batch of the call. Megatron keeps the objects in one process-wide
list, filled before a pass and popped in order; that fails when virtual stages interleave, or when activations of one
micro-batch are recomputed between others. Here the experts travel with the micro-batch instead: they are part of its
``packed_seq_params``, which Megatron passes to every layer, also on recomputation. At the start of each call a layer
sets its experts at its router, which is queried within that call. Where Megatron would recompute an expert layer
without its transformer layer (``recompute: [moe]``), that layer is wrapped so that it remembers the experts of its
call. The order of calls therefore does not matter, and the only state between them is counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ModelConfig, ParallelConfig, PolicyConfig, RouterConfig
from megatron_fleet.config.sections.trainer import DEEPEP_RANKS
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.platform.device import to_device
from megatron_fleet.platform.megatron.spec import has_experts
from megatron_fleet.trainer.packing.pack import PackedMicroBatch

_REPLAYED, _DISAGREED, _WRONG, _EXPECTED, _POSSIBLE = range(5)


class RouterTap:
    """Tap at one router, in the place of Megatron's ``RouterReplay``.

    Attributes:
        experts: uint8 or int16 ``[n, k]``, of the tokens of the current call; two equal ids at the front of a token's
            entry mean that the router chooses. ``None``: it chooses for all.
        counts: int64 ``[3]``, since the last collection, of calls with gradients: tokens replayed; replayed experts
            that the router itself would not have chosen; tokens for which other experts were used than recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.experts: torch.Tensor | None = None
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Answer Megatron's query with the experts ``[n, topk]`` and their entries of ``scores`` ``[n, experts]``.

        Raises:
            RuntimeError: the recorded experts are for another number of tokens.
        """
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, live
        if self.experts.shape != live.shape:
            raise RuntimeError(
                f"experts were recorded for {tuple(self.experts.shape)} tokens × choices, the router has "
                f"{tuple(live.shape)}"
            )
        recorded, known = _unpacked(self.experts)
        # Fewer distinct experts than a token needs would fail in the middle of an all-to-all between ranks.
        ordered = recorded.sort(1).values
        sound = (ordered[:, 1:] != ordered[:, :-1]).all(1, keepdim=True)
        chosen = torch.where(known & sound, recorded, live)
        if torch.is_grad_enabled():
            would = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, live, True)
            self.counts[_REPLAYED] += known.sum()
            self.counts[_DISAGREED] += (known & ~would.gather(1, recorded)).sum()
        return scores.gather(1, chosen), chosen

    def verify(self, _: nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count tokens that the router did not send exactly where recorded. ``output``: probabilities and map, ``[n,
        experts]``.
        """
        if self.experts is None or not torch.is_grad_enabled():
            return
        recorded, known = _unpacked(self.experts)
        used = output[1].bool()
        wanted = torch.zeros_like(used).scatter_(1, recorded, True)
        right = (used == wanted).all(1) & (wanted.sum(1) == recorded.shape[1])
        self.counts[_WRONG] += (known[:, 0] & ~right).sum()


def _unpacked(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices int64 ``[n, k]``, and bool ``[n, 1]``: whether they are a recorded choice."""
    recorded = experts.long()
    return recorded, recorded[:, :1] != recorded[:, 1:2]


def expert_arguments(model: ModelConfig, policy: PolicyConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Arguments of Megatron's configuration for the routers of a mixture of experts and the way of tokens to experts.

    Raises:
        UserError: DeepEP is asked for and not installed.
    """
    router = policy.router
    return {
        "moe_router_dtype": {"float32": "fp32", "float64": "fp64"}[router.dtype],
        "moe_router_bias_update_rate": router.bias_update_rate,
        **_dispatcher(router, parallel, model.dtype),
    }


def _dispatcher(router: RouterConfig, parallel: ParallelConfig, dtype: str) -> dict[str, Any]:
    installed = fused_a2a.fused_dispatch is not None
    if router.dispatcher == "deepep" and not installed:
        raise UserError(
            "policy.router.dispatcher=deepep needs the package deep_ep, which cannot be imported here; install it from "
            "github.com/deepseek-ai/DeepEP, or set policy.router.dispatcher=auto."
        )
    # Its kernels take bfloat16 activations and float32 scores.
    fits = dtype == "bfloat16" and router.dtype == "float32"
    fits = fits and parallel.expert * parallel.expert_tensor_size in DEEPEP_RANKS
    if router.dispatcher == "alltoall" or not (installed and fits):
        return {"moe_token_dispatcher_type": "alltoall"}
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


def attach(chunk: nn.Module) -> None:
    """Put a tap at every router of a chunk (a GPTModel on its device). Without ``routing`` in a micro-batch's
    ``packed_seq_params`` the routers choose as before.
    """
    for layer in _expert_layers(chunk):
        tap = RouterTap(layer.mlp.router.weight.device)
        layer.mlp.router.router_replay = tap
        layer.mlp.router.register_forward_hook(tap.verify)
        if layer.mlp.moe_layer_recompute:
            _recompute_with(tap, layer.mlp)
        layer.register_forward_pre_hook(partial(_lay_down, tap), with_kwargs=True)


def _lay_down(tap: RouterTap, layer: Any, _: Any, kwargs: Mapping[str, Any]) -> None:
    routing = kwargs["packed_seq_params"].routing
    tap.experts = None if routing is None else routing[layer.layer_number]


def _recompute_with(tap: RouterTap, moe: Any) -> None:
    """Take over the recomputation of an expert layer from Megatron, keeping the experts of the call."""
    forward = moe.forward
    moe.moe_layer_recompute = False

    def checkpointed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        experts = tap.experts

        def run(hidden: torch.Tensor) -> Any:
            tap.experts = experts
            return forward(hidden, *args, **kwargs)

        if moe.config.fp8 or moe.config.fp4:
            return _te_checkpoint(run, hidden_states)
        return checkpoint(run, False, hidden_states)

    moe.forward = checkpointed


def _te_checkpoint(run: Any, hidden_states: torch.Tensor) -> Any:
    from megatron.core.extensions.transformer_engine import te_checkpoint
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    group = parallel_state.get_tensor_model_parallel_group()
    return te_checkpoint(run, False, get_cuda_rng_tracker, group, hidden_states)


def recorded_experts(micro_batch: PackedMicroBatch) -> list[tuple[slice, np.ndarray]]:
    """Tokens of a sequence in the micro-batch and its recorded experts ``[T, layers, k]``, for those that have any.

    Raises:
        ValueError: a sequence has experts of another number of tokens.
    """
    found = [(where, extras["routing"]) for where, extras in micro_batch.extras if "routing" in extras]
    for where, experts in found:
        if len(experts) != where.stop - where.start:
            raise ValueError(f"a sequence of {where.stop - where.start} tokens with the experts of {len(experts)}")
    return found


def micro_batch_experts(
    micro_batch: PackedMicroBatch, chunk: nn.Module, here: torch.Tensor | None, device: torch.device
) -> dict[int, torch.Tensor] | None:
    """``packed_seq_params.routing`` of a micro-batch for one chunk: Megatron's layer number → ``[n, k]``, of the n
    tokens that this rank's routers see.

    Args:
        chunk: a GPTModel, or its wrapper for data parallelism.
        here: int64, indices into the micro-batch of this context-parallel rank's tokens, in its order; ``None``: all.

    Returns:
        ``None`` where nothing was recorded.

    Raises:
        ValueError: the recorded experts do not fit the model.
    """
    stage: Any = getattr(chunk, "module", chunk)
    numbers = [layer.layer_number for layer in _expert_layers(stage)]
    recorded = recorded_experts(micro_batch)
    if not numbers or not recorded:
        return None
    config = stage.config
    fits = (config.num_layers, config.moe_router_topk)
    kind = recorded[0][1].dtype
    whole = np.zeros((len(numbers), len(micro_batch.tokens), fits[1]), kind)
    for where, chosen in recorded:
        if chosen.shape[1:] != fits or chosen.dtype != kind:
            raise ValueError(f"routing of layers × choices {chosen.shape[1:]}, {chosen.dtype}; the model has {fits}")
        whole[:, where] = chosen[:, np.array(numbers) - 1].swapaxes(0, 1)
    if not 0 <= whole.min() <= whole.max() < config.num_moe_experts:
        raise ValueError(f"routing names expert {whole.max()}; the model has {config.num_moe_experts}")
    experts = torch.from_numpy(whole)
    if here is not None:
        experts = experts[:, here]
    if config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return dict(zip(numbers, to_device(experts.contiguous(), device), strict=True))


def collect(chunks: Sequence[nn.Module], micro_batches: Sequence[PackedMicroBatch]) -> dict[str, float]:
    """Sums over all ranks since the last call, after a check that every recorded choice was used exactly once;
    collective.

    Args:
        micro_batches: this data-parallel rank's micro-batches of the passes with gradients since then.

    Returns:
        ``routing_choices``: experts replayed, over tokens and layers; ``routing_disagreed``: those among them that the
            live router would not have chosen; ``routing_possible``: the value of ``routing_choices`` if every token
            were recorded.

    Raises:
        RuntimeError: other experts were used than recorded, or another number of them.
    """
    stages: list[Any] = [getattr(chunk, "module", chunk) for chunk in chunks]
    config = stages[0].config
    taps = [layer.mlp.router.router_replay for stage in stages for layer in _expert_layers(stage)]
    device = next(stages[0].parameters()).device
    table = torch.zeros(5, dtype=torch.int64, device=device)
    for tap in taps:
        table[: len(tap.counts)] += tap.counts
        tap.counts.zero_()
    if _speaks_for_its_micro_batches():
        layers = [n for n in range(config.num_layers) if has_experts(config, n)]
        recorded = (experts[:, layers] for part in micro_batches for _, experts in recorded_experts(part))
        table[_EXPECTED] = sum(int(np.count_nonzero(e[..., 0] != e[..., 1])) for e in recorded)
        table[_POSSIBLE] = sum(micro_batch.real_tokens for micro_batch in micro_batches) * len(layers)
    TorchCommunicator().sum_(table)
    replayed, disagreed, wrong, expected, possible = table.tolist()
    if wrong or replayed != expected:
        raise RuntimeError(
            f"routing replay failed: of {expected} recorded choices {replayed} were replayed, {wrong} of them with "
            f"other experts than recorded"
        )
    choices = config.moe_router_topk
    return {
        "routing_choices": float(replayed * choices),
        "routing_disagreed": float(disagreed),
        "routing_possible": float(possible * choices),
    }


def _speaks_for_its_micro_batches() -> bool:
    """Whether this is the one rank to count, of those that have the same micro-batches."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
    )


def _expert_layers(chunk: Any) -> Iterator[Any]:
    return (layer for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer))
