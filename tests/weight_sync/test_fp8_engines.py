"""Engines in block FP8 that start from a folder in BF16: they hold, and are sent, what a conversion to FP8 writes.

vLLM 0.32 computes block FP8 on CPUs with AMX, in layers and in experts. On others its own parameters and loaders take
the tensors here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import tiny_models
import torch
from block_models import block_config
from engine_process import EngineProcess, Engines
from folder_source import FolderSource
from local_sender import LocalSender
from safetensors.torch import load_file, save_file
from simulated_trainer import RecordingEngines, SimulatedTrainer
from tiny_models import stored_tensors
from weight_fixtures import Silence

from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_hf import FP8, plan_to_hf
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.weight_sync.broadcast.group import pack, unpack
from megatron_fleet.weight_sync.buckets import BucketLayout, make_buckets, source_groups, stored_parts, stream_buckets
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weight_sync.engine_model import FP8_FORMAT, FP8_LOADER, open_engine_model
from megatron_fleet.weight_sync.registry import make_transport
from megatron_fleet.weight_sync.shm.sender import ShmSender
from megatron_fleet.weight_sync.vllm_plugin import LOADER
from megatron_fleet.weights.exchange import AsHeld, FormattedSource
from megatron_fleet.weights.fp8_model import declare_fp8, fp8_tensors
from megatron_fleet.weights.hf_model import open_model

FAMILIES = ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_moe"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [100, 33, 2, 77, 410, 3, 9, 4], [500, 1, 250, 9, 9, 14, 30, 8]]
AMX = torch.cpu._is_amx_tile_supported()


def converted(folder: Path, out: Path) -> Path:
    """The folder by ``mfleet convert``: to a Megatron checkpoint, and back in FP8."""
    for plan, to in (
        (lambda: plan_to_megatron(open_model(folder)), out / "megatron"),
        (lambda: plan_to_hf(out / "megatron", folder, FP8), out / "hf"),
    ):
        assert execute(plan(), str(to), 2, Share(), Silence())
    return out / "hf"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family → a folder in BF16, the same by conversion in FP8, and its declaration."""
    root, made = tmp_path_factory.mktemp("fp8"), {}

    def get(family: str) -> tuple[Path, Path, dict]:
        if family not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiny_models, "raw_config", block_config)
                plain = tiny_models.make(family, root / family / "plain")
            model = open_model(plain)
            made[family] = plain, converted(plain, root / family), declare_fp8(model, fp8_tensors(model.table))
        return made[family]

    return get


def assert_equal_bytes(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def by_shm(plain, model, _):
    def sender(comm):
        source = FolderSource(plain, comm)
        return ShmSender(source, comm, torch.device("cpu"), EngineFormat(model))

    engines, transport = RecordingEngines(), make_transport("shm")
    asyncio.run(transport.sync(SimulatedTrainer(2, sender), engines, 1))
    transport.close()
    return engines.tensors


def by_disk(plain, model, folder):
    transport, sender = make_transport("disk", {"url": str(folder)}), LocalSender(FolderSource(plain), model)
    asyncio.run(transport.sync(sender, StoppedEngines(), 1))
    (version,) = folder.iterdir()
    return {name: tensor for file in version.glob("*.safetensors") for name, tensor in load_file(file).items()}


def by_broadcast(plain, model, _):
    """What rank 0 hands to NCCL or gloo, and an engine makes of it."""
    source, form = FolderSource(plain), EngineFormat(model)
    buckets = make_buckets(source_groups(source))
    layout, found = BucketLayout(stored_parts(buckets, form)), {}

    def send(bucket, tensors):
        memory = pack(layout, bucket, tensors, torch.device("cpu"))
        found.update((name, tensor.clone()) for name, tensor in unpack(layout, bucket, memory))

    stream_buckets(FormattedSource(source, form), stored_parts(buckets, form), send)
    return found


def by_cuda_ipc(plain, model, _):
    """What vLLM's trainer half takes."""
    return dict(FormattedSource(FolderSource(plain), EngineFormat(model)))


class StoppedEngines:
    """`WeightReceiver` without engines."""

    async def open_transport(self, init_info): ...
    async def begin_update(self): ...
    async def load(self, message): ...
    async def finish_update(self, version, message): ...


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [by_shm, by_disk, by_broadcast, by_cuda_ipc])
def test_engines_are_sent_what_conversion_writes_in_half_the_bytes(folders, tmp_path, way, family):
    plain, quantised, declared = folders(family)
    found, expected = way(plain, open_engine_model(plain, declared), tmp_path / "w"), stored_tensors(quantised)
    held = open_model(plain, prediction=False)
    assert set(found) == {n for n in expected if n not in held.passthrough and not n.startswith("mtp.")}
    for name, tensor in found.items():
        assert_equal_bytes(tensor, expected[name])
    codes = [tensor for tensor in found.values() if tensor.dtype == torch.float8_e4m3fn]
    scales = sum(tensor.nbytes for name, tensor in found.items() if name.endswith("_scale_inv"))
    assert len(codes) == len(fp8_tensors(held.table)) and scales <= sum(t.nbytes for t in codes) / 4000


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_for_other_devices_gives_the_same(folders, family, monkeypatch):
    plain, quantised, declared = folders(family)
    form, expected = EngineFormat(open_engine_model(plain, declared)), stored_tensors(quantised)
    monkeypatch.setattr(form, "_fp8", form._fp8_torch)
    for name, tensor in FormattedSource(FolderSource(plain), form):
        assert_equal_bytes(tensor, expected[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_quantises_to_the_bytes_of_the_conversion(folders, family):
    plain, quantised, declared = folders(family)
    form, expected = EngineFormat(open_engine_model(plain, declared)), stored_tensors(quantised)
    for name, values in FormattedSource(FolderSource(plain), AsHeld()):
        for part, found in zip(form.names(name), form.encode(name, values.cuda()), strict=True):
            assert_equal_bytes(found.cpu(), expected[part])


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_vllms_parameters_take_the_codes_and_scales(folders, monkeypatch, tensor_parallel):
    """The joined matrix of queries, keys and values, on each device: whole blocks of each, codes with their scales."""
    pytest.importorskip("vllm")
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import fp8

    plain, _, declared = folders("qwen3")
    sent = by_cuda_ipc(plain, open_engine_model(plain, declared), None)
    kernel = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: kernel)
    monkeypatch.setattr(
        fp8, "get_current_vllm_config", lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    )
    config = fp8.Fp8Config.from_config(declared)
    at = "model.layers.0.self_attn."
    for rank in range(tensor_parallel):
        group = SimpleNamespace(world_size=tensor_parallel, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_TP", group)
        layer = linear.QKVParallelLinear(
            256, 64, 8, 4, bias=False, quant_config=config, prefix=at + "qkv_proj", params_dtype=torch.bfloat16
        )
        for kind in ("weight", "weight_scale_inv"):
            parameter_ = getattr(layer, kind)
            parts = []
            for part in "qkv":
                tensor = sent[f"{at}{part}_proj.{kind}"]
                if part != "q":  # as wide as two devices need
                    tensor = torch.cat([tensor, tensor])
                parameter_.weight_loader(parameter_, tensor, part)
                parts.append(tensor.chunk(tensor_parallel)[rank])
            assert_equal_bytes(parameter_.data, torch.cat(parts))


def fp8_engine(folder: Path, declared: dict, log: Path) -> EngineProcess:
    overrides = {"quantization_config": declared}
    return EngineProcess(folder, log, dtype="bfloat16", load_format=FP8_FORMAT, hf_overrides=overrides)


def trained(plain: Path, out: Path) -> Path:
    """The folder with other weights."""
    out.mkdir()
    (out / "config.json").write_text((plain / "config.json").read_text())
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (t.float() + 0.02 * torch.randn(t.shape, generator=generator)).to(t.dtype)
        for name, t in stored_tensors(plain).items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def dequantised_scores(folder: Path) -> torch.Tensor:
    """Log-probs ``[N, T - 1]`` of the prompts by ``transformers`` in float32, with the weights that the codes mean."""
    ids = torch.tensor(PROMPTS)
    logprobs = tiny_models.reference_logits(folder, ids)[:, :-1].log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])[..., 0]


@pytest.mark.slow
@pytest.mark.skipif(not AMX, reason="vLLM computes block FP8 only on CPUs with AMX")
async def test_an_updated_engine_computes_what_one_that_starts_from_the_conversion_does(folders, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    plain, quantised, declared = folders("qwen3_moe")
    other = trained(plain, tmp_path / "other")
    converted_other = converted(other, tmp_path / "converted")
    monkeypatch.setenv(LOADER, FP8_LOADER)
    engine = fp8_engine(plain, declared, tmp_path / "log")
    try:
        first = engine.ask("score", PROMPTS)
        assert (torch.tensor(first) - dequantised_scores(quantised)).abs().mean() < 0.03
        assert (torch.tensor(first) - dequantised_scores(plain)).abs().mean() > 0.03, "FP8 rounds more than BF16"
        model, transport, engines = open_engine_model(plain, declared), make_transport("shm"), Engines(engine)
        await transport.sync(LocalSender(FolderSource(other), model), engines, 1)
        updated = engine.ask("score", PROMPTS)
        await transport.sync(LocalSender(FolderSource(plain), model), engines, 2)
        assert engine.ask("score", PROMPTS) == first and engines.failures == [] and updated != first
        await transport.sync(LocalSender(FolderSource(plain), open_model(plain)), engines, 3)
        assert "the update lacks" in engines.failures[0] and "weight_scale_inv" in engines.failures[0]
        transport.close()
    finally:
        engine.close()
    monkeypatch.delenv(LOADER)
    fresh = EngineProcess(converted_other, tmp_path / "fresh.log", dtype="bfloat16")
    try:
        assert fresh.ask("score", PROMPTS) == updated
    finally:
        fresh.close()
