"""Content-addressed files of the images that episodes saw: each is written once, however often it was shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Trajectory

FOLDER = "images"
EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/jpg": "jpg",
    "image/webp": "webp",
    "image/gif": "gif",
    "image/bmp": "bmp",
}
OTHER = "bin"
"""Extension for any other media type."""


def digests(trajectory: Trajectory) -> list[str]:
    """Return the distinct digests of the images in its messages and its tokens, in order."""
    said = (name for message in trajectory.messages for name in message.get("images", ()))
    return list(dict.fromkeys([*said, *(span.digest for span in trajectory.image_spans)]))


def save_images(folder: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Write the images of ``trajectories`` that ``folder`` lacks; return the files of all that they name."""
    for t in trajectories:
        for name, image in t.images.items():
            if image_file(folder, name) is None:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}.{EXTENSIONS.get(image.media_type, OTHER)}"
                part = path.with_name(path.name + ".part")
                part.write_bytes(image.data)
                part.replace(path)
    return list(_files(folder, (name for t in trajectories for name in digests(t))))


def image_file(folder: Path, name: str) -> Path | None:
    """Return the file of a digest; ``None`` if it does not exist, or ``name`` is not a digest."""
    if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        return None
    kinds = dict.fromkeys([*EXTENSIONS.values(), OTHER])
    return next((path for kind in kinds if (path := folder / f"{name}.{kind}").is_file()), None)


def _files(folder: Path, names: Iterable[str]) -> Iterable[Path]:
    return (path for name in dict.fromkeys(names) if (path := image_file(folder, name)) is not None)
