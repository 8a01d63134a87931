"""Tool definitions in the form Kimi K2.5 reads: a TypeScript namespace with one function type per tool.

The layout matches the model's own tokenizer files (``tool_declaration_ts.py``); the tests compare with texts that those
files produced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_INDENT = "  "
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class _NoDeclaration(Exception):
    """The schema cannot be written as TypeScript."""


@dataclass(slots=True)
class _References:
    definitions: dict[str, Any] = field(default_factory=dict)
    to_itself: bool = False


def sorted_keys(value: Any) -> Any:
    """Sort the keys of all objects in ``value``, as Kimi's tokenizers do before rendering."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list | tuple) else value


def declare(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Declarations of ``tools`` (OpenAI function format); ``None`` if a schema cannot be declared."""
    ordered = sorted_keys(list(tools))
    try:
        functions = [_function(t["function"]) for t in ordered if t.get("type") == "function" and t.get("function")]
    except (_NoDeclaration, AttributeError, TypeError, KeyError):  # not a valid schema
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n" if functions else None


def _function(function: Mapping[str, Any]) -> str:
    references = _References()
    parameters = function.get("parameters") or {}
    written = _object(parameters, "", references)
    parts = []
    if references.to_itself:
        fields = _fields(parameters.get("properties", {}), parameters, _INDENT, references)
        body = ",\n".join(text for _, _, text in fields)
        parts.append("interface parameters {" + (f"\n{body}\n" if body else "") + "}")
        written = "parameters"
    for name, schema in tuple(references.definitions.items()):
        about = schema.get("description", "")
        parts.append(
            (_comment(about, "") + "\n" if about else "") + f"interface {name} {_type(schema, '', references)}"
        )
    if function.get("description"):
        parts.append(_comment(function["description"], ""))
    return "\n".join([*parts, f"type {function.get('name', 'function')} = (_: {written}) => any;"])


def _type(schema: Any, indent: str, references: _References) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"], references)
    if "anyOf" in schema:
        return " | ".join(_type(choice, indent, references) for choice in schema["anyOf"])
    if "enum" in schema:
        return _enum(schema)
    if "type" not in schema:
        if schema:
            raise _NoDeclaration
        return "any"
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_UNION[k] for k in kind)
    if kind == "object":
        return _object(schema, indent, references)
    if kind == "array":
        return _array(schema, indent, references)
    return "number" if kind == "integer" else str(kind)


def _object(schema: Mapping[str, Any], indent: str, references: _References) -> str:
    references.definitions.update(schema.get("$defs") or {})
    inner = indent + _INDENT
    fields = sorted(_fields(schema.get("properties", {}), schema, inner, references))
    lines = [text for _, _, text in fields]
    more = schema.get("additionalProperties")
    if more is not None:
        if not isinstance(more, bool | dict):
            raise _NoDeclaration
        written = _type(more, inner, references) if isinstance(more, dict) else "any" if more else "never"
        lines.append(f"{inner}[k: string]: {written}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"


def _fields(
    properties: Mapping[str, Any], schema: Mapping[str, Any], indent: str, references: _References
) -> list[tuple[bool, str, str]]:
    """(optional, name, text) of each property, in schema order."""
    required = schema.get("required", [])
    found = []
    for name, prop in properties.items():
        optional = name not in required
        default = prop.get("default") if isinstance(prop, dict) else None
        text = _comments(prop, indent)
        if default is not None:
            plain = isinstance(default, int | float)
            shown = repr(default) if plain else json.dumps(default, ensure_ascii=False)
            text += f"{indent}// Default: {shown}\n"
        text += f"{indent}{name}{'?' if optional else ''}: {_type(prop, indent, references)}"
        found.append((optional, name, text))
    return found


def _array(schema: Mapping[str, Any], indent: str, references: _References) -> str:
    items = schema.get("items") or {}
    about = _comments(items, indent + _INDENT)
    if not about:
        return f"Array<{_type(items, indent, references)}>"
    inner = indent + _INDENT
    return f"Array<\n{about}{inner}{_type(items, inner, references)}\n{indent}>"


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind):
            raise _NoDeclaration
        kind = kind[0] if kind[0] != "null" or len(kind) == 1 else kind[1]
    for value in schema["enum"]:
        if value is not None and kind in _PYTHON_TYPES and not isinstance(value, _PYTHON_TYPES[kind]):
            raise _NoDeclaration
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _reference(target: str, references: _References) -> str:
    if target == "#":
        references.to_itself = True
        return "parameters"
    name = target.removeprefix("#/$defs/").split("/")[-1]
    if not target.startswith("#/$defs/") or name not in references.definitions:
        raise _NoDeclaration
    return name


def _comments(schema: Any, indent: str) -> str:
    """Comment lines before a type: its description and its constraints."""
    if isinstance(schema, bool):
        return ""
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type")
    limits = _LIMITS.get(kind, ()) if plain and isinstance(kind, str) else ()
    found = [f"{key}: {schema[key]}" for key in limits if key in schema]
    if found:
        lines.append(f"{indent}// {', '.join(found)}")
    return "".join(line + "\n" for line in lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
