"""Models from the Hugging Face hub, and the hashes that it states.

``HF_ENDPOINT`` (a mirror), ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` mean what they mean to huggingface_hub, whose cache is
used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.remote_model import HubModel
from megatron_fleet.storage.local import NO_ROOM, LocalFolder
from megatron_fleet.weights.fetch.listing import Listing, has_weights, is_needed

HASHING_THREADS = 8
RANGE_S = 60.0
"""Deadline of one request for a part of a file."""
_TRUE = ("1", "ON", "YES", "TRUE")


def is_offline() -> bool:
    """Whether the user forbids requests to the hub."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def look_up(model: HubModel) -> Listing:
    """Ask the hub for a model's commit and files. Raises UserError."""
    from huggingface_hub import HfApi

    with _errors_of(model):
        info = HfApi(endpoint=_endpoint()).model_info(model.repo, revision=model.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if is_needed(file.rfilename)}
    if not info.sha or not has_weights(sizes):
        raise UserError(f"model.path={model}: there is no *.safetensors file; name a model with such weights.")
    return Listing(HubModel(model.repo, info.sha), sizes)


def download(model: HubModel, files: Sequence[str]) -> None:
    """Download files that are not here. Raises UserError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _errors_of(model):
        snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=model.storage(os.environ).parent,
            endpoint=_endpoint(),
            allow_patterns=list(files),
            library_name="megatron_fleet",
        )


class HeadersUnavailable(UserError):
    """The headers of the weights cannot be read without downloading whole files."""


class HubFolder:
    """`storage.folder.Readable`: a model on the hub, read in ranges without a download; files that are on this host
    are read here.
    """

    def __init__(self, listing: Listing) -> None:
        assert isinstance(listing.model, HubModel)
        self._model, self._listed = listing.model, listing.sizes
        self._here = LocalFolder(self._model.folder(os.environ))
        self._sizes_here = self._here.sizes()
        self.url = str(self._model)

    def join(self, name: str) -> str:
        return f"{self.url}/{name}"

    def sizes(self) -> dict[str, int]:
        return dict(sorted(self._listed.items()))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name in self._sizes_here:
            return self._here.read(name, offset, length)
        length = self._listed[name] - offset if length is None else length
        return self._range(name, offset, length) if length else b""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        view[:] = self.read(name, offset, len(view))

    def _range(self, name: str, offset: int, length: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        repo, revision = self._model.repo, self._model.revision
        url = hf_hub_url(repo, name, revision=revision, endpoint=_endpoint())
        headers = build_hf_headers(library_name="megatron_fleet")
        headers["range"] = f"bytes={offset}-{offset + length - 1}"
        with _errors_of(self._model), http_stream_backoff("GET", url, headers=headers, timeout=RANGE_S) as answer:
            hf_raise_for_status(answer)
            if answer.status_code != HTTPStatus.PARTIAL_CONTENT and length < self._listed[name]:
                raise HeadersUnavailable(
                    f"{self.join(name)}: the server does not support requests for a part of a file."
                )
            data: bytes = answer.read()
        if len(data) != length:
            raise UserError(f"{self.join(name)}: the hub gave {len(data)} of {length} bytes; try again.")
        return data


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
        raise UserError(f"{name}: the hub has no such revision; correct the part after the @.") from None
    except errors.RepositoryNotFoundError:
        known = "the token in HF_TOKEN may not read it" if os.environ.get("HF_TOKEN") else "it is private"
        raise UserError(
            f"{name} is not a folder here, and {hub} has no such model, or {known}; correct the name, or set HF_TOKEN."
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
