"""Images, and a folder of a model that sees them."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import PIL.Image
from tokenizer_fixtures import CORPUS

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.tokenizer import train_tokenizer
from megatron_fleet.models.qwen3.chat import QWEN_VL_TOKENS

PROCESSOR = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 40}}


@cache
def make_image(width: int, height: int, colour: str = "red") -> Image:
    out = io.BytesIO()
    PIL.Image.new("RGB", (width, height), colour).save(out, "PNG")
    return Image("image/png", out.getvalue())


def vision_folder(folder: Path, **processor: object) -> Path:
    """A tokenizer with the vision tokens, and the two files that say how images become tokens."""
    special = train_tokenizer(CORPUS, 400, folder, QWEN_VL_TOKENS).special
    config = {"image_token_id": special["<|image_pad|>"], "video_token_id": special["<|video_pad|>"]}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | processor))
    return folder
