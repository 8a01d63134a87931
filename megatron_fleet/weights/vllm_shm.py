"""``fleet_shm``: weights reach vLLM through one shared-memory file.

The trainer keeps a file in shared memory, writes HF-named tensors into it and sends only names, shapes and offsets.
Every vLLM worker maps the same file, so a tensor-parallel engine reads it once per rank and nothing is copied on the way.

vLLM finds the backend through the ``vllm.general_plugins`` entry point (``register``), which it loads in every process
of an engine; registering in the parent alone would be lost, because engine processes are spawned, not forked.
Nothing heavy is imported until vLLM asks for the engine class.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BACKEND = "fleet_shm"
ALIGNMENT = 256
"""Offsets in the file are multiples of this many bytes, so that any dtype can be viewed in place."""


def register() -> None:
    """Make the backend known to vLLM. Idempotent, as the plugin rules ask."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "megatron_fleet.weights.vllm_shm_engine", "ShmWeightTransferEngine")


def checksum(buffer: bytes | memoryview | np.ndarray) -> int:
    """CRC-32 of a tensor's bytes, as ``update_info["checksums"]`` carries it."""
    return zlib.crc32(buffer)
