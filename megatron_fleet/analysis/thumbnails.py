"""Thumbnails of the images that episodes saw, re-encoded so that no bytes of an untrusted file reach the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

import PIL.Image

from megatron_fleet.models.images import FORMATS, MAX_PIXELS
from megatron_fleet.telemetry.image_files import FOLDER, image_file

SIDE = 640
"""Maximum side in pixels."""
QUALITY = 60
MAX_BYTES = 16_000_000


def thumbnails(run: Path, names: Iterable[str], budget: int) -> dict[str, str]:
    """Map digest → ``data:`` URL, in order, as many as fit into ``budget`` and ``MAX_BYTES``; skips unreadable ones."""
    left, found = min(budget, MAX_BYTES), dict[str, str]()
    for name in dict.fromkeys(names):
        path = image_file(run / FOLDER, name)
        address = None if path is None else _small(path)
        if address is None:
            continue
        left -= len(address) + 80
        if left < 0:
            break
        found[name] = address
    return found


def _small(path: Path) -> str | None:
    try:
        with PIL.Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                return None
            small = opened.convert("RGB")
    except Exception:  # on broken files the decoders may raise anything
        return None
    small.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
