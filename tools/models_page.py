"""Write ``docs/run/models.md`` from the model families of the package. Usage: python tools/models_page.py"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_fleet.models.architecture import Architecture
from megatron_fleet.models.families import family_modules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "run" / "models.md"
RELEASES: Mapping[str, str] = {
    "deepseek_v3": "DeepSeek-V3 and R1, Moonlight",
    "glm4_moe": "GLM-4.5, 4.6 and 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "kimi_k2": "Kimi K2 and K2-Thinking",
    "kimi_k25": "Kimi K2.5",
    "llama": "Llama 3",
    "qwen2": "Qwen2 and 2.5",
    "qwen3": "Qwen3, dense",
    "qwen3_moe": "Qwen3, experts, and Qwen3-Coder",
    "qwen3_vl": "Qwen3-VL, dense",
    "qwen3_5_text": "Qwen3.5 and 3.6, dense, without the vision part",
    "qwen3_5_moe_text": "Qwen3.5 and 3.6, experts, without the vision part",
    "qwen3_5": "Qwen3.5 and 3.6, dense",
    "qwen3_5_moe": "Qwen3.5 and 3.6, experts",
}
"""``model_type`` of ``config.json`` → releases that have it."""
CHAT_OF_OTHERS = {"deepseek_v3": "Moonlight: that of Kimi; others: none"}
CHAT_FAMILIES: Mapping[str, tuple[str, ...]] = {"qwen3_moe": ("qwen3", "qwen3_coder")}
"""``model_type`` → families of its chat formats, if not its own family alone."""
HEAD = """# Which models

*Can I train my model, with adapters, with images?*

Made by `python tools/models_page.py` from the families in `megatron_fleet/models/`. `model_type` is in the model's
`config.json`. Every model here is read from its Hugging Face folder, written back to one, served by vLLM with live
weight updates, and [converted](convert.md) in both directions, also from the quantised forms of its releases.

"""
TAIL = """
* **trained**: all parameters, in every layout ([parity](../understand/parity.md)). *text part*: the vision part stays
  as it is. Multi-token prediction layers are kept and not trained.
* **LoRA**: `policy.lora.rank` above 0 trains adapters alone; `policy.lora.targets` names the layers. A checkpoint
  holds only them; `hf/` is the merged model, see [precision and memory](precision.md).
* **chat format**: runs and evaluations with engines need one (`rollout.renderer`), and
  [choose it](#chat-templates) by the model's chat template. Without one a model is converted and evaluated behind an
  endpoint, but not trained.
* **images**: `mfleet eval` shows an environment's images to the model; training refuses such tasks
  ([images](../understand/images.md)).

## Chat templates

The template that counts is the one that transformers takes for tools: `additional_chat_templates/tool_use.jinja`, then
`chat_template.jinja`, then `tokenizer_config.json` (of several, `tool_use` before `default`); `chat_template.json`, a
file of vision processors, only where there is no other. A run starts only if the template renders a few conversations
to the same text as the chat format, character for character; comments, blanks inside tags and a system text for
conversations without one make no difference. `rollout.renderer=FORMAT` leaves the template unread; a
[format of your own](../understand/adding-an-architecture.md) is for models that no built-in format fits.

| template of | outcome |
|---|---|
| Qwen3-Instruct-2507, Qwen3-VL-Instruct | `qwen3-instruct` |
| Qwen3-Thinking-2507, whose turns begin inside `<think>` | `qwen3-thinking`, with `rollout.thinking=true` only |
| Qwen3.8 | `qwen3.5`, at its medium reasoning effort (the one without a text about effort) |
| trainers, with their marks and with thinking kept in every turn (TRL) | the format of the model |
| Qwen3-Coder | `qwen3-coder` |
| Qwen3-Coder as first published (its macro is `render_item_list`) | refused: take its present `chat_template.jinja` |
| Qwen2.5-VL and ChatML (no tools) | refused: take another release |
| none, as in the folders of some base models | the format of the family, with a warning: the model has never seen it |

Which of them fits on one GPU: [one GPU](one-gpu.md#which-model-fits). Layouts for more: `mfleet plan --search N`,
[planning](planning.md). A family that is not here: [adding a model family](../understand/adding-an-architecture.md).
"""


def architectures() -> Iterator[tuple[str, str, Architecture]]:
    """Yield family, ``model_type`` and architecture of every model."""
    for module in family_modules("weights"):
        for architecture in module.ARCHITECTURES:
            for model_type in architecture.model_types:
                yield module.__name__.split(".")[-2], model_type, architecture


def page() -> str:
    """Return the page as Markdown."""
    formats = {module.__name__.split(".")[-2]: list(module.FORMATS) for module in family_modules("chat")}
    seeing = {model_type for module in family_modules("vision") for model_type in module.MODEL_TYPES}
    lines = ["| model | `model_type` | trained | LoRA | chat format | images |", "|---" * 6 + "|"]
    for family, model_type, architecture in architectures():
        names = [name for used in CHAT_FAMILIES.get(model_type, (family,)) for name in formats.get(used, ())]
        chat = CHAT_OF_OTHERS.get(model_type) or ", ".join(f"`{name}`" for name in names) or "none"
        cells = [
            RELEASES[model_type],
            f"`{model_type}`",
            "text part" if architecture.text else "yes",
            f"no, {architecture.mixer.name}" if architecture.mixer else "yes",
            chat,
            "in evaluations" if model_type in seeing else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
