"""Tool results as text and images: MCP content blocks, FastMCP results, OpenAI image parts, plain JSON, pixels."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from megatron_fleet.envs.base import Image
from megatron_fleet.envs.pixels import replace_pixels

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,(?P<data>.*)", re.DOTALL)
MAX_REWARD = 1e30
_BLOCKS = ("text", "image", "image_url", "audio", "resource", "resource_link")
"""Kinds of content blocks: those of the Model Context Protocol, and OpenAI's name for images."""


def read_content(result: Any) -> tuple[str, tuple[Image, ...]]:
    """Convert a tool's result to text and images; the text marks their places as ``[image 1]``, ``[image 2]``…

    Supports FastMCP's ``{content, structured_content, data, is_error}``, lists of content blocks as in the Model
    Context Protocol (2025-06-18, "Tool result") and in OpenAI's chat format. Everything else becomes text, or JSON in
    which arrays of pixels are images.
    """
    images: list[Image] = []
    return _text(_unwrap(result), images), tuple(images)


def read_fields(fields: Mapping[str, Any]) -> tuple[str, tuple[Image, ...]]:
    """Convert the fields of an observation to JSON and images, as `read_content` does with a result that is plain JSON.

    No fields give an empty text.
    """
    images: list[Image] = []
    return _json(dict(fields), images) if fields else "", tuple(images)


def error_text(result: Any) -> str | None:
    """Return the message of a result marked as an error (``is_error`` or ``isError``), else ``None``."""
    if isinstance(result, dict) and (result.get("is_error") is True or result.get("isError") is True):
        return read_content(result)[0] or "the tool failed"
    return None


def score_of(result: Any) -> float | None:
    """Return the field ``score`` or ``reward`` of a structured result, or the result if a number; else ``None``."""
    value = _unwrap(result)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict):
        value = next((value[name] for name in ("score", "reward") if value.get(name) is not None), None)
    return known_number(value)


def known_number(value: Any) -> float | None:
    """Return ``value`` as a reward; ``None`` for another type, NaN, infinities and magnitudes above MAX_REWARD."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_REWARD else None


def _unwrap(result: Any) -> Any:
    """Return the value of a FastMCP result; images exist only in its blocks."""
    if not isinstance(result, dict) or not ({"content", "structured_content", "data"} & result.keys()):
        return result
    blocks = result.get("content")
    if _are_blocks(blocks) and any(block["type"] != "text" for block in blocks):
        return blocks
    for name in ("data", "structured_content", "structuredContent"):
        if result.get(name) is not None:
            return result[name]
    return blocks if _are_blocks(blocks) else result


def _are_blocks(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(part, dict) and part.get("type") in _BLOCKS for part in value)
    )


def _text(value: Any, images: list[Image]) -> str:
    if isinstance(value, str):
        return value
    if _are_blocks(value):
        return "\n".join(_block(part, images) for part in value)
    return _json(value, images)


def _json(value: Any, images: list[Image]) -> str:
    return json.dumps(replace_pixels(value, images), ensure_ascii=False)


def _block(block: dict[str, Any], images: list[Image]) -> str:
    kind = block["type"]
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "image":
        return _image(block.get("mimeType") or block.get("mime_type"), block.get("data"), images)
    if kind == "image_url":
        given = block.get("image_url")
        url = str(given.get("url") if isinstance(given, dict) else given)
        if found := _DATA_URL.fullmatch(url):
            return _image(found["type"], found["data"], images)
        return f"[image at {url}]"
    if kind == "resource" and isinstance(block.get("resource"), dict):
        inner = block["resource"]
        return str(inner["text"]) if "text" in inner else f"[{inner.get('mimeType') or 'data'}: {inner.get('uri')}]"
    return f"[{kind}: {block.get('uri') or block.get('mimeType') or 'not shown'}]"


def _image(media_type: Any, data: Any, images: list[Image]) -> str:
    try:
        decoded = base64.b64decode(data, validate=True)
    except (TypeError, ValueError):
        decoded = b""
    if not decoded:
        return "[an image that could not be read]"
    images.append(Image(str(media_type or "image/png"), decoded))
    return f"[image {len(images)}]"
