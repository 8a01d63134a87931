"""Write down how a release of Megatron-Core names the weights of every model family: in memory and in a checkpoint.

To add a release: unpack its wheel anywhere (`pip download --no-deps --only-binary=:all: --python-version 3.12
megatron-core==VERSION`, then `unzip`), run this tool with `--source` on that folder, and run
`tests/weights/test_megatron_names.py`: what changed for us fails there, to be taken up there and in the weight tables.
`git diff --no-index` of two releases' files shows all of it. Without `--source`, the installed release is written down.

Tiny models are built on the CPU, with Megatron's local layers and with its Transformer Engine layers over a stand-in
for that library. All groups have one process. Without Transformer Engine, Megatron has no attention that takes latent
attention's head sizes: another module without weights stands in for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "weights" / "megatron_names"
STAND_IN = ROOT / "tests" / "weights" / "te_stub"

VARIANTS = {"local": ("local",), "te": ("te", "te_grouped")}
"""Layer specification → variants of a model: experts one by one, or (``_grouped``) all in one module."""

Config = dict[str, Any]

_BASE: Config = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 6}
_BASE |= {"vocab_size": 131, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_BASE |= {"rope_theta": 10000.0, "max_position_embeddings": 64}
_GQA: Config = _BASE | {"num_key_value_heads": 2}
_MLA: Config = _BASE | {"num_key_value_heads": 6, "kv_lora_rank": 14, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
_MLA |= {"v_head_dim": 16, "model_type": "deepseek_v3"}
_MOE: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 18, "norm_topk_prob": True}
_SIGMOID_MOE: Config = _MOE | {"n_routed_experts": 4, "n_shared_experts": 3, "n_group": 1, "topk_group": 1}
_SIGMOID_MOE |= {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}
_SIGMOID_MOE |= {"topk_method": "noaux_tc"}
_QWEN3_MOE: Config = _GQA | _MOE | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4}
_GLM4_MOE: Config = _GQA | _SIGMOID_MOE | {"model_type": "glm4_moe", "head_dim": 16, "attention_bias": True}
_QWEN3_5: Config = _GQA | _MOE | {"model_type": "qwen3_5_moe_text", "head_dim": 16, "num_experts": 4}
_QWEN3_5 |= {"shared_expert_intermediate_size": 22, "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1}
_QWEN3_5 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
_QWEN3_5 |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 3}
_QWEN3_5 |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
del _QWEN3_5["intermediate_size"], _QWEN3_5["norm_topk_prob"]

MODELS: dict[str, Config] = {
    "qwen2": _GQA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama3": _GQA | {"model_type": "llama"},
    "qwen3": _GQA | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_listed": _QWEN3_MOE,
    "deepseek_v3": _MLA | _SIGMOID_MOE | {"q_lora_rank": 26, "num_nextn_predict_layers": 1},
    "moonlight": _MLA | _SIGMOID_MOE | {"q_lora_rank": None, "num_nextn_predict_layers": 0},
    "glm4_moe": _GLM4_MOE | {"use_qk_norm": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
    "qwen3_5": _QWEN3_5,
}
"""Models as their ``config.json`` describes them. Within one of them every axis has its own size. ``_listed`` tells
Megatron the expert layers as a list instead of a stride: the same model, other checkpoint keys."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the module's state dict.

    Attributes:
        kind: ``parameter`` or ``buffer``.
        key: the checkpoint tensor that it is a part of; ``None`` = it is not saved.
        index: its place on the axes (layer, expert) that the checkpoint tensor has in front.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    key: str | None
    index: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint. ``flexible``: a stored tensor of another shape is cut or padded when loaded."""

    dtype: str
    shape: tuple[int, ...]
    flexible: bool


@dataclass(frozen=True)
class Objects:
    """Byte objects of a checkpoint, one for each index of ``grid``, all alike."""

    grid: tuple[int, ...]
    content: str

    def keys(self, key: str) -> list[str]:
        """Their names in the checkpoint's metadata."""
        shape = ".".join(map(str, self.grid))
        indices = itertools.product(*map(range, self.grid))
        return [f"{key}/shard_{'.'.join(map(str, index))}_{shape}" for index in indices]


@dataclass
class Names:
    """One model under one variant. ``failure`` is set where Megatron refuses to build it."""

    weights: dict[str, Weight] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Objects] = field(default_factory=dict)
    failure: str | None = None


Release = dict[tuple[str, str], Names]
"""(model, variant) → its names."""

_ROWS: dict[str, type] = {"weights": Weight, "tensors": Tensor, "objects": Objects}


def encode(version: str, release: Release) -> str:
    """A release as JSON text, a row per name: variants that agree → the attributes of their common value, in order."""
    lines = []
    for model, config in MODELS.items():
        variants = {v: names for (m, v), names in release.items() if m == model}
        parts: dict[str, str] = {"config": json.dumps(config)}
        if failures := {v: names.failure for v, names in sorted(variants.items()) if names.failure}:
            parts["failures"] = json.dumps(failures)
        for section in _ROWS:
            rows = []
            for name in sorted({n for names in variants.values() for n in getattr(names, section)}):
                values: dict[str, list[str]] = {}
                for variant, names in sorted(variants.items()):
                    if name in getattr(names, section):
                        row = json.dumps(list(vars(getattr(names, section)[name]).values()))
                        values.setdefault(row, []).append(variant)
                pairs = ", ".join(f'"{" ".join(who)}": {row}' for row, who in values.items())
                rows.append(f"{json.dumps(name)}: {{{pairs}}}")
            parts[section] = "{\n" + ",\n".join(rows) + "}"
        body = ",\n".join(f'"{name}": {text}' for name, text in parts.items())
        lines.append(f'"{model}": {{\n{body}}}')
    return f'{{"megatron_core": "{version}", "models": {{\n' + ",\n".join(lines) + "}}\n"


def decode(text: str) -> Release:
    """The inverse of `encode`, without the configurations."""
    release: Release = {}
    for model, parts in json.loads(text)["models"].items():
        variants = VARIANTS["local"] + (VARIANTS["te"] if is_moe(parts["config"]) else VARIANTS["te"][:1])
        for variant in variants:
            names = release[model, variant] = Names(failure=parts.get("failures", {}).get(variant))
            for section, row_type in _ROWS.items():
                for name, values in parts[section].items():
                    for who, row in values.items():
                        if variant in who.split():
                            row = (tuple(v) if isinstance(v, list) else v for v in row)
                            getattr(names, section)[name] = row_type(*row)
    return release


def read(version: str) -> Release:
    """The names written down for a release."""
    return decode((RECORDS / f"{version}.json").read_text(encoding="utf-8"))


def is_moe(config: Config) -> bool:
    return "moe_intermediate_size" in config


def megatron_arguments(model: str, variant: str) -> dict[str, Any]:
    """Arguments of a (MLA) ``TransformerConfig`` for a model of `MODELS`."""
    hf = MODELS[model]
    arguments = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf.get("intermediate_size") or hf["moe_intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2" or hf.get("attention_bias", False),
        "qk_layernorm": hf["model_type"] not in ("qwen2", "llama"),
        "mtp_num_layers": hf.get("num_nextn_predict_layers") or hf.get("mtp_num_hidden_layers") or None,
    }
    if "kv_lora_rank" in hf:
        arguments |= {name: hf[name] for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
        arguments |= {"qk_head_dim": hf["qk_nope_head_dim"], "qk_pos_emb_head_dim": hf["qk_rope_head_dim"]}
    else:
        arguments["kv_channels"] = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    if is_moe(hf):
        listed = [int(i >= hf.get("first_k_dense_replace", 0)) for i in range(hf["num_hidden_layers"])]
        arguments |= {
            "num_moe_experts": hf.get("num_experts") or hf["n_routed_experts"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": variant.endswith("_grouped"),
            "moe_layer_freq": 1 if model in ("qwen3_moe", "qwen3_5") else listed,
        }
    if "n_shared_experts" in hf:
        arguments |= {
            "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
            "moe_router_score_function": hf["scoring_func"],
            "moe_router_enable_expert_bias": True,
        }
    if is_hybrid(hf):
        arguments |= {name: value for name, value in hf.items() if name.startswith("linear_num_")}
        arguments |= {name: hf[name] for name in ("linear_key_head_dim", "linear_value_head_dim")}
        arguments |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in hf["layer_types"]],
            "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            "transformer_impl": "local" if variant == "local" else "transformer_engine",
        }
    return arguments


def is_hybrid(config: Config) -> bool:
    return "linear_num_key_heads" in config


def _build(model: str, variant: str) -> Any:
    """A GPTModel on one process. Raises whatever Megatron raises."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hf, te = MODELS[model], variant != "local"
    config = (MLATransformerConfig if "kv_lora_rank" in hf else TransformerConfig)(
        **megatron_arguments(model, variant),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    if is_hybrid(hf):
        spec = _hybrid_spec(config, te)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm")
    if not te and "kv_lora_rank" in hf:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    mtp = _prediction_spec(config, spec, te) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_percent=hf.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        mtp_block_spec=mtp,
    )


def _hybrid_spec(config: Any, te: bool) -> Any:
    """Layers of which some are Gated DeltaNets: Megatron's, or ours where Megatron has none (without TE)."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as stock

    from megatron_fleet.models.qwen3_5.modules.megatron import LAYER
    from megatron_fleet.platform.megatron.spec import layer_spec

    if te:
        return stock.get_transformer_block_with_experimental_attention_variant_spec(config)
    return layer_spec(config, mixer=LAYER, pattern=config.linear_attention_freq)


def _prediction_spec(config: Any, spec: Any, te: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as stock

    from megatron_fleet.platform.megatron.spec import TorchBackend

    if te or not config.layernorm_zero_centered_gamma:
        return stock.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=te)
    return stock.get_gpt_mtp_block_spec_for_backend(config, spec, TorchBackend())


def names_of(module: Any) -> Names:
    """Names of a built model. Raises ValueError where pieces do not tile what Megatron says they are pieces of."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = module.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})
    pieces: dict[str, list[Any]] = {}
    of_name: dict[str, list[Any]] = {}
    for name, entry in sharded.items():
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        of_name[name] = built if isinstance(built, list) else [built]
        for piece in of_name[name]:
            pieces.setdefault(piece.key, []).append(piece)
    names = Names()
    for key, parts in pieces.items():
        if all(isinstance(part, ShardedTensor) for part in parts):
            names.tensors[key] = _tensor(key, parts)
        elif all(isinstance(part, ShardedObject) for part in parts):
            names.objects[key] = _objects(key, parts)
        else:
            raise ValueError(f"{key}: {[type(part).__name__ for part in parts]}")
    parameters = dict(module.named_parameters())
    for name, value in module.state_dict(keep_vars=True).items():
        if not name.rpartition(".")[2].startswith("_extra_state"):
            kind = "parameter" if name in parameters else "buffer"
            parts = {piece.key.rpartition(".")[2]: piece for piece in of_name.get(name, [])}
            if name.rpartition(".")[2] == "weight" and parts.keys() > {"query"}:
                # A layer's input projection and convolution are stored as tensors of their own for each use.
                for part, piece in parts.items():
                    place = _place(f"{name}.{part}", [piece])
                    names.weights[f"{name}.{part}"] = Weight(kind, _dtype(value), tuple(piece.data.shape), *place)
            else:
                place = _place(name, of_name.get(name, []))
                names.weights[name] = Weight(kind, _dtype(value), tuple(value.shape), *place)
    return names


def _place(name: str, pieces: list[Any]) -> tuple[str | None, tuple[int, ...]]:
    places = {(piece.key, tuple(piece.global_offset[: piece.prepend_axis_num])) for piece in pieces}
    if len(places) > 1:
        raise ValueError(f"{name} is spread over {sorted(places)}")
    return places.pop() if places else (None, ())


def _tensor(key: str, pieces: list[Any]) -> Tensor:
    (one,) = {Tensor(_dtype(p), tuple(p.global_shape), p.allow_shape_mismatch) for p in pieces}
    corners = {tuple(p.global_offset) for p in pieces}
    if sum(math.prod(p.local_shape) for p in pieces) != math.prod(one.shape) or len(corners) != len(pieces):
        raise ValueError(f"{key}: {len(pieces)} pieces do not tile {one.shape}")
    return one


def _objects(key: str, pieces: list[Any]) -> Objects:
    (one,) = {Objects(tuple(p.global_shape), _content(p.data)) for p in pieces}
    if sorted(p.unique_key for p in pieces) != sorted(one.keys(key)):
        raise ValueError(f"{key}: {len(pieces)} objects do not fill {one.grid}")
    return one


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _content(data: Any) -> str:
    return "None" if data is None else f"{_dtype(data)}{list(data.shape)}"


def _enumerate_here(spec: str) -> tuple[str, Release]:
    """Version and names of the Megatron that this process imports, under one layer specification."""
    import torch
    import torch.distributed as dist

    if spec == "local":
        # As on a machine without Transformer Engine, whatever is installed on this one.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    import megatron_fleet.platform.megatron  # noqa: F401  # makes Megatron importable without a GPU

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    torch.set_num_threads(1)
    release: Release = {}
    for model, config in MODELS.items():
        for variant in VARIANTS[spec] if is_moe(config) else VARIANTS[spec][:1]:
            try:
                module = _build(model, variant)
            except Exception as error:
                release[model, variant] = Names(failure=f"{type(error).__name__}: {error}".splitlines()[0])
            else:
                release[model, variant] = names_of(module)
    dist.destroy_process_group()
    return megatron.core.__version__, release


def enumerate_release(source: Path | None) -> str:
    """Names of a release as JSON text, a process for each layer specification.

    Args:
        source: folder that holds the unpacked package ``megatron``; ``None`` = the installed one.

    Raises:
        UserError: ``source`` holds no Megatron-Core.
        RuntimeError: a process failed; with the end of what it printed.
    """
    if source and not (source / "megatron" / "core" / "__init__.py").is_file():
        raise UserError(f"{source} holds no megatron/core/__init__.py; name the folder a wheel was unpacked into.")
    with tempfile.TemporaryDirectory() as folder:
        running = {spec: _start(spec, source, folder) for spec in VARIANTS}
        outputs = {spec: process.communicate()[0] for spec, process in running.items()}
        for spec, process in running.items():
            if process.returncode:
                raise RuntimeError(f"{spec}: exit status {process.returncode}\n{outputs[spec][-3000:]}")
        texts = {spec: Path(folder, f"{spec}.json").read_text(encoding="utf-8") for spec in VARIANTS}
    (version,) = {json.loads(text)["megatron_core"] for text in texts.values()}
    release = {
        at: names for spec, text in texts.items() for at, names in decode(text).items() if at[1] in VARIANTS[spec]
    }
    return encode(version, release)


def _start(spec: str, source: Path | None, folder: str) -> subprocess.Popen[str]:
    """This tool in a process of its own, about to write ``{spec}.json`` into ``folder``."""
    path = [*([source] if source else []), *([STAND_IN] if spec == "te" else []), ROOT]
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--spec", spec, "--out", folder]
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder of an unpacked wheel; default: the installed release")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder to write VERSION.json to")
    parser.add_argument("--spec", choices=sorted(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.spec:
        text, name = encode(*_enumerate_here(arguments.spec)), arguments.spec
    else:
        try:
            text = enumerate_release(arguments.source)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        name = json.loads(text)["megatron_core"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
