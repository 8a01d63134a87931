"""Weights as the forward pass uses them (adapters merged, values quantised), and adapters in peft's format.

An adapter of a matrix that stacks HF tensors (query, key and value; gate and up) is equivalent to one adapter for each
of them: the same A, and the corresponding rows of B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.storage.local import is_unfinished, write_atomically
from megatron_fleet.weights.exchange import Box, OwnedBox, ParamMeta, Place, layer_groups
from megatron_fleet.weights.hf_folder import safetensors_header
from megatron_fleet.weights.mapping import Interval, check_tiling
from megatron_fleet.weights.shards import LocalTensor
from megatron_fleet.weights.source import MegatronWeightSource

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""File names that ``peft`` and vLLM expect in an adapter folder."""
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

View = Callable[[torch.Tensor, Interval], torch.Tensor]
"""Maps rows of a parameter ``[n, in]`` and their indices in it to the rows to export."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """``weight + scale · b · a`` on this rank: frozen parameter ``[out, in]``, adapter ``[out, r]`` and ``[r, in]``.

    Each rank's part of the product is complete: row sharding of the matrix also shards the rows of b, column sharding
    the columns of a.
    """

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def merged(self, values: torch.Tensor, rows: Interval) -> torch.Tensor:
        """A `View` of ``weight`` with the adapter merged: float32, rounded only by the consumer."""
        product = self.b.detach()[slice(*rows)].float() @ self.a.detach().float()
        return product.mul_(self.scale).add_(values)


class ViewedWeightSource(MegatronWeightSource):
    """The live model with some parameters replaced by views; the parameters themselves are unchanged."""

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        place: Place,
        views: Mapping[torch.Tensor, View],
    ) -> None:
        """See the base class.

        Args:
            views: by parameter; a parameter without a view is exported as it is.
        """
        super().__init__(model_chunks, hf_config, dtype=dtype, place=place)
        self._views = [(views.get(local.parameter), local.first_row) for local in self._local]

    def values(self, owned: OwnedBox) -> torch.Tensor:
        view, first = self._views[owned.local]
        values = super().values(owned)
        return values if view is None else view(values, (first + owned.rows[0], first + owned.rows[1]))


class AdapterSource(MegatronWeightSource):
    """Adapters under peft's names, ``base_model.model.{HF module}.lora_A.weight`` ``[r, in]`` and
    ``….lora_B.weight`` ``[out, r]``; gathered like weights, one layer at a time."""

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        hf_config: Mapping[str, Any],
        *,
        adapters: Sequence[LowRank],
        rank: int,
        dtype: torch.dtype,
        place: Place,
    ) -> None:
        """Collective over ``place.model``.

        Args:
            adapters: this rank's adapters; all ranks of one model together hold each exactly once.
            rank: r, the same for all adapters.
            dtype: dtype of the tensors yielded.
        """
        super().__init__(model_chunks, hf_config, dtype=dtype, place=place)
        self._tensors = [tensor for low in adapters for tensor in (low.a, low.b)]
        numbers = {low.weight: 2 * k for k, low in enumerate(adapters)}
        held = [
            entry
            for local in self._local
            if local.parameter in numbers
            for entry in _held(local, numbers[local.parameter], rank)
        ]
        self._shapes: dict[str, tuple[int, ...]] = {}
        owned: dict[str, dict[Box, OwnedBox]] = {}
        for owner, entries in enumerate(place.model.all_gather(held)):
            for name, tensor, box, number, rows in entries:
                out, width = self._table.tensors[tensor]
                self._shapes[name] = (rank, width) if name.endswith("lora_A.weight") else (out, rank)
                owned.setdefault(name, {}).setdefault(box, OwnedBox(owner, box, number, rows))
        for name, boxes in owned.items():
            check_tiling(name, self._shapes[name], boxes)
        order = {tensor: k for k, tensor in enumerate(self._table.tensors)}
        names = sorted(owned, key=lambda name: (order[adapted_tensor(name)], name))
        self._owned = {name: list(owned[name].values()) for name in names}
        self._metadata = {name: ParamMeta(name, dtype, self._shapes[name]) for name in names}
        self._groups = layer_groups(names)

    def values(self, owned: OwnedBox) -> torch.Tensor:
        return self._tensors[owned.local].detach()[slice(*owned.rows)]

    def modules(self) -> list[str]:
        """peft's ``target_modules``: last components of the adapted modules' names, or full names where modules that
        are not adapted have the same last component."""
        adapted = {adapted_tensor(name).removesuffix(".weight") for name in self._owned}
        last = {name.rsplit(".", 1)[-1] for name in adapted}
        all_modules = (name.removesuffix(".weight") for name in self._table.tensors)
        short = all(name in adapted or name.rsplit(".", 1)[-1] not in last for name in all_modules)
        return sorted(last if short else adapted)


PREFIX = "base_model.model."


def adapted_tensor(name: str) -> str:
    """The HF tensor to which an adapter tensor belongs."""
    return name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] + ".weight"


def _held(local: LocalTensor, number: int, rank: int) -> list[tuple[str, str, Box, int, Interval]]:
    """Adapter parts that this rank holds for a local tensor of the base weight.

    Each is (name, HF tensor, box, index of the local tensor, rows in it). A's index is ``number``, B's the next one.
    """
    first = local.first_row
    out: list[tuple[str, str, Box, int, Interval]] = []
    for piece in local.matrix.restrict(local.rows):
        assert piece.tensor is not None  # linear layers have no padding
        module = PREFIX + piece.tensor.removesuffix(".weight")
        rows = (first + piece.rows[0], first + piece.rows[1])
        out.append((f"{module}.lora_A.weight", piece.tensor, ((0, rank), local.cols), number, (0, rank)))
        out.append((f"{module}.lora_B.weight", piece.tensor, (piece.tensor_rows, None), number + 1, rows))
    return out


def export_adapters(
    source: AdapterSource, out: Path | str, *, base: str, rank: int, alpha: float, world: Communicator
) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` for ``peft``; collective over ``world``.

    World rank 0 writes, one layer at a time. The configuration is written last: a folder that has it is complete.

    Args:
        base: path of the base model, stored as ``base_model_name_or_path``.

    Raises:
        UserError: ``out`` is a folder with other content; raised on every rank.
    """
    out = Path(out)
    with together(world):
        if world.rank == 0:
            _make_room(out)
    with together(world):
        if source.place.replica == 0:
            _stream(source, out / WEIGHTS if world.rank == 0 else None)
    with together(world):
        if world.rank == 0:
            _write_config(out, base, rank, alpha, source.modules())


def _make_room(out: Path) -> None:
    if out.is_file() or (
        out.is_dir() and any(p.name not in (WEIGHTS, CONFIG) and not is_unfinished(p.name) for p in out.iterdir())
    ):
        raise UserError(f"{out} exists and is not a folder of adapters; choose another place for the export.")
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).unlink(missing_ok=True)


def _stream(source: AdapterSource, path: Path | None) -> None:
    """Iterate the source on every rank of the replica; write the file where ``path`` is set.

    The source is iterated to its end even if writing fails, because the other ranks iterate in lockstep.
    """
    error: OSError | None = None
    file: BinaryIO | None = None
    try:
        if path is not None:
            file = path.open("wb")
            file.write(safetensors_header(_entries(source.metadata())))
    except OSError as e:
        error = e
    for _, tensor in source:
        if file is not None and error is None:
            try:
                file.write(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
            except OSError as e:
                error = e
    if file is not None:
        file.close()
    if error is not None:
        raise error


def _entries(metadata: Sequence[ParamMeta]) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for meta in metadata:
        start, end = end, end + math.prod(meta.shape) * meta.dtype.itemsize
        entries[meta.name] = {"dtype": _NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": [start, end]}
    return entries


def _write_config(out: Path, base: str, rank: int, alpha: float, modules: list[str]) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    write_atomically(out / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
