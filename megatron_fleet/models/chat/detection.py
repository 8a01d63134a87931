"""Detection of a model folder's chat format, and construction of its renderer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import is_path, load
from megatron_fleet.config.files import read_file, read_object
from megatron_fleet.models.chat.format import ChatFormat, ModelFolder, NamedFormat
from megatron_fleet.models.chat.renderer import ChatRenderer, Renderer
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import Vision, read_vision
from megatron_fleet.models.registry import OWN_FAMILIES, family_modules

AUTO = "auto"

FORMATS: Mapping[str, NamedFormat] = MappingProxyType(
    {name: chat for module in family_modules("chat") for name, chat in module.FORMATS.items()}
)
"""Formats of the families here, by the names that rollout.renderer accepts."""


def _formats() -> dict[str, NamedFormat]:
    """Return `FORMATS` and those of the user's families."""
    return dict(FORMATS) | {name: chat for family in OWN_FAMILIES.values() for name, chat in family.formats.items()}


def make_renderer(folder: str | Path, thinking: bool, name: str = AUTO) -> Renderer:
    """Build the renderer for the model in ``folder``.

    Args:
        thinking: whether the policy thinks before it acts (rollout.thinking).
        name: a family (rollout.renderer), or the path of a user-defined one; ``auto`` detects it from the folder.

    Raises:
        UserError: the folder's tokenizer cannot be read, no family matches or the given one does not, the family does
            not support this ``thinking``, or the model sees images and its files do not say how.
    """
    if is_path(name):
        own: Renderer = load("rollout.renderer", name)(Path(folder), thinking)
        return own
    tokenizer = Tokenizer(folder)
    chat, vision = make_format(folder, tokenizer, thinking, name), read_vision(folder)
    if vision is not None:
        _check_placeholder(folder, tokenizer, chat.image, vision)
    return ChatRenderer(tokenizer, chat, vision)


def _check_placeholder(folder: str | Path, tokenizer: Tokenizer, placeholder: str, vision: Vision) -> None:
    found = tokenizer.special.get(placeholder)
    if found != vision.placeholder_id:
        raise UserError(
            f"model.path={folder}: image_token_id={vision.placeholder_id} in config.json is not the tokenizer's "
            f"{placeholder} ({found}); fetch the model again."
        )


def make_format(folder: str | Path, tokenizer: Tokenizer, thinking: bool, name: str = AUTO) -> ChatFormat:
    """Build the chat format only; see ``make_renderer``."""
    template = read_template(folder)
    found = detect(folder, tokenizer, template) if name == AUTO else name
    if (named := _formats().get(found)) is None:
        raise UserError(
            f"rollout.renderer={name}: there is no such chat format; choose {AUTO}, {', '.join(_formats())} or "
            f"package.module:name."
        )
    missing = [t for t in named.tokens.control if t not in tokenizer.special]
    if missing:
        raise UserError(
            f"rollout.renderer={name}: the tokenizer in {folder} lacks the tokens {', '.join(missing)} of {found}; "
            f"name the format that the model was trained with."
        )
    if thinking not in named.thinking:
        raise UserError(
            f"rollout.thinking={str(thinking).lower()}: models of the format {found} "
            f"{'do not think' if thinking else 'always think'}; set it to {str(not thinking).lower()}."
        )
    return named.make(thinking, template)


def detect(folder: str | Path, tokenizer: Tokenizer, template: str | None) -> str:
    """Name of the format whose control tokens the tokenizer has; the chat template distinguishes related formats.

    Without a template the folder's config.json decides. Raises UserError if nothing matches.
    """
    model_type = str(_json(Path(folder) / "config.json").get("model_type"))
    asked = ModelFolder(model_type, template, tokenizer.special.__contains__)
    recognisers = [family.recognise for family in OWN_FAMILIES.values()]
    recognisers += [module.recognise for module in family_modules("chat")]
    found = next((name for recognise in recognisers if (name := recognise(asked)) is not None), None)
    if found is None:
        raise UserError(
            f"{folder}: its tokenizer and chat template are of none of the formats {', '.join(_formats())}; set "
            f"rollout.renderer to the format that the model was trained with, or choose another model."
        )
    return found


def read_template(folder: str | Path) -> str | None:
    """Read the model's chat template, the one for tools if there are several; ``None`` if there is none."""
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


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, "fetch the model again") if path.is_file() else {}
