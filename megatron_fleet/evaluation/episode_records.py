"""Files of a run's episodes: shards, images and Fleet's dumps in ``run.out``, their copies in a store, what is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.evaluation.dumps import Decode, EvalDumps
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.evaluation.uploads import Uploads
from megatron_fleet.storage.local import list_files
from megatron_fleet.telemetry.shards import IMAGES
from megatron_fleet.telemetry.trajectories import TrajectoryLog, prune

TRAJECTORIES, DUMPS = "trajectories", "dumped_evals"

log = logging.getLogger(__name__)


class EpisodeRecords:
    """Writer of all files of episodes. In a store, evaluations are below ``evals/<run.id>/``, training steps below
    ``rollouts/<run.id>/``, and both have their images in a folder ``images``, once each.
    """

    def __init__(self, config: Config, run_id: str, decode: Decode, resumed_step: int | None) -> None:
        """Drop what a failed attempt wrote past its checkpoint.

        Args:
            decode: text of token ids, for Fleet's dumps.
            resumed_step: keep files up to it; ``None`` = a new run, keep nothing.
        """
        out, own = Path(config.run.out), config.logging.trajectories
        self._folder, self._images = out / TRAJECTORIES, out / IMAGES
        self._log = TrajectoryLog(self._folder, resumed_step)
        self._dumps = EvalDumps(out / DUMPS, decode, config.rollout.sampling.max_turns, resumed_step)
        self._evaluations = _uploads(config.eval.upload, f"evals/{run_id}")
        self._steps = _uploads(own.upload, f"rollouts/{run_id}")
        self._max_bytes = None if own.max_gb is None else own.max_gb * 1e9
        self._bytes = sum(path.stat().st_size for path in (*list_files(self._folder), *list_files(self._images)))
        # A shard that is written may name an image that is there already, which must not be removed meanwhile.
        self._writing = threading.Lock()

    def metrics(self, evaluation: bool) -> dict[str, float]:
        """Return how many files did not get into the store so far. ``evaluation``: of those of evaluations."""
        uploads, name = (self._evaluations, "eval/all") if evaluation else (self._steps, "generate")
        return {} if uploads is None else {f"{name}/uploads_failed": uploads.failed}

    def training(self, step: int, groups: Sequence[Group]) -> None:
        """Write and upload the episodes of a training step; remove the oldest ones beyond the limit."""
        with self._writing:
            shard, *images = self._log.write(step, groups)
            self._bytes += sum(path.stat().st_size for path in (shard, *images))
        if self._steps is not None:
            self._steps.add_once({path.name: path for path in images}, IMAGES)
            self._steps.add({shard.name: shard}, TRAJECTORIES)
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            if self._steps is None:
                self._prune()
            else:
                self._steps.run(self._prune)

    def evaluation(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float], folder: str) -> None:
        """Write and upload the episodes and ``metrics`` of an evaluation. ``folder``: its name in the store."""
        written = []
        with self._writing:
            if evaluation.sampled:
                written += self._log.write(step, evaluation.sampled, "eval")
            if evaluation.greedy:
                written += self._log.write(step, evaluation.greedy, "greedy")
        files = self._dumps.write(step, evaluation.sampled, evaluation.greedy, metrics)
        if self._evaluations is not None:
            images = {path.name: path for path in written if path.parent == self._images}
            shards = {f"{TRAJECTORIES}/{path.name}": path for path in written if path.parent == self._folder}
            self._evaluations.add_once(images, IMAGES)
            self._evaluations.add(files | shards, folder)

    def close(self) -> None:
        """Wait for uploads, for a limited time. Idempotent."""
        for uploads in (self._evaluations, self._steps):
            if uploads is not None:
                uploads.close()

    def _prune(self) -> None:
        assert self._max_bytes is not None
        try:
            stored = None if self._steps is None else self._steps.stored(TRAJECTORIES)
            with self._writing:
                prune(self._folder, self._max_bytes, stored)
                files = (*list_files(self._folder), *list_files(self._images))
                self._bytes = sum(path.stat().st_size for path in files)
        except (UserError, OSError) as error:
            log.warning("old trajectories could not be removed (logging.trajectories.max_gb): %s", error)


def _uploads(url: str | None, folder: str) -> Uploads | None:
    return None if url is None else Uploads(f"{url.rstrip('/')}/{folder}")
