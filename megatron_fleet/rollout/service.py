"""RolloutService: the driver's handle on everything that plays episodes. Synchronous."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from megatron_fleet.agents.engine import Engine
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import Config
from megatron_fleet.envs.registry import Start, serve
from megatron_fleet.rollout import ray_local
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.janitor import MARK, Janitor
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, Progress, RolloutStats

PROGRESS_INTERVAL_S = 0.5
CALL_TIMEOUT_S = 60.0


class RolloutService:
    """Starts Ray, the environment server, the engines and the workers; ends all of them with itself.

    Use it as a context manager. Entering returns before the engines are up, so that the trainer can start meanwhile;
    the first call that needs them waits. However the owning process ends, killed included, nothing of it stays.
    """

    def __init__(self, config: Config, out: Path, episode_python: Path) -> None:
        """Args: ``out``: logs go to ``out/logs``. ``episode_python``: interpreter of the episode environment.

        ``run_id`` marks every process of this rollout (see ``janitor``).
        """
        self._config = config
        self._logs = out.resolve() / "logs"
        self._episode_python = episode_python
        self.run_id = secrets.token_hex(4)
        self._token = secrets.token_hex(32)
        self._cleanup = contextlib.ExitStack()
        self._manager: Any = None
        self._starting: list[Any] = []

    def __enter__(self) -> RolloutService:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        folder = ray_local.run_folder(self.run_id)
        janitor = Janitor(self.run_id, folder)
        self._cleanup.callback(janitor.close)
        with ray_local.children_environment(self.run_id):
            ray_local.start(folder)
            self._cleanup.callback(_leave_ray)
            self._cleanup.callback(janitor.look)
            self._manager = self._make_manager()
            self._cleanup.callback(self._close_manager)
            engines = self._manager.start_engines.remote()
            url = self._environment_url()
        self._starting = [engines, self._manager.start_workers.remote(url)]

    def _make_manager(self) -> Any:
        import ray
        import torch

        from megatron_fleet.rollout.manager import Place, RolloutManager

        env_vars = {MARK: self.run_id}
        place = Place(
            logs=self._logs,
            episode_python=self._episode_python,
            cuda=torch.cuda.is_available(),
            token=self._token,
            env_vars=env_vars,
        )
        options = {
            "num_cpus": 0,
            "max_concurrency": 64,
            "runtime_env": {"env_vars": env_vars | {"OMP_NUM_THREADS": "1"}},
        }
        return ray.remote(RolloutManager).options(**options).remote(self._config, place)

    def _environment_url(self) -> str:
        config = self._config
        start = Start(config.env, self._logs / "env.log", str(self._episode_python), config.run.seed)
        return self._cleanup.enter_context(serve(start))

    def wait_ready(self) -> None:
        """Wait until engines and workers serve. Raises RolloutFailed when one cannot start."""
        while self._starting:
            self._get(self._starting[0], self._config.rollout.engine.start_timeout_s + CALL_TIMEOUT_S)
            self._starting.pop(0)

    def collect(
        self,
        request: CollectRequest,
        on_progress: Callable[[Progress], None] | None = None,
        on_episodes: Callable[[list[Trajectory]], None] | None = None,
    ) -> CollectResult:
        """Play all episodes of ``request``; ``on_progress`` hears of it about twice a second, and so does
        ``on_episodes`` of those that ended since, as long as some are under way.

        Raises:
            RolloutFailed: an engine or a worker died too often.
        """
        import ray

        self.wait_ready()
        pending, told = self._manager.collect.remote(request), 0
        while not ray.wait([pending], timeout=PROGRESS_INTERVAL_S)[0]:
            if on_progress is not None:
                on_progress(self._get(self._manager.progress.remote()))
            if on_episodes is not None and (fresh := self._get(self._manager.kept.remote(told))):
                told += len(fresh)
                on_episodes(fresh)
        result = self._get(pending)
        for group in result.groups:
            for trajectory in group.trajectories:
                trajectory.check()
        return result

    def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Log-probs of ``sequences`` (int32 ``[T]``) by every engine, at temperature 1: float32 ``[T]``, first 0."""
        self.wait_ready()
        return self._get(self._manager.score.remote(list(sequences)), self._config.rollout.engine.request_timeout_s)

    def engine(self) -> Engine:
        """The engines themselves, for requests outside any episode."""
        self.wait_ready()
        endpoints = self._get(self._manager.endpoints.remote())
        return connect(endpoints, self._token, self._config.rollout.engine.request_timeout_s)

    def stats(self) -> RolloutStats:
        self.wait_ready()
        return self._get(self._manager.stats.remote())

    def engine_processes(self) -> list[int]:
        """Pids of the engines' processes, the actors' included."""
        self.wait_ready()
        return self._get(self._manager.processes.remote())

    def weight_client(self) -> WeightClient:
        return WeightClient(self)

    def sleep(self) -> str | None:
        """All engines leave their devices and lose their weights; why one freed no memory, if so.

        Raises:
            RolloutFailed: an engine was given up.
        """
        return self.control("sleep")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Engines take memory for their weights, which then must be published; for the KV cache, and serve again.

        An engine that died while it slept is back, with the weights, when the second returns.

        Raises:
            RolloutFailed: an engine was given up.
        """
        self.control("wake", part)

    def control(self, method: str, *args: Any) -> Any:
        """One verb of a weight update, or of sleeping, on all engines."""
        self.wait_ready()
        engine = self._config.rollout.engine
        # Finishing may include replacing an engine that failed the update.
        timeout_s = engine.update_timeout_s + 2 * engine.start_timeout_s
        return self._get(getattr(self._manager, method).remote(*args), timeout_s)

    def close(self) -> None:
        """End everything. Idempotent."""
        self._cleanup.close()

    def _close_manager(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._manager.close.remote(), timeout=10)

    def _get(self, reference: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Wait for a call of the manager and raise what it raised."""
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else error) from None


class WeightClient:
    """vLLM's ``VLLMWeightSyncClient`` for all engines of the rollout at once.

    An engine that fails during an update is replaced and given the whole update again, so that after
    ``finish_weight_update`` either every engine has the version or RolloutFailed was raised.
    """

    def __init__(self, service: RolloutService) -> None:
        self._service = service

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._service.control("init_weight_transfer", init_info)

    def start_weight_update(self) -> None:
        self._service.control("start_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._service.control("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Args: ``weight_version``: an integer as text; it is stamped on everything sampled from now on."""
        if weight_version is None:
            raise ValueError("a weight update needs its version")
        self._service.control("finish_update", int(weight_version))


def _leave_ray() -> None:
    import ray

    ray.shutdown()
