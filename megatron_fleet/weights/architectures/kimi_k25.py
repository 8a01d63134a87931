"""Kimi K2.5: DeepSeek-V3's language model under ``language_model.``; the vision tower is carried."""

from dataclasses import replace

from megatron_fleet.weights.architectures import deepseek_v3

ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_types=("kimi_k25",),
    text="text_config",
    body="language_model.model.",
    head="language_model.lm_head.weight",
    carried=(*deepseek_v3.ARCHITECTURE.carried, r"vision_tower\..+", r"mm_projector\..+"),
    ignored=(
        *deepseek_v3.ARCHITECTURE.ignored,
        *("vision_config", "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "ignore_index"),
        *("projection_hidden_size", "projection_layer_norm_eps"),
    ),
)
