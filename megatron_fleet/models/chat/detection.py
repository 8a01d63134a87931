"""Detection of a model folder's chat format, and construction of its renderer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.config.files import read_file, read_object
from megatron_fleet.config.names import is_path
from megatron_fleet.models.chat.format import ChatFormat, ModelFolder, NamedFormat
from megatron_fleet.models.chat.renderer import ChatRenderer, Renderer
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.families import family_modules
from megatron_fleet.models.images import Vision, read_vision
from megatron_fleet.models.registry import OWN_FAMILIES

AUTO = "auto"
_T = TypeVar("_T")


class RendererFactory(Protocol):
    def __call__(self, folder: Path, thinking: bool, /) -> Renderer:
        """Return the renderer for the model in ``folder``. ``thinking``: rollout.thinking."""
        ...


OWN_RENDERER = Interface("rollout.renderer", "chat format", RendererFactory, "episode workers")

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
        own: Renderer = load(OWN_RENDERER, name)(Path(folder), thinking)
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
    return named.make(thinking, _without_comments(template))


def detect(folder: str | Path, tokenizer: Tokenizer, template: str | None) -> str:
    """Name of the format whose control tokens the tokenizer has; the chat template distinguishes related formats.

    Without a template the folder's config.json decides. Raises UserError if nothing matches.
    """
    model_type = str(_json(Path(folder) / "config.json").get("model_type"))
    template = _without_comments(template)
    asked = ModelFolder(model_type, template, tokenizer.special.__contains__)
    recognisers = [family.recognise for family in OWN_FAMILIES.values()]
    recognisers += [module.recognise for module in family_modules("chat")]
    found = next((name for recognise in recognisers if (name := recognise(asked)) is not None), None)
    if found is not None:
        return found
    names = [name for name, _ in fitting(tokenizer)]
    if not names:
        raise UserError(
            f"{folder}: its tokenizer lacks control tokens of each of the formats {', '.join(_formats())}; choose "
            f"another model, or give a renderer of your own (rollout.renderer=package.module:name)."
        )
    if template is None:
        raise UserError(
            f"{folder}: it has no chat template, and model_type={model_type} does not decide between the formats of "
            f"its tokenizer, {', '.join(names)}; set rollout.renderer to the one that the model was trained with."
        )
    what = "writes tools or calls in a form that no supported format has" if "tools" in template else "writes no tools"
    raise UserError(
        f"{folder}: its chat template {what}. rollout.renderer={' or '.join(names)} would leave it unread and train "
        f"the model in a format that it may never have seen; choose another release of the model, or give a renderer "
        f"of your own (rollout.renderer=package.module:name)."
    )


def fitting(tokenizer: Tokenizer) -> list[tuple[str, NamedFormat]]:
    """List the formats whose control tokens ``tokenizer`` has, with their names."""
    return [
        (name, chat) for name, chat in _formats().items() if all(t in tokenizer.special for t in chat.tokens.control)
    ]


def read_template(folder: str | Path) -> str | None:
    """Read the model's chat template, the one for tools if there are several; ``None`` if there is none.

    Raises:
        UserError: a file cannot be read, or none of several templates is the one for tools or the default.
    """
    return next((text for _, text in read_templates(folder)), None)


def read_templates(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Read the chat templates of all files that can hold one: file and template, first the one that counts.

    The order is that of transformers: ``chat_template.jinja`` and ``additional_chat_templates`` before
    ``tokenizer_config.json``; then ``chat_template.json``, which only the processors of vision models read.
    """
    folder = Path(folder)
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (default := folder / "chat_template.jinja").is_file():
        paths["default"] = default
    if path := _choose(paths, folder):
        try:
            yield str(path.relative_to(folder)), read_file(path).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start}: not UTF-8 text; fetch the model again.") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        found = _json(path).get("chat_template")
        if isinstance(found, list):
            try:
                found = {str(template["name"]): template["template"] for template in found}
            except (TypeError, KeyError):
                raise UserError(
                    f"{path}: chat_template: not a list of names and templates; fetch the model again."
                ) from None
        if isinstance(found, dict):
            found = _choose(found, path)
        if isinstance(found, str):
            yield name, found


def _choose(named: Mapping[str, _T], where: Path) -> _T | None:
    """Return the template for tools, or the default one, of several; ``None`` if there are none."""
    if named and not named.keys() & {"tool_use", "default"}:
        raise UserError(
            f"{where}: none of its chat templates {', '.join(named)} is named tool_use or default; rename the one that "
            f"the model was trained with."
        )
    return named.get("tool_use", named.get("default"))


def _without_comments(template: str | None) -> str | None:
    """Remove comments, in which other trainers say what a template does not have."""
    return template and re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, "fetch the model again") if path.is_file() else {}
