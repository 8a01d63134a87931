"""Device and collective backend of a rank: the one place that distinguishes CPU from CUDA."""

from __future__ import annotations

import os

import torch


def device() -> torch.device:
    """This rank's device: its CUDA device (by LOCAL_RANK) where CUDA exists, the CPU elsewhere."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """Collective backend: NCCL for CUDA tensors, gloo for CPU tensors (which exist everywhere)."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def cores_of_rank() -> int:
    """Number of the host's cores divided by its ranks (LOCAL_WORLD_SIZE), at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def prepare(threads: int, seed: int) -> torch.device:
    """Select this rank's device, its number of CPU threads and its random seed.

    Args:
        threads: intra-op CPU threads of this process.
        seed: the same on every rank; nothing in a step draws from it yet, but model-parallel streams derive from it.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    where = device()
    if where.type == "cuda":
        torch.cuda.set_device(where)
        torch.cuda.manual_seed(seed)
    return where


def to_device(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device without waiting for the work that is queued there."""
    if where.type == "cpu":
        return tensor.to(where)
    return tensor.pin_memory().to(where, non_blocking=True)
