"""Quantised weights on their way to engines: the bytes of the engines' folder, and those that a conversion writes."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from folder_source import FolderSource  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from test_publish import RecordingClient  # noqa: E402
from tiny_models import make, raw_config, stored_tensors  # noqa: E402
from weight_fixtures import Silence, run_ranks  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.platform.communicator import PeerError  # noqa: E402
from megatron_fleet.weight_sync.publish_shm import ShmPublisher  # noqa: E402
from megatron_fleet.weight_sync.wire import Wire, WireSource  # noqa: E402
from megatron_fleet.weights import wire as wire_module  # noqa: E402
from megatron_fleet.weights.convert.execute import Share, execute  # noqa: E402
from megatron_fleet.weights.convert.to_hf import plan_to_hf  # noqa: E402
from megatron_fleet.weights.convert.to_megatron import plan_to_megatron  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402

QUANTISED = ["deepseek_v3_fp8", "kimi_k2_thinking", "kimi_k25"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wire")
    return {family: make(family, folder / family) for family in QUANTISED}


def train(source):
    """As an optimizer does: every value moves a little, every other expert's not at all."""
    generator = torch.Generator().manual_seed(9)
    for name, tensor in source.tensors.items():
        if ".experts.1." not in name:
            moved = tensor + 0.01 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
            source.tensors[name] = moved.bfloat16().float()


def published(folder, edit, ranks=2):
    """What engines receive from two ranks."""
    client = RecordingClient()

    def body(comm):
        source = FolderSource(folder, comm.rank, comm.size)
        edit(source)
        publisher = ShmPublisher(source, client if comm.rank == 0 else None, comm, Wire(open_model(folder)))
        publisher.publish(1)
        publisher.close()

    failures = [r for r in run_ranks(ranks, body) if isinstance(r, Exception)]
    if failures:
        raise failures[0]
    return client.tensors


def assert_equal_bytes(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("family", QUANTISED)
def test_weights_nobody_changed_travel_as_the_bytes_of_the_folder(folders, family):
    model = open_model(folders[family])
    stored = stored_tensors(folders[family])
    found = published(folders[family], lambda source: None)
    assert set(found) == {name for name in stored if name not in model.carried}
    for name, tensor in found.items():
        assert_equal_bytes(tensor, stored[name])


@pytest.mark.parametrize("family", QUANTISED)
def test_trained_weights_travel_as_the_bytes_that_conversion_writes(folders, family, tmp_path):
    trained = FolderSource(folders[family])
    train(trained)
    plain, stored = tmp_path / "plain", stored_tensors(folders[family])
    plain.mkdir()
    config = raw_config(family, "v4")
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in trained}, plain / "model.safetensors")
    for plan, out in (
        (lambda: plan_to_megatron(open_model(plain)), tmp_path / "megatron"),
        (lambda: plan_to_hf(tmp_path / "megatron", folders[family]), tmp_path / "hf"),
    ):
        assert execute(plan(), str(out), 2, Share(), Silence())
    expected = stored_tensors(tmp_path / "hf")
    found = published(folders[family], train)
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, stored[name])]
    assert any(n.endswith(("_scale_inv", "_scale")) for n in changed)
    for name, tensor in found.items():
        assert_equal_bytes(tensor, expected[name])


@pytest.mark.parametrize("family", QUANTISED)
def test_the_form_for_other_devices_gives_the_same(folders, family, monkeypatch):
    """GPU ranks quantise with torch; in slices, so small ones here."""
    monkeypatch.setattr(wire_module, "SLICE_VALUES", 1)
    source = FolderSource(folders[family])
    train(source)
    wire = Wire(open_model(folders[family]))
    seen = set()
    for name, values in source:
        if wire.is_quantised(name) and values.shape not in seen:
            seen.add(values.shape)
            expected = wire.encode(name, values)
            with monkeypatch.context() as patch:
                patch.setattr(wire, "_fp8", wire._fp8_torch)
                patch.setattr(wire, "_int4", wire._int4_torch)
                found = wire.encode(name, values)
            for a, b in zip(found, expected, strict=True):
                assert_equal_bytes(a, b)
    assert len(seen) >= 2


@pytest.mark.parametrize("family", QUANTISED)
def test_a_wire_source_says_what_it_yields(folders, family):
    source = WireSource(FolderSource(folders[family]), Wire(open_model(folders[family])))
    stored = stored_tensors(folders[family])
    yielded = list(source)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in yielded]
    assert [name for group in source.groups() for name in group] == [name for name, _ in yielded]
    for name, tensor in yielded:
        assert_equal_bytes(tensor, stored[name])
    grouped = list(source.iter_groups())
    assert [names for names, _ in grouped] == source.groups()
    flat = [tensor for _, tensors in grouped for tensor in tensors]
    assert all(torch.equal(a, b) for a, (_, b) in zip(flat, yielded, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "kimi_k25"])
def test_what_is_no_number_stops_the_update_with_its_name(folders, family, value):
    wire = Wire(open_model(folders[family]))

    def spoil(source):
        name = next(name for name in source.tensors if wire.is_quantised(name))
        train(source)  # FP8 has a NaN, which an unchanged block keeps
        source.tensors[name][3, 5] = value

    with pytest.raises((UserError, PeerError), match=r"proj.weight: holds NaN or infinity"):
        published(folders[family], spoil)
    source = FolderSource(folders[family])
    spoil(source)
    wire._fp8, wire._int4 = wire._fp8_torch, wire._int4_torch
    with pytest.raises(UserError, match=r"proj.weight: holds NaN or infinity"):
        list(WireSource(source, wire))
