"""The vLLM half of ``fleet_shm``: loaded by vLLM workers only (see ``vllm_shm``)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_fleet.weight_sync.shared_buffer import SUMMED, Board, SharedLayout, checksum, map_memory, view_in
from megatron_fleet.weights.hf_folder import INDEX, SINGLE
from megatron_fleet.weights.hf_model import open_model


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """The shared memory: ``path`` to map and what `SharedLayout.describe` says of it."""

    path: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    buckets: list[int]
    writers: int
    scratch_bytes: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """``round``: the attempt to publish whose tensors are loaded; its writers need not be through yet."""

    round: int


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads tensors from mapped memory, bucket by bucket as they become ready, through vLLM's own layerwise reload.

    Nothing of a bucket is loaded before its checksums agree. Any failure leaves the model unusable, never mixed: vLLM
    then holds parameters without values, and whoever drives it must not let it go on.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._memory: torch.Tensor | None = None
        self._loaded: int | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the memory; a second call maps anew.

        Raises:
            ValueError: it does not hold the whole checkpoint. A layer that receives only some of its tensors would
                keep uninitialised memory without an error.
        """
        described = asdict(init_info)
        path = described.pop("path")
        self._layout = SharedLayout.parse(**described)
        missing = _checkpoint_names(Path(self.model_config.model)) - set(init_info.names)
        if missing:
            raise ValueError(f"fleet_shm: the update lacks {len(missing)} tensors, first {min(missing)!r}")
        self._memory = map_memory(path, self._layout.nbytes)
        self._board = Board(self._memory, len(self._layout.buckets), self._layout.writers)

    def start_weight_update(self) -> None:
        if self._memory is None:
            raise RuntimeError("fleet_shm: weight update before init_weight_transfer_engine")
        self._loaded = None
        if self.device.type == "cpu":
            _forget_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load all buckets of a round, waiting for each. Checksums run ahead of loading, in a thread.

        Raises:
            ValueError: a checksum differs.
            RoundLost: the trainer gave the round up, or has begun another one.
        """
        buckets = range(len(self._layout.buckets))
        with ThreadPoolExecutor(1) as pool, disable_mtp_completeness_check():
            checks = [pool.submit(self._check, bucket, update_info.round) for bucket in buckets]
            try:
                for bucket, check in zip(buckets, checks, strict=True):
                    check.result()
                    self.model.load_weights(self._tensors(bucket))
            finally:
                pool.shutdown(cancel_futures=True)
        self._loaded = update_info.round

    def finish_weight_update(self) -> None:
        """Complete the layers. Raises RuntimeError when nothing was received, or it was overwritten meanwhile."""
        if self._loaded is None:
            raise RuntimeError("fleet_shm: finish_weight_update without the tensors of a round")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_lm_heads(self.model)
        self._board.check_current(self._loaded)

    def shutdown(self) -> None:
        self._memory = None

    def _check(self, bucket: int, number: int) -> None:
        assert self._memory is not None  # the caller has looked
        self._board.wait(SUMMED, bucket, number)
        for writer in range(self._layout.writers):
            start, end = self._layout.piece(bucket, writer)
            if checksum(self._memory[start:end]) != self._board.checksums[bucket, writer]:
                raise ValueError(f"fleet_shm: checksum of bucket {bucket} differs, bytes {start} to {end}")

    def _tensors(self, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._memory is not None  # the caller has looked
        for slot in self._layout.buckets[bucket]:
            yield slot.meta.name, view_in(self._memory, slot.offset, slot.meta)


def _forget_moe_kernels(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU skips the expert prepack when a kernel exists already, and leaves plain weights in packed
    storage (``unquantized_fused_moe_method._setup_kernel``). Without a kernel it packs again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_lm_heads(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU packs ``lm_head`` into a copy of its own; a tied head is not loaded, so the copy stays old
    (``vocab_parallel_embedding.process_weights_after_loading``). Packing again reads the new embedding."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _checkpoint_names(folder: Path) -> set[str]:
    """What the folder that the engine started from stores of its language model, prediction layers aside; nothing when
    it holds no safetensors (dummy weights)."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return set()
    model = open_model(folder, prediction=False)
    return {name for name in model.stored if name not in model.carried and name not in model.table.repeated}
