"""Checkpoints of a run: copied between steps, written and uploaded while training goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, final

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.store import Replaced, Uploader
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.run import CheckpointConfig
from megatron_fleet.loop.exports import Exports
from megatron_fleet.platform.alerts import alert
from megatron_fleet.platform.waiting import until_done
from megatron_fleet.trainer.base import Files, Trainer

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
        trainer: Trainer,
        checkpoints: Checkpoints,
        uploader: Uploader | None,
        exports: Exports | None = None,
    ) -> None:
        """
        Args:
            uploader: copies each checkpoint to a store.
            exports: makes HF folders of them.
        """
        self._config, self._trainer, self._checkpoints, self._uploader = config, trainer, checkpoints, uploader
        self._exports = exports
        self.saved_step: int | None = None
        self.failed = 0
        self._saving: tuple[int, asyncio.Task[None]] | None = None

    async def newest(self) -> Checkpoint | None:
        """See `Checkpoints.newest_in_thread`."""
        return await self._checkpoints.newest_in_thread()

    async def begin(self, step: int, state: dict[str, Any]) -> bool:
        """Copy the trainer's state, which may change afterwards; with ``checkpoint.asynchronous=false`` write it.

        Returns:
            Whether anything was begun; not if the step is committed already.

        Raises:
            UserError, OSError: this or the last checkpoint cannot be written, and ``checkpoint.on_failure=stop``.
        """
        await self.finish()
        copy = self._trainer.copy_state if self._config.asynchronous else self._write_at_once
        try:
            finishing = await self._checkpoints.begin(step, copy, state)
        except (UserError, OSError) as error:
            self._fail(step, error)
            return False
        if finishing is not None:
            self._saving = step, asyncio.create_task(self._finish(finishing))
        return finishing is not None

    async def finish(self, wait: bool = True) -> None:
        """Wait until the last checkpoint is written; else only look whether that failed. Errors are those of `begin`.

        Raises:
            Replaced: the run goes on elsewhere.
        """
        if self._saving is None or not (wait or self._saving[1].done()):
            return
        (step, saving), self._saving = self._saving, None
        try:
            await saving
        except Replaced:
            raise
        except (UserError, OSError) as error:
            self._fail(step, error)

    async def leave(self) -> None:
        """Wait until the last checkpoint is written, because the attempt ends; the loss of the trainer ends it, too."""
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            await until_done(saving)
            if not saving.cancelled() and (error := saving.exception()) is not None:
                log.warning("step %d has no checkpoint: %s", step, error)

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
        if self._uploader is not None:
            self._uploader.add(checkpoint)
        if self._exports is not None:
            await asyncio.to_thread(self._exports.refresh)

    def _fail(self, step: int, error: Exception) -> None:
        if self._config.on_failure == "stop":
            raise error
        alert(log, "checkpoint", f"step {step} has no checkpoint: {error}", level=logging.ERROR)
        self.failed += 1
