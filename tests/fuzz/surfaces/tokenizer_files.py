"""A model folder's tokenizer, chat template and image processor: what makes its prompts."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of

from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.template_check import check_template
from megatron_fleet.models.chat.tokenizer import train_tokenizer
from megatron_fleet.models.images import read_vision
from megatron_fleet.models.kimi.chat import TOKENS
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS, QWEN_VL_TOKENS

PROCESSOR = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 100_000}}


@cache
def seeds() -> list[Any]:
    found: list[Any] = []
    with TemporaryDirectory() as place:
        train_tokenizer(["tool of the ticket"] * 3, 290, Path(place, "qwen"), QWEN3_TOKENS)
        qwen = {n: folders.structured(n, data) for n, data in folders.read(Path(place, "qwen")).items()}
        train_tokenizer(["tool of the ticket"] * 3, 290, Path(place, "vl"), QWEN_VL_TOKENS)
        vl = {n: folders.structured(n, data) for n, data in folders.read(Path(place, "vl")).items()}
    template = qwen["tokenizer_config.json"]["chat_template"]
    plain = qwen["tokenizer_config.json"] | {"chat_template": [{"name": "default", "template": template}]}
    found += [qwen, qwen | {"tokenizer_config.json": plain}, qwen | {"chat_template.jinja": template}]
    found.append({n: json.dumps(file).encode() for n, file in qwen.items()})
    ids = {name: i for i, name in _added(vl).items()}
    raw = {"model_type": "qwen2_vl", "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    found.append(vl | {"config.json": raw, "preprocessor_config.json": PROCESSOR})
    found.append(vl | {"config.json": raw, "processor_config.json": {"image_processor": PROCESSOR}})
    return [*found, _kimi()]


def _added(tree: Any) -> dict[int, str]:
    return {token["id"]: token["content"] for token in tree["tokenizer.json"]["added_tokens"]}


def _kimi() -> dict[str, Any]:
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    names = TOKENS.control + TOKENS.tags
    added = {str(256 + i): {"content": n, "special": n in TOKENS.control} for i, n in enumerate(names)}
    return {
        "tiktoken.model": "\n".join(lines) + "\n",
        "tokenizer_config.json": {"added_tokens_decoder": added},
        "config.json": {"model_type": "kimi_k2"},
    }


def check(tree: Any, folder: Path) -> bool:
    folders.write(folder, tree)
    with refusal_of(folder, "rollout."):
        vision = read_vision(folder)
        if vision is not None:
            assert vision.tokens(640, 480) > 0
        renderer = make_renderer(folder, thinking=False)
        ids = renderer.initial("be kind", (), "find it é <|im_end|> \ud800")
        renderer.parse(renderer.text(ids))
        assert all(0 <= i < renderer.tokenizer.vocab_size for i in ids)
        check_template(folder, thinking=False)
        return True
    return False


WORDS = ("{{ messages }}", "{% for m in messages %}", "{{ 1/0 }}", "{{ x.y.z }}", "ByteLevel", "BPE", "WordLevel")
SURFACE = Surface("tokenizer_files", 100, seeds, check, words=WORDS)
