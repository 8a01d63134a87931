"""Writes ``template_digests.json``: what the models' own chat templates make of the seeded conversations, as digests.

The templates are their authors' and are not kept here. Usage, from a folder that holds them under the names below:

    python tests/models/chat/record_templates.py FOLDER            # record
    python tests/models/chat/record_templates.py FOLDER --compare  # the first difference of each from our renderers
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from talks import Talks, digest, with_images

from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.template_check import difference, render_template, written
from megatron_fleet.models.kimi.tool_types import declare, sorted_keys

DIGESTS = Path(__file__).with_name("template_digests.json")
COUNT, SEED = 150, 5
# File → our family, where the file comes from.
TEMPLATES = {
    "trl_qwen2_5.jinja": ("qwen2.5", "Qwen/Qwen2.5-7B-Instruct, from the wheel trl 1.16.0"),
    "trl_qwen3.jinja": ("qwen3", "Qwen/Qwen3-8B, from the wheel trl 1.16.0"),
    "Qwen-Qwen3-0.6B.jinja": ("qwen3", "Qwen/Qwen3-0.6B, from llama_cpp_python 0.3.36"),
    "trl_qwen3_instruct_2507.jinja": ("qwen3-instruct", "Qwen/Qwen3-4B-Instruct-2507, from the wheel trl 1.16.0"),
    "qwen3.5_fixed.jinja": ("qwen3.5", "Qwen/Qwen3.5, as kept in radixark/miles: what it adds is off by default"),
    "trl_qwen3_6.jinja": ("qwen3.5", "Qwen/Qwen3.6, from the wheel trl 1.13.0"),
    "tool_chat_template_qwen3coder.jinja": (
        "qwen3-coder",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct, as kept in vllm-project/vllm, examples/",
    ),
    "trl_glm4moe.jinja": ("glm-4.5", "zai-org/GLM-4.5, from the wheel trl 1.16.0"),
    "GLM-4.6.jinja": ("glm-4.5", "zai-org/GLM-4.6, from llama_cpp_python 0.3.36"),
    "GLM-4.7-Flash.jinja": ("glm-4.7", "zai-org/GLM-4.7-Flash, from llama_cpp_python 0.3.36"),
    "Kimi-K2-Instruct.jinja": ("kimi-k2", "moonshotai/Kimi-K2-Instruct, from llama_cpp_python 0.3.36"),
    "Kimi-K2-Thinking.jinja": ("kimi-k2-thinking", "moonshotai/Kimi-K2-Thinking, from llama_cpp_python 0.3.36"),
}
WITH_IMAGES = ("trl_qwen3_vl.jinja", "qwen3-instruct", "Qwen/Qwen3-VL, from the wheel trl 1.16.0")
DECLARATIONS = ("tool_declaration_ts.py", "moonshotai/Kimi-K2.5, as copied in the wheel tinker_cookbook 0.6.1")


def recorded_with_images(folder: Path, compare: bool) -> dict[str, Any]:
    """The conversations with images, by a template that knows them."""
    name, family, origin = WITH_IMAGES
    source = (folder / name).read_bytes()
    chat = FORMATS[family].make(False, source.decode())
    talks = [with_images(talk) for talk in Talks(SEED).conversations(COUNT, False)]
    theirs = render_template(source.decode(), chat, talks)
    if compare:
        show(name, [written(chat, talk) for talk in talks], theirs)
    found = entry(name, origin, source, theirs) | {"family": family, "thinking": False}
    return found | {"spaced": "separators" not in source.decode(), "images": True}


def main(folder: Path, compare: bool) -> None:
    recorded = []
    for name, (family, origin) in TEMPLATES.items():
        source = (folder / name).read_bytes()
        for thinking in FORMATS[family].thinking:
            spaced = "separators" not in source.decode()
            chat = FORMATS[family].make(thinking, source.decode())
            talks = list(Talks(SEED).conversations(COUNT, thinking))
            theirs = render_template(source.decode(), chat, talks)
            recorded.append(entry(name, origin, source, theirs) | {"family": family, "thinking": thinking})
            recorded[-1] |= {"spaced": spaced, "json_scalars": "else args_value | tojson" in source.decode()}
            if compare:
                show(f"{name}, thinking {thinking}", [written(chat, talk) for talk in talks], theirs)
    recorded.append(recorded_with_images(folder, compare))
    name, origin = DECLARATIONS
    original = load(folder / name)
    tools = [[Talks(seed).tool(references=seed % 3 == 0) for _ in range(2)] for seed in range(COUNT)]
    theirs = [attempt(original, sorted_keys(t)) for t in tools]
    declarations = entry(name, origin, (folder / name).read_bytes(), theirs)
    if compare:
        show(name, [declare(t) or "" for t in tools], theirs)
    else:
        content = {"count": COUNT, "seed": SEED, "templates": recorded, "declarations": declarations}
        DIGESTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def entry(name: str, origin: str, source: bytes, texts: list[str]) -> dict[str, Any]:
    sha = hashlib.sha256(source).hexdigest()
    return {"file": name, "origin": origin, "sha256": sha, "digests": " ".join(map(digest, texts))}


def attempt(original: Callable[[Any], str], tools: Any) -> str:
    try:
        return original(tools)
    except Exception:  # the model's tokenizer falls back to JSON whatever it was
        return ""


def show(name: str, ours: list[str], theirs: list[str]) -> None:
    wrong = [difference(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    print(f"{name}: {len(wrong)} of {len(ours)} differ", *wrong[:1], sep="\n  ")


def load(path: Path) -> Callable[[Any], str]:
    spec = importlib.util.spec_from_file_location("declarations", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.encode_tools_to_typescript_style


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--compare" in sys.argv)
