"""The index of a checkpoint: torch's own files give every byte, and whatever is wrong is told in one sentence."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_dist_files import (
    ALL_DTYPES,
    Grid,
    random_tensor,
    raw_bytes,
    read_folder,
    reader,
    save_with_torch,
    stored_parts,
    torch_saved,
)
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.torch_dist import folder as folders
from megatron_fleet.weights.torch_dist.dtypes import BY_TORCH_NAME
from megatron_fleet.weights.torch_dist.index import read_index
from megatron_fleet.weights.torch_dist.tiling import tiling_fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Tensors of all types in grids of chunks → the folder that torch made of them."""
    grids = {
        "decoder.weight": Grid(random_tensor(torch.bfloat16, 6, 10), [[2], [3, 9]]),
        "decoder.experts.weight": Grid(random_tensor(torch.float32, 4, 6, 5, seed=1), [[1, 2, 3], [4], []]),
        "decoder.scalar": Grid(random_tensor(torch.float32), []),
        "decoder.rows": Grid(random_tensor(torch.float16, 40_000, seed=2), [[7]]),
        "decoder.transposed": Grid(random_tensor(torch.float32, 5, 7).t().contiguous(), [[], []]),
    } | {name: Grid(random_tensor(getattr(torch, name[6:]), 3, 4), [[1], [2]]) for name in ALL_DTYPES}
    state = {
        **grids,
        "plain": random_tensor(torch.int64, 3, 3),
        "view": random_tensor(torch.float32, 8, 3)[2:5],
        "decoder.layer._extra_state/shard_0_1": io.BytesIO(torch_saved([None])),
        "optimizer.state.exp_avg.decoder.weight": torch.zeros(3),
        "chained_0.optimizer.state.param.x": torch.zeros(3),
        "optimizer.param_groups/shard_0_1": io.BytesIO(b"anything"),
    }
    path = tmp_path_factory.mktemp("torch") / "checkpoint"
    save_with_torch(path, state)
    return SimpleNamespace(path=path, state=state)


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the folder to damage."""
    shutil.copytree(written.path, tmp_path / "copy")
    return tmp_path / "copy"


def test_every_byte_of_torchs_own_files(written):
    index = read_folder(written.path)
    tensors = {key: value for key, value in written.state.items() if isinstance(value, Grid | torch.Tensor)}
    assert set(index.tensors) == {key for key in tensors if "optimizer" not in key}
    for key, stored in index.tensors.items():
        value = tensors[key]
        whole = value.tensor if isinstance(value, Grid) else value
        assert (stored.dtype, stored.shape) == (BY_TORCH_NAME[str(whole.dtype)].name, tuple(whole.shape))
        parts = list(stored_parts(written.path, stored))
        assert len(parts) == (len(value.__create_chunk_list__()) if isinstance(value, Grid) else 1)
        for chunk, found in parts:
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert found == raw_bytes(whole[box]), (key, chunk)
    assert set(index.objects) == {"decoder.layer._extra_state/shard_0_1"}
    (blob,) = index.objects.values()
    read, _ = reader(written.path)
    assert torch.load(io.BytesIO(read(*blob))) == [None]
    assert set(index.optimizer) == {key for key in written.state if "optimizer" in key}
    assert index.common["iteration"] == 7


def test_needs_no_torch():
    program = (
        "import sys\n"
        "from megatron_fleet.weights.torch_dist import container, folder, index, writer\n"
        "container.wrap('BF16', (2, 3)), writer.metadata_bytes({}, {}, {}), writer.common_bytes()\n"
        "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


def test_common_state_inside_the_data_files(tmp_path):
    """Megatron-Core 0.19 and later store it as one more object."""
    common = {
        "PK\7\x08": "looks like the end of a record",
        "iteration": 12,
        "args": SimpleNamespace(hidden_size=8),
        "tensor": torch.zeros(5),
    }
    save_with_torch(
        tmp_path / "new", {"w": torch.zeros(2), "common_state/shard_0_1": io.BytesIO(torch_saved([common]))}
    )
    (tmp_path / "new" / "common.pt").unlink()
    index = read_folder(tmp_path / "new")
    assert index.objects == {}
    found = index.common
    assert found["iteration"] == 12
    assert found["args"].state == {"hidden_size": 8}
    assert found["tensor"].name == "torch._utils._rebuild_tensor_v2"


def edit_metadata(path: Path, change) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata.state_dict_metadata, metadata.storage_data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(places, key: str, which: int = 0):
    return [place for index, place in places.items() if index.fqn == key][which]


def drop_place(entries, places):
    del places[next(index for index in places if index.fqn == "decoder.weight")]


def move_chunk(entries, places):
    """The last of six chunks covers a part of the one before it."""
    chunk = entries["decoder.weight"].chunks[-1]
    index = next(i for i in places if i.fqn == "decoder.weight" and i.offset == chunk.offsets)
    place = places.pop(index)
    chunk.offsets = torch.Size([2, 8])
    places[type(index)("decoder.weight", chunk.offsets)] = place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e, p: e["decoder.weight"].chunks.pop(), "decoder.weight wrongly: its chunks hold 56 of 60 elements"),
        (move_chunk, r"decoder.weight wrongly: its chunks at \[2, 3\] and \[2, 8\] overlap"),
        (lambda e, p: setattr(e["decoder.weight"], "size", torch.Size([6, 9])), "lies outside shape"),
        (lambda e, p: setattr(e["decoder.weight"], "size", torch.Size([60])), "2 axes and the tensor 1"),
        (drop_place, r"no place in a file for its chunk at \[0, 0\], decoder.weight"),
        (lambda e, p: setattr(place_of(p, "decoder.rows"), "length", 10**9), "of __0_0.distcp, which has"),
        (lambda e, p: setattr(place_of(p, "decoder.rows", 1), "length", 100), "too few for .* F16"),
        (lambda e, p: setattr(place_of(p, "decoder.rows"), "relative_path", "../x"), "from ../x, which is missing"),
        (lambda e, p: setattr(place_of(p, "plain"), "transform_descriptors", ["zstd"]), "plain is compressed"),
        (lambda e, p: setattr(place_of(p, "plain"), "offset", -1), "no place in a file for plain"),
        (lambda e, p: setattr(e["plain"].properties, "dtype", torch.complex128), "plain has type torch.complex128"),
        (lambda e, p: e.update(plain="x"), "'plain' neither that it is a tensor nor an object"),
    ],
)
def test_a_metadata_that_is_wrong(copy, change, said):
    edit_metadata(copy, change)
    with pytest.raises(UserError, match=rf"^run/\.metadata .*{said}"):
        read_folder(copy)


def test_damage_to_the_optimizer_does_not_matter(copy):
    edit_metadata(copy, lambda e, p: setattr(place_of(p, "optimizer.state.exp_avg.decoder.weight"), "length", 10**12))
    assert "plain" in read_folder(copy).tensors


def test_files_that_are_missing_or_cut_off(copy):
    (data,) = copy.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-4000])
    with pytest.raises(UserError, match=rf"{data.name}, which has {len(whole) - 4000}"):
        read_folder(copy)
    data.unlink()
    with pytest.raises(UserError, match=f"{data.name}, which is missing"):
        read_folder(copy)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (".metadata", None, "no save was finished"),
        (".metadata", b"", r"\.metadata is not a whole pickle"),
        (".metadata", b"{}", r"\.metadata is not a pickle that torch writes"),
        (".metadata", pickle.dumps({"a": 1}), "lacks a Metadata"),
        ("metadata.json", None, "torch_dcp"),
        ("metadata.json", b"[" * 100_000, "names no sharded_backend"),
        ("metadata.json", b'{"sharded_backend": "zarr", "sharded_backend_version": 1}', "the format is 'zarr'"),
        ("metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 9}', "version 9"),
        ("common.pt", None, "lists no common_state"),
        ("common.pt", b"PK", "common state is not a file of torch.save"),
        ("common.pt", torch_saved([1]), "holds no dict"),
    ],
)
def test_small_files_that_are_wrong(copy, name, content, said):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_folder(copy)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("decoder.weight/.zarray", "zarr"),
        ("mp_rank_00/model_optim_rng.pt", "one file per rank"),
        ("model-00001-of-00002.safetensors", "Hugging Face"),
    ],
)
def test_folders_of_other_formats(tmp_path, name, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"^run holds .*{said}"):
        read_folder(tmp_path)


def test_a_metadata_that_would_run_code(copy, tmp_path):
    class Harmful:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    class Nameless:
        def __reduce__(self):
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    for harm in (Harmful(), Nameless()):
        (copy / ".metadata").write_bytes(pickle.dumps(harm))
        with pytest.raises(UserError, match=r"\.metadata"):
            read_folder(copy)
        shutil.copy(copy / ".metadata", tmp_path / "keep")
    save_with_torch(tmp_path / "fresh", {"w": torch.zeros(1)})
    (tmp_path / "fresh" / "common.pt").write_bytes(torch_saved({"args": Nameless()}))
    with pytest.raises(UserError, match=r"common\.pt: .*'builtins\.eval'.*do not trust"):
        read_folder(tmp_path / "fresh")
    assert not (tmp_path / "ran").exists()


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_damaged_metadata_is_refused_or_sound(written, data):
    """Random damage: one clear error, or an index whose places all lie inside the files."""
    read, sizes = reader(written.path)
    damaged = bytearray(read(".metadata", 0, None))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=8))
    files = {".metadata": bytes(damaged)}
    try:
        index = read_index(lambda name, *span: files.get(name) or read(name, *span), sizes, "run")
    except UserError as e:
        assert len(str(e)) < 600
        return
    places = [chunk[2:] for tensor in index.tensors.values() for chunk in tensor.chunks] + list(index.objects.values())
    assert all(0 <= offset < offset + length <= sizes[file] for file, offset, length in places)


def test_metadata_of_plans_and_paths(tmp_path):
    """Megatron leaves its ranks' plans in the metadata; they are skipped."""
    save_with_torch(tmp_path / "a", {"w": torch.zeros(2, 2)})
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": torch.zeros(2, 2)}, is_coordinator=True)
    metadata.all_local_plans = [planner.create_local_plan()]
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_folder(tmp_path / "a").tensors["w"].shape == (2, 2)


def boxes(*pairs):
    return [SimpleNamespace(offsets=o, sizes=s) for o, s in pairs]


def test_tiling():
    pinwheel = boxes(((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
    assert tiling_fault((3, 3), pinwheel) is None
    assert "8 of 9" in tiling_fault((3, 3), pinwheel[:4])
    assert "overlap" in tiling_fault((3, 3), [*pinwheel[:4], *boxes(((0, 1), (1, 1)))])
    assert "overlap" in tiling_fault((4,), boxes(((0,), (2,)), ((0,), (2,))))
    assert "overlap" in tiling_fault((), boxes(((), ()), ((), ())))
    assert "0 of 1" in tiling_fault((), [])
    assert tiling_fault((), boxes(((), ()))) is None
    assert tiling_fault((0, 5), []) is None
    assert tiling_fault((4,), boxes(((0,), (0,)), ((0,), (4,)))) is None


def test_tiling_of_many_matrices_one_of_which_is_cut_in_the_middle_of_rows():
    """As optimizer state lies in a checkpoint of a mixture of experts, far more than could be compared in pairs."""
    cut = [((0, 0), (1, 4)), ((1, 0), (1, 3)), ((1, 3), (1, 1)), ((2, 0), (2, 4))]
    parts = [
        ((layer, expert, *offsets), (1, 1, *sizes))
        for layer in range(60)
        for expert in range(384)
        for offsets, sizes in (cut if (layer, expert) == (7, 9) else [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    ]
    assert tiling_fault((60, 384, 4, 4), boxes(*parts)) is None
    assert "overlap" in tiling_fault((60, 384, 4, 4), boxes(*parts, ((7, 9, 1, 2), (1, 1, 1, 1))))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tiling_agrees_with_counting(data):
    shape = (5, 4)
    box = st.tuples(st.integers(0, 4), st.integers(0, 3)).flatmap(
        lambda o: st.tuples(st.just(o), st.tuples(st.integers(0, 5 - o[0]), st.integers(0, 4 - o[1])))
    )
    parts = data.draw(st.lists(box, max_size=3))
    cut = data.draw(st.integers(1, 4))
    if data.draw(st.booleans()):
        parts = [((0, 0), (cut, 4)), ((cut, 0), (5 - cut, 2)), ((cut, 2), (5 - cut, 2)), *parts[1:]]
    count = torch.zeros(shape, dtype=torch.int)
    for (row, column), (rows, columns) in parts:
        count[row : row + rows, column : column + columns] += 1
    assert (tiling_fault(shape, boxes(*parts)) is None) == bool((count == 1).all())


def run_folder(*names: str, tracker: str | None = None):
    sizes = dict.fromkeys(names, 1)
    if tracker is not None:
        sizes[folders.TRACKER] = len(tracker)
    return lambda name, offset, length: (tracker or "").encode(), sizes, "run"


def test_the_checkpoint_of_a_run_folder():
    two = ("iter_0000100/.metadata", "iter_0000200/.metadata")
    assert folders.locate(*run_folder(".metadata", "metadata.json")) == ""
    assert folders.locate(*run_folder("metadata.json", "w/.zarray")) == ""  # the index says what is wrong with it
    assert folders.locate(*run_folder(*two, tracker="100\n")) == "iter_0000100"
    assert folders.locate(*run_folder("release/.metadata", *two, tracker="release")) == "release"
    assert folders.locate(*run_folder("release/.metadata")) == "release"
    assert folders.locate(*run_folder("iter_12345678/.metadata", tracker="12345678")) == "iter_12345678"
    steps = [f"step_{n:06d}/{f}" for n in (5, 999_999, 1_000_000) for f in (".metadata", "manifest.json")]
    assert folders.locate(*run_folder(*steps, ".step_1000005.partial/.metadata")) == "step_1000000"
    assert folders.locate(*run_folder(*(f"checkpoints/{s}" for s in steps))) == "checkpoints/step_1000000"


@pytest.mark.parametrize(
    ("names", "tracker", "said"),
    [
        (["iter_0000100/.metadata", "iter_0000200/.metadata"], None, "iter_0000100, iter_0000200 and no latest"),
        (["iter_0000100/.metadata"], "300", "names iter_0000300, .* has iter_0000100"),
        (["iter_0000100/x"], "100", "holds no .metadata, and the folder has no checkpoint"),
        (["iter_0000100/.metadata"], "../../etc", "expected a number or 'release'"),
        (["step_000001/.metadata", "step_000002/.metadata"], None, "give one of these"),
        ([".step_000001.partial/.metadata", "config.json"], None, "neither .metadata nor"),
        ([], None, "neither .metadata nor"),
    ],
)
def test_run_folders_that_name_no_checkpoint(names, tracker, said):
    with pytest.raises(UserError, match=said):
        folders.locate(*run_folder(*names, tracker=tracker))


def test_json_says_what_megatron_reads(written):
    found = json.loads((written.path / "metadata.json").read_text())
    assert found["sharded_backend"] == "torch_dist"
