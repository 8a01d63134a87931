"""Build a `Config` from overrides: Hydra composes the YAML groups, the pydantic tree validates the result.

The only module that uses Hydra, and only its compose API: nothing here changes the working directory, the logging or
the outputs of the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fleet.config import keys
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object, user_path
from megatron_fleet.config.remote_model import remote_model
from megatron_fleet.config.schema import Config

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ROOT = Path(__file__).resolve().parents[2]
"""Repository root; paths in ``configs/`` relative to it are written ``${root:}/…``."""


def load(overrides: Sequence[str] = (), config_dir: Path | None = None) -> Config:
    """Compose ``config.yaml`` with ``overrides`` (``group=option``, ``section.key=value``) into a typed tree.

    Relative paths given by the user (``run.out``, ``model.path``, ``data.tasks``) are made absolute from the working
    directory, because ranks and Ray workers may have another one. A ``model.path`` that does not exist and has the form
    of a hub id stays as it is.

    Raises:
        UserError: unknown key or option, value of the wrong type, required key not set, unreadable YAML.
    """
    folder = (config_dir or ROOT / "configs").resolve()
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: no config.yaml there; run from a checkout of the repository.")
    return _typed(_absolute(_compose([_override(text, folder) for text in overrides], folder)))


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read an already resolved configuration (``<out>/config.json``).

    Args:
        overrides: ``section.key=value``, the value as JSON or as a bare word.

    Raises:
        UserError: the file is missing, is not JSON or does not fit the schema, or an override names an unknown key.
    """
    tree = read_object(path, "give the config.json of a run")
    for text in overrides:
        _replace(tree, text, path)
    return _typed(tree)


def _replace(tree: dict[str, Any], text: str, path: Path) -> None:
    name, equals, value = text.partition("=")
    if not equals or name not in {leaf.name for leaf in keys.leaves()}:
        raise UserError(f"Override '{text}': {_unknown(name) if equals else 'write key=value.'}")
    _refuse_none(name, value)
    *sections, key = name.split(".")
    for section in sections:
        tree = tree.get(section)  # type: ignore[assignment]  # checked on the next line
        if not isinstance(tree, dict):
            raise UserError(f"{path} has no section {section}; give the config.json of a run.")
    try:
        tree[key] = value if name in keys.texts() and value != "null" else json.loads(value)
    except ValueError:
        tree[key] = value  # a bare word; the schema validates it


def dump_resolved(config: Config) -> str:
    """Return the JSON text that ``load_resolved`` reads back to an equal tree."""
    return config.model_dump_json(indent=2) + "\n"


def _override(text: str, folder: Path) -> str:
    """Check one override against groups and schema; return it in the form that is passed to Hydra.

    A value is forced (``++``) because keys with a default in the schema need not occur in the YAML. A text key takes
    its value literally: Hydra's grammar would require quotes for a path with a space, a ``~`` or a ``=``.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    name, _, value = text.lstrip("+").partition("=")
    _refuse_none(name, value)
    if name in keys.texts() and value and value != "null" and value[0] not in "'\"" and "${" not in value:
        return f"++{name}='{_escape(value)}'"
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:  # ValueError: too many digits
        raise UserError(f"Override '{text}' cannot be read; write key=value, special characters quoted.") from error
    if parsed.type is OverrideType.DEL or parsed.package or parsed.is_sweep_override():
        raise UserError(f"Override '{text}' deletes, re-packages or sweeps, which is not supported; write key=value.")
    key, plain = parsed.key_or_group, text.lstrip("+")
    if key and (options := sorted(p.stem for p in (folder / key).glob("*.yaml"))):
        _check_option(key, parsed.value(), options)
        return plain
    if key not in keys.names():
        raise UserError(f"Override '{text}': {_unknown(key)}")
    return "++" + plain


def _refuse_none(name: str, value: str) -> None:
    if value.lower() == "none" and name in keys.nullable():
        raise UserError(f"{name}={value}: write null for no value (or \"'{value}'\" for that text).")


def _escape(value: str) -> str:
    """Escape for Hydra's single quotes, where a backslash is special only before a quote or at the end."""
    return re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)


def _check_option(group: str, option: Any, options: list[str]) -> None:
    if option not in options:
        raise UserError(f"{group}={option}: there is no such option; choose one of {', '.join(options)}.")


def _compose(overrides: list[str], folder: Path) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from yaml import YAMLError

    OmegaConf.register_new_resolver("root", lambda: str(ROOT), replace=True)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            tree = compose(config_name="config", overrides=overrides)
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} must be set; add {error.full_key}=… to the command line.") from error
    except YAMLError as error:
        raise UserError(f"A file in {folder} is not valid YAML: {_one_line(error)}.") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"The configuration from {folder} cannot be composed: {_one_line(error)}.") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "experiment"}


def _absolute(tree: dict[str, Any]) -> dict[str, Any]:
    paths = (("run", "out"), ("model", "path"), ("agent", "prompts"), ("data", "tasks"), ("data", "split_manifest"))
    for section, key in paths:
        values = tree.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        if isinstance(value, str) and value and value != "embedded" and "://" not in value:
            if (section, key) == ("model", "path") and remote_model(value) and not user_path(value).exists():
                continue
            tree[section][key] = str(user_path(value).absolute())
    if isinstance(tree.get("data"), dict) and isinstance(names := tree["data"].get("exclusions"), list):
        # Names of the package's own exclusion lists are not paths.
        files = (isinstance(name, str) and bool(Path(name).suffix) for name in names)
        tree["data"]["exclusions"] = [
            str(user_path(name).absolute()) if is_file else name for name, is_file in zip(names, files, strict=True)
        ]
    return tree


def _typed(tree: dict[str, Any]) -> Config:
    from pydantic import ValidationError

    try:
        # Strict JSON mode: `true` is not an integer and "3" not a number, but a list may still become a tuple.
        return Config.model_validate_json(json.dumps(tree, ensure_ascii=False).encode(), strict=True)
    except UnicodeEncodeError:
        raise UserError(f"{_without_utf8(tree)} is not UTF-8 text; correct it.") from None
    except ValidationError as error:
        # Unknown keys first: one is often the misspelling of a key that is then reported as missing.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        _, *others = dict.fromkeys(map(_dotted, problems))
        more = f" ({len(others)} more: {', '.join(others)}.)" if others else ""
        raise UserError(_explain(problems[0]) + more) from error


def _without_utf8(value: Any, name: str = "") -> str:
    """Return the first key, with its value, that contains an unpaired surrogate; empty if none does."""
    if isinstance(value, str):
        return f"{name}={value!a}" if any("\ud800" <= c <= "\udfff" for c in value) else ""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (
        _without_utf8(key, f"A key of {name or 'the configuration'}")
        or _without_utf8(item, f"{name}.{key}" if name else str(key))
        for key, item in pairs
    )
    return next(filter(None, found), "")


def _explain(problem: ErrorDetails) -> str:
    name = _dotted(problem)
    if problem["type"] == "extra_forbidden":
        return _unknown(name)
    if problem["type"] == "missing" and len(problem["loc"]) == name.count(".") + 1:
        return f"{name} must be set; add {name}=… to the command line."
    expected = next((k.accepts for k in keys.leaves() if k.name == name), "")
    expected = f"it must be {expected}" if expected else problem["msg"]
    if problem["type"] == "string_pattern_mismatch":
        expected = f"it must have the form {problem['ctx']['pattern']}"
    return f"{name}={json.dumps(problem['input'], ensure_ascii=False)}: {expected}."


def _unknown(name: str) -> str:
    guess = keys.suggest(name)
    hint = f"did you mean {guess}?" if guess else "`mfleet config` prints all keys."
    return f"there is no key {name}; {hint}"


def _dotted(problem: ErrorDetails) -> str:
    """Name of the key at fault, and of the part of it if its value is a mapping; without the branch of a union."""
    parts = [part for part in problem["loc"] if isinstance(part, str)]
    known = {key.name for key in keys.leaves() if not key.accepts.startswith("{")}
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((name for name in names if name in known), ".".join(parts))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
