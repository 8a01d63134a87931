"""Chat format of Qwen 2.5: Qwen 3's without thinking."""

from megatron_fleet.models.chat.format import ModelFolder, NamedFormat
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS, Qwen, announces_json_calls

FORMATS = {"qwen2.5": NamedFormat(QWEN3_TOKENS, (False,), lambda thinking, template: Qwen(False, thinking))}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    if not folder.has_all(QWEN3_TOKENS.control) or folder.has("<think>"):
        return None
    template = folder.template
    if template is None:
        return "qwen2.5"
    thinks = "enable_thinking" in template or "<think>" in template
    return "qwen2.5" if announces_json_calls(template) and not thinks else None
