"""Download of adapters from the service, as a folder in peft's format."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import tinker

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.hosted.service import ServiceLost
from megatron_fleet.storage.local import begin_folder, commit_folder, fingerprint, write_atomically

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter folder that peft and vLLM load. `weights.adapters` has these names too, but imports torch."""
LIFE_S = 6 * 3600
"""Seconds after which the service itself deletes an export, if it was not deleted after the download."""
RENEW = timedelta(minutes=5)
"""Download addresses are requested again when they expire sooner than this."""
SILENCE_S = 60.0
"""Seconds without data after which a download fails."""


async def export_adapters(
    client: tinker.TrainingClient, rest: tinker.RestClient, name: str, path: Path, base_model: str
) -> None:
    """Write the adapters of ``client`` to the folder ``path``, whole or not at all.

    Args:
        name: of the export at the service, where it is deleted afterwards.
        base_model: the adapters are of this model; written into their configuration if it names none.

    Raises:
        UserError: the service writes no adapters, or none in peft's format.
    """
    try:
        exported = (await client.save_weights_external(name, ttl_seconds=LIFE_S)).path
    except tinker.NotFoundError as error:
        raise UserError(
            f"checkpoint.export.last: the service exports no adapters ({error.message}); set it to false. The run is "
            f"saved."
        ) from error
    try:
        partial = begin_folder(path)
        await download(rest, exported, partial)
        missing = [file for file in (CONFIG, WEIGHTS) if not (partial / file).is_file()]
        if missing:
            lacks = " and no ".join(missing)
            raise UserError(f"checkpoint.export.last: the service's export {exported} has no {lacks}; set it to false.")
        config = read_object(partial / CONFIG, "export again")
        if not config.get("base_model_name_or_path"):
            config["base_model_name_or_path"] = base_model
            write_atomically(partial / CONFIG, json.dumps(config, indent=2).encode())
        for file in partial.rglob("*"):
            if file.is_file():
                fingerprint(file, flush=True)
        commit_folder(partial, path)
    finally:
        with suppress(tinker.TinkerError):
            await rest.delete_checkpoint_from_tinker_path(exported)


async def download(rest: tinker.RestClient, exported: str, folder: Path) -> None:
    """Download all files of an export."""
    signed = await rest.get_external_weights_urls(exported)
    async with httpx.AsyncClient(timeout=SILENCE_S, follow_redirects=True) as http:
        for number, name in enumerate(sorted(signed.urls), 1):
            target = (folder / name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise ServiceLost(f"the service's export {exported} names a file outside its folder: {name!r}")
            if signed.expires - datetime.now(UTC) < RENEW:
                signed = await rest.get_external_weights_urls(exported)
            log.info("downloading %s, file %d of %d", name, number, len(signed.urls))
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                async with http.stream("GET", signed.urls[name]) as answer:
                    answer.raise_for_status()
                    with target.open("wb") as file:
                        async for block in answer.aiter_bytes():
                            await asyncio.to_thread(file.write, block)
            except httpx.HTTPError as error:
                # The address is signed: whoever has it may read the file.
                raise ServiceLost(f"downloading {name} of {exported}: {type(error).__name__}") from None
