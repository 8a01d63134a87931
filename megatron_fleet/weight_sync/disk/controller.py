"""Controller side of the ``disk`` transport. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender
from megatron_fleet.weight_sync.disk.manifest import MANIFEST

KEPT_VERSIONS = 2
_OURS = re.compile(r"\.?(weights-\d{8}-[0-9a-f]{8})(\.partial)?")


class DiskTransport:
    """`weight_sync.base.Transport`."""

    name = "disk"
    lasting = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises UserError without a ``url``."""
        if not options.get("url"):
            raise UserError(
                "rollout.engine.transport=disk needs a folder that trainer and engines see, s3://… or gs://…"
            )
        self._url = str(options["url"]).rstrip("/")
        self._versions: list[str] = []

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """See `Transport.sync`. Engines continue sampling while the trainer writes.

        Raises:
            UserError: the disk or the object store fails.
        """
        # Each attempt has its own folder: a failed one may have left files.
        folder = f"weights-{version:08d}-{secrets.token_hex(4)}"
        message = {"path": f"{self._url}/{folder}"}
        await trainer.prepare_weights(self.name, {})
        await trainer.send_weights(version, message, _deliver_nothing)
        await engines.open_transport({})
        await engines.begin_update()
        await engines.load(message)
        await engines.finish_update(version, message)
        self._versions = [*self._versions, folder][-KEPT_VERSIONS:]
        await asyncio.to_thread(_remove_others, self._url, set(self._versions))

    def close(self) -> None:
        """See `Transport.close`. The last versions are kept."""


def _remove_others(url: str, kept: set[str]) -> None:
    """Remove all versions below ``url`` except ``kept``, including unfinished ones and those of earlier runs."""
    folder = open_folder(url)
    if isinstance(folder, LocalFolder):
        for path in Path(url).iterdir():
            if (match := _OURS.fullmatch(path.name)) and match[1] not in kept:
                shutil.rmtree(path, ignore_errors=True)
        return
    names = [name for name in folder.sizes() if (match := _OURS.fullmatch(name.split("/")[0])) and match[1] not in kept]
    # Manifests first: a partially removed version must not look complete.
    for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
        folder.delete(name)


async def _deliver_nothing(message: Mapping[str, Any]) -> None:
    raise AssertionError(f"ranks have no messages for engines with disk, and sent {message}")
