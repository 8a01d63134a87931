"""Search of the whole model for parameters with non-finite weights or gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_fleet.platform.communicator import TorchCommunicator

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")


@dataclass(frozen=True, slots=True)
class Faults:
    """Names of parameters as in Megatron's whole, unsplit model; equal on every rank.

    Attributes:
        weights: those with a non-finite value, from the input to the output of the model.
        gradients: those with a non-finite gradient, from the output to the input: the order of a backward pass, so that
            the first one is the origin.
        parameters: number of parameters of the model.
    """

    weights: list[str]
    gradients: list[str]
    parameters: int


def find_faults(chunks: Sequence[nn.Module]) -> Faults:
    """Check every weight and every gradient buffer, before or after gradients are summed over ranks; collective.

    Args:
        chunks: this rank's GPTModel chunks, unwrapped.
    """
    stages, stage = parallel_state.get_pipeline_model_parallel_world_size(), _stage()
    found: list[tuple[tuple[int, int], str, bool, bool]] = []
    for index, chunk in enumerate(chunks):
        named = list(_named(chunk))
        weights = _finite([p for _, p in named])
        gradients = _finite(
            [g if (g := getattr(p, "main_grad", None)) is not None else p.new_zeros(1) for _, p in named]
        )
        for place, ((name, _), weight, gradient) in enumerate(zip(named, weights, gradients, strict=True)):
            found.append(((index * stages + stage, place), name, not weight, not gradient))
    ordered = sorted(entry for part in TorchCommunicator().all_gather(found) for entry in part)
    return Faults(
        weights=_unique([name for _, name, weight, _ in ordered if weight]),
        gradients=_unique([name for _, name, _, gradient in reversed(ordered) if gradient]),
        parameters=len({name for _, name, _, _ in ordered}),
    )


def _stage() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def _finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    return torch.stack([torch.isfinite(t).all() for t in tensors]).tolist() if tensors else []


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _named(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters named with layer and expert numbers counted over all ranks."""
    experts = parallel_state.get_expert_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        if layer := _LAYER.search(name):
            module: Any = chunk.get_submodule(name[: layer.end()])
            name = _LAYER.sub(str(module.layer_number - 1), name)
            if expert := _EXPERT.search(name):
                here = module.mlp.num_local_experts
                name = name[: expert.start()] + str(experts * here + int(expert[0])) + name[expert.end() :]
        yield name, parameter
