"""The vLLM half of ``fleet_shm``: loaded by vLLM workers only (see ``vllm_shm``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_fleet.weights.vllm_shm import checksum


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """``path``: the shared file; ``nbytes``: its size."""

    path: str
    nbytes: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """Where each HF-named tensor lies in the file; lists of equal length.

    Attributes:
        names: HF checkpoint names.
        dtype_names: torch dtype names without ``torch.``, as stored in the file.
        shapes: shapes of the whole, unsharded tensors.
        offsets: bytes from the start of the file.
        checksums: CRC-32 per tensor; ``None`` skips the check.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    checksums: list[int] | None = None


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Reads tensors from the mapped file into the model through vLLM's own layerwise reload.

    The file must not change between ``start_weight_update`` and ``finish_weight_update``: loaders keep references
    to the mapping until their layer is complete.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._buffer: torch.Tensor | None = None
        self._received: set[str] = set()

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the file. A second call maps anew, for a file that was made again under the same or another name."""
        self._buffer = torch.from_file(init_info.path, shared=True, size=init_info.nbytes, dtype=torch.uint8)

    def start_weight_update(self) -> None:
        if self._buffer is None:
            raise RuntimeError("fleet_shm: weight update before init_weight_transfer_engine")
        self._received = set()
        if self.device.type == "cpu":
            _forget_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load one chunk. Raises ValueError for a tensor outside the file or with a wrong checksum."""
        self.model.load_weights(self._tensors(update_info))
        self._received.update(update_info.names)

    def finish_weight_update(self) -> None:
        """Complete the layers. Raises ValueError when the update did not cover the whole checkpoint.

        A layer that received only some of its tensors would otherwise keep uninitialised memory without an error.
        """
        missing = _checkpoint_names(Path(self.model_config.model), self._tied()) - self._received
        if missing:
            raise ValueError(f"fleet_shm: the update lacks {len(missing)} tensors, first {min(missing)!r}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_lm_heads(self.model)

    def shutdown(self) -> None:
        self._buffer = None

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _tensors(self, info: ShmUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._buffer is not None  # the caller has looked
        sums: Sequence[int | None] = info.checksums or [None] * len(info.names)
        for name, dtype_name, shape, offset, expected in zip(
            info.names, info.dtype_names, info.shapes, info.offsets, sums, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            raw = self._buffer[offset : offset + math.prod(shape) * dtype.itemsize]
            if len(raw) != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"fleet_shm: {name!r} reaches beyond the shared file")
            if expected is not None and checksum(raw.numpy()) != expected:
                raise ValueError(f"fleet_shm: checksum of {name!r} differs, the file was written during the update")
            yield name, raw.view(dtype).view(shape)


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


def _checkpoint_names(folder: Path, tied: bool) -> set[str]:
    """Weights of the HF folder the engine started from; empty when it holds no safetensors (dummy weights)."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        # Old folders store the rotary frequencies too, which are no weights: no table has them, vLLM skips them.
        names |= {name for name in header if name != "__metadata__" and not name.endswith(".rotary_emb.inv_freq")}
    return names - {"lm_head.weight"} if tied else names
