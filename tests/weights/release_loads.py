"""Models of one layer specification, loaded by Megatron-Core from converted checkpoints and directly from HF folders.

Arguments: ``local`` or ``te`` (over the stand-in, which must be on the path), and an empty folder. The release is the
one that this process imports.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

if sys.argv[1] == "local":
    sys.modules["transformer_engine"] = None  # as on a machine without it

import torch
import torch.distributed as dist
from recorded_names import megatron_names
from weight_fixtures import Silence, random_tensors, write_folder

import megatron_fleet.platform.megatron  # noqa: F401
from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.shards import load_hf

# isort: split
import megatron.core
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    buffers = {name: b for name, b in module.named_buffers() if name.endswith("expert_bias")}
    return {name: p.data for name, p in module.named_parameters()} | buffers


def forget(module: torch.nn.Module) -> None:
    for tensor in weights(module).values():
        tensor.fill_(float("nan"))


def check(model: str, variant: str, folder: Path) -> str:
    hf = folder / f"{model}-{variant}"
    config = megatron_names.MODELS[model] | {"architectures": ["x"]}
    write_folder(hf, config, random_tensors(config, torch.bfloat16))
    numbered = True if model == "qwen3_moe_listed" else None
    execute(plan_to_megatron(open_model(hf), numbered), f"{hf}-megatron", 1, Share(), Silence())
    try:
        module = megatron_names._build(model, variant)
    except ValueError as error:
        return f"not built ({str(error)[:30]})"
    forget(module)
    try:
        load_hf([module], hf)
    except UserError as error:
        return f"refused ({error})"
    direct = {name: tensor.clone() for name, tensor in weights(module).items()}
    assert not [name for name, tensor in direct.items() if tensor.isnan().any()]
    forget(module)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    described = module.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})
    # Megatron-Core 0.19 would ask for a package of its own otherwise.
    newer = "async_strategy" in inspect.signature(dist_checkpointing.load).parameters
    more = {"async_strategy": "mcore"} if newer else {}
    state = dist_checkpointing.load({"model": described}, f"{hf}-megatron/release", **more)
    for name, tensor in weights(module).items():
        assert torch.equal(state["model"][name], direct[name].to(tensor.dtype)), name
    return "loaded"


def main(spec: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    for model, config in megatron_names.MODELS.items():
        variants = megatron_names.VARIANTS[spec] if megatron_names.is_moe(config) else megatron_names.VARIANTS[spec][:1]
        for variant in variants:
            print(json.dumps([megatron.core.__version__, model, variant, check(model, variant, folder)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
