"""Offload of a rank's training state to host memory and back, so that an engine can use the device.

Memory is released beneath the tensors: a storage is resized to zero and back. Every view of it therefore stays valid
(the parameters inside Megatron's buffers, the buckets' slices, gradients, the shards of the distributed optimizer), and
shared memory moves once, which Megatron's own ``offload_to_cpu`` gets wrong for a precision-aware optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.device import device

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
BLOCK_BYTES = 256 << 20
"""CUDA's allocator of pinned memory rounds up to a power of two; blocks of that size waste memory only
in the last one.
"""

Storages = list[torch.UntypedStorage]


class TrainState:
    """Parameters, gradients and optimizer of this rank. Use between passes only: nothing may access offloaded parts.

    ``parameters``: everything the chunks hold, frozen parameters and module buffers included. ``gradients``: Megatron's
    gradient buffers; their content is lost. ``optimizer``: master parameters and moments that are on the device.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
        """Raise UserError when parameters are quantised: only their library knows where their memory is."""
        self._chunks, self._optimizer = list(chunks), optimizer
        self._device = device()
        for chunk in self._chunks:
            for name, parameter in chunk.module.named_parameters():
                if type(parameter.data) is not torch.Tensor:
                    kind = type(parameter.data).__name__
                    raise UserError(
                        f"rollout.engine.colocated=true: {name} is stored quantised ({kind}) and cannot leave the "
                        f"device; set precision.fp8_param_gather=false."
                    )
        self._away: dict[Part, list[tuple[torch.UntypedStorage, int]]] = {}
        pinned = self._device.type == "cuda"
        self._copies: dict[Part, HostCopy] = {"parameters": HostCopy(pinned), "optimizer": HostCopy(pinned)}
        self._stream = torch.cuda.Stream(self._device) if pinned else None

    def held(self) -> dict[str, int]:
        """Bytes on the device now."""
        return {part: sum(s.nbytes() for s in storages) for part, storages in self.storages().items()}

    def sizes(self) -> dict[str, int]:
        """Bytes that each part takes on the device when it is there."""
        held = self.held()
        return {part: held[part] + sum(n for _, n in self._away.get(part, ())) for part in PARTS}

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Free the device memory of ``parts``; parts already offloaded stay so.

        Raises:
            RuntimeError: no host memory; nothing has moved.
        """
        leaving = [part for part in PARTS if part in parts and part not in self._away]
        if not leaving:
            return
        if "gradients" in leaving:
            self._optimizer.zero_grad()
        storages = self.storages()
        with self._copying():
            for part in leaving:
                if part in self._copies:
                    self._copies[part].store(list(map(as_bytes, storages[part])))
        for part in leaving:
            self._away[part] = [(storage, storage.nbytes()) for storage in storages[part]]
            for storage in storages[part]:
                storage.resize_(0)
        self._drop_workspaces()

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Onload ``parts``: parameters and optimizer bit for bit, gradients as zeros.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """
        coming = [part for part in PARTS if part in parts and part in self._away]
        if not coming:
            return
        for part in coming:
            for storage, nbytes in self._away[part]:
                storage.resize_(nbytes)
        with self._copying():
            for part in coming:
                storages = [storage for storage, _ in self._away[part]]
                if part in self._copies:
                    self._copies[part].load(list(map(as_bytes, storages)))
                else:
                    for storage in storages:
                        as_bytes(storage).zero_()
        for part in coming:
            del self._away[part]

    def storages(self) -> dict[Part, Storages]:
        """Find the storages, again on each call: an optimizer may create its state at its first step.

        A storage belongs to the first part that has a view of it.
        """
        seen: set[int] = set()
        return {
            "parameters": self._distinct(self._parameter_tensors(), seen),
            "gradients": self._distinct(self._gradient_tensors(), seen),
            "optimizer": self._distinct(self._optimizer_tensors(), seen),
        }

    def _distinct(self, tensors: Iterable[torch.Tensor], seen: set[int]) -> Storages:
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Storages resized to zero all have the address 0; the object behind them is unique.
            if tensor.device.type == self._device.type and storage._cdata not in seen:
                seen.add(storage._cdata)
                found.append(storage)
        return found

    def _parameter_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from (b.param_data for b in _buffers(chunk) if b.param_data is not None)
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            for buffer in _buffers(chunk):
                yield buffer.grad_data
                yield from getattr(buffer, "extra_main_grads", ())  # since Megatron-Core 0.19

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            if inner is None:  # this rank has no parameters for it
                continue
            # An optimizer that is partly in host memory has a sub-optimizer for each kind of memory.
            for optimizer in (inner, *getattr(inner, "sub_optimizers", ())):
                yield from (p for group in optimizer.param_groups for p in group["params"])
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Run the copies inside on a separate stream, after all earlier work of the device; waits for them on exit."""
        if self._stream is None:
            yield
            return
        # Not the current stream alone: parameters may still be gathered on the communicators' streams.
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _drop_workspaces(self) -> None:
        """Free buffers that are recreated on demand, and return the allocator's free blocks to the device."""
        parallel_state.get_global_memory_buffer().buffer.clear()
        # Gradients without content, one of each shape, which its layers return when they have filled the buffers.
        engine = sys.modules.get("transformer_engine.pytorch.module.base")
        getattr(engine, "_dummy_wgrads", {}).clear()
        if "parameters" in self._away:
            for chunk in self._chunks:
                for module in chunk.module.modules():
                    # Transformer Engine's quantised copies of weights: 2 bytes for each.
                    getattr(module, "_fp8_workspaces", {}).clear()
        if self._device.type == "cuda":
            # What was shared with engines stays allocated until somebody asks whether they have released it.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class HostCopy:
    """Bytes of tensors in host memory, pinned on request. The memory grows as needed and is never released."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors, uint8 ``[N]`` each, packed behind each other; asynchronously on a CUDA device."""
        self._reserve(sum(len(tensor) for tensor in tensors))
        for ours, theirs in self.pieces(tensors):
            ours.copy_(theirs, non_blocking=True)

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy back into tensors of the stored sizes, in the same order; asynchronously on a CUDA device."""
        for ours, theirs in self.pieces(tensors):
            theirs.copy_(ours, non_blocking=True)

    def stretches(self, sizes: Sequence[int]) -> Iterator[Iterator[torch.Tensor]]:
        """The stored tensors, each in one stretch or more, uint8; ``sizes``: theirs in bytes, in the same order."""
        start = 0
        for size in sizes:
            yield (ours for ours, _, _ in self._stretches(start, size))
            start += size

    def _reserve(self, nbytes: int) -> None:
        for index, start in enumerate(range(0, nbytes, BLOCK_BYTES)):
            size = min(BLOCK_BYTES, nbytes - start)
            if index == len(self._blocks):
                self._blocks.append(self._block(size))
            elif len(self._blocks[index]) < size:
                self._blocks[index] = self._block(size)

    def _block(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair equal stretches, uint8, of our blocks and of the tensors, covering all of them."""
        start = 0
        for tensor in tensors:
            yield from ((ours, tensor[a:b]) for ours, a, b in self._stretches(start, len(tensor)))
            start += len(tensor)

    def _stretches(self, start: int, size: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Views of the ``size`` bytes from ``start`` on, each with its place among them."""
        done = 0
        while done < size:
            index, at = divmod(start + done, BLOCK_BYTES)
            count = min(size - done, BLOCK_BYTES - at)
            yield self._blocks[index][at : at + count], done, done + count
            done += count


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as uint8 ``[bytes]``, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
