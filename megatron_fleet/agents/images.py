"""Images of an observation as the policy sees them: in their places, or a sentence instead of each unseen image."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import Vision, around, readable

UNREADABLE = "[an image that could not be read]"


@dataclass(frozen=True, slots=True)
class View:
    """Observation as the policy sees it: text with ``images`` at the markers ``[image n]``, n from 1.

    ``unseen``: number of images left out.
    """

    text: str
    images: tuple[Image, ...] = ()
    unseen: int = 0


Viewer = Callable[[str, Sequence[Image]], Awaitable[View]]
"""Maps an environment's text and images to what the policy sees."""


async def view_all(text: str, images: Sequence[Image]) -> View:
    """Keep all images, for a policy behind an external API that reads them itself."""
    return View(text, tuple(images))


async def view_images(text: str, images: Sequence[Image], vision: Vision | None, sentence: str) -> View:
    """Convert ``text`` and its ``images`` to what the policy is shown.

    A sentence replaces an unreadable file; for a model without ``vision``, ``sentence`` replaces every image.
    """
    if not images:
        return View(text)
    if vision is None:
        return _chosen(text, images, [sentence] * len(images))
    # Decoding a screenshot takes milliseconds and would block every other episode of the process.
    whole = await asyncio.to_thread(lambda: [readable(image) for image in images])
    return _chosen(text, images, [None if good else UNREADABLE for good in whole])


def _chosen(text: str, images: Sequence[Image], instead: Sequence[str | None]) -> View:
    """Keep the images without a replacement in ``instead``, and renumber them."""
    first, *rest = around(text, len(images))
    kept: list[Image] = []
    for image, other, part in zip(images, instead, rest, strict=True):
        if other is None:
            kept.append(image)
        first += (f"[image {len(kept)}]" if other is None else other) + part
    return View(first, tuple(kept), len(images) - len(kept))
