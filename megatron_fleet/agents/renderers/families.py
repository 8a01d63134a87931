"""Which chat format a model folder speaks, and the renderer for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_fleet.agents.images import Vision, read_vision
from megatron_fleet.agents.renderer import Renderer
from megatron_fleet.agents.renderers import glm, kimi
from megatron_fleet.agents.renderers.chat import ChatRenderer
from megatron_fleet.agents.renderers.format import ChatFormat
from megatron_fleet.agents.renderers.glm import Glm
from megatron_fleet.agents.renderers.kimi import Kimi
from megatron_fleet.agents.renderers.qwen import Qwen
from megatron_fleet.agents.tokenizer import IMAGE_PAD, QWEN3_TOKENS, AddedTokens, Tokenizer
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import is_path, load
from megatron_fleet.config.files import read_file, read_object

AUTO = "auto"
OWN_ARGUMENTS = ("folder", "thinking")
"""What a chat format of the user's own is called with, to give a ``Renderer``: the model's folder (`Path`) and
rollout.thinking."""


@dataclass(frozen=True, slots=True)
class Family:
    """One chat format.

    Attributes:
        tokens: its control tokens must be in the tokenizer; tags may be.
        thinking: the values of rollout.thinking that its models know.
        make: the format, given rollout.thinking and the model's own chat template, if there is one.
    """

    tokens: AddedTokens
    thinking: tuple[bool, ...]
    make: Callable[[bool, str | None], ChatFormat]


def _spaced(template: str | None) -> bool:
    return template is not None and "separators" not in template


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2.5": Family(QWEN3_TOKENS, (False,), lambda thinking, template: Qwen(False, thinking)),
        "qwen3": Family(QWEN3_TOKENS, (False, True), lambda thinking, template: Qwen(True, thinking)),
        "qwen3-instruct": Family(QWEN3_TOKENS, (False,), lambda thinking, template: Qwen(False, thinking)),
        "glm-4.5": Family(glm.TOKENS, (False, True), lambda thinking, template: Glm(False, thinking)),
        "glm-4.7": Family(glm.TOKENS, (False, True), lambda thinking, template: Glm(True, thinking)),
        "kimi-k2": Family(kimi.TOKENS, (False,), lambda thinking, t: Kimi("k2", thinking, _spaced(t))),
        "kimi-k2-thinking": Family(kimi.TOKENS, (True,), lambda thinking, t: Kimi("k2-thinking", thinking, _spaced(t))),
        "kimi-k2.5": Family(kimi.TOKENS, (False, True), lambda thinking, t: Kimi("k2.5", thinking, _spaced(t))),
    }
)
"""By the names that rollout.renderer takes."""


def make_renderer(folder: str | Path, thinking: bool, name: str = AUTO) -> Renderer:
    """The renderer of the model in ``folder``.

    Args:
        thinking: whether the policy thinks before it acts (rollout.thinking).
        name: of a family (rollout.renderer), or the path of a user's own; ``auto`` looks at the folder.

    Raises:
        UserError: the folder's tokenizer cannot be read, no family fits it or the given one does not, the family has
            no such ``thinking``, or the model sees pictures and its files do not say how.
    """
    if is_path(name):
        own: Renderer = load("rollout.renderer", name, OWN_ARGUMENTS)(Path(folder), thinking)
        return own
    tokenizer = Tokenizer(folder)
    chat, vision = make_format(folder, tokenizer, thinking, name), read_vision(folder)
    if vision is not None:
        _check_placeholder(folder, tokenizer, vision)
    return ChatRenderer(tokenizer, chat, vision)


def _check_placeholder(folder: str | Path, tokenizer: Tokenizer, vision: Vision) -> None:
    found = tokenizer.special.get(IMAGE_PAD)
    if found != vision.placeholder_id:
        raise UserError(
            f"model.path={folder}: image_token_id={vision.placeholder_id} in config.json is not the tokenizer's "
            f"{IMAGE_PAD} ({found}); fetch the model again."
        )


def make_format(folder: str | Path, tokenizer: Tokenizer, thinking: bool, name: str = AUTO) -> ChatFormat:
    """The chat format alone; see ``make_renderer``."""
    template = read_template(folder)
    found = detect(folder, tokenizer, template) if name == AUTO else name
    family = FAMILIES[found]
    missing = [t for t in family.tokens.control if t not in tokenizer.special]
    if missing:
        raise UserError(
            f"rollout.renderer={name}: the tokenizer in {folder} lacks the tokens {', '.join(missing)} of {found}; "
            f"name the format that the model was trained with."
        )
    if thinking not in family.thinking:
        raise UserError(
            f"rollout.thinking={str(thinking).lower()}: models of the format {found} "
            f"{'do not think' if thinking else 'always think'}; set it to {str(not thinking).lower()}."
        )
    return family.make(thinking, template)


def detect(folder: str | Path, tokenizer: Tokenizer, template: str | None) -> str:
    """The family whose control tokens the tokenizer has, told from its relatives by the chat template.

    Without a template the folder's config.json decides. Raises UserError when nothing fits.
    """
    has = tokenizer.special.__contains__
    model_type = str(_json(Path(folder) / "config.json").get("model_type"))
    found: str | None = None
    if all(map(has, kimi.TOKENS.control)):
        found = _kimi(template, model_type)
    elif all(map(has, glm.TOKENS.control)):
        found = _glm(template, model_type)
    elif all(map(has, QWEN3_TOKENS.control)):
        found = _qwen(template, has("<think>"))
    if found is None:
        raise UserError(
            f"{folder}: its tokenizer and chat template are of none of the formats {', '.join(FAMILIES)}; set "
            f"rollout.renderer to the format that the model was trained with, or choose another model."
        )
    return found


def read_template(folder: str | Path) -> str | None:
    """The model's own chat template, the one for tools if there are several; ``None`` when it has none."""
    path = Path(folder) / "chat_template.jinja"
    if path.is_file():
        try:
            return read_file(path).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start}: not UTF-8 text; fetch the model again.") from None
    path = Path(folder) / "tokenizer_config.json"
    found = _json(path).get("chat_template")
    if isinstance(found, list):
        try:
            named = {str(template["name"]): template["template"] for template in found}
        except (TypeError, KeyError):
            raise UserError(
                f"{path}: chat_template: not a list of names and templates; fetch the model again."
            ) from None
        found = named.get("tool_use", named.get("default"))
    return found if isinstance(found, str) else None


def _kimi(template: str | None, model_type: str) -> str:
    if template is None:
        return "kimi-k2.5" if model_type == "kimi_k25" else "kimi-k2"
    if "tools_ts_str" in template:
        return "kimi-k2.5"
    return "kimi-k2-thinking" if "<think>" in template else "kimi-k2"


def _glm(template: str | None, model_type: str) -> str | None:
    if template is None:
        return {"glm4_moe": "glm-4.5", "glm4_moe_lite": "glm-4.7"}.get(model_type)
    if "{function-name}\n" in template:
        return "glm-4.5"
    return "glm-4.7" if "{function-name}<arg_key>" in template else None


def _qwen(template: str | None, thinks: bool) -> str | None:
    if template is None:
        return "qwen3" if thinks else "qwen2.5"
    if "<tools>" not in template or "<function=" in template:
        return None
    if "enable_thinking" in template:
        return "qwen3"
    if "<think>" in template:
        return None
    return "qwen3-instruct" if thinks else "qwen2.5"


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, "fetch the model again") if path.is_file() else {}
