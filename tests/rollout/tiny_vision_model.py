"""A random Qwen3-VL HF folder, small enough to serve in a test, and what transformers makes of it."""

from __future__ import annotations

import functools
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.images import PlacedImage, digest
from megatron_fleet.models.qwen3.chat import QWEN_VL_TOKENS

VOCABULARY = 320
SIDE = 32
"""Pixels along a token's side; sides that are multiples of it are not resized."""
PROCESSOR = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 640 * 640}, "processor_class": "Qwen3VLProcessor",
}  # fmt: skip


def write_tiny_vision_model(
    folder: Path, seed: int, corpus: Sequence[str] = ("a small corpus for a small model",), tied: bool = True
) -> Path:
    """float32 weights scaled up, so that what the model sees changes what it says."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = train_tokenizer(corpus, VOCABULARY, folder, QWEN_VL_TOKENS)
    special = tokenizer.special
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True, "rope_theta": 10_000.0}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": rope,
            "max_position_embeddings": 4096,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "in_channels": 3, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=special["<|image_pad|>"], video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"], vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.3 if "embed" in name else 0.1)
    model.to(torch.float32).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"})
    )
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"})
    )
    return folder


def noise(width: int, height: int, seed: int, kind: str = "PNG") -> Image:
    """An image that no compressor makes smaller, so that every pixel is a different one."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind)
    return Image(f"image/{kind.lower()}", file.getvalue())


def with_images(parts: Sequence[Sequence[int] | Image], vision) -> tuple[list[int], list[PlacedImage]]:
    """A prompt of token ids and images in order."""
    from megatron_fleet.models.images import size_of

    ids: list[int] = []
    placed = []
    for part in parts:
        if isinstance(part, Image):
            end = len(ids) + vision.tokens(*size_of(part))
            placed.append(PlacedImage(len(ids), end, part, digest(part)))
            ids += [vision.placeholder_id] * (end - len(ids))
        else:
            ids += part
    return ids, placed


def reference_logprobs(folder: Path, ids: Sequence[int], images: Sequence[Image], placeholder: int) -> np.ndarray:
    """float32 ``[T - 1]``: entry t is log π(ids[t + 1] | ids[: t + 1], images), by transformers."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = _load(folder)
    settings = {name: PROCESSOR[name] for name in PROCESSOR if name != "processor_class"}
    processor = Qwen2VLImageProcessorPil(**settings)
    seen = processor([PIL.Image.open(io.BytesIO(image.data)) for image in images], return_tensors="pt")
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=tokens, mm_token_type_ids=(tokens == placeholder).int(), **seen).logits[0]
    scores = torch.log_softmax(logits.float(), -1)[:-1].gather(1, tokens[0, 1:, None])
    return scores[:, 0].numpy()


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'


def write_looking_model(folder: Path) -> Path:
    """One that calls ``look`` in every turn, whatever it reads: each token of the call is unlike the others, and the
    head knows which one follows which."""
    content = CALL.partition("<tool_call>")[2].partition("</tool_call>")[0]
    write_tiny_vision_model(folder, seed=2, corpus=[content] * 50, tied=False)
    tokenizer = Tokenizer(folder)
    special = tokenizer.special
    chain = [*tokenizer.encode("\n"), special["<tool_call>"]]
    chain += [*tokenizer.encode(content), special["</tool_call>"], special["<|im_end|>"]]
    assert len(set(chain)) == len(chain)
    model = _load(folder)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    (embedding,) = (weight for name, weight in weights.items() if "embed_tokens" in name)
    head = weights["lm_head.weight"].zero_()
    for token, following in itertools.pairwise(chain):
        head[following] = 10 * embedding[token]
    model.save_pretrained(folder)
    return folder


@functools.cache
def _load(folder: Path) -> Any:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
