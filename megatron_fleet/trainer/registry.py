"""Registry of trainers by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron_fleet.cluster.launcher import RankStarter
from megatron_fleet.config.extension import Interface, load_named
from megatron_fleet.config.schema import Config
from megatron_fleet.trainer.base import Trainer
from megatron_fleet.trainer.links import RankListener


@dataclass(frozen=True, slots=True)
class RankHosts:
    """Listener, secret and launcher for a trainer that runs as ranks on the hosts of the run.

    Attributes:
        listener: accepts the connections of the ranks.
        token: secret of the run.
        starter: makes what starts the ranks where the placement has put them.
    """

    listener: RankListener
    token: str
    starter: Callable[[], RankStarter]


class TrainerFactory(Protocol):
    def __call__(self, config: Config, hosts: RankHosts, /) -> AbstractAsyncContextManager[Trainer]:
        """Return the trainer of a run, which is closed on leaving. ``hosts``: for the ranks of `megatron` alone."""
        ...


OWN_TRAINER = Interface("policy.trainer", "trainer", TrainerFactory, "controller")

TRAINERS: dict[str, str] = {
    "megatron": "megatron_fleet.trainer.group:megatron",
    "hosted": "megatron_fleet.hosted.trainer:open_hosted",
}
"""Factory of each trainer by name, as ``module:function``; imported only when it is used."""


def trainer_factory(name: str) -> TrainerFactory:
    """Look up a trainer by name, or a user's own by path.

    Raises:
        UserError: the user's own cannot be imported.
    """
    factory: TrainerFactory = load_named(OWN_TRAINER, TRAINERS, name)
    return factory
