"""Settings of a trainer process that must be made before CUDA and Megatron start in it."""

from __future__ import annotations

import os
import sys

from megatron_fleet.cluster.inventory import compute_capability, cuda_is_installed
from megatron_fleet.config.schema import ParallelConfig, PolicyConfig

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def prepare_process(policy: PolicyConfig, parallel: ParallelConfig) -> None:
    """Make the settings that the trainer needs, except those that the user has made in the environment.

    Raises:
        UserError: nvidia-smi fails.
    """
    if policy.kernels == "torch":
        # An entry of None makes every later import of it fail as if it were not installed, in Megatron as well.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    shared = parallel.tensor > 1 or parallel.context > 1
    if shared and CONNECTIONS not in os.environ and cuda_is_installed():
        found = compute_capability(os.environ)
        if found is not None and (connections := device_connections(parallel, found)):
            os.environ[CONNECTIONS] = connections


def device_connections(parallel: ParallelConfig, capability: tuple[int, int]) -> str | None:
    """Number of CUDA's hardware queues for a layout; ``None``: CUDA's default of 8.

    Tensor and context parallelism start collectives just before the matrix products that run beside them. Up to Hopper
    one queue keeps this order; otherwise a product may take all multiprocessors first, and the collective waits for its
    end. From Blackwell on the order is kept without it, and streams of several groups need more queues. These are the
    settings of Megatron-Bridge.
    """
    if parallel.tensor == 1 and parallel.context == 1:
        return None
    if capability < (10, 0):
        return "1"
    return "32" if parallel.data > 1 or parallel.pipeline > 1 else None
