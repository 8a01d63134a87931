"""Qwen3-VL, dense: Qwen3's language model; the vision tower is carried.

On text alone the three axes of its rotary embedding have equal positions, so it computes what Qwen3 does.
"""

from dataclasses import replace

from megatron_fleet.weights.architectures import qwen3

ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    model_types=("qwen3_vl",),
    text="text_config",
    body="model.language_model.",
    carried=(*qwen3.ARCHITECTURE.carried, r"model\.visual\..+"),
    ignored=(
        *qwen3.ARCHITECTURE.ignored,
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    ),
)
