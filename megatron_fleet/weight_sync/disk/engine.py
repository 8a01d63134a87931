"""Engine side of the ``disk`` transport; runs in vLLM's workers only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weight_sync.buckets import checksum, prefetch
from megatron_fleet.weight_sync.disk.manifest import BucketFile, read_manifest
from megatron_fleet.weight_sync.reloading import ReloadingEngine, check_names


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """Empty: every update contains its own address."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """``path``: address of a version's folder."""

    path: str


class DiskEngine(ReloadingEngine):
    """Reads a file while the previous one is being loaded."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        """No-op: there is nothing to open."""

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        """Load all files of a version.

        Raises:
            UserError: the folder is missing or incomplete.
            ValueError: it lacks tensors of the engine's folder, or a checksum differs.
        """
        # Workers of several engines on this host read the same files.
        folder = open_folder(update_info.path, cached=True)
        files = read_manifest(folder)
        check_names(self, {name for file in files for name in file.names})
        self.load_buckets(prefetch(lambda number: _read(folder, files[number]), len(files)))


def _read(folder: Folder, file: BucketFile) -> list[tuple[str, torch.Tensor]]:
    padded = bytearray(-(-file.nbytes // 8) * 8)
    content = memoryview(padded)[: file.nbytes]
    folder.read_into(file.file, 0, content)
    if checksum(torch.frombuffer(padded, dtype=torch.uint8)) != file.checksum:
        raise ValueError(f"{folder.join(file.file)}: checksum differs")
    return list(load(bytes(content)).items())
