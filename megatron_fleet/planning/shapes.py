"""Shapes of published models, so that a run can be planned where their weights are not.

Each is the model's ``config.json``, as far as anything that is planned depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object

Shape = dict[str, Any]

FP8: Shape = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
INT4: Shape = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}


def _shape(kind: str, sizes: tuple[int, int, int, int, int, int], context: int, *parts: Shape, **more: Any) -> Shape:
    """Return a shape. ``sizes``: layers, hidden, feed-forward, heads, key-value heads, vocabulary."""
    names = (
        *("num_hidden_layers", "hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "vocab_size"),
    )
    shape: Shape = {"model_type": kind, "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    for part in (dict(zip(names, sizes, strict=True)), *parts, more):
        shape |= part
    return shape


def _experts(number: int, chosen: int, width: int, **more: Any) -> Shape:
    return {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": width, **more}


def _latent(query: int | None, nope: int = 128, value: int = 128) -> Shape:
    sizes = {"kv_lora_rank": 512, "q_lora_rank": query, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64}
    return {**sizes, "v_head_dim": value}


def _routed(
    number: int, chosen: int, width: int, shared: int, scaling: float, dense: int = 1, groups: int = 1
) -> Shape:
    return {
        "n_routed_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "routed_scaling_factor": scaling,
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": groups // 2 or 1,
    }


def _yarn(factor: float) -> Shape:
    ramp = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {"rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, **ramp}}


def _qwen3_5(kind: str, sizes: tuple[int, int, int, int, int, int], value_heads: int, *parts: Shape) -> Shape:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    mixer = {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (sizes[0] // 4),
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": rope,
    }
    text = _shape(f"{kind}_text", sizes, 262144, {"head_dim": 256}, mixer, *parts)
    del text["rope_theta"]
    if not sizes[2]:
        del text["intermediate_size"]
    return {"model_type": kind, "text_config": text, "tie_word_embeddings": False, "vision_config": {"depth": 27}}


_QWEN3 = {"head_dim": 128}
_QWEN3_MOE = {"head_dim": 128, "norm_topk_prob": True}
_KIMI = _shape(
    *("kimi_k2", (61, 7168, 18432, 64, 64, 163840), 262144),
    *(_latent(1536), _routed(384, 8, 2048, 1, 2.827), _yarn(64.0), INT4),
    rope_theta=50000.0,
)
KNOWN: Mapping[str, Shape] = {
    "Qwen2.5-7B": _shape("qwen2", (28, 3584, 18944, 28, 4, 152064), 131072),
    "Qwen2.5-14B": _shape("qwen2", (48, 5120, 13824, 40, 8, 152064), 131072),
    "Qwen2.5-72B": _shape("qwen2", (80, 8192, 29568, 64, 8, 152064), 131072),
    "Qwen3-0.6B": _shape("qwen3", (28, 1024, 3072, 16, 8, 151936), 40960, _QWEN3, tie_word_embeddings=True),
    "Qwen3-4B": _shape("qwen3", (36, 2560, 9728, 32, 8, 151936), 40960, _QWEN3, tie_word_embeddings=True),
    "Qwen3-8B": _shape("qwen3", (36, 4096, 12288, 32, 8, 151936), 40960, _QWEN3),
    "Qwen3-14B": _shape("qwen3", (40, 5120, 17408, 40, 8, 151936), 40960, _QWEN3),
    "Qwen3-32B": _shape("qwen3", (64, 5120, 25600, 64, 8, 151936), 40960, _QWEN3),
    "Qwen3-30B-A3B": _shape("qwen3_moe", (48, 2048, 6144, 32, 4, 151936), 40960, _QWEN3_MOE, _experts(128, 8, 768)),
    "Qwen3-235B-A22B": _shape("qwen3_moe", (94, 4096, 12288, 64, 4, 151936), 40960, _QWEN3_MOE, _experts(128, 8, 1536)),
    "Qwen3.5-9B": _qwen3_5("qwen3_5", (32, 4096, 12288, 16, 4, 248320), 32),
    "Qwen3.5-27B": _qwen3_5("qwen3_5", (64, 5120, 17408, 24, 4, 248320), 48),
    "Qwen3.5-35B-A3B": _qwen3_5(
        *("qwen3_5_moe", (40, 2048, 0, 16, 2, 248320), 32),
        _experts(256, 8, 512, shared_expert_intermediate_size=512),
    ),
    "Llama-3.1-8B": _shape("llama", (32, 4096, 14336, 32, 8, 128256), 131072),
    "Llama-3-70B": _shape("llama", (80, 8192, 28672, 64, 8, 128256), 131072),
    "Moonlight-16B-A3B": _shape(
        *("deepseek_v3", (27, 2048, 11264, 16, 16, 163840), 8192),
        *(_latent(None), _routed(64, 6, 1408, 2, 2.446)),
        rope_theta=50000.0,
    ),
    "GLM-4.7-Flash": _shape(
        *("glm4_moe_lite", (47, 2048, 10240, 20, 20, 154880), 202752),
        *(_latent(768, nope=192, value=256), _routed(64, 4, 1536, 1, 1.8)),
        num_nextn_predict_layers=1,
    ),
    "DeepSeek-V3": _shape(
        *("deepseek_v3", (61, 7168, 18432, 128, 128, 129280), 163840),
        *(_latent(1536), _routed(256, 8, 2048, 1, 2.5, dense=3, groups=8), _yarn(40.0), FP8),
        num_nextn_predict_layers=1,
        rope_theta=10000.0,
    ),
    "Kimi-K2.5": {
        "model_type": "kimi_k25",
        "text_config": _KIMI,
        "tie_word_embeddings": False,
        "vision_config": {"vt_num_hidden_layers": 27},
    },
}
"""Name of a model → its shape."""


def shape_of(path: str) -> tuple[Shape, str]:
    """Return a model's ``config.json`` and where it is from: the folder, or this table by the folder's name.

    The name of a folder or hub repository may have a suffix, in any case: ``Qwen/Qwen3-8B``,
    ``qwen3-8b-64k``.

    Raises:
        UserError: the model is neither on this machine nor known.
    """
    file = Path(path) / "config.json"
    if file.is_file():
        return read_object(file, "fetch the model again"), str(file)
    name = Path(path).name.lower()
    found = [known for known in KNOWN if f"{name}-".startswith(f"{known.lower()}-")]
    if not found:
        raise UserError(
            f"model.path={path}: config.json is missing, and the name is not one of the models whose shape is built in "
            f"({', '.join(KNOWN)}); name a folder with the model's config.json, or one of these."
        )
    known = max(found, key=len)
    return KNOWN[known], f"the published shape of {known}, as model.path={path} is not on this machine"
