"""Reading of the fields of a model's ``config.json``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.errors import UserError

_MOST = {"layers": 1000, "heads": 1 << 16, "groups": 1 << 16, "experts": 1 << 16, "mtp": 9}
_MOST_OTHERWISE = (1 << 31) - 1
"""Default upper bound of an integer, beyond any model's: tables are sized by some, and sizes are multiplied."""

REQUIRED: Any = object()
"""Default of a ``Field`` that is required in ``config.json``."""


@dataclass(frozen=True, slots=True)
class Field:
    """Mapping of one ``config.json`` field to an attribute of `model.Model`.

    Attributes:
        name: field name in ``config.json``, used for writing.
        to: attribute name in ``Model``.
        default: value if the field is absent.
        also: alternative names used by other versions of transformers.
        most: largest integer that the family supports; ``None``: the usual one.
    """

    name: str
    to: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    most: int | None = None


_NO_EFFECT = re.compile(
    # Who wrote the file.
    r"(unsloth|axolotl|llamafactory|llama_factory|mergekit|swift|trl|peft|torchtune)_.+|(.+_)?version|_name_or_path"
    r"|_commit_hash|_from_model_config"
    # Implementations of the same function; ids of tokens and settings of tokenizers.
    r"|_?(.+_)?implementation(_.+)?|.+_token_(ids?|index)|tokenizer_.+|model_max_length"
    # Training: dropout, which is off in reinforcement learning, and weights of auxiliary losses.
    r"|(.+_)?(dropout|pdrop)(_prob|_rate)?|.+_loss_(coef|coefficient|weight|alpha|scale|scaling_factor)"
    r"|(.+_)?gradient_checkpointing"
)


def has_no_effect(name: str, value: Any) -> bool:
    """Return whether an unknown field of a ``config.json`` changes nothing that a model computes, by its kind.

    That is one without a value, and one whose name says that it tells of the writer, tokens, training or speed.
    """
    return value in (None, "", [], {}) or _NO_EFFECT.fullmatch(name) is not None


def same(name: str, values: Iterable[Any]) -> Any:
    """The single value of a field that may appear in several places; ``None`` if it appears in none."""
    found = [value for value in values if value is not None]
    if any(value != found[0] for value in found[1:]):
        raise UserError(f"config.json: {name} is there several times with different values {found}; correct the file.")
    return found[0] if found else None


def of_kind(name: str, value: Any, kind: type, least: float = 0, most: int = _MOST_OTHERWISE) -> Any:
    """Check that ``value`` is of a kind (bool; int from ``least`` to ``most``; float above ``least``); return it."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and type(value) in (int, float) and least < value <= sys.float_info.max:
        return float(value)
    if kind is int and type(value) is int and least <= value <= most:
        return value
    wanted = {bool: "true or false", int: f"an integer from {least} to {most}", float: f"a number above {least}"}[kind]
    raise UserError(f"config.json: {name}={value!r} is not supported, only {wanted}; correct the file.")


class Fields:
    """Reader of the fields of a ``config.json``; tracks which ones were read."""

    def __init__(self, raw: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
        """``kinds``: name of each attribute of `model.Model` → its type."""
        self._raw, self._kinds, self._seen = raw, kinds, set[str]()

    def optional(self, name: str, default: Any = None) -> Any:
        """Return a field as it is; ``default`` where it is absent or null."""
        self._seen.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a field that is an object, empty where it is absent."""
        value = self.optional(name, {})
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {name}={value!r} is not a JSON object; correct the file.")
        return value

    def integer(self, name: str, least: int, default: Any = REQUIRED, most: int = _MOST_OTHERWISE) -> int:
        """Return a field that is an integer from ``least`` to ``most``."""
        value: int = of_kind(name, self._required(name, self.optional(name, default)), int, least, most)
        return value

    def take(self, field: Field) -> Any:
        """Return the value of a family's field, checked to have the type of its attribute."""
        value = same(" or ".join((field.name, *field.also)), map(self.optional, (field.name, *field.also)))
        value = self._required(field.name, field.default if value is None else value)
        kind = self._kinds[field.to]
        if value is None or kind in (bool, float):
            return value if value is None else of_kind(field.name, value, kind)
        most = _MOST.get(field.to, _MOST_OTHERWISE) if field.most is None else field.most
        return of_kind(field.name, value, int, 0 if field.to == "mtp" else 1, most)

    def check(self, name: str, expected: Any) -> None:
        """Check a field's value.

        A list as ``expected`` means a list field whose items all have that value, a tuple several supported values.
        """
        choices = expected if isinstance(expected, tuple) else (expected,)
        value = self.optional(name, choices[0])
        each = isinstance(expected, list) and isinstance(value, list) and all(item in expected for item in value)
        if value not in choices and not each:
            raise UserError(
                f"config.json: {name}={value!r} is not supported for model_type={self._raw.get('model_type')!r}, only "
                f"{' or '.join(map(repr, choices))}; use a model without it."
            )

    def refuse_rest(self, harmless: set[str]) -> None:
        """Raise UserError if a field was neither read nor is ``harmless`` nor `has_no_effect`."""
        unread = set(self._raw) - self._seen - harmless
        rest = sorted(name for name in unread if not has_no_effect(name, self._raw[name]))
        if rest:
            raise UserError(
                f"config.json: {rest[0]}={self._raw[rest[0]]!r} is an unknown field and may change what the model "
                f"computes; remove it from the file if it does not."
            )

    @staticmethod
    def _required(name: str, value: Any) -> Any:
        if value is REQUIRED:
            raise UserError(f"config.json: {name} is missing; use the config.json that belongs to the weights.")
        return value
