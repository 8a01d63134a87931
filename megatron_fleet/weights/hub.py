"""Models from the Hugging Face hub: downloaded once per host, and compared with the hashes that the hub states.

``HF_HOME``, ``HF_ENDPOINT`` (a mirror), ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` mean what they mean to huggingface_hub,
whose cache this is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.hub import HubModel, hub_model
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.local import NO_ROOM, make_folders, write_atomically

NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Files of a model that something here reads; repositories also hold other formats of the weights."""
WEIGHTS = "*.safetensors"
HASHING_THREADS = 8
ROOM = 256 << 20
"""Bytes that a download leaves free on the disk."""
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Listing:
    """A model as the hub lists it: its commit, and the size in bytes of each file that a run needs."""

    model: HubModel
    sizes: Mapping[str, int]

    def missing_bytes(self) -> int:
        """Bytes that are not here yet."""
        folder = self.model.folder(os.environ)
        return sum(size for name, size in self.sizes.items() if not (folder / name).is_file())


def fetch(path: str, weights: bool = True) -> str:
    """Make the files of ``model.path`` present on this host, if it is a hub id; other paths are returned unchanged.

    Processes of one host take turns, so that one of them downloads. Files that were compared with their hashes before
    are not read again.

    Args:
        weights: also the weights; without, what describes the model.

    Returns:
        The id with its commit, so that all hosts take the same files.

    Raises:
        UserError: the hub does not know the model or refuses it, does not answer, the disk has no room, or files are
            damaged.
    """
    model = hub_model(path)
    if model is None:
        return path
    if model.pinned and _is_verified(model, weights):
        return str(model)
    with _turn(model):
        listing = None if is_offline() else look_up(model)
        if listing is not None:
            _remember(model, listing.model.revision)
            model = listing.model
            if not _is_verified(model, weights):
                _download(listing, weights)
        folder = model.folder(os.environ)
        if not folder.is_dir():
            raise UserError(
                f"model.path={path}: is not in {model.storage(os.environ).parent}, and HF_HUB_OFFLINE forbids to fetch "
                f"it; unset that, copy the cache of another host, or name a folder."
            )
        model = HubModel(model.repo, folder.name)
        if not _is_verified(model, weights):
            _verify(model, listing, weights)
    return str(model)


def fetched(config: Config, weights: bool = True) -> Config:
    """Return ``config`` with the commit of its model, whose files are on this host; see `fetch`. Raises UserError."""
    path = fetch(config.model.path, weights)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def is_offline() -> bool:
    """Whether the user forbids requests to the hub."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def look_up(model: HubModel) -> Listing:
    """Ask the hub for a model's commit and files. Raises UserError."""
    from huggingface_hub import HfApi

    with _errors_of(model):
        info = HfApi(endpoint=_endpoint()).model_info(model.repo, revision=model.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _is_needed(file.rfilename)}
    if not info.sha or not any(Path(name).match(WEIGHTS) for name in sizes):
        raise UserError(f"model.path={model}: there is no *.safetensors file; name a model with such weights.")
    return Listing(HubModel(model.repo, info.sha), sizes)


def damaged_files(folder: Path) -> tuple[int, list[str]]:
    """Compare the files of a folder of the hub's cache, or of one that ``hf download --local-dir`` made, with the
    hashes that the hub stated.

    Returns:
        The number of files that were compared, 0 if no hashes are known; and the names of those that differ.
    """
    stated = _stated(folder)
    there = [(name, wanted) for name, wanted in sorted(stated.items()) if (folder / name).is_file()]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        same = list(pool.map(lambda item: _digest(folder / item[0], item[1]) == item[1], there))
    return len(there), [name for (name, _), good in zip(there, same, strict=True) if not good]


def _download(listing: Listing, weights: bool) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    model, storage = listing.model, listing.model.storage(os.environ)
    missing = listing.missing_bytes() if weights else 0
    if missing > (free := shutil.disk_usage(storage).free) - ROOM:
        raise UserError(
            f"model.path={model}: needs {missing / 1e9:.1f} GB in {storage.parent}, where {free / 1e9:.1f} GB are "
            f"free; free some space, or set HF_HOME to a larger disk."
        )
    if missing:
        say(f"downloading {model} ({missing / 1e9:.2f} GB) to {storage.parent}", sys.stderr)
    if not sys.stderr.isatty():
        disable_progress_bars()
    files = [name for name in listing.sizes if weights or not Path(name).match(WEIGHTS)]
    with _errors_of(model):
        snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=storage.parent,
            endpoint=_endpoint(),
            allow_patterns=files,
            library_name="megatron_fleet",
        )


def _remember(model: HubModel, commit: str) -> None:
    """Record the commit of a branch or tag, as huggingface_hub does, for when there is no network."""
    reference = model.storage(os.environ) / "refs" / model.revision
    if not model.pinned and not (reference.is_file() and reference.read_text(encoding="utf-8") == commit):
        make_folders(reference.parent)
        write_atomically(reference, commit.encode())


def _verify(model: HubModel, listing: Listing | None, weights: bool) -> None:
    """Compare the files with their hashes, and record that they are good. Damaged ones are fetched once more."""
    folder = model.folder(os.environ)
    missing = [name for name in (listing.sizes if listing else ()) if not (folder / name).is_file()]
    if missing and weights:
        raise UserError(f"model.path={model}: {missing[0]} was not downloaded; run the command again.")
    _, damaged = damaged_files(folder)
    if damaged and listing is not None:
        for name in damaged:
            (folder / name).resolve().unlink()
            (folder / name).unlink(missing_ok=True)
        _download(listing, weights)
        _, damaged = damaged_files(folder)
    if damaged:
        raise UserError(
            f"model.path={model}: {', '.join(damaged)} in {folder} differs from the hash that the hub states; remove "
            f"that folder and fetch the model again."
        )
    record = _record(model)
    make_folders(record.parent)
    write_atomically(record, json.dumps(_fingerprints(folder), indent=1).encode())


def _is_verified(model: HubModel, weights: bool) -> bool:
    """Whether all files were compared with their hashes before, and have not changed since."""
    record, folder = _record(model), model.folder(os.environ)
    if not record.is_file():
        return False
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:  # damaged itself
        return False
    if weights and not any(Path(name).match(WEIGHTS) for name in known):
        return False
    return all(_fingerprint(folder / name) == known[name] for name in known)


def _record(model: HubModel) -> Path:
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


def _stated(folder: Path) -> dict[str, str]:
    """Hash that the hub states for each file, SHA-256 of weights and git's SHA-1 of the others."""
    tree = folder.parent.parent / "trees" / f"{folder.name}.json"
    if tree.is_file():
        files = json.loads(tree.read_text(encoding="utf-8"))["files"]
        return {name: entry.get("lfs_sha256") or entry["blob_id"] for name, entry in files.items()}
    if folder.parent.name == "snapshots":  # of an earlier huggingface_hub: the content is in a file named by its hash
        return {path.name: Path(os.readlink(path)).name for path in folder.iterdir() if path.is_symlink()}
    notes = folder / ".cache" / "huggingface" / "download"
    stated = {note.name.removesuffix(".metadata"): note.read_text().split() for note in notes.glob("*.metadata")}
    return {name: words[1] for name, words in stated.items() if len(words) > 1}


def _digest(path: Path, wanted: str) -> str:
    """Hash of a file, of the kind that ``wanted`` is."""
    with path.open("rb") as file:
        if len(wanted) == hashlib.sha256().digest_size * 2:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha1(f"blob {os.fstat(file.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while data := file.read(1 << 20):
            digest.update(data)
        return digest.hexdigest()


def _is_needed(name: str) -> bool:
    return "/" not in name and any(Path(name).match(pattern) for pattern in NEEDED)


@contextmanager
def _turn(model: HubModel) -> Iterator[None]:
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


@contextmanager
def _errors_of(model: HubModel) -> Iterator[None]:
    """Convert the errors of huggingface_hub to UserError; none of the messages has the token."""
    import httpx2
    from huggingface_hub import errors

    hub, name = _endpoint() or "https://huggingface.co", f"model.path={model}"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{name}: its owner must grant access to it; ask for it at {hub}/{model.repo}, and set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name}: the hub has no such revision of it; correct what follows the @.") from None
    except errors.RepositoryNotFoundError:
        known = "the token in HF_TOKEN may not read it" if os.environ.get("HF_TOKEN") else "it is private"
        raise UserError(
            f"{name}: is no folder here, and {hub} has no such model, or {known}; correct the name, or set HF_TOKEN."
        ) from None
    except (errors.HFValidationError, errors.OfflineModeIsEnabled) as error:
        raise UserError(f"{name}: {_first_line(error)}; correct it.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise UserError(f"{name}: {hub} answers {status}; try again later, or set HF_ENDPOINT to a mirror.") from None
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = re.sub(r"\s+", " ", _first_line(error)).rstrip(".")
        raise UserError(
            f"{name}: {hub} does not answer ({reason}); check the network, set HF_ENDPOINT to a mirror, or copy the "
            f"model here and name its folder."
        ) from None
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EACCES, errno.EROFS):
            raise
        place = model.storage(os.environ).parent
        raise UserError(
            f"{name}: {place}: {error.strerror}; set HF_HOME to another disk, or free some space."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _endpoint() -> str | None:
    """Address of the hub or its mirror; ``None``: the default."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
