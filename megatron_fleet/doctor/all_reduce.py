"""One process of an all-reduce: ``python -m megatron_fleet.doctor.all_reduce``.

Reads the request of `network.exchange` from standard input. Prints bytes per second over gloo and, with GPUs, NCCL:
those that each process would have to send in a ring.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

GLOO_BYTES, NCCL_BYTES = 16 << 20, 256 << 20
ROUNDS = 4
TIMEOUT_S = 240.0


def main(request: dict[str, Any]) -> dict[str, float]:
    """Meet the others and reduce; returns the speeds.

    Raises:
        ValueError: a sum is wrong.
    """
    if interface := _interface(request["address"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ["LOCAL_RANK"] = str(request["local_rank"])

    from megatron_fleet.platform import device
    from megatron_fleet.platform.communicator import TorchCommunicator, join_at, leave

    where = device.prepare(1, 0)
    descriptor = request["listener"]
    listener = None if descriptor is None else socket.socket(fileno=descriptor)
    how = {"rank": request["rank"], "size": request["size"], "key": request["key"], "timeout_s": TIMEOUT_S}
    join_at(request["rendezvous"], listener, backend=device.backend(), **how)
    world = TorchCommunicator()
    speeds = {"gloo": _speed(world, "cpu", GLOO_BYTES)}
    if where.type == "cuda":
        speeds["nccl"] = _speed(world, where, NCCL_BYTES)
    leave()
    return speeds


def _speed(world: Any, where: Any, nbytes: int) -> float:
    import torch

    seconds = []
    for number in range(1, 1 + ROUNDS):
        values = torch.full((nbytes // 4,), float(number * (world.rank + 1)), device=where)
        world.barrier()
        begun = time.perf_counter()
        world.sum_(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        wanted = number * world.size * (world.size + 1) / 2
        if not bool((values == wanted).all()):
            raise ValueError(f"the sum over {world.size} processes on {where} is wrong")
    ring = 2 * (world.size - 1) / world.size
    return ring * nbytes / min(seconds[1:])  # the first round makes connections


def _interface(address: str) -> str | None:
    """Network interface that has ``address``."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read()))))
