"""Open a folder by its address: a local path, ``s3://bucket/prefix`` or ``gs://bucket/prefix``."""

from __future__ import annotations

import secrets
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder, is_path
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.remote import RemoteFolder
from megatron_fleet.storage.staging import LocalStaging, Staging, StoreStaging


def open_folder(url: str | Path, *, cached: bool = False) -> Folder:
    """Open the folder at an address; it need not exist. The client of a store is imported for its addresses only.

    Args:
        cached: read local files through the page cache, because other processes of this machine read the same ones.

    Raises:
        UserError: another scheme, or an address in a store without a bucket.
    """
    remote = _open_remote(url)
    return LocalFolder(Path(url), cached) if remote is None else remote


def check_writable(url: str) -> None:
    """Write an empty file to the folder at an address and remove it.

    Raises:
        UserError: as of ``open_folder``, or files cannot be written or removed there.
    """
    folder, name = open_folder(url), f"write-test-{secrets.token_hex(4)}"
    folder.write(name, b"")
    folder.delete(name)


def open_staging(url: str | Path, marker: str) -> Staging:
    """Open a staging area for a folder of many files that appears whole or not at all; see ``Staging``.

    Args:
        url: the folder's final address.
        marker: name of the file that is written last; a folder with it is whole.

    Raises:
        UserError: as of ``open_folder``.
    """
    remote = _open_remote(url)
    return LocalStaging(Path(url), marker) if remote is None else StoreStaging(remote, marker)


def _open_remote(url: str | Path) -> RemoteFolder | None:
    """Open the folder at an address in an object store, ``None`` for a local one."""
    scheme, found, rest = str(url).partition("://")
    if not found:
        if not str(url):
            raise UserError("the address of a folder is empty; give a path, s3://bucket/prefix or gs://bucket/prefix.")
        if not is_path(str(url)):
            raise UserError(f"{url} cannot be a path (a NUL or half of a surrogate pair); give another one.")
        return None
    bucket, _, prefix = rest.partition("/")
    if bucket and scheme == "s3":
        from megatron_fleet.storage.s3 import S3Folder

        return S3Folder(bucket, prefix.strip("/"))
    if bucket and scheme == "gs":
        from megatron_fleet.storage.gcs import GCSFolder

        return GCSFolder(bucket, prefix.strip("/"))
    raise UserError(f"{url} is not the address of a folder; give a path, s3://bucket/prefix or gs://bucket/prefix.")
