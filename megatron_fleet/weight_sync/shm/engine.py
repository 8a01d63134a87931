"""Engine side of the ``shm`` transport; runs in vLLM's workers only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_fleet.weight_sync.buckets import checksum, prefetch
from megatron_fleet.weight_sync.reloading import ReloadingEngine, check_names
from megatron_fleet.weight_sync.shm.board import SUMMED
from megatron_fleet.weight_sync.shm.sender import map_memory, parse_layout


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Shared memory to map: its ``path``, and its layout as given by `SharedLayout.describe`."""

    path: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    buckets: list[int]
    writers: int
    scratch_bytes: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """``round``: the attempt to send weights whose tensors are loaded; its writers may still be active."""

    round: int


class ShmEngine(ReloadingEngine):
    """Loads tensors from mapped memory, each bucket once it is ready."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._memory: torch.Tensor | None = None
        self._round = 0

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the memory; a second call remaps it. Raises ValueError if it lacks tensors of the engine's folder."""
        described = asdict(init_info)
        path = described.pop("path")
        check_names(self, init_info.names)
        self._layout = parse_layout(described)
        self._memory = map_memory(path, self._layout.nbytes)
        self._board = self._layout.board(self._memory)

    def start_weight_update(self) -> None:
        if self._memory is None:
            raise RuntimeError("shm: weight update before init_weight_transfer_engine")
        super().start_weight_update()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load all buckets of a round, waiting for each one. Checksums are computed ahead of loading.

        Raises:
            ValueError: a checksum differs.
            RoundLost: the trainer abandoned the round, or has begun another one.
        """
        self._round = update_info.round
        count = len(self._layout.buckets)
        self.load_buckets(prefetch(self._checked, count, ahead=count))

    def finish_weight_update(self) -> None:
        """Finalise the layers. Raises RuntimeError if nothing was received, or it was overwritten in the meantime."""
        super().finish_weight_update()
        self._board.check_current(self._round)

    def shutdown(self) -> None:
        self._memory = None

    def _checked(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        memory = self._memory
        assert memory is not None  # checked by start_weight_update
        self._board.wait(SUMMED, bucket, self._round)
        for writer in range(self._layout.writers):
            start, end = self._layout.piece(bucket, writer)
            if checksum(memory[start:end]) != self._board.checksums[bucket, writer]:
                raise ValueError(f"shm: checksum of bucket {bucket} differs, bytes {start} to {end}")
        return self._layout.tensors(bucket, memory)
