"""Hosts of a run: this machine, hosts that run `mfleet node`, and hosts of externally started ranks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.cluster.inventory import LOOPBACK, Inventory, local_inventory, with_nodes, with_started_ranks
from megatron_fleet.cluster.joined_nodes import NodeRanks, Nodes
from megatron_fleet.cluster.launcher import ExternalRanks, LocalRanks, RankStarter
from megatron_fleet.cluster.placement import Placement, ranks_by_host
from megatron_fleet.cluster.rank_identity import ListenAt, listen_at
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.trainer.links import RankListener


@dataclass(frozen=True, slots=True)
class RunHosts:
    """Hosts of a run, and the listener that connects them.

    Attributes:
        listener: accepts the connections of ranks and nodes.
        nodes: the hosts that run `mfleet node`; ``None``: there are none.
        inventory: all hosts, this one first.
    """

    listener: RankListener
    nodes: Nodes | None
    inventory: Inventory

    def starter(self, config: Config, placement: Placement) -> RankStarter:
        """Return the starter that launches the ranks as ``placement`` assigns them."""
        logs = Path(config.run.out, "logs")
        if config.cluster.ranks == "external":
            return ExternalRanks(logs)
        by_host = ranks_by_host(placement, self.inventory, config.policy.threads or 1)
        if self.nodes is not None:
            return NodeRanks(self.nodes, by_host)
        (mine,) = by_host.values()
        return LocalRanks(mine, logs)


@asynccontextmanager
async def open_hosts(config: Config, token: str) -> AsyncIterator[RunHosts]:
    """Wait until every host of the run is known; on exit stop everything that the run started there.

    Raises:
        UserError: a host or a rank did not connect in time, or they contradict each other.
    """
    cluster = config.cluster
    listener = RankListener(token, None, config.ranks)
    nodes = None
    if cluster.nodes:
        logs, elastic = Path(config.run.out, "logs"), config.rollout.engine.elastic
        nodes = Nodes(cluster.nodes, logs, cluster.join_timeout_s, config.model.path, elastic)
    external = nodes is not None or cluster.ranks == "external"
    place = listen_at(os.environ) if external else ListenAt(LOOPBACK, 0, None)
    if nodes is not None:
        listener.admit("node", nodes.admit)
    await listener.listen(place.host, place.port)
    try:
        if place.file is not None:
            write_atomically(place.file, listener.address.encode())
        yield RunHosts(listener, nodes, await _inventory(config, listener, nodes))
    finally:
        if nodes is not None:
            await nodes.close()
        listener.close()


async def _inventory(config: Config, listener: RankListener, nodes: Nodes | None) -> Inventory:
    joined = [] if nodes is None else await nodes.hosts()
    if config.cluster.ranks == "local":
        if nodes is None:
            return local_inventory(os.environ)
        return with_nodes(local_inventory(os.environ, alone=False).hosts[0], joined)
    try:
        started = [who.started() for who in await listener.who(config.cluster.join_timeout_s)]
    except ConnectionError as error:
        raise UserError(f"{error}; start them, or read their logs.") from None
    (own,) = local_inventory(os.environ).hosts
    if any(name != own.name for name in [*(host.name for host in joined), *(rank.host for rank in started)]):
        (own,) = local_inventory(os.environ, alone=False).hosts
    return with_started_ranks(own, joined, started)
