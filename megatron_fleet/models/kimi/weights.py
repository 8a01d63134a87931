"""Kimi K2 and K2 Thinking: DeepSeek-V3's layers. K2.5: the same under ``language_model.``, plus a vision tower."""

from dataclasses import replace

from megatron_fleet.models.deepseek_v3.weights import ARCHITECTURE as DEEPSEEK_V3

K2 = replace(DEEPSEEK_V3, model_types=("kimi_k2",))
K25 = replace(
    DEEPSEEK_V3,
    model_types=("kimi_k25",),
    text="text_config",
    body="language_model.model.",
    head="language_model.lm_head.weight",
    passthrough=(*DEEPSEEK_V3.passthrough, r"vision_tower\..+", r"mm_projector\..+"),
    ignored=(
        *DEEPSEEK_V3.ignored,
        *("vision_config", "use_unified_vision_chunk", "video_placeholder", "ignore_index"),
        *("projection_hidden_size", "projection_layer_norm_eps"),
    ),
)
"""The vision tower passes through."""
ARCHITECTURES = (K2, K25)
