"""The tokens that Qwen 2.5 and Qwen 3 add to their vocabulary."""

from dataclasses import replace

from megatron_fleet.models.chat.tokenizer import AddedTokens
from megatron_fleet.models.qwen3.chat_template import QWEN3_CHAT_TEMPLATE

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_PAD, VIDEO_PAD)

QWEN3_TOKENS = AddedTokens(
    control=(END_OF_TEXT, IM_START, IM_END),
    tags=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    stops=(IM_END, END_OF_TEXT),
    pad=END_OF_TEXT,
    chat_template=QWEN3_CHAT_TEMPLATE,
)

QWEN_VL_TOKENS = replace(
    QWEN3_TOKENS,
    control=(*QWEN3_TOKENS.control, *VISION_TOKENS),
    chat_template=None,
)
"""Vision tokens of Qwen2-VL to Qwen3-VL, whose templates come with the models."""
