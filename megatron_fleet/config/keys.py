"""Configuration keys: enumeration, suggestions for misspelt keys, and the reference in ``docs/reference/config.md``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_fleet.config.names import NameOrPath
from megatron_fleet.config.schema import Config


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the tree: dotted name, accepted values, default (``None`` = required) and meaning."""

    name: str
    accepts: str
    default: str | None
    description: str


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Yield all leaf keys below ``section``, in schema order."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            default = None if info.is_required() else _spell(info.get_default())
            yield Key(prefix + name, accepts(info), default, info.description or "")


@functools.cache
def names() -> frozenset[str]:
    """Return every dotted name an override may use: leaves and the sections above them."""
    out: set[str] = set()
    for key in leaves():
        parts = key.name.split(".")
        out.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return frozenset(out)


@functools.cache
def texts() -> frozenset[str]:
    """Return the names of the leaves whose value is text."""
    return frozenset(key.name for key in leaves() if key.accepts.partition(" or ")[0] == "text")


@functools.cache
def nullable() -> frozenset[str]:
    """Return the names of the leaves that may be null, and for which no value is named ``none``."""
    found = ((key.name, key.accepts.removeprefix("one of ").replace(", ", " or ").split(" or ")) for key in leaves())
    return frozenset(name for name, accepted in found if "null" in accepted and "none" not in accepted)


def suggest(name: str) -> str | None:
    """Return the key closest to ``name``: same last part first (``lr`` → ``policy.optimizer.lr``), then spelling."""
    known = sorted(names())
    last = name.rsplit(".", 1)[-1]
    lasts = sorted({k.rsplit(".", 1)[-1] for k in known})
    alike = [last] if last in lasts else difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)
    candidates = [k for k in known if k.rsplit(".", 1)[-1] in alike]
    close = difflib.get_close_matches(name, candidates or known, n=1, cutoff=0.0 if candidates else 0.5)
    return close[0] if close else None


def accepts(info: FieldInfo) -> str:
    """Describe the values a field accepts: ``integer ≥ 1``, ``one of k1, k2, k3``, ``number > 0 or null``."""
    for rule in info.metadata:
        if isinstance(rule, NameOrPath):
            return rule.spelt
    kind, _, null = _kind(info.annotation).partition(" or ")
    text = f"{kind} {_bounds(info)}".strip()
    return f"{text} or {null}" if null else text


def _bounds(info: FieldInfo) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = ((sign, getattr(rule, attribute, None)) for rule in info.metadata for attribute, sign in signs)
    return " and ".join(f"{sign} {bound}" for sign, bound in found if bound is not None)


def _kind(annotation: Any) -> str:
    words = {int: "integer", float: "number", str: "text", bool: "true/false", type(None): "null", Any: "any value"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is Annotated:
        (rule,) = annotation.__metadata__
        return rule.spelt if isinstance(rule, NameOrPath) else f"{_kind(annotation.__origin__)} {_bounds(rule)}"
    if get_origin(annotation) is Literal:
        names = ", ".join(map(str, get_args(annotation)))
        return f"one of {names}" if "," in names else names
    if get_origin(annotation) is dict:
        return "{name: " + _kind(get_args(annotation)[1]) + "}"
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        if parts[-1] is Ellipsis:
            return f"list of {_kind(parts[0])}"
        return "[" + ", ".join(map(_kind, parts)) + "]"
    return " or ".join(map(_kind, get_args(annotation)))


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return "null" if value is None else str(value)


def reference() -> str:
    """Return the text of ``docs/reference/config.md``."""
    lines = [
        "# Configuration keys",
        "",
        "Generated from `megatron_fleet/config/schema.py` by `python -m megatron_fleet.config.keys`; do not edit.",
        "Set a key on the command line with `key=value`. A key without a default is required; the groups in `configs/`",
        "set most of them.",
    ]
    sections = dict[str, list[Key]]()
    for key in leaves():
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    for section, keys in sections.items():
        lines += ["", f"## {section}", "", "| key | accepts | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            default = "required" if key.default is None else f"`{key.default}`"
            lines.append(f"| `{key.name}` | {key.accepts} | {default} | {key.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(reference(), encoding="utf-8")
    print(target)
