"""One rank of test_megatron: real GPTModel stages, real process groups. Arguments: folder of the test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from weight_fixtures import random_tensors, tiny_config, write_folder

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.platform import device
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron import parallel
from megatron_fleet.trainer.megatron.build import build_chunks
from megatron_fleet.weight_sync.registry import make_sender
from megatron_fleet.weight_sync.shm.controller import HeldMemory
from megatron_fleet.weight_sync.shm.sender import map_memory, parse_layout
from megatron_fleet.weights.export import export_hf
from megatron_fleet.weights.shards import load_hf
from megatron_fleet.weights.source import MegatronWeightSource, megatron_place

LAYOUTS = [
    (ParallelConfig(tensor=2, pipeline=2), True),
    (ParallelConfig(tensor=2, pipeline=2), False),
    (ParallelConfig(tensor=4), True),
    (ParallelConfig(pipeline=2, data=2), True),
    (ParallelConfig(tensor=2, data=2), False),
]


NO_OUTBOX: Any = None
"""These senders post nothing."""


def check(folder: Path, layout: ParallelConfig, tied: bool) -> None:
    parallel.initialise(layout, seed=0)
    world = TorchCommunicator()
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config, torch.bfloat16)
    tag = f"t{layout.tensor}p{layout.pipeline}d{layout.data}-{tied}"
    if world.rank == 0:
        write_folder(folder / tag, config, tensors)
    dist.barrier()
    (chunk,) = build_chunks(config, layout, torch.bfloat16, micro_batch_tokens=256)
    load_hf([chunk], folder / tag)
    source = MegatronWeightSource([chunk], config, dtype=torch.bfloat16, place=megatron_place())
    gathered = dict(source)
    assert list(gathered) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(gathered[name].view(torch.int16), tensor.view(torch.int16)), name

    for received in (sent_by_shm(source, world), sent_by_disk(source, world, folder / f"{tag}-version")):
        if world.rank == 0:
            assert set(received) == set(tensors)
            assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())

    export_hf(source, folder / tag, folder / f"{tag}-out", world=world)
    if world.rank == 0:
        a, b = (json.loads((folder / f / "config.json").read_text()) for f in (tag, f"{tag}-out"))
        assert a | {"torch_dtype": "bfloat16"} == b
        print("passed", tag, flush=True)


def sent_by_shm(source: MegatronWeightSource, world: TorchCommunicator) -> dict[str, torch.Tensor]:
    """Tensors that engines find in the memory, on rank 0."""
    sender = make_sender("shm", source, world, torch.device("cpu"), None)
    wanted = sender.prepare({})
    held = HeldMemory(**wanted) if world.rank == 0 else None
    known = world.all_gather(held and {"key": held.key, "path": held.path})[0]
    assert sender.prepare(known) == {"key": wanted["key"]}
    sender.send(7, {"round": 1}, NO_OUTBOX)
    found = {}
    if held is not None:
        layout = parse_layout(wanted["layout"])
        memory = map_memory(held.path, layout.nbytes)
        found = {n: t for bucket in range(len(layout.buckets)) for n, t in layout.tensors(bucket, memory)}
        held.close()
    sender.close()
    return found


def sent_by_disk(source: MegatronWeightSource, world: TorchCommunicator, path: Path) -> dict[str, torch.Tensor]:
    """Tensors that engines find in the folder, on rank 0."""
    sender = make_sender("disk", source, world, torch.device("cpu"), None)
    sender.send(7, {"path": str(path)}, NO_OUTBOX)
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


if __name__ == "__main__":
    device.prepare(1, seed=0)
    for layout, tied in LAYOUTS:
        check(Path(sys.argv[1]), layout, tied)
        # The default group stays: ranks that leave and meet again at one port can miss each other.
        parallel.parallel_state.destroy_model_parallel()
    parallel.shutdown()
