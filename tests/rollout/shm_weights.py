"""Publishes the tensors of an HF folder, as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_fleet.platform.communicator import Alone
from megatron_fleet.weight_sync.publish_shm import ShmPublisher
from megatron_fleet.weights.source import ParamMeta, Place, layer_groups


class FolderWeights:
    """A sharded source of one rank that has all of ``folder``, which may be set anew between two versions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, Place()
        self.before_write: Any = None

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors().items()]

    def groups(self) -> list[list[str]]:
        return layer_groups(sorted(self._tensors(), key=lambda name: "layers." not in name))

    def write_local(self, out: Mapping[str, torch.Tensor]) -> None:
        if self.before_write is not None:
            self.before_write()
        tensors = self._tensors()
        for name, whole in out.items():
            whole.copy_(tensors[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


def folder_publisher(folder: Path, client: Any) -> tuple[FolderWeights, ShmPublisher]:
    source = FolderWeights(folder)
    return source, ShmPublisher(source, client, Alone())
