"""Shares of a checkpoint that ranks write are each value once, and any box of a tensor can be read back."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer.megatron import saving, shard_reader
from megatron_fleet.trainer.megatron.offload import HostCopy
from megatron_fleet.trainer.megatron.saving import Piece, Save
from megatron_fleet.trainer.megatron.shard_reader import ShardReader
from megatron_fleet.weights.torch_dist.index import COMMON, METADATA, METADATA_JSON

RANKS = 4
SIZES = (70, 40, 30, 30, 20, 20, 10, 10, 10)


class World:
    """The ranks one after the other: what each gives to a gathering is kept for those that come later."""

    def __init__(self, rank, given):
        self.rank, self._given = rank, given

    def all_gather(self, value):
        self._given[self.rank] = value
        return [self._given[rank] for rank in sorted(self._given)]


def described(rank, tensor_rank=0):
    """Dense parameters, a buffer, and experts, of which two of four data-parallel ranks have the same ones."""
    found = {}
    for number, size in enumerate(SIZES):
        weight = nn.Parameter(torch.full((size,), float(number)))
        found[f"dense {number}"] = ShardedTensor.from_rank_offsets(
            f"dense {number}", weight, replica_id=(0, tensor_rank, rank)
        )
        expert = nn.Parameter(torch.full((size,), 100.0 + number))
        expert.allreduce = False
        if rank < 2:
            found[f"expert {number}"] = ShardedTensor.from_rank_offsets(
                f"expert {number}", expert, replica_id=(0, tensor_rank, rank)
            )
    found["bias"] = ShardedTensor.from_rank_offsets("bias", torch.arange(5.0), replica_id=(0, tensor_rank, rank))
    return found


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda with_context_parallel: RANKS)
    monkeypatch.setattr(parallel_state, "get_expert_data_parallel_world_size", lambda: 2)


def test_of_equal_parameters_each_data_parallel_rank_writes_a_share(sizes):
    written = [list(saving._model_pieces([described(rank)])) for rank in range(RANKS)]
    keys = [piece.key for mine in written for piece in mine]
    assert sorted(keys) == sorted(described(0)) and len(set(keys)) == len(keys)
    assert ["bias" in [piece.key for piece in mine] for mine in written] == [True, False, False, False]
    for kind, ranks in (("dense", range(RANKS)), ("expert", range(2))):
        loads = [sum(p.data.numel() for p in written[rank] if p.key.startswith(kind)) for rank in ranks]
        assert sum(loads) == sum(SIZES) and min(loads) > 0 and max(loads) - min(loads) <= max(SIZES)
        assert max(loads) <= max(max(SIZES), 1.3 * sum(SIZES) / len(loads))
    for mine in written:
        for piece in mine:
            number = float(piece.key.split()[-1]) if " " in piece.key else None
            assert (
                piece.dtype == "F32" and piece.offsets == (0,) and piece.shape == piece.sizes == (piece.data.numel(),)
            )
            assert number is None or set(piece.data.tolist()) == {number + 100 * piece.key.startswith("expert")}


def test_copies_on_other_ranks_than_data_parallel_ones_are_not_written(sizes):
    assert list(saving._model_pieces([described(0, tensor_rank=1)])) == []


def test_loads_of_several_chunks_are_balanced_together(sizes):
    both = [described(1), described(1)]
    once, twice = (sum(p.data.numel() for p in saving._model_pieces(chunks)) for chunks in ([both[0]], both))
    assert 0 < once < twice < 2 * sum(SIZES)


def share(path, rank, given, pieces, monkeypatch, copy=None, objects=None):
    """What `Save` is after its ranks have described their shares."""
    monkeypatch.setattr(saving, "TorchCommunicator", lambda: World(rank, given))
    save = Save.__new__(Save)
    save._path, save._pieces, save._objects, save._copy = path, pieces, objects or {}, copy
    save._file = f"__{rank}_0.distcp"
    save._small = save._index({"step": 3})
    return save


def pieces_of(tensor, key, cut, first=True):
    """The rows of a tensor before or from ``cut``, as one rank writes them."""
    rows = tensor[:cut] if first else tensor[cut:]
    at = (0 if first else cut, *([0] * (tensor.dim() - 1)))
    return Piece(key, "F32", tuple(tensor.shape), at, tuple(rows.shape), rows.reshape(-1))


def write(path, monkeypatch, tensors, cuts, copies=(None, None)):
    given = {}
    shares = [
        share(
            path,
            rank,
            given,
            [pieces_of(tensor, key, cuts[key], first=rank == 0) for key, tensor in tensors.items()],
            monkeypatch,
            copies[rank],
            {f"state/{rank}": b"object %d" % rank},
        )
        for rank in (1, 0)
    ]
    return [files for save in shares for files in [save.write()]]


def test_what_two_ranks_write_is_read_as_one(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(3), "c": torch.randn(5, 2, 3)}
    second, first = write(tmp_path / "saved", monkeypatch, tensors, {"a": 2, "b": 1, "c": 4})
    assert second.keys() == {"__1_0.distcp"} and first.keys() == {"__0_0.distcp", COMMON, METADATA, METADATA_JSON}
    for name, entry in (second | first).items():
        assert (tmp_path / "saved" / name).stat().st_size == entry["bytes"] > 0
    reader = ShardReader(tmp_path / "saved")
    assert reader.names() == {"a", "b", "c", "state/0", "state/1"}
    assert reader.common()["optimizer"] == {"step": 3}
    for key, tensor in tensors.items():
        out = torch.full_like(tensor, torch.nan)
        reader.read_box(key, (0,) * tensor.dim(), out)
        assert torch.equal(out, tensor)
        reader.require_tensor(key, tuple(tensor.shape))
        reader.require_tensor(key, (99,), allow_shape_mismatch=True)
        with pytest.raises(UserError, match=f"holds no {key} as the model has it"):
            reader.require_tensor(key, (99,))
    reader.require_object("state/1")
    for require in (reader.require_object, lambda key: reader.require_tensor(key, (3,))):
        with pytest.raises(UserError, match=r"choose another run\.out"):
            require("d")


def test_a_tensor_that_ranks_do_not_hold_once_is_refused(tmp_path, monkeypatch):
    tensor = torch.randn(6, 4)
    for second in ([], [pieces_of(tensor, "a", 1, first=False)]):  # rows that nobody has, or two have
        given = {}
        share(tmp_path, 1, given, second, monkeypatch)
        with pytest.raises(ValueError, match="the ranks do not hold a once"):
            share(tmp_path, 0, given, [pieces_of(tensor, "a", 3)], monkeypatch)


def test_a_share_with_a_copy_is_of_the_moment_it_was_copied(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(3)}
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    given, saves = {}, []
    for rank in (1, 0):
        pieces = [pieces_of(tensor, key, 2, first=rank == 0) for key, tensor in tensors.items()]
        copy = HostCopy(pinned=False)
        copy.store([piece.data.view(torch.uint8) for piece in pieces])
        saves.append(share(tmp_path / "saved", rank, given, pieces, monkeypatch, copy))
    for tensor in tensors.values():
        tensor.zero_()
    for save in saves:
        save.write()
    reader = ShardReader(tmp_path / "saved")
    for key, tensor in expected.items():
        out = torch.empty_like(tensor)
        reader.read_box(key, (0,) * tensor.dim(), out)
        assert torch.equal(out, tensor)


@settings(max_examples=40)
@given(st.data())
def test_any_box_is_read_from_any_chunks(tmp_path_factory, data):
    """Outside the tensor it is zero."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    cut = data.draw(st.integers(1, max(shape[0] - 1, 1)))
    folder = tmp_path_factory.mktemp("boxes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "BLOCK_VALUES", data.draw(st.sampled_from([1, 3, 1 << 20])))
        given_, cuts = {}, [(0, cut), (cut, shape[0])] if shape[0] > 1 else [(0, 1)]
        shares = []
        for rank in reversed(range(2)):
            rows = [
                Piece("t", "F32", shape, (a, *[0] * (len(shape) - 1)), (b - a, *shape[1:]), tensor[a:b].reshape(-1))
                for number, (a, b) in enumerate(cuts)
                if number == rank
            ]
            shares.append(share(folder / "saved", rank, given_, rows, patch))
        for one in shares:
            one.write()
        reader = ShardReader(folder / "saved")
        for _ in range(3):
            offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
            sizes = [data.draw(st.integers(1, 5)) for _ in shape]
            out = torch.full(sizes, torch.nan)
            reader.read_box("t", offsets, out)
            expected = torch.zeros(sizes)
            inside = tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            expected[tuple(slice(0, n) for n in inside.shape)] = inside
            assert torch.equal(out, expected)
