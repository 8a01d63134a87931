"""The policy's view of an observation: images in their places, or a sentence instead of each unseen image."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import Vision, around, readable

UNREADABLE = "[an image that could not be read]"


@dataclass(frozen=True, slots=True)
class Seen:
    """Text with ``images`` at the markers ``[image n]``, n from 1; ``unseen``: number of images left out."""

    text: str
    images: tuple[Image, ...] = ()
    unseen: int = 0


Look = Callable[[str, Sequence[Image]], Awaitable[Seen]]
"""Maps an environment's text and images to what the policy sees."""


async def show_all(text: str, images: Sequence[Image]) -> Seen:
    """Keep all images, for a policy behind an external API that reads them itself."""
    return Seen(text, tuple(images))


async def see(text: str, images: Sequence[Image], vision: Vision | None, sentence: str) -> Seen:
    """Convert ``text`` and its ``images`` to what the policy is shown.

    A sentence replaces an unreadable file; for a model without ``vision``, ``sentence`` replaces every image.
    """
    if not images:
        return Seen(text)
    if vision is None:
        return _chosen(text, images, [sentence] * len(images))
    # Decoding a screenshot takes milliseconds and would block every other episode of the process.
    whole = await asyncio.to_thread(lambda: [readable(image) for image in images])
    return _chosen(text, images, [None if good else UNREADABLE for good in whole])


def _chosen(text: str, images: Sequence[Image], instead: Sequence[str | None]) -> Seen:
    """Keep the images without a replacement in ``instead``, and renumber them."""
    first, *rest = around(text, len(images))
    kept: list[Image] = []
    for image, other, part in zip(images, instead, rest, strict=True):
        if other is None:
            kept.append(image)
        first += (f"[image {len(kept)}]" if other is None else other) + part
    return Seen(first, tuple(kept), len(images) - len(kept))
