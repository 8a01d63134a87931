"""Copies of a run's checkpoints in an object store or on another disk, made in the background.

Below the run's address each checkpoint is a folder ``global_step_<N>`` with the files of the local one; its manifest is
written last, so a folder without one is an unfinished upload and no reader trusts it. Each attempt at the run takes the
next number below ``attempts/``, which only one writer can get; an attempt that finds a higher number than its own has
been replaced, on another machine, and stops writing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.checkpoint.manifest import MANIFEST, DamagedCheckpoint, is_whole, parse_manifest, progress
from megatron_fleet.config import units
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.remote_model import remote_model
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.local import LocalFolder, begin_folder, commit_folder, write_atomically
from megatron_fleet.storage.open import open_folder, open_staging
from megatron_fleet.storage.transfer import Copy, Throttle, transfer

UPLOADING = "uploading.json"
"""File in an unfinished upload that tells which manifest the finished files belong to."""
SUPERSEDED = "superseded.json"
"""Mark of a checkpoint that no longer counts, because the run went on from an earlier one."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
"""Waits before a failed upload is tried again; the store's own client has retried each request by then."""

SendApart = Callable[[Path, str, Mapping[str, int]], Collection[str]]
"""Function that makes other hosts copy those of the files (name → bytes) that their ranks wrote, from a folder that has
the same path everywhere to an address. Returns the names of those that are there now."""

log = logging.getLogger(__name__)


class Replaced(UserError):
    """Another attempt at the same run has begun since."""


class RunStore:
    """The checkpoints of one run in a store. Every method raises UserError when the store refuses.

    Attributes:
        url: address of the run.
        attempt: number of this attempt; 0 before `begin_attempt`.
        bytes_per_s: limit of the uploads of all hosts together; ``None``: none.
        throttle: the same, for those of this process.
        send_apart: called during an upload, to make other hosts send what their ranks wrote.
    """

    def __init__(self, url: str, bytes_per_s: float | None = None) -> None:
        """Send no request yet. ``bytes_per_s``: limit of uploads."""
        self.url, self.attempt, self.bytes_per_s = url, 0, bytes_per_s
        self.send_apart: SendApart | None = None
        self._folder: Folder = open_folder(url)
        self.throttle = None if bytes_per_s is None else Throttle(bytes_per_s)

    def begin_attempt(self) -> None:
        """Take the next number; attempts with lower ones stop writing."""
        note = json.dumps({"began": time.time(), "host": socket.gethostname(), "id": secrets.token_hex(8)}).encode()
        number = self._newest_attempt() + 1
        while not self._folder.write_new(f"attempts/{number:06d}.json", note):
            number += 1
        self.attempt = number

    def _newest_attempt(self) -> int:
        names = (re.fullmatch(r"(\d+)\.json", name) for name in open_folder(f"{self.url}/attempts").sizes())
        return max((int(name[1]) for name in names if name), default=0)

    def check_attempt(self) -> None:
        """Raise `Replaced` when a later attempt has begun."""
        if (newest := self._newest_attempt()) > self.attempt:
            raise Replaced(
                f"{self.url}: attempt {newest} at this run has begun since this one, attempt {self.attempt}, which "
                f"stops; let one process at a time train a run, or give this one another run.id."
            )

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints that count, newest first."""
        whole, aside = self._marked()
        return sorted(whole - aside, reverse=True)

    def superseded(self) -> list[int]:
        """Steps of the checkpoints that no longer count."""
        return sorted(self._marked()[1])

    def _marked(self) -> tuple[set[int], set[int]]:
        """Steps of the folders with a manifest, and of those that are superseded."""
        names = self._folder.sizes()
        whole, aside = (
            {int(found[1]) for name in names if (found := re.fullmatch(rf"global_step_(\d+)/{re.escape(file)}", name))}
            for file in (MANIFEST, SUPERSEDED)
        )
        return whole, aside

    def set_later_aside(self, step: int) -> None:
        """Mark checkpoints of steps after ``step``: they no longer count."""
        for later in self.steps():
            if later > step:
                log.warning("%s no longer counts: the run resumes from step %d", self.url_of(later), step)
                open_folder(self.url_of(later)).write(SUPERSEDED, json.dumps({"resumed_step": step}).encode())

    def upload(self, checkpoint: Checkpoint, stop: threading.Event) -> None:
        """Copy a checkpoint; files that an earlier, interrupted call has finished are not copied again.

        A checkpoint of the same step from before a resume is replaced.

        Raises:
            Replaced: see `check_attempt`.
            CancelledError: ``stop`` was set.
        """
        url = self.url_of(checkpoint.step)
        staging, data = open_staging(url, MANIFEST), (checkpoint.path / MANIFEST).read_bytes()
        manifest = parse_manifest(data, str(checkpoint.path / MANIFEST))
        self.check_attempt()
        if staging.exists():
            if open_folder(url).read(MANIFEST) == data:
                return
            log.warning("replacing %s, which is from before the run was resumed", url)
            self.remove(checkpoint.step)
        note = json.dumps({"manifest": hashlib.sha256(data).hexdigest()}).encode()
        there = staging.folder.sizes()
        if UPLOADING not in there or staging.folder.read(UPLOADING) != note:
            there = {}
            staging.folder.write(UPLOADING, note)
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        if self.send_apart is not None:
            unsent = {name: size for name, size in sizes.items() if there.get(name) != size}
            there |= {name: sizes[name] for name in self.send_apart(checkpoint.path, staging.folder.url, unsent)}
        missing = [Copy(name, name, size) for name, size in sizes.items() if there.get(name) != size]
        source = LocalFolder(checkpoint.path, cached=True)  # written a moment ago
        transfer(source, staging.folder, missing, self.throttle, stop)
        stored = staging.folder.sizes()
        for name, size in sizes.items():
            if stored.get(name) != size:
                raise UserError(f"{url}/{name}: the store holds {stored.get(name)} bytes of {size}.")
        for name in stored.keys() - sizes.keys() - {UPLOADING}:  # of an upload that was given up
            staging.folder.delete(name)
        self.check_attempt()
        staging.commit(data)
        open_folder(url).delete(UPLOADING)  # if the commit fails, the next call finds what is finished

    def download(self, step: int, final: Path, stop: threading.Event) -> None:
        """Copy a checkpoint to the folder ``final``, in place of a damaged one.

        Raises:
            DamagedCheckpoint: it is incomplete or damaged; ``final`` is as it was.
            UserError: the store or the disk refuses.
            CancelledError: ``stop`` was set.
        """
        partial = begin_folder(final)
        for again in (True, False):
            try:
                self._fetch(step, partial, stop)
                break
            except DamagedCheckpoint as error:
                if not again:
                    raise
                # If it was damaged on the way here, an older checkpoint in its place would lose steps.
                log.warning("downloading the damaged file once more: %s", error)
        commit_folder(partial, final)

    def _fetch(self, step: int, folder: Path, stop: threading.Event) -> None:
        """Copy those files of a checkpoint that ``folder`` does not have as its manifest says, and verify them all."""
        url = self.url_of(step)
        source = open_folder(url)
        data = source.read(MANIFEST)
        manifest = parse_manifest(data, f"{url}/{MANIFEST}")
        if manifest["step"] != step:
            raise DamagedCheckpoint(f"{url}/{MANIFEST} is that of step {manifest['step']}; use another checkpoint.")
        stored, files = source.sizes(), manifest["files"]
        for name, entry in files.items():
            if stored.get(name) != entry["bytes"]:
                raise DamagedCheckpoint(f"{url}/{name} has {stored.get(name)} bytes of {entry['bytes']}.")
        missing = [name for name, entry in files.items() if not is_whole(folder, name, entry, stop)]
        copies = [Copy(name, name, files[name]["bytes"]) for name in missing]
        needed = sum(copy.size for copy in copies)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise UserError(
                f"{folder.parent}: the disk has {units.size(free)} left, and {url} takes {units.size(needed)}; make "
                f"room, or choose another run.out."
            )
        with progress("downloading", f"{url}", needed) as advance:
            transfer(source, LocalFolder(folder), copies, stop=stop, advance=advance)
        write_atomically(folder / MANIFEST, data)
        Checkpoint.open(folder).verify(stop)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        open_folder(self.url_of(step)).clear(MANIFEST)

    def url_of(self, step: int) -> str:
        """Address of the checkpoint of a step."""
        return f"{self.url}/global_step_{step}"


class Uploader:
    """Thread that uploads checkpoints, oldest first, and removes those that the store need not keep.

    Uploads that fail are tried again; when a newer checkpoint waits, it goes first and the failed one is given up.
    """

    def __init__(self, store: RunStore, kept: Callable[[Sequence[int]], set[int]]) -> None:
        """``kept``: of steps, newest first, returns those to keep in the store."""
        self.store = self._store = store
        self._kept = kept
        self._changed = threading.Condition()
        self._waiting: list[Checkpoint] = []
        self._stop = threading.Event()
        self._ending = False
        self._replaced: Replaced | None = None
        self._failures = self._uploaded = 0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint uploads", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Checkpoint) -> None:
        """Schedule an upload. Raises `Replaced` if another attempt at the run has begun."""
        self.check()
        with self._changed:
            self._waiting.append(checkpoint)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `Replaced` if an upload found that another attempt at the run has begun."""
        if self._replaced is not None:
            raise self._replaced

    def waiting(self) -> set[int]:
        """Steps whose local checkpoints are still needed."""
        with self._changed:
            return {checkpoint.step for checkpoint in self._waiting}

    def settle(self, step: int, timeout_s: float, stop: threading.Event) -> bool:
        """Wait until a scheduled checkpoint is in the store; give it up after ``timeout_s``, or when ``stop`` is set.

        Returns:
            Whether it is there.

        Raises:
            Replaced: another attempt at the run has begun.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (wanted := self._of(step)) and not stop.is_set() and time.monotonic() < deadline:
                self._changed.wait(1.0)
            self._waiting = [checkpoint for checkpoint in self._waiting if checkpoint not in wanted]
            self._changed.notify_all()
        self.check()
        return not wanted

    def _of(self, step: int) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self._waiting if checkpoint.step == step]

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the seconds of the last finished upload."""
        with self._changed:
            return {
                "checkpoint/uploads": self._uploaded,
                "checkpoint/uploads_failed": self._failures,
                "checkpoint/uploads_waiting": len(self._waiting),
                "checkpoint/upload_seconds": self._seconds,
            }

    def close(self, timeout_s: float) -> None:
        """Wait for the scheduled uploads, at most ``timeout_s``. Idempotent."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            left = len(self._waiting)
        if left and timeout_s > 0:
            log.info("waiting for the upload of %d checkpoints to %s", left, self._store.url)
        self._thread.join(timeout_s)
        self._stop.set()
        if unsent := sorted(self.waiting()):
            log.warning(
                "step %s was not uploaded to %s; it is in run.out, and is uploaded when the run resumes",
                ", ".join(map(str, unsent)),
                self._store.url,
            )
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting or self._stop.is_set():
                    return
                checkpoint = self._waiting[0]
            began = time.monotonic()
            try:
                self._store.upload(checkpoint, self._stop)
                steps = self._store.steps()
                for step in set(steps) - self._kept(steps):
                    self._store.remove(step)
            except CancelledError:
                return
            except Replaced as error:
                with self._changed:
                    self._replaced, self._waiting = error, []
                return
            except (UserError, OSError) as error:
                log.warning("step %d could not be uploaded yet: %s", checkpoint.step, error)
                with self._changed:
                    self._failures += 1
                    self._changed.wait_for(lambda: self._stop.is_set() or len(self._waiting) != 1, retry_s)
                    if len(self._waiting) > 1:
                        log.warning("step %d is not uploaded: a newer checkpoint is in the store", checkpoint.step)
                        self._waiting.remove(checkpoint)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            with self._changed:
                if checkpoint in self._waiting:
                    self._waiting.remove(checkpoint)
                self._changed.notify_all()
                self._uploaded, self._seconds = self._uploaded + 1, time.monotonic() - began
            retry_s = FIRST_RETRY_S


def run_url(store: str, project: str, model: str, run_id: str) -> str:
    """Address of a run below a store. ``model``: path, address or hub id; its last part is used, without a revision."""
    remote = remote_model(model)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", remote.name if remote else Path(model).name).strip("-") or "model"
    return f"{store.rstrip('/')}/{project}/{name}/{run_id}"
