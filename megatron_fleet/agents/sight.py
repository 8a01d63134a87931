"""What a policy sees of an observation: its images in their places, or a sentence where it sees none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import Vision, around, readable

UNREADABLE = "[an image that could not be read]"


@dataclass(frozen=True, slots=True)
class Seen:
    """``images`` stand at the places ``[image n]`` of ``text``, n from 1; ``unseen``: how many were left out."""

    text: str
    images: tuple[Image, ...] = ()
    unseen: int = 0


Look = Callable[[str, Sequence[Image]], Awaitable[Seen]]
"""From what an environment shows to what the policy sees of it."""


async def show_all(text: str, images: Sequence[Image]) -> Seen:
    """For a policy behind somebody else's interface, which reads images itself."""
    return Seen(text, tuple(images))


async def see(text: str, images: Sequence[Image], vision: Vision | None, sentence: str) -> Seen:
    """What the policy is shown of ``text`` and its ``images``.

    A broken file has a sentence in its place; a model without ``vision`` reads ``sentence`` in each.
    """
    if not images:
        return Seen(text)
    if vision is None:
        return _chosen(text, images, [sentence] * len(images))
    # Decoding a screenshot takes milliseconds in which no other episode of the process would go on.
    whole = await asyncio.to_thread(lambda: [readable(image) for image in images])
    return _chosen(text, images, [None if good else UNREADABLE for good in whole])


def _chosen(text: str, images: Sequence[Image], instead: Sequence[str | None]) -> Seen:
    """Keep the images that have nothing ``instead``, numbered anew."""
    first, *rest = around(text, len(images))
    kept: list[Image] = []
    for image, other, part in zip(images, instead, rest, strict=True):
        if other is None:
            kept.append(image)
        first += (f"[image {len(kept)}]" if other is None else other) + part
    return Seen(first, tuple(kept), len(images) - len(kept))
