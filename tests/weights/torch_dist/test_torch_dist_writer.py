"""torch's loader and Megatron's read back what we write, and we read what Megatron writes."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch_dist_files import ALL_DTYPES, Grid, random_tensor, raw_bytes, read_folder, save_with_ours
from waiting import HANG_S

from megatron_fleet.weights.torch_dist import writer
from megatron_fleet.weights.torch_dist.index import Blob, Chunk, ChunkedTensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_torch_loads_it(tmp_path):
    grids = {
        "weight": Grid(random_tensor(torch.bfloat16, 6, 10), [[2], [3, 9]]),
        "experts": Grid(random_tensor(torch.float32, 4, 6, 5, seed=1), [[1, 2, 3], [], [2]]),
        "scalar": Grid(random_tensor(torch.float32), []),
        "empty": Grid(random_tensor(torch.float32, 0, 3), [[], []]),
        "size": Grid(random_tensor(torch.float16, 5), [[1]]),
    } | {name: Grid(random_tensor(getattr(torch, name[6:]), 3, 4), [[1], []]) for name in ALL_DTYPES}
    save_with_ours(tmp_path / "ours", grids, aliases={"other.weight": "weight"}, extra_states=["a/shard_0_1", "b"])
    expected = {key: grid.tensor for key, grid in grids.items()} | {"other.weight": grids["weight"].tensor}
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    state["a/shard_0_1"] = state["b"] = io.BytesIO()
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    for key, tensor in expected.items():
        assert raw_bytes(state[key]) == raw_bytes(tensor), key
    for key in ("a/shard_0_1", "b"):
        (empty,) = state[key]
        assert (empty.dtype, empty.shape) == (torch.uint8, (0,))
    # Loading across the stored chunks' borders.
    across = Grid(torch.zeros(6, 10, dtype=torch.bfloat16), [[5], [1, 4]])
    dcp.load({"weight": across}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert raw_bytes(across.tensor) == raw_bytes(grids["weight"].tensor)


def test_our_reader_gives_back_what_was_written(tmp_path):
    grid = Grid(random_tensor(torch.bfloat16, 6, 10), [[2], [3, 9]])
    save_with_ours(tmp_path / "ours", {"weight": grid}, aliases={"alias": "weight"}, extra_states=["x", "y"])
    index = read_folder(tmp_path / "ours")
    assert index.tensors["alias"] == index.tensors["weight"]
    assert len(index.tensors["weight"].chunks) == 6
    assert index.objects["x"] == index.objects["y"]
    assert index.common == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


def test_metadata_is_what_torch_would_have_pickled():
    """Object for object, with keys and files that need every width of number and reference."""
    tensors, entries, places = {}, {}, {}
    for i in range(400):
        key, file = f"layer.{i}.{'é' * (i % 300)}", f"__0_{i % 270}.distcp"
        chunks = tuple(Chunk((start, 0), (1 << 15, 70_000), file, start * 2**32 + i, 300) for start in (0, 1 << 15))
        tensors[key] = ChunkedTensor("BF16" if i % 2 else "F8_E4M3", (1 << 16, 70_000), chunks)
    objects = {f"state/{i}": Blob("__0_1.distcp", 2**31 + i, 5) for i in range(3)}
    for key, tensor in tensors.items():
        dtype = torch.bfloat16 if tensor.dtype == "BF16" else torch.float8_e4m3fn
        boxes = [torch_metadata.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = torch_metadata.TensorProperties(dtype=dtype)
        entries[key] = torch_metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        for chunk in tensor.chunks:
            places[torch_metadata.MetadataIndex(key, chunk.offsets)] = _StorageInfo(*chunk[2:])
    for key, blob in objects.items():
        entries[key] = torch_metadata.BytesStorageMetadata()
        places[torch_metadata.MetadataIndex(key)] = _StorageInfo(*blob)
    expected = torch_metadata.Metadata(entries, storage_data=places, version="1.0.0")

    found = pickle.loads(writer.metadata_bytes(tensors, {}, objects))
    assert found == expected
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert type(next(iter(found.storage_data)).offset) is torch.Size
    assert repr(found) == repr(expected)


def test_keys_given_twice():
    tensor = ChunkedTensor("F32", (1,), (Chunk((0,), (1,), "f", 0, 100),))
    for arguments in (
        ({"a": tensor}, {"a": "a"}, {}),
        ({"a": tensor}, {}, {"a": Blob("f", 0, 1)}),
        ({"a": tensor}, {"b": "a"}, {"b": Blob("f", 0, 1)}),
    ):
        with pytest.raises(ValueError, match="given twice"):
            writer.metadata_bytes(*arguments)
    with pytest.raises(KeyError):
        writer.metadata_bytes({"a": tensor}, {"b": "c"}, {})


def test_common_state_loads_under_torchs_own_restrictions():
    loaded = torch.load(io.BytesIO(writer.common_bytes(5, {"layers": [1, None]})), weights_only=True)
    assert loaded["iteration"] == 5
    assert loaded["content_metadata"] == {"layers": [1, None]}


@pytest.mark.slow
def test_megatron_loads_ours_and_we_read_megatrons(tmp_path):
    script = Path(__file__).with_name("torch_dist_megatron.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["loaded", "read"]
