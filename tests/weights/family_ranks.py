"""One rank of test_families: every family in every layout of its world size, loaded directly and converted.

Arguments: the folder, the families.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import dequantise, stored_tensors, unstacked

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.megatron_config import megatron_arguments
from megatron_fleet.models.model import Model
from megatron_fleet.platform import device
from megatron_fleet.platform.megatron.attention import MicroBatchParams
from megatron_fleet.platform.megatron.spec import TorchBackend
from megatron_fleet.trainer.megatron.build import build_stage, stage_layers, transformer_config
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weights.exchange import FormattedSource
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.shards import load_hf
from megatron_fleet.weights.source import MegatronWeightSource, megatron_place

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

LENGTHS = (24, 17)
MICRO_BATCH_TOKENS = 48
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Layout:
    """Sizes; what ``world`` has more ranks for are replicas."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    world: int = 4

    @property
    def name(self) -> str:
        return f"tp{self.tp}pp{self.pp}vpp{self.vpp or 1}ep{self.ep}etp{self.etp}"

    @property
    def for_experts(self) -> bool:
        return self.ep > 1


LAYOUTS = [
    Layout(world=2),
    Layout(tp=2, etp=2, world=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2, world=2),
    Layout(tp=2, pp=2, etp=2),
    Layout(ep=2, world=2),
    Layout(tp=2, pp=2, ep=2),
    Layout(tp=2, ep=2, etp=2),
]
SAVED, SAVED_DENSE = LAYOUTS[6], LAYOUTS[4]
CONVERTED = [LAYOUTS[i] for i in (0, 1, 3, 5, 6)]
"""Layouts in which converted checkpoints are loaded, which takes longest. Each size of the others is among them."""


def initialise(layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)


def build(model: Model, layout: Layout) -> list[GPTModel]:
    sizes = {"virtual": layout.vpp or 1, "expert": layout.ep, "expert_tensor": layout.etp}
    config = transformer_config(model, ParallelConfig(tensor=layout.tp, pipeline=layout.pp, **sizes), torch.float32)
    stages = [None] if layout.vpp is None else range(layout.vpp)
    chunks = [build_stage(model, config, MICRO_BATCH_TOKENS, GPTModel, stage) for stage in stages]
    forget(chunks)
    return chunks


def with_prediction(model: Model) -> GPTModel:
    """The model with its prediction layers, on one stage; for their weights alone."""
    config = transformer_config(model, ParallelConfig(), torch.float32, mtp_num_layers=model.mtp)
    spec = stage_layers(model, config)
    prediction = get_gpt_mtp_block_spec_for_backend(config, spec, TorchBackend())
    chunk = GPTModel(
        config, spec, model.vocab, MICRO_BATCH_TOKENS, mtp_block_spec=prediction, **megatron_arguments(model).gpt
    )
    forget([chunk])
    return chunk


def forget(chunks: list[GPTModel]) -> None:
    """Overwrite all weights."""
    with torch.no_grad():
        for tensor in values(chunks).values():
            tensor.fill_(float("nan"))


def values(chunks: list[GPTModel]) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that belong to the weights."""
    found = {}
    for k, chunk in enumerate(chunks):
        found |= {f"{k}.{name}": p.data for name, p in chunk.named_parameters()}
        found |= {f"{k}.{name}": b for name, b in chunk.named_buffers() if name.endswith("expert_bias")}
    return found


def describe(chunks: list[GPTModel]) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    return {f"model{k}": chunk.sharded_state_dict(metadata=metadata) for k, chunk in enumerate(chunks)}


def load_converted(chunks: list[GPTModel], folder: Path) -> None:
    state = dist_checkpointing.load(describe(chunks), str(folder))
    for k, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(state[f"model{k}"], strict=False)
        assert not [n for n in (*missing, *unexpected) if not n.endswith("_extra_state")], (missing, unexpected)


def logits(chunks: list[GPTModel], ids: torch.Tensor, vocab: int) -> torch.Tensor | None:
    """``[tokens, V]`` of the packed micro-batch, on the last stage."""
    ends = torch.tensor([0, LENGTHS[0], sum(LENGTHS), MICRO_BATCH_TOKENS], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, MICRO_BATCH_TOKENS - sum(LENGTHS))])
    packed = torch.cat([ids, torch.zeros(MICRO_BATCH_TOKENS - len(ids), dtype=torch.int64)])
    found: list[torch.Tensor] = []

    def step(_: Any, chunk: GPTModel) -> tuple[torch.Tensor, Any]:
        params = MicroBatchParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_kv=max(LENGTHS),
            lengths=LENGTHS,
            filler=MICRO_BATCH_TOKENS - sum(LENGTHS),
        )
        out = chunk(packed[None], positions[None], None, packed_seq_params=params)

        def keep(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            whole = gather_from_tensor_model_parallel_region(output)
            found.append(whole[0, : sum(LENGTHS), :vocab].clone())
            return output.sum(), torch.tensor(1, dtype=torch.int32), {}

        return out, partial(keep)

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([0, 0]) for _ in chunks] if len(chunks) > 1 else iter([0, 0]),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=MICRO_BATCH_TOKENS,
            micro_batch_size=1,
            forward_only=True,
        )
    return found[0] if found else None


def check(folder: Path, family: str, layout: Layout) -> str:
    """The greatest difference of logits, on the rank that has them."""
    hf = folder / family / "hf"
    config = json.loads((hf / "config.json").read_text())
    model = read_model(config)
    if layout.for_experts and not model.experts:
        return ""
    reference = torch.load(folder / family / "reference.pt")
    chunks = build(model, layout)
    if layout in CONVERTED:
        check_loading(chunks, hf, folder / family / "megatron" / "release")
    else:
        load_hf(chunks, hf)
        assert not [name for name, tensor in values(chunks).items() if tensor.isnan().any()]
    if model.mtp and layout == LAYOUTS[0]:
        check_loading([with_prediction(model)], hf, folder / family / "megatron" / "release")
    found = logits(chunks, reference["ids"], model.vocab)
    worst = 0.0
    if found is not None:
        worst = float((found - reference["logits"]).abs().max())
        assert worst <= TOLERANCE, f"logits differ by {worst}"
        assert torch.equal(found.argmax(-1), reference["logits"].argmax(-1))
    check_source(chunks, hf, config)
    if layout == (SAVED if model.experts else SAVED_DENSE):
        save(chunks, folder / family / "saved")
    return f"{worst:.1e}"


def check_loading(chunks: list[GPTModel], hf: Path, converted: Path) -> None:
    """Loaded directly and from the converted checkpoint, every value is the same."""
    load_hf(chunks, hf)
    direct = {name: tensor.clone() for name, tensor in values(chunks).items()}
    assert not [name for name, tensor in direct.items() if tensor.isnan().any()]
    forget(chunks)
    load_converted(chunks, converted)
    for name, tensor in values(chunks).items():
        assert torch.equal(tensor, direct[name]), f"{name} differs between direct and converted loading"


def check_source(chunks: list[GPTModel], hf: Path, config: dict[str, Any]) -> None:
    """The live export gives every tensor of the source back, and engines are sent its codes and scales."""
    source = MegatronWeightSource(chunks, config, dtype=torch.float32, place=megatron_place())
    stored, form = stored_tensors(hf), EngineFormat(open_model(hf))
    expected = unstacked(dequantise(stored))
    coded = {part for name in expected if len(form.names(name)) > 1 for part in form.names(name)}
    for name, tensor in FormattedSource(source, form) if coded else ():
        if name in coded:
            assert tensor.dtype == stored[name].dtype and tensor.shape == stored[name].shape, name
            assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name
    for name, tensor in source:
        wanted = expected[name].float()
        if name.endswith("linear_attn.norm.weight"):
            wanted = (wanted - 1.0) + 1.0  # Megatron's norms are centred at zero
        assert torch.equal(tensor, wanted), name


def save(chunks: list[GPTModel], out: Path) -> None:
    """As Megatron does, in bfloat16, but for what Qwen3.5 stores in float32."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not name.endswith(("A_log", "out_norm.weight")):
                parameter.data = parameter.data.to(torch.bfloat16)
    if dist.get_rank() == 0:
        out.mkdir()
    dist.barrier()
    dist_checkpointing.save(describe(chunks), str(out))


def main(folder: Path, families: list[str]) -> None:
    device.prepare(1, seed=0)
    dist.init_process_group("gloo")
    for layout in [x for x in LAYOUTS if x.world == dist.get_world_size()]:
        initialise(layout)
        for family in families:
            try:
                worst = check(folder, family, layout)
            except Exception as error:
                raise RuntimeError(f"{family} at {layout.name}") from error
            # The last stage has the logits.
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, worst)
            if dist.get_rank() == 0 and worst:
                print("passed", family, layout.name, max(gathered), flush=True)
        parallel_state.destroy_model_parallel()
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
    # Megatron's save leaves a helper process, and groups of former layouts threads that do not end by themselves.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)
