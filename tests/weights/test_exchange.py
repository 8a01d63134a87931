"""Quantised tensors encoded by the owners of their rows: the same codes and scales as encoded whole, in fewer bytes."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from weight_fixtures import random_tensors, run_ranks, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.platform.communicator import PeerError  # noqa: E402
from megatron_fleet.weight_sync.disk.manifest import MANIFEST  # noqa: E402
from megatron_fleet.weight_sync.disk.sender import DiskSender  # noqa: E402
from megatron_fleet.weight_sync.engine_format import EngineFormat  # noqa: E402
from megatron_fleet.weights.exchange import AsHeld, FormattedSource, Place  # noqa: E402
from megatron_fleet.weights.fp8_model import as_fp8, fp8_tensors  # noqa: E402
from megatron_fleet.weights.hf_model import BLOCK, GROUP, open_model  # noqa: E402
from megatron_fleet.weights.quant import torch_ops  # noqa: E402
from megatron_fleet.weights.shards import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")

CONFIG = tiny_config(hidden_size=256, intermediate_size=512, head_dim=32, num_hidden_layers=2)
"""Of two tensor-parallel ranks each has 128 rows of queries, gate and up, and 64 of keys and values."""
FORMS = ["fp8", "fp8_powers_of_two", "fp8_declared", "int4"]
LAYOUTS = [(1, 2), (2, 1), (2, 2), (4, 1)]
SPLIT_BLOCKS = {1: set(), 2: {"k_proj", "v_proj"}, 4: {"q_proj", "k_proj", "v_proj", "o_proj"}}
"""Tensor-parallel size → matrices of which the boxes of ranks end inside blocks of 128 x 128."""


class Counting:
    """A communicator that counts the bytes it broadcasts."""

    def __init__(self, comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.all_gather = comm.all_gather
        self.nbytes = 0

    def broadcast(self, tensor, source):
        self.nbytes += tensor.nbytes
        self._comm.broadcast(tensor, source)


def quantised(tensor: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """Parts of a matrix, with scales that the declared rule would not choose."""
    if form == "int4":
        scales = torch_ops.int4_group_scales(tensor) * torch.tensor(1.5, dtype=torch.bfloat16)
        shape = torch.tensor(tensor.shape, dtype=torch.int32)
        return {"_packed": torch_ops.int4_quantize(tensor, scales), "_scale": scales, "_shape": shape}
    scales = torch_ops.fp8_block_scales(tensor, power_of_two=form == "fp8_powers_of_two")
    scales *= 2 if form == "fp8_powers_of_two" else 1.37
    return {"": torch_ops.fp8_quantize(tensor, scales), "_scale_inv": scales}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Form → a folder as engines hold it, and one of the same weights in BF16."""
    root, made = tmp_path_factory.mktemp("exchange"), {}
    plain = random_tensors(CONFIG, torch.bfloat16)
    matrices = [name for name in plain if name.endswith("_proj.weight")]

    def get(form):
        if form in made:
            return made[form]
        if form == "fp8_declared":
            folder = write_folder(root / form, CONFIG, plain)
            model = open_model(folder)
            made[form] = as_fp8(model, fp8_tensors(model.table)), folder
            return made[form]
        stored = {n: t for n, t in plain.items() if n not in matrices}
        stored |= {n + part: t for n in matrices for part, t in quantised(plain[n], form).items()}
        how = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        if form == "int4":
            weights = {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True}
            how = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        elif form == "fp8_powers_of_two":
            how["scale_fmt"] = "ue8m0"
        folder = write_folder(root / form, CONFIG | {"quantization_config": how}, stored)
        made[form] = open_model(folder), folder
        return made[form]

    return get


def train(chunks):
    """Change every other row a little; the scales of the folder no longer hold where a row changed."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter[::2].mul_(1.01)


def run(folder, layout, body, trained=True):
    """``body`` of the source on every rank, the results in order."""
    tp, pp = layout

    def on_rank(comm):
        chunks = stage_chunks(CONFIG, (comm.rank % tp, tp), comm.rank // tp, pp, torch.bfloat16)
        load_hf(chunks, folder)
        if trained:
            train(chunks)
        return body(MegatronWeightSource(chunks, CONFIG, dtype=torch.bfloat16, place=Place(0, Counting(comm))))

    results = run_ranks(tp * pp, on_rank)
    errors = [result for result in results if isinstance(result, Exception)]
    assert not errors, errors[0]
    return results


def assert_equal_bytes(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def encoded_whole(model, source):
    """Parts of every tensor, encoded after it was gathered."""
    form = EngineFormat(model)
    gathered = FormattedSource(source, AsHeld())
    return {
        part: tensor
        for name, values in gathered
        for part, tensor in zip(form.names(name), form.encode(name, values), strict=True)
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_owners_encode_what_is_encoded_whole(folders, form, layout, trained):
    model, folder = folders(form)

    def body(source):
        expected = encoded_whole(model, source)
        found = FormattedSource(source, EngineFormat(model))
        for _ in range(2):
            assert_equal_bytes(dict(found), expected)
        split = {name.rsplit(".", 2)[1] for name in found.whole_first}
        assert split == (set() if form == "int4" else SPLIT_BLOCKS[layout[0]])
        return expected

    first, *others = run(folder, layout, body, trained)
    for other in others:
        assert_equal_bytes(other, first)
    if form != "fp8_declared":  # the folder's own scales hold its own weights, and only them
        stored = load_file(folder / "model.safetensors")
        kept = {name for name in first if torch.equal(first[name], stored[name])}
        assert kept == set(first) if not trained else not any("_scale" in name for name in kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_write_their_parts_into_shared_memory(folders, form, layout):
    model, folder = folders(form)
    memory: dict[str, torch.Tensor] = {}

    def body(source):
        weights = FormattedSource(source, EngineFormat(model))
        for meta in source.metadata() if source.place.model.rank == 0 else ():
            parts = [meta] if meta.name in weights.whole_first else EngineFormat(model).parts(meta)
            memory.update({part.name: torch.zeros(part.shape, dtype=part.dtype) for part in parts})
        source.place.model.all_gather(None)
        before = source.place.model.nbytes
        weights.write_local([meta.name for meta in source.metadata()], memory)
        assert source.place.model.nbytes == before, "no rank waits for another"
        source.place.model.all_gather(None)
        expected, plain = encoded_whole(model, source), dict(source)
        return {name: plain[name] if name in weights.whole_first else expected[name] for name in memory}

    assert_equal_bytes(memory, run(folder, layout, body)[0])


@pytest.mark.parametrize(("form", "share"), [("fp8_declared", 1 / 2), ("int4", 1 / 4 + 1 / 32)])
@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
def test_codes_and_scales_travel_instead_of_weights(folders, form, share, layout):
    model, folder = folders(form)

    def body(source):
        weights, sent = FormattedSource(source, EngineFormat(model)), source.place.model
        list(weights)
        encoded = {
            meta.name: len(EngineFormat(model).names(meta.name)) > 1 and meta.name not in weights.whole_first
            for meta in source.metadata()
        }
        return sent.nbytes, [(meta.nbytes, encoded[meta.name]) for meta in source.metadata()]

    for sent, tensors in run(folder, layout, body):
        quantised_bytes = sum(nbytes for nbytes, coded in tensors if coded)
        assert quantised_bytes > 0.8 * sum(nbytes for nbytes, _ in tensors)
        least = share * quantised_bytes + sum(nbytes for nbytes, coded in tensors if not coded)
        assert least <= sent <= 1.01 * least


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize(("matrix", "at"), [("up_proj", (300, 7)), ("k_proj", (100, 7))])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_on_one_rank_is_an_error_on_all(folders, tmp_path, form, matrix, at, value):
    model, folder = folders(form)
    name = f"model.layers.0.self_attn.{matrix}.weight" if matrix == "k_proj" else f"model.layers.0.mlp.{matrix}.weight"

    def body(source):
        for owned in source.owned(name):
            rows = owned.box[0]
            if owned.owner == source.place.model.rank and rows[0] <= at[0] < rows[1]:
                source.values(owned)[at[0] - rows[0], at[1]] = value
                assert source.place.model.rank == 1
        weights = FormattedSource(source, EngineFormat(model))
        with pytest.raises(UserError, match=f"{name} holds NaN or infinity"):
            list(weights)
        sender = DiskSender(source, source.place.model, torch.device("cpu"), EngineFormat(model))
        with pytest.raises(UserError, match=f"{name} holds NaN or infinity"):
            sender.send(1, {"path": str(tmp_path / "version")}, None)
        return True

    assert all(run(folder, (2, 1), body))
    assert not (tmp_path / "version" / MANIFEST).exists()


def test_a_rank_that_cannot_read_its_scales_does_not_leave_the_others_waiting(folders):
    model, folder = folders("int4")

    def body(source):
        form = EngineFormat(model)
        if source.place.model.rank == 1:
            form._hint = lambda *_: (_ for _ in ()).throw(OSError("the disk is gone"))
        with pytest.raises((OSError, PeerError), match="the disk is gone") as error:
            list(FormattedSource(source, form))
        return type(error.value)

    assert run(folder, (2, 1), body) == [PeerError, OSError]


def test_scales_of_a_folder_are_read_once_and_only_by_their_owner(folders):
    model, folder = folders("int4")

    def body(source):
        form = EngineFormat(model)
        weights = FormattedSource(source, form)
        list(weights)
        kept = sum(hint.nbytes for hint in form._hints.values())
        form._folder = None
        list(weights)
        return kept, sum(part.nbytes for part in weights.metadata() if part.name.endswith("_scale"))

    found = run(folder, (2, 1), body)
    assert sum(kept for kept, _ in found) == found[0][1]
