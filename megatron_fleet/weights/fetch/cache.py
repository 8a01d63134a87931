"""The cache of models on this host: each is downloaded once, and compared with what its source states.

``HF_HOME`` says where it is, for models from object stores too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.remote_model import HubModel, RemoteModel, remote_model
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.folder import Readable
from megatron_fleet.storage.local import make_folders, write_atomically
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.fetch import hub, object_store
from megatron_fleet.weights.fetch.listing import WEIGHTS, Listing, has_weights

ROOM = 256 << 20
"""Bytes that a download leaves free on the disk."""


def fetch(path: str, weights: bool = True) -> str:
    """Make the files of ``model.path`` present on this host, if it names a remote model; other paths are returned
    unchanged.

    Processes of one host take turns, so that one of them downloads. Files that were verified before are not read again.

    Args:
        weights: also the weights; without, what describes the model.

    Returns:
        The path with its commit (hub) or content (object store), so that all hosts take the same files.

    Raises:
        UserError: the source does not know the model or refuses it, does not answer, or has changed it; the disk has
            no room; or files are damaged.
    """
    model = remote_model(path)
    if model is None:
        return path
    if model.pinned and _is_verified(model, weights):
        return str(model)
    with _turn(model):
        listing = None if _is_offline(model) else look_up(model)
        if listing is not None:
            _remember(model, listing.model.revision)
            model = listing.model
            if not _is_verified(model, weights):
                _download(listing, weights)
        folder = model.folder(os.environ)
        if not folder.is_dir():
            raise UserError(
                f"model.path={path} is not in {model.storage(os.environ).parent}, and HF_HUB_OFFLINE forbids "
                f"downloading it; unset that, copy the cache of another host, or name a folder."
            )
        model = model.at(folder.name)
        if not _is_verified(model, weights):
            _verify(model, listing, weights)
    return str(model)


def fetched(config: Config, weights: bool = True) -> Config:
    """Return ``config`` with the commit or content of its model, whose files are on this host; see `fetch`. Raises
    UserError.
    """
    path = fetch(config.model.path, weights)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def look_up(model: RemoteModel) -> Listing:
    """Ask the source for a model's commit or content, and its files. Raises UserError."""
    if not isinstance(model, HubModel):
        return object_store.look_up(model)
    if hub.is_offline():
        fetch(str(model))  # says why it cannot be
    return hub.look_up(model)


def at_source(path: str) -> Readable | None:
    """Return the files of a remote model as they are at their source, for a look at their headers; ``None`` where the
    user forbids requests to it. Raises UserError.
    """
    model = remote_model(path)
    assert model is not None
    if not isinstance(model, HubModel):
        return open_folder(model.address)
    return None if hub.is_offline() else hub.HubFolder(hub.look_up(model))


def _is_offline(model: RemoteModel) -> bool:
    return isinstance(model, HubModel) and hub.is_offline()


def _download(listing: Listing, weights: bool) -> None:
    model, storage = listing.model, listing.model.storage(os.environ)
    missing = listing.missing_bytes() if weights else 0
    if missing > (free := shutil.disk_usage(storage).free) - ROOM:
        raise UserError(
            f"model.path={model} needs {missing / 1e9:.1f} GB in {storage.parent}, where {free / 1e9:.1f} GB are "
            f"free; free some space, or set HF_HOME to a larger disk."
        )
    if missing:
        say(f"downloading {model} ({missing / 1e9:.2f} GB) to {storage.parent}", sys.stderr)
    files = [name for name in listing.sizes if weights or not Path(name).match(WEIGHTS)]
    if isinstance(model, HubModel):
        hub.download(model, files)
    else:
        object_store.download(model, {name: listing.sizes[name] for name in files})


def _remember(model: RemoteModel, revision: str) -> None:
    """Record the commit of a branch or tag, as huggingface_hub does, for when there is no network."""
    reference = model.storage(os.environ) / "refs" / model.revision
    if not model.pinned and not (reference.is_file() and reference.read_text(encoding="utf-8") == revision):
        make_folders(reference.parent)
        write_atomically(reference, revision.encode())


def _verify(model: RemoteModel, listing: Listing | None, weights: bool) -> None:
    """Compare the files with what the source states, and record that they are good; fetch damaged ones once more."""
    folder = model.folder(os.environ)
    missing = [name for name in (listing.sizes if listing else ()) if not (folder / name).is_file()]
    if missing and weights:
        raise UserError(f"model.path={model}: {missing[0]} was not downloaded; run the command again.")
    damaged = _damaged(model, listing)
    if damaged and listing is not None:
        _record(model).unlink(missing_ok=True)
        for name in damaged:
            (folder / name).resolve().unlink()
            (folder / name).unlink(missing_ok=True)
        _download(listing, weights)
        damaged = _damaged(model, listing)
    if damaged:
        stated = "the hash that the hub states" if isinstance(model, HubModel) else "the size that the store states"
        raise UserError(
            f"model.path={model}: {', '.join(damaged)} in {folder} differs from {stated}; remove that folder and fetch "
            f"the model again."
        )
    record = _record(model)
    make_folders(record.parent)
    write_atomically(record, json.dumps(_fingerprints(folder), indent=1).encode())


def _damaged(model: RemoteModel, listing: Listing | None) -> list[str]:
    """Names of the files with another hash than the source states; without hashes, of those with another size, or
    changed since they were verified.
    """
    folder = model.folder(os.environ)
    compared, damaged = hub.damaged_files(folder)
    if compared:
        return damaged
    known, sizes = _verified(model), listing.sizes if listing else {}
    there = [(folder / name, size) for name, size in sizes.items() if (folder / name).is_file()]
    return [
        path.name
        for path, size in there
        if path.stat().st_size != size or _fingerprint(path) != known.get(path.name, _fingerprint(path))
    ]


def _is_verified(model: RemoteModel, weights: bool) -> bool:
    """Whether all files were verified before, and have not changed since."""
    known, folder = _verified(model), model.folder(os.environ)
    if not known or (weights and not has_weights(known)):
        return False
    return all(_fingerprint(folder / name) == known[name] for name in known)


def _verified(model: RemoteModel) -> dict[str, list[int] | None]:
    """Fingerprints of the files that were verified before."""
    try:
        known = json.loads(_record(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is damaged itself
        return {}
    return known if isinstance(known, dict) else {}


def _record(model: RemoteModel) -> Path:
    return model.storage(os.environ) / "verified" / f"{model.revision}.json"


def _fingerprints(folder: Path) -> dict[str, list[int] | None]:
    return {path.name: _fingerprint(path) for path in sorted(folder.iterdir()) if path.is_file()}


def _fingerprint(path: Path) -> list[int] | None:
    """Size and time of the last change; ``None``: there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def _turn(model: RemoteModel) -> Iterator[None]:
    """Wait until no other process of this host fetches the model."""
    lock = model.storage(os.environ) / "mfleet.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(
            f"model.path={model}: {error.filename} cannot be written to ({error.strerror}); set HF_HOME to a folder of "
            f"yours."
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that fetches {model}", sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
