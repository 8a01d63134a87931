"""Checkpoints of a run: copied before the weights go out, written and uploaded while training goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Collection, Coroutine, Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints, Copied
from megatron_fleet.checkpoint.exports import Exports
from megatron_fleet.checkpoint.resume_point import newest_of
from megatron_fleet.checkpoint.store import Replaced, Uploader
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.run import CheckpointConfig
from megatron_fleet.platform.alerts import alert
from megatron_fleet.platform.waiting import finish_in_thread, until_done
from megatron_fleet.storage.folder import Files
from megatron_fleet.trainer.base import Trainer, TrainerLost

log = logging.getLogger(__name__)


@final
class Saves:
    """Saves of one run, one at a time.

    Attributes:
        saved_step: of the newest checkpoint that is whole, or from which the run was resumed; ``None``: none yet.
        failed: checkpoints that could not be written.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        last_step: int,
        trainer: Trainer,
        checkpoints: Checkpoints,
        uploader: Uploader | None,
        exports: Exports | None = None,
    ) -> None:
        """
        Args:
            last_step: of the run.
            uploader: copies each checkpoint to a store.
            exports: makes HF folders of them.
        """
        self._config, self._trainer, self._checkpoints, self._uploader = config, trainer, checkpoints, uploader
        self._last_step, self._exports = last_step, exports
        self.saved_step: int | None = None
        self.failed = 0
        self._copied: Copied | None = None
        self._saving: tuple[int, asyncio.Task[None]] | None = None
        self._lost = threading.Event()
        self._apart: bool | None = None  # as the trainer says once it is built

    def due(self, step: int) -> bool:
        """Return whether to save after ``step`` steps; always true after the last one."""
        return step == self._last_step or (self._config.interval > 0 and step % self._config.interval == 0)

    async def newest(self, found: Checkpoint | None) -> Checkpoint | None:
        """Return the newest good checkpoint, see `Checkpoints.newest`; where hosts share no folder, of the store.

        Args:
            found: where the run started; still the newest if no trainer has resumed from it.
        """
        if self._apart is None:
            return found
        if self._apart and self._uploader is not None:
            return await asyncio.to_thread(newest_of, self._checkpoints, self._uploader.store)
        return await self._checkpoints.newest_in_thread()

    async def resume(self, found: Checkpoint | None) -> None:
        """Give the trainer the state of a checkpoint, if there is one; its hosts upload what they will write.

        Raises:
            UserError: the trainer's hosts share no folder, and the run needs one.
        """
        self._lost.clear()
        ranks = self._trainer.ranks
        self._apart = ranks is not None and ranks.info.hosts_apart
        if self._apart:
            self._check_apart()
        if self._uploader is not None and ranks is not None:
            store, loop = self._uploader.store, asyncio.get_running_loop()

            def send(path: Path, url: str, sizes: Mapping[str, int]) -> Collection[str]:
                try:
                    return _done(ranks.send_state(path, url, sizes, store.bytes_per_s), loop)
                except TrainerLost:
                    self._lost.set()  # what only its hosts have is gone with it
                    return []

            store.send_apart = send
            if found is not None and self._apart:
                await ranks.fetch_state(store.url_of(found.step), found.path, found.files())
        if found is not None:
            await self._trainer.load_state(found.path)

    def _check_apart(self) -> None:
        export = self._config.export
        if self._uploader is None:
            raise UserError(
                "run.out: not all hosts of the ranks see this folder, and checkpoint.store.url is null; put run.out on "
                "a file system that they share, or name a store."
            )
        if export.last or export.every or export.best:
            raise UserError(
                "checkpoint.export: not all hosts of the ranks see run.out, which exports need; set "
                "checkpoint.export.last=false, every=0 and best=false and convert checkpoints of the store "
                "(mfleet convert to-hf), or put run.out on a file system that they share."
            )

    async def copy(self, step: int) -> bool:
        """Copy the trainer's state, which may change afterwards, for the checkpoint that `commit` makes of it. A
        trainer without ranks writes it at once, as all do with ``checkpoint.asynchronous=false``.

        Returns:
            Whether there is a copy: not if the step is committed already.

        Raises:
            UserError: this or the last checkpoint cannot be written, and ``checkpoint.on_failure=stop``.
        """
        await self.finish()
        ranks = self._trainer.ranks
        copy = self._write_at_once if ranks is None or not self._config.asynchronous else ranks.copy_state
        try:
            if self._apart and ranks is not None:
                await ranks.clear_state(self._checkpoints.folder)
            self._copied = await self._checkpoints.copy(step, copy)
        except (UserError, OSError) as error:
            self._fail(step, error)
            return False
        return self._copied is not None

    def commit(self, state: Mapping[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Make the checkpoint of the copied state, if there is one, in the background.

        Args:
            state: the controller's, JSON-able.
            files: further small files of the controller, by name.
        """
        copied, self._copied = self._copied, None
        if copied is not None:
            finishing = self._checkpoints.commit(copied, dict(state), self._publish if self._apart else None, files)
            self._saving = copied.step, asyncio.create_task(self._finish(finishing))

    async def finish(self) -> None:
        """Wait until the last checkpoint is written. Errors are those of `check`."""
        if self._saving is not None:
            await asyncio.wait([self._saving[1]])
        self.check()

    def check(self) -> None:
        """Look whether the last checkpoint could be written, if that has ended.

        Raises:
            UserError: it could not, and ``checkpoint.on_failure=stop``.
            Replaced: the run goes on elsewhere.
        """
        if self._saving is None or not self._saving[1].done():
            return
        (step, saving), self._saving = self._saving, None
        try:
            saving.result()
        except Replaced:
            raise
        except (UserError, OSError) as error:
            self._fail(step, error)

    async def leave(self) -> None:
        """Wait until the last checkpoint is written, because the attempt ends; the loss of the trainer ends it, too.
        A copy that is not committed is given up.
        """
        if self._copied is not None:
            self._copied.writing.cancel()
            self._copied = None
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            await until_done(saving)
            if not saving.cancelled() and (error := saving.exception()) is not None:
                log.warning("step %d has no checkpoint: %s", step, error)

    async def choose_kept(self) -> None:
        """Decide anew which checkpoints and exports are kept: an evaluation was recorded after the last save."""
        if self.saved_step is not None:
            await finish_in_thread(self._checkpoints.prune)
        if self._exports is not None:
            await asyncio.to_thread(self._exports.refresh)

    def metrics(self) -> dict[str, float]:
        """``checkpoint/failed``, and metrics of the uploads and exports."""
        metrics = {"checkpoint/failed": float(self.failed)}
        for background in (self._uploader, self._exports):
            metrics |= {} if background is None else background.metrics()
        return metrics

    async def _write_at_once(self, path: Path) -> Awaitable[Files]:
        done: asyncio.Future[Files] = asyncio.get_running_loop().create_future()
        done.set_result(await self._trainer.save_state(path))
        return done

    async def _finish(self, finishing: Coroutine[Any, Any, Checkpoint]) -> None:
        checkpoint = await finishing
        self.saved_step = checkpoint.step
        if self._uploader is not None and not self._apart:
            self._uploader.add(checkpoint)
        if self._exports is not None:
            await asyncio.to_thread(self._exports.refresh)

    async def _publish(self, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint whose files lie on several hosts. Raises UserError when it does not get there in time."""
        uploader, limit_s = self._uploader, self._config.store.drain_timeout_s
        assert uploader is not None  # `resume` has refused
        uploader.add(checkpoint)
        try:
            there = await asyncio.to_thread(uploader.settle, checkpoint.step, limit_s, self._lost)
        except asyncio.CancelledError:
            self._lost.set()
            raise
        if not there:
            raise UserError(
                f"{uploader.store.url_of(checkpoint.step)}: the files of all hosts were not uploaded within "
                f"checkpoint.store.drain_timeout_s={limit_s:g}; see the warnings above."
            )
        ranks = self._trainer.ranks
        assert ranks is not None  # they are apart
        with suppress(TrainerLost):  # the checkpoint is there all the same
            await ranks.clear_state(self._checkpoints.folder)

    def _fail(self, step: int, error: Exception) -> None:
        if self._config.on_failure == "stop":
            if isinstance(error, UserError):
                raise error
            raise UserError(
                f"step {step} has no checkpoint: {error}; make room in {self._checkpoints.folder}, then the same "
                f"command resumes from the previous checkpoint, or set checkpoint.on_failure=continue."
            ) from error
        alert(log, "checkpoint", f"step {step} has no checkpoint: {error}", level=logging.ERROR)
        self.failed += 1


def _done(work: Coroutine[Any, Any, Collection[str]], loop: asyncio.AbstractEventLoop) -> Collection[str]:
    """Result of work that another thread wants done; nothing when the run has ended."""
    if loop.is_closed():
        work.close()
        return []
    future = asyncio.run_coroutine_threadsafe(work, loop)
    while not future.done():
        futures.wait([future], timeout=1.0)
        if loop.is_closed():  # nothing would ever finish it
            return []
    try:
        return future.result()
    except futures.CancelledError:
        return []
