"""Exactly resumable task samplers: whole epochs over all tasks, or a mixture of environments."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import MixtureConfig
from megatron_fleet.data import curriculum
from megatron_fleet.data.curriculum import SignalEstimate
from megatron_fleet.data.mixture import check_mixture, env_shares, env_sizes, quotas, with_minimum
from megatron_fleet.data.task import Task

Results = Iterable[tuple[str, Sequence[float]]]
"""Task key and known rewards of each completed group."""


class Sampler(Protocol):
    """Source of batches of tasks."""

    def next(self) -> list[Task]:
        """Return the tasks of the next step."""
        ...

    def observe(self, results: Results) -> None:
        """Update from the groups of a step, in their order. The caller leaves out unknown rewards."""
        ...

    def status(self) -> dict[str, dict[str, float]]:
        """Map name of a ``data/`` metric → environment → value, after the latest batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable state; a sampler that loads it continues with the same tasks."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``.

        Raises:
            UserError: the state belongs to other tasks, another seed or mixture: resuming would repeat or skip tasks.
        """
        ...


def make_sampler(tasks: Sequence[Task], batch: int, seed: int, mixture: MixtureConfig) -> Sampler:
    """Create the sampler for ``data.mixture``; with its defaults, whole epochs over all tasks.

    Raises:
        UserError: there is no task, or the mixture does not fit the tasks.
    """
    adaptive = mixture.curriculum.signal_weights or mixture.curriculum.defer_after
    if mixture.weights == "proportional" and not mixture.min_per_env and not adaptive:
        return PromptSampler(tasks, batch, seed)
    return MixtureSampler(tasks, batch, seed, mixture)


@final
class PromptSampler:
    """Sampler of every task once per epoch, in an order that depends only on seed and epoch.

    A batch may span the end of an epoch; a task among the last of one and the first of the next is then in it twice, as
    two groups.
    """

    def __init__(self, tasks: Sequence[Task], batch: int, seed: int) -> None:
        """Raises UserError when there is no task."""
        _check_tasks(tasks)
        # Sorted by key, so that the order of rows in the file does not matter.
        self._tasks = sorted(tasks, key=lambda task: task.key)
        self._batch = batch
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def next(self) -> list[Task]:
        """Return the next ``batch`` tasks."""
        picked: list[Task] = []
        while len(picked) < self._batch:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled(self._epoch)
            picked.append(self._tasks[self._order[self._position]])
            self._position += 1
        return picked

    def observe(self, results: Results) -> None:
        """Do nothing: the order is fixed."""

    def status(self) -> dict[str, dict[str, float]]:
        """See ``Sampler``."""
        sizes = env_sizes(self._tasks)
        begun = Counter(self._tasks[i].env_key for i in self._order[: self._position])
        drawn = {env: self._epoch * size + begun[env] for env, size in sizes.items()}
        return {
            "mix_total": _shares(drawn),
            "weight": {env: size / len(self._tasks) for env, size in sizes.items()},
            "epoch": {env: drawn[env] / size for env, size in sizes.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable state; a sampler that loads it continues with the same tasks."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "tasks": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Sampler``."""
        if "mixture" in state:
            _check_mixture_state(MixtureConfig.model_validate(state["mixture"]), MixtureConfig())
        _check_state(state, self._seed, self._fingerprint())
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return int64 ``[tasks]``, the order of one epoch."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))

    def _fingerprint(self) -> str:
        return _digest(task.key for task in self._tasks)


@final
class MixtureSampler:
    """Sampler that divides every batch among the environments (``Task.env_key``), with separate passes over each.

    An environment's share depends on the configuration, on its number of tasks and, with a curriculum, on the observed
    rewards. An environment whose quota exceeds its number of tasks repeats tasks within a batch; one that begins a new
    pass within a batch may do so too.
    """

    def __init__(self, tasks: Sequence[Task], batch: int, seed: int, mixture: MixtureConfig) -> None:
        """Raises UserError when there is no task, or the mixture does not fit the tasks or ``batch``."""
        _check_tasks(tasks)
        check_mixture(tasks, batch, mixture)
        self._batch, self._seed, self._mixture = batch, seed, mixture
        self._shares = env_shares(env_sizes(tasks), mixture)
        self._passes = {env: Passes(env, [t for t in tasks if t.env_key == env], seed) for env in self._shares}
        self._env_of = {task.key: task.env_key for task in tasks if task.env_key in self._shares}
        self._fingerprint = _digest(sorted(f"{task.key}\t{task.env_key}" for task in tasks))
        self._estimates = {env: SignalEstimate(mixture.curriculum.prior) for env in self._shares}
        self._streaks: Counter[str] = Counter()
        self._credit = np.zeros(len(self._shares))
        self._batches = 0
        self._wanted = dict(self._shares)

    def next(self) -> list[Task]:
        """Return the next ``batch`` tasks, in an order that mixes the environments."""
        self._wanted = self._weights()
        shares = np.array(list(self._wanted.values()))
        counts, self._credit = quotas(shares, self._credit, self._batch, self._mixture.min_per_env)
        quota = zip(self._wanted, counts.tolist(), strict=True)
        picked = [task for env, count in quota for task in self._passes[env].take(count)]
        # Several updates per batch take contiguous parts of it, which must be mixed too.
        order = np.random.default_rng([self._seed, self._batches]).permutation(len(picked))
        self._batches += 1
        return [picked[i] for i in order]

    def observe(self, results: Results) -> None:
        """Update the estimates and defer tasks, as far as the curriculum enables either."""
        settings = self._mixture.curriculum
        for key, rewards in results:
            env = self._env_of[key]
            if settings.signal_weights:
                self._estimates[env] = curriculum.measured(self._estimates[env], rewards, settings.half_life)
            if settings.defer_after:
                self._streaks[key] = curriculum.streak_after(self._streaks[key], rewards)
                if curriculum.measurable(rewards) and self._streaks[key] >= settings.defer_after:
                    self._passes[env].defer(key, settings.defer_passes)

    def status(self) -> dict[str, dict[str, float]]:
        """See ``Sampler``."""
        out = {
            "mix_total": _shares({env: passes.drawn for env, passes in self._passes.items()}),
            "weight": dict(self._wanted),
            "epoch": {env: passes.epoch for env, passes in self._passes.items()},
        }
        if self._mixture.curriculum.signal_weights:
            out["signal"] = {env: estimate.signal for env, estimate in self._estimates.items()}
            out["reward"] = {env: e.reward for env, e in self._estimates.items() if e.reward is not None}
        if self._mixture.curriculum.defer_after:
            out["deferred"] = {env: float(passes.left_out) for env, passes in self._passes.items()}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable state; a sampler that loads it continues with the same tasks."""
        credit = dict(zip(self._shares, self._credit.tolist(), strict=True))
        return {
            "seed": self._seed,
            "tasks": self._fingerprint,
            "mixture": self._mixture.model_dump(mode="json"),
            "batches": self._batches,
            "streaks": {key: streak for key, streak in self._streaks.items() if streak},
            "environments": {
                env: {
                    **passes.state_dict(),
                    "credit": credit[env],
                    "signal": self._estimates[env].signal,
                    "reward": self._estimates[env].reward,
                    "groups": self._estimates[env].groups,
                }
                for env, passes in self._passes.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Sampler``."""
        _check_mixture_state(MixtureConfig.model_validate(state.get("mixture", {})), self._mixture)
        _check_state(state, self._seed, self._fingerprint)
        self._batches, self._streaks = int(state["batches"]), Counter(state["streaks"])
        own = state["environments"]
        self._credit = np.array([float(own[env]["credit"]) for env in self._shares])
        for env, passes in self._passes.items():
            passes.load_state_dict(own[env])
            self._estimates[env] = SignalEstimate(own[env]["signal"], own[env]["reward"], own[env]["groups"])

    def _weights(self) -> dict[str, float]:
        """Map environment → share of the next batch: configured, weighted by signal, raised to the minimum."""
        shares, settings = self._shares, self._mixture.curriculum
        if settings.signal_weights:
            signals = {env: estimate.signal for env, estimate in self._estimates.items()}
            shares = curriculum.signal_weights(shares, signals, settings.floor)
        raised = with_minimum(np.array(list(shares.values())), self._mixture.min_per_env / self._batch)
        return dict(zip(shares, raised.tolist(), strict=True))


def _check_tasks(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise UserError("data: no task is left for training; lower data.eval_fraction or give more tasks.")


def _shares(drawn: dict[str, int]) -> dict[str, float]:
    """Return each environment's share of all batches so far."""
    total = max(sum(drawn.values()), 1)
    return {env: count / total for env, count in drawn.items()}


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _check_state(state: dict[str, Any], seed: int, fingerprint: str) -> None:
    if state["tasks"] != fingerprint or state["seed"] != seed:
        raise UserError(
            "The checkpoint's data cursor belongs to other training tasks or another run.seed; resume with that "
            "run's task file, data.eval_fraction and seed, or start fresh with run.resume=never."
        )


def _check_mixture_state(saved: MixtureConfig, present: MixtureConfig) -> None:
    """Refuse to resume with another mixture; keys missing from the checkpoint had their defaults."""
    was, now = _settings(saved), _settings(present)
    for key, value in now.items():
        if was[key] != value:
            raise UserError(
                f"data.mixture.{key}={value}, but the checkpoint's data cursor was saved with {was[key]}; resume with "
                f"that value, or start fresh in another run.out."
            )


def _settings(mixture: MixtureConfig) -> dict[str, Any]:
    own = mixture.model_dump()
    return own | {f"curriculum.{key}": value for key, value in own.pop("curriculum").items()}


@final
class Passes:
    """Sequence of tasks in which no task repeats within a pass.

    The order of a pass depends only on seed, environment and pass number. A deferred task is left out of the following
    passes; a pass in which all tasks are deferred includes all of them.
    """

    def __init__(self, env_key: str, tasks: Sequence[Task], seed: int) -> None:
        # Sorted by key, so that the order of rows in the file does not matter.
        self._tasks = sorted(tasks, key=lambda task: task.key)
        self._seed = [seed, int.from_bytes(hashlib.blake2b(env_key.encode(), digest_size=8).digest(), "big")]
        self._deferred: dict[str, int] = {}
        self._drawn = 0
        self._begin(0, frozenset())

    @property
    def drawn(self) -> int:
        """Number of tasks drawn so far."""
        return self._drawn

    @property
    def epoch(self) -> float:
        """Number of earlier passes, plus the completed fraction of this one."""
        return self._number + self._position / len(self._order)

    @property
    def left_out(self) -> int:
        """Number of tasks that this pass leaves out."""
        return len(self._left_out)

    def take(self, count: int) -> list[Task]:
        """Draw the next ``count`` tasks."""
        taken: list[Task] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._begin(self._number + 1, self._due(self._number + 1))
            taken.append(self._order[self._position])
            self._position += 1
        self._drawn += count
        return taken

    def defer(self, key: str, passes: int) -> None:
        """Leave a task out of the next ``passes`` passes; the current one is unchanged."""
        self._deferred[key] = self._number + passes

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable state."""
        return {
            "drawn": self._drawn,
            "pass": self._number,
            "position": self._position,
            "left_out": sorted(self._left_out),
            "deferred": self._deferred,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, with the same tasks and seed."""
        self._begin(int(state["pass"]), frozenset(state["left_out"]))
        self._position, self._drawn = int(state["position"]), int(state["drawn"])
        self._deferred = {str(key): int(last) for key, last in state["deferred"].items()}

    def _begin(self, number: int, left_out: frozenset[str]) -> None:
        order = np.random.default_rng([*self._seed, number]).permutation(len(self._tasks))
        self._number, self._position, self._left_out = number, 0, left_out
        self._order = [self._tasks[i] for i in order if self._tasks[i].key not in left_out]

    def _due(self, number: int) -> frozenset[str]:
        """Return the tasks that pass ``number`` leaves out."""
        self._deferred = {key: last for key, last in self._deferred.items() if last >= number}
        return frozenset(self._deferred) if len(self._deferred) < len(self._tasks) else frozenset()
