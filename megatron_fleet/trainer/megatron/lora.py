"""Low-rank adapters of frozen linear layers: y = W·x + (alpha / r)·B·(A·x), with A ``[r, in]`` and B ``[out, r]``.

LoRA: Hu et al. 2021, arXiv:2106.09685. B begins at zero and A as in the paper's code and peft (Kaiming uniform, √5), so
training begins at the base model. Only adapters get gradients and moments and are stored in checkpoints.

The sharding of an adapter follows its layer:

* column-parallel (rows of W split): A whole on every rank, rows of B; A·x is gathered, not x;
* row-parallel (columns of W split): columns of A, B whole; A·x is summed over ranks, not the output;
* duplicated (down-projections of latent attention): both whole;
* experts: one adapter for each expert, split as the expert is; token dispatch does the communication of activations.

Layers are named by the weight table and not by their place on a rank, so initial values and checkpoints are equal in
every layout, and for Megatron's own layers and Transformer Engine's.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import LoraConfig
from megatron_fleet.platform.communicator import ProcessGroup, TorchCommunicator
from megatron_fleet.weights.adapters import LowRank, View
from megatron_fleet.weights.mapping import Interval, Matrix, WeightTable
from megatron_fleet.weights.shards import local_tensors

_ROW_PARALLEL = ("linear_proj", "linear_fc2")
_DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")


@dataclass(frozen=True, slots=True)
class _Target:
    """Linear layer (or one expert of a grouped one) that gets an adapter."""

    module: nn.Module
    weight: nn.Parameter
    matrix: Matrix
    cols: Interval
    gated: bool

    @property
    def role(self) -> Literal["column", "row", "duplicated"]:
        linear = self.matrix.key.split(".")[-2]
        return "row" if linear in _ROW_PARALLEL else "duplicated" if linear in _DUPLICATED else "column"


def group_of(key: str) -> Literal["attention", "mlp", "experts"] | None:
    """Entry of ``policy.lora.targets`` that covers a checkpoint key; ``None`` when it is not such a linear layer."""
    if not key.startswith("decoder.layers.") or ".linear_" not in key or not key.endswith(".weight"):
        return None
    if ".self_attention." in key:
        return "attention"
    return "experts" if ".mlp.experts." in key else "mlp"


class Adapter(nn.Module):
    """A and B of one linear layer: this rank's shards."""

    def __init__(self, target: _Target, settings: LoraConfig, seed: int, sequence_parallel: bool) -> None:
        """Initialise B with zero; A depends only on the seed and the layer's name."""
        super().__init__()
        self.role, self.matrix, self.gated = target.role, target.matrix, target.gated
        self.weight_ref = [target.weight]  # not registered as a parameter of this module
        self.scale = settings.alpha / settings.rank
        self.sequence_parallel = sequence_parallel
        out, rank = target.weight.shape[0], settings.rank
        dtype, device = target.weight.dtype, target.weight.device
        a = _initial(f"{seed} {self.name} {self.matrix.expert}", rank, self.matrix.shape[1])
        self.a = nn.Parameter(a[:, slice(*target.cols)].to(device, dtype).contiguous())
        self.b = nn.Parameter(torch.zeros(out, rank, dtype=dtype, device=device))
        self._mark(getattr(target.weight, "allreduce", True))

    @property
    def name(self) -> str:
        return "adapters." + self.matrix.key.removesuffix(".weight")

    @property
    def is_expert(self) -> bool:
        return self.matrix.expert is not None

    @property
    def low_rank(self) -> LowRank:
        return LowRank(self.weight_ref[0], self.a, self.b, self.scale)

    def _mark(self, allreduce: bool) -> None:
        """Set the attributes by which Megatron chooses the ranks to reduce gradients over, and the copies counted in
        their norm.
        """
        for parameter, axis, split in ((self.a, 1, self.role == "row"), (self.b, 0, self.role == "column")):
            marked: Any = parameter
            marked.allreduce = allreduce
            if self.is_expert:
                # Ranks of one tensor-parallel group may hold different experts: "not split" would drop theirs.
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                marked.shared = not split and parallel_state.get_expert_tensor_parallel_rank() > 0
            else:
                set_tensor_model_parallel_attributes(parameter, split, axis if split else -1, 1)
                marked.sequence_parallel = self.sequence_parallel and not split

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Adapted output from the frozen layer's output ``out`` ``[…, out]`` and its input ``x`` ``[…, in]``."""
        b = self.b
        if self.is_expert:
            # The copies are whole on ranks that see a part of the output: their gradients add up.
            group = parallel_state.get_expert_tensor_parallel_group()
            a = mappings.copy_to_tensor_model_parallel_region(self.a, group) if self.role == "column" else self.a
            b = mappings.copy_to_tensor_model_parallel_region(b, group) if self.role == "row" else b
            inner = F.linear(x, a)
        else:
            inner = self._share(F.linear(x, self.a))
        return torch.addmm(out.flatten(0, -2), inner.flatten(0, -2), b.t(), alpha=self.scale).view_as(out)

    def _share(self, inner: torch.Tensor) -> torch.Tensor:
        """Gather or sum A·x over the tensor-parallel ranks, as B needs it."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.role == "column":
            if self.sequence_parallel:
                return mappings.gather_from_sequence_parallel_region(inner, group=group)
            return mappings.copy_to_tensor_model_parallel_region(inner, group)
        if self.role == "row":
            if self.sequence_parallel:
                return mappings.reduce_scatter_to_sequence_parallel_region(inner, group=group)
            return mappings.reduce_from_tensor_model_parallel_region(inner, group)
        return inner

    def describe(self, prefix: str, experts: int, data_group: ProcessGroup) -> ShardedStateDict:
        """A and B with their place in the whole model."""
        lead: tuple[tuple[int, int, int], ...] = ()
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        replica = data_group.rank()
        if self.matrix.expert is not None:
            lead = ((0, self.matrix.expert, experts),)
            rank = parallel_state.get_expert_tensor_parallel_rank()
            size = parallel_state.get_expert_tensor_parallel_world_size()
            replica = parallel_state.get_expert_data_parallel_rank()
        out: ShardedStateDict = {}
        for letter, parameter, axis, split in (
            ("a", self.a, 1, self.role == "row"),
            ("b", self.b, 0, self.role == "column"),
        ):
            sharded = ShardedTensor.from_rank_offsets(
                f"{self.name}.{letter}",
                parameter,
                *lead,
                *([(axis + len(lead), rank, size)] if split else []),
                replica_id=(0, 0 if split else rank, replica),
                prepend_axis_num=len(lead),
            )
            gated = letter == "b" and self.gated
            out[prefix + letter] = apply_swiglu_sharded_factory(sharded, lead) if gated else sharded
        return out


def _initial(name: str, rank: int, width: int) -> torch.Tensor:
    """Kaiming uniform with slope √5: within ±1/√width; float32 ``[rank, width]`` on the CPU."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class Adapters(nn.ModuleList):
    """Adapters of one chunk, stored as ``chunk.adapters``.

    Attributes:
        enabled: whether the chunk computes with them.
    """

    def __init__(self, adapters: Sequence[Adapter], experts: int) -> None:
        super().__init__(adapters)
        self.enabled = True
        self._experts = experts

    def sharded_state_dict(self, *_: Any, **__: Any) -> ShardedStateDict:
        """Return nothing: to loaders and exports, a chunk is the base model."""
        return {}

    def describe(self, prefix: str, data_group: ProcessGroup) -> ShardedStateDict:
        """Checkpoint content of the chunk, by parameter name within the chunk (``prefix`` + ``0.a``).

        Args:
            data_group: data-parallel ranks, context-parallel ones included.
        """
        out: ShardedStateDict = {}
        for index, adapter in enumerate(self):
            assert isinstance(adapter, Adapter)
            out |= adapter.describe(f"{prefix}{index}.", self._experts, data_group)
        return out


def attach(chunks: Sequence[GPTModel], hf_config: Mapping[str, Any], settings: LoraConfig, seed: int) -> list[Adapters]:
    """Freeze the filled chunks and give their linear layers adapters; collective. Before gradient buffers are made.

    Args:
        settings: ``rank`` above 0.
        seed: of A's initial values.

    Raises:
        UserError: the model lacks a target, or a pipeline rank would have nothing to train; on every rank.
    """
    table = WeightTable(hf_config)
    groups = {group_of(matrix.key) for matrix in table.matrices()}
    if missing := [name for name in settings.targets if name not in groups]:
        raise UserError(f"policy.lora.targets names {missing[0]}, which this model does not have; remove it.")
    adapters = [_attach(chunk, table, settings, seed) for chunk in chunks]
    if any(TorchCommunicator().all_gather(not any(len(each) for each in adapters))):
        raise UserError(
            f"policy.lora.targets={list(settings.targets)} leaves a pipeline rank without adapters; add attention."
        )
    return adapters


def _attach(chunk: GPTModel, table: WeightTable, settings: LoraConfig, seed: int) -> Adapters:
    targets = list(_targets(chunk, table, settings))
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    by_module: dict[nn.Module, list[Adapter]] = {}
    for target in targets:
        adapter = Adapter(target, settings, seed, chunk.config.sequence_parallel)
        by_module.setdefault(target.module, []).append(adapter)
    adapters = Adapters([adapter for several in by_module.values() for adapter in several], table.model.experts)
    chunk.adapters = adapters
    for module, several in by_module.items():
        _hook(module, several, adapters)
    if getattr(chunk, "pre_process", False):
        # Recomputation passes gradients on only where the input of a layer requires one, and nothing before it does.
        chunk.embedding.register_forward_hook(lambda _module, _args, out: out.requires_grad_(torch.is_grad_enabled()))
    return adapters


def _targets(chunk: MegatronModule, table: WeightTable, settings: LoraConfig) -> Iterator[_Target]:
    owners = {p: module for module in chunk.modules() for p in module.parameters(recurse=False)}
    parts: dict[torch.Tensor, list[Any]] = {}
    for local in local_tensors([chunk], table):
        if group_of(local.matrix.key) in settings.targets:
            parts.setdefault(local.parameter, []).append(local)
    for weight, several in parts.items():
        assert isinstance(weight, nn.Parameter)
        matrix = several[0].matrix
        yield _Target(owners[weight], weight, matrix, several[0].cols or (0, matrix.shape[1]), len(several) > 1)


def _hook(module: nn.Module, several: Sequence[Adapter], adapters: Adapters) -> None:
    """Pass a linear layer's output through its adapter, or through those of a grouped layer's experts, in order."""
    with_norm = hasattr(module, "layer_norm_weight")
    if with_norm:
        # Transformer Engine's fused layer: request the input of the matrix product.
        module.return_layernorm_output = True  # type: ignore[assignment]

    def adapt(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        x = args[0]
        if with_norm:
            output, x = _split_norm(output)
        out, bias = output
        if not adapters.enabled:
            return out, bias
        if len(args) > 1:
            pieces = zip(several, x.split(args[1]), out.split(args[1]), strict=True)
            return torch.cat([adapter(piece, base) for adapter, piece, base in pieces]), bias
        return several[0](x, out), bias

    module.register_forward_hook(adapt)


def _split_norm(output: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Split a fused layer's output into (Megatron's pair of output and bias, output of the norm); the
    bias is optional.
    """
    if isinstance(output[0], tuple):
        (out, normed), bias = output
    else:
        out, bias, normed = output
    return (out, bias), normed


@contextlib.contextmanager
def without(adapters: Sequence[Adapters]) -> Iterator[None]:
    """Disable the adapters inside, leaving the base model."""
    for each in adapters:
        each.enabled = False
    try:
        yield
    finally:
        for each in adapters:
            each.enabled = True


def low_rank(adapters: Sequence[Adapters]) -> list[LowRank]:
    """All adapters of this rank, for export."""
    return [adapter.low_rank for each in adapters for adapter in each if isinstance(adapter, Adapter)]


def views(adapters: Sequence[Adapters]) -> dict[torch.Tensor, View]:
    """Adapted weights, each as one matrix."""
    return {low.weight: low.merged for low in low_rank(adapters)}


def exports_adapters(settings: LoraConfig) -> bool:
    """Whether an export contains the adapters alone instead of a model."""
    return settings.rank > 0 and settings.export == "adapters"
