"""Weights in the form that engines take: the bytes of their folder, and those that a conversion writes."""

from __future__ import annotations

import asyncio
import json

import pytest

torch = pytest.importorskip("torch")

from folder_source import FolderSource  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from simulated_trainer import RecordingEngines, SimulatedTrainer  # noqa: E402
from tiny_models import make, raw_config, stored_tensors  # noqa: E402
from weight_fixtures import Silence  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.convert.execute import Share, execute  # noqa: E402
from megatron_fleet.convert.to_hf import plan_to_hf  # noqa: E402
from megatron_fleet.convert.to_megatron import plan_to_megatron  # noqa: E402
from megatron_fleet.platform.communicator import PeerError  # noqa: E402
from megatron_fleet.weight_sync import engine_format  # noqa: E402
from megatron_fleet.weight_sync.engine_format import EngineFormat  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402
from megatron_fleet.weight_sync.shm.sender import ShmSender  # noqa: E402
from megatron_fleet.weights.exchange import AsHeld, FormattedSource  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402

HALF = "deepseek_v3_fp8_half"
QUANTISED = ["deepseek_v3_fp8", HALF, "kimi_k2_thinking", "kimi_k25"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    made = {family: make(family.removesuffix("_half"), folder / family) for family in QUANTISED}
    for file in made[HALF].glob("*.safetensors"):
        tensors = load_file(file).items()
        save_file({n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in tensors}, file)
    return made


def train(source):
    """As an optimizer does: every value moves a little, every other expert's not at all."""
    generator = torch.Generator().manual_seed(9)
    for name, tensor in source.tensors.items():
        if ".experts.1." not in name:
            moved = tensor + 0.01 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
            source.tensors[name] = moved.bfloat16().float()


def sent(folder, edit, ranks=2):
    """Tensors that engines receive from two ranks."""

    def sender(comm):
        source = FolderSource(folder, comm)
        edit(source)
        return ShmSender(source, comm, torch.device("cpu"), EngineFormat(open_model(folder)))

    engines, transport = RecordingEngines(), make_transport("shm")
    asyncio.run(transport.sync(SimulatedTrainer(ranks, sender), engines, 1))
    transport.close()
    return engines.tensors


def assert_equal_bytes(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("family", QUANTISED)
def test_weights_nobody_changed_are_sent_as_the_bytes_of_the_folder(folders, family):
    model = open_model(folders[family])
    stored = stored_tensors(folders[family])
    found = sent(folders[family], lambda source: None)
    assert set(found) == {name for name in stored if name not in model.passthrough}
    for name, tensor in found.items():
        assert_equal_bytes(tensor, stored[name])


@pytest.mark.parametrize("family", QUANTISED)
def test_trained_weights_are_sent_as_the_bytes_that_conversion_writes(folders, family, tmp_path):
    trained = FolderSource(folders[family])
    train(trained)
    plain, stored = tmp_path / "plain", stored_tensors(folders[family])
    plain.mkdir()
    config = raw_config(family.removesuffix("_half"), "v4")
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in FormattedSource(trained, AsHeld())}, plain / "model.safetensors"
    )
    for plan, out in (
        (lambda: plan_to_megatron(open_model(plain)), tmp_path / "megatron"),
        (lambda: plan_to_hf(tmp_path / "megatron", folders[family]), tmp_path / "hf"),
    ):
        assert execute(plan(), str(out), 2, Share(), Silence())
    expected = stored_tensors(tmp_path / "hf")
    found = sent(folders[family], train)
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, stored[name])]
    assert any(n.endswith(("_scale_inv", "_scale")) for n in changed)
    for name, tensor in found.items():
        assert_equal_bytes(tensor, expected[name])


@pytest.mark.parametrize("family", QUANTISED)
def test_the_form_for_other_devices_gives_the_same(folders, family, monkeypatch):
    """GPU ranks quantise with torch; in slices, so small ones here."""
    monkeypatch.setattr(engine_format, "SLICE_VALUES", 1)
    source = FolderSource(folders[family])
    train(source)
    form = EngineFormat(open_model(folders[family]))
    seen = set()
    for name, values in FormattedSource(source, AsHeld()):
        if len(form.names(name)) > 1 and values.shape not in seen:
            seen.add(values.shape)
            expected = form.encode(name, values)
            with monkeypatch.context() as patch:
                patch.setattr(form, "_fp8", form._fp8_torch)
                patch.setattr(form, "_int4", form._int4_torch)
                found = form.encode(name, values)
            for a, b in zip(found, expected, strict=True):
                assert_equal_bytes(a, b)
    assert len(seen) >= 2


@pytest.mark.parametrize("family", QUANTISED)
def test_a_formatted_source_declares_what_it_yields(folders, family):
    source = FormattedSource(FolderSource(folders[family]), EngineFormat(open_model(folders[family])))
    stored = stored_tensors(folders[family])
    yielded = list(source)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in yielded]
    for name, tensor in yielded:
        assert_equal_bytes(tensor, stored[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "kimi_k2_thinking"])
def test_a_gpu_quantises_to_the_same_bytes(folders, family):
    form = EngineFormat(open_model(folders[family]))
    for name, values in FormattedSource(FolderSource(folders[family]), AsHeld()):
        for a, b in zip(form.encode(name, values * 1.01), form.encode(name, values.cuda() * 1.01), strict=True):
            assert_equal_bytes(b.cpu(), a)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "kimi_k25"])
def test_what_is_no_number_stops_the_update_with_its_name(folders, family, value):
    form = EngineFormat(open_model(folders[family]))

    def spoil(source):
        name = next(name for name in source.tensors if len(form.names(name)) > 1)
        train(source)  # FP8 has a NaN, which an unchanged block keeps
        source.tensors[name][3, 5] = value

    with pytest.raises((UserError, PeerError), match=r"proj.weight holds NaN or infinity"):
        sent(folders[family], spoil)
    source = FolderSource(folders[family])
    spoil(source)
    form._fp8, form._int4 = form._fp8_torch, form._int4_torch
    with pytest.raises(UserError, match=r"proj.weight holds NaN or infinity"):
        list(FormattedSource(source, form))
