"""GPUs that a run can be planned for, from their makers' data sheets, and the kind that a configuration names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ClusterConfig
from megatron_fleet.planning.memory.phases import DEVICES_PER_HOST, H100_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and its share of the host around it.

    Attributes:
        memory: bytes, as ``nvidia-smi`` shows them.
        flops: dense FLOP/s in bfloat16.
        hbm: bytes per second of its own memory.
        nvlink: bytes per second to the other GPUs of the host, in one direction.
        network: bytes per second to other hosts, in one direction: one port for each GPU.
        pcie: bytes per second to host memory, from pinned memory.
        per_host: GPUs of a host.
        host_memory: bytes of a host; a usual size, not a limit.
    """

    name: str
    memory: int
    flops: float
    hbm: float
    nvlink: float
    network: float = 50e9
    pcie: float = 50e9
    per_host: int = DEVICES_PER_HOST
    host_memory: int = 2000 << 30


_H100 = Gpu(name="H100", memory=H100_BYTES, flops=989e12, hbm=3.35e12, nvlink=450e9)
_L4 = Gpu(
    name="L4", memory=23_034 << 20, flops=121e12, hbm=300e9, nvlink=25e9, network=12.5e9, pcie=25e9,
    host_memory=512 << 30,
)  # fmt: skip
"""Without NVLink: its GPUs meet over PCIe."""
_ALL = (
    _H100,
    replace(_H100, name="H200", memory=143_771 << 20, hbm=4.8e12),
    replace(_H100, name="H20", memory=97_871 << 20, flops=148e12, hbm=4.0e12),
    Gpu(name="A100", memory=81_920 << 20, flops=312e12, hbm=2.04e12, nvlink=300e9, network=25e9, pcie=25e9),
    Gpu(name="B200", memory=183_359 << 20, flops=2250e12, hbm=8.0e12, nvlink=900e9),
    Gpu(name="B300", memory=275_040 << 20, flops=2250e12, hbm=8.0e12, nvlink=900e9, network=100e9),
    _L4,
    replace(_L4, name="A10", memory=23_028 << 20, flops=125e12, hbm=600e9),
    replace(_L4, name="4090", memory=24_564 << 20, flops=165e12, hbm=1.008e12),
    replace(_L4, name="L40S", memory=46_068 << 20, flops=362e12, hbm=864e9),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ALL}


def gpu_of(cluster: ClusterConfig, name: str | None = None, memory_gib: float | None = None) -> Gpu:
    """Return the GPU of that name, in any case; ``None``: ``cluster.gpu``, or an H100 where that is null.

    Args:
        memory_gib: memory in place of its own, for a GPU that is not known; all else stays.

    Raises:
        UserError: it is not known, or has no memory.
    """
    name = name or cluster.gpu or _H100.name
    if name.upper() not in GPUS:
        raise UserError(f"--gpu {name} is not a known GPU; choose one of {', '.join(GPUS)}, or add --gpu-memory GIB.")
    gpu = GPUS[name.upper()]
    if memory_gib is None:
        return gpu
    if not 1 <= memory_gib <= 10_000:
        raise UserError(f"--gpu-memory {memory_gib:g} is not a GPU's memory; give a number of GiB.")
    return replace(gpu, name=f"{gpu.name} with {memory_gib:g} GiB", memory=int(memory_gib * (1 << 30)))


def other_kind(cluster: ClusterConfig, products: Iterable[str]) -> str | None:
    """Return a sentence if a GPU is not of the kind that ``cluster.gpu`` names; ``None``: all are, or it names none.

    Args:
        products: names of the GPUs as nvidia-smi has them: ``NVIDIA H100 80GB HBM3``.
    """
    wanted = cluster.gpu
    others = sorted({product for product in products if not re.search(rf"\b{wanted}\b", product)}) if wanted else []
    if not others:
        return None
    return (
        f"cluster.gpu={wanted}, but the GPU here is {', '.join(others)}: layout and micro-batches were chosen for "
        f"another GPU; run `mfleet plan --gpu` for yours."
    )
