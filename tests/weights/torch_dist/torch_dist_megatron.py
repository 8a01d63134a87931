"""One process with Megatron-Core's own loader and writer, for test_torch_dist_writer. Argument: folder of the test."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_fleet.platform.megatron  # noqa: F401 - makes megatron.core importable

# isort: split
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch_dist_files import Grid, random_tensor, raw_bytes, read_folder, save_with_ours, stored_parts

LAYERS = 3


def state(weights: torch.Tensor, norms: torch.Tensor, extra: object) -> dict[str, object]:
    """Per layer a weight in two parts, with the layers as first axis on disk, a norm, and an object."""
    found: dict[str, object] = {"norm": ShardedTensor.from_rank_offsets("norm", norms)}
    for layer in range(LAYERS):
        for half in range(2):
            part = weights[layer, half * 4 : half * 4 + 4]
            offsets = ((0, layer, LAYERS), (1, half, 2))
            found[f"{layer}.{half}"] = ShardedTensor.from_rank_offsets("w", part, *offsets, prepend_axis_num=1)
        found[f"{layer}.extra"] = ShardedObject("w._extra_state", extra, (LAYERS,), (layer,))
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = random_tensor(torch.bfloat16, LAYERS, 8, 5)
    norms = random_tensor(torch.float32, 9, seed=1)
    # Chunks that are not the ones asked for: a layer in one piece.
    grids = {"w": Grid(weights, [[1, 2], [], []]), "first.norm": Grid(norms, [[4]])}
    extra_states = [f"w._extra_state/shard_{layer}_{LAYERS}" for layer in range(LAYERS)]
    save_with_ours(folder / "ours", grids, aliases={"norm": "first.norm"}, extra_states=extra_states)

    blank = torch.zeros_like(weights), torch.zeros_like(norms)
    loaded = dist_checkpointing.load(state(*blank, None), str(folder / "ours"))
    assert loaded["iteration"] == 0
    assert raw_bytes(loaded["norm"]) == raw_bytes(norms)
    for layer in range(LAYERS):
        for half in range(2):
            assert raw_bytes(loaded[f"{layer}.{half}"]) == raw_bytes(weights[layer, half * 4 : half * 4 + 4])
        assert loaded[f"{layer}.extra"].numel() == 0
    print("loaded", flush=True)

    (folder / "megatron").mkdir()
    common = {"iteration": 31, "optimizer": {"lr": 0.5}}
    dist_checkpointing.save(state(weights, norms, None) | common, str(folder / "megatron"))
    index = read_folder(folder / "megatron")
    assert index.common["iteration"] == 31
    assert set(index.objects) == set(extra_states)
    assert index.tensors["w"].shape == (LAYERS, 8, 5)
    for key, whole in (("w", weights), ("norm", norms)):
        for chunk, found in stored_parts(folder / "megatron", index.tensors[key]):
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert found == raw_bytes(whole[box]), (key, chunk)
    print("read", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

    dist.destroy_process_group()
