"""Placement: assign every rank and every engine to a host and devices. Pure and deterministic, without I/O.

Ranks take the first devices of a host, one each. A *colocated* engine uses the devices of consecutive ranks of one
host, as many as its tensor-parallel size; other engines take devices that no rank uses, those of evaluations after
those of the rollout. Engines are assigned to the hosts round-robin. A host without devices computes on its CPU, which
ranks and engines share; if some hosts have devices, those without get neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.joined_nodes import RanksOfHost
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EngineConfig
from megatron_fleet.config.sections.evaluation import sharing_problem

AUTO = "auto"
_LAYOUT = "parallel.tensor × pipeline × context × data"
_DEVICE_PARTS = "rollout.engine.replicas × tensor_parallel"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Settings of a configuration that determine the placement.

    Attributes:
        engines: number of engines of the rollout; ``None``: as many as there is room for.
        eval_engines: number of engines that play evaluations only.
        tensor_parallel: devices of each engine.
        colocated: engines use the ranks' devices; ``None``: true on GPUs, false on CPUs.
        transport: transport of the weight sync; ``auto``: chosen by the placement.
    """

    ranks: int
    engines: int | None = 1
    tensor_parallel: int = 1
    colocated: bool | None = None
    transport: str = AUTO
    eval_engines: int = 0

    @classmethod
    def of(cls, ranks: int, engine: EngineConfig, eval_engines: int) -> PlacementRequest:
        """Return the settings for a run.

        Args:
            ranks: of the trainer, see `Config.ranks`.
            eval_engines: `eval.engines`.
        """
        replicas = None if engine.replicas == "auto" else engine.replicas
        tensor_parallel = engine.tensor_parallel
        if ranks == 0:
            transport = "message" if engine.transport == AUTO else engine.transport
            return cls(0, replicas, tensor_parallel, False, transport, eval_engines)
        return cls(ranks, replicas, tensor_parallel, engine.colocated, engine.transport, eval_engines)

    @classmethod
    def of_evaluation(cls, engine: EngineConfig) -> PlacementRequest:
        """Return the settings for engines without a trainer."""
        replicas = None if engine.replicas == "auto" else engine.replicas
        return cls(0, replicas, engine.tensor_parallel, colocated=False)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of a rank; ``device``: its index on ``host``, ``None`` on a CPU."""

    rank: int
    host: str
    device: int | None


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Place of an engine.

    Attributes:
        devices: their indices on ``host``, empty on a CPU.
        evaluation: the engine plays evaluations only.
    """

    host: str
    devices: tuple[int, ...]
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a run. ``ranks`` are in rank order, both kinds of engines in index order; ``transport``: see
    `weight_sync`.
    """

    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    colocated: bool
    transport: str
    eval_engines: tuple[EnginePlace, ...] = ()


_RanksOf = dict[str, tuple[int, ...]]
"""Ranks of each host, by host name."""


def place(inventory: Inventory, request: PlacementRequest) -> Placement:
    """Place ranks and engines.

    Raises:
        UserError: it does not fit, or the transport does not support the placement; the message names the keys, their
            values and the available devices.
    """
    cuda = any(host.devices for host in inventory.hosts)
    ranks_of = _ranks_of_hosts(inventory.hosts, request.ranks, cuda)
    colocated = cuda if request.colocated is None else request.colocated
    if colocated and request.eval_engines:
        raise UserError(sharing_problem(request.eval_engines))
    if cuda:
        engines = _engines_on_devices(inventory.hosts, ranks_of, request, colocated)
    else:
        engines = _engines_on_cpus(inventory.hosts, ranks_of, request, colocated)
    ranks = sorted(
        (
            RankPlace(rank, host.name, host.devices[i].index if cuda else None)
            for host in inventory.hosts
            for i, rank in enumerate(ranks_of[host.name])
        ),
        key=lambda place: place.rank,
    )
    controller = inventory.hosts[0].name
    hosts_in_use = {controller} | {rank.host for rank in ranks} | {engine.host for engine in engines}
    elastic = request.engines is None and not colocated
    # Engines may be on further hosts later.
    transport = _transport(request.transport, cuda, colocated, len(hosts_in_use) + elastic)
    own = len(engines) - request.eval_engines
    of_evaluations = tuple(replace(place, evaluation=True) for place in engines[own:])
    return Placement(tuple(ranks), engines[:own], colocated, transport, of_evaluations)


def ranks_by_host(placement: Placement, inventory: Inventory, threads: int) -> dict[str, RanksOfHost]:
    """Return the ranks of each host that has any, by host name. ``threads``: CPU threads of each rank."""
    found: dict[str, RanksOfHost] = {}
    for host in inventory.hosts:
        mine = [place for place in placement.ranks if place.host == host.name]
        devices = [place.device for place in mine if place.device is not None]
        visible = inventory.visible_devices(host.name, devices) if devices else None
        if mine:
            ranks = tuple(place.rank for place in mine)
            found[host.name] = RanksOfHost(ranks, len(placement.ranks), threads, visible)
    return found


def _ranks_of_hosts(hosts: Sequence[Host], wanted: int, cuda: bool) -> _RanksOf:
    if undecided := [host for host in hosts if host.ranks is None]:
        return dict.fromkeys((host.name for host in hosts), ()) | (_fill if cuda else _spread)(undecided, wanted)
    ranks_of: _RanksOf = {host.name: host.ranks or () for host in hosts}
    started = sorted(chain.from_iterable(ranks_of.values()))
    if started != list(range(wanted)):
        found = "; ".join(f"{name}: {', '.join(map(str, ranks)) or 'none'}" for name, ranks in ranks_of.items())
        raise UserError(
            f"{_LAYOUT} = {wanted} ranks are needed, but {len(started)} were started ({found}); change the launch or "
            f"the layout."
        )
    for host in hosts:
        if cuda and len(ranks_of[host.name]) > len(host.devices):
            raise UserError(
                f"{len(ranks_of[host.name])} ranks were started on host {host.name}, which has {len(host.devices)} "
                f"GPUs, and each rank needs one of its own; start fewer there, or change "
                f"{_LAYOUT} = {wanted}."
            )
    return ranks_of


def _fill(hosts: Sequence[Host], wanted: int) -> _RanksOf:
    """Assign consecutive ranks to each host in turn, as many as it has devices."""
    there = sum(len(host.devices) for host in hosts)
    if wanted > there:
        raise UserError(
            f"{_LAYOUT} = {wanted} ranks need a GPU each, but there are {there} ({_gpus(hosts)}); choose a smaller "
            f"layout or more hosts."
        )
    ranks_of: _RanksOf = {}
    first = 0
    for host in hosts:
        count = min(len(host.devices), wanted - first)
        ranks_of[host.name] = tuple(range(first, first + count))
        first += count
    return ranks_of


def _spread(hosts: Sequence[Host], wanted: int) -> _RanksOf:
    """Assign consecutive ranks to each host in turn, as evenly as possible."""
    bounds = [wanted * i // len(hosts) for i in range(len(hosts) + 1)]
    return {host.name: tuple(range(bounds[i], bounds[i + 1])) for i, host in enumerate(hosts)}


def _engines_on_cpus(
    hosts: Sequence[Host], ranks_of: _RanksOf, request: PlacementRequest, colocated: bool
) -> tuple[EnginePlace, ...]:
    names = [host.name for host in hosts if host.rollout and (ranks_of[host.name] or not colocated)]
    if not names:
        raise UserError(_no_host_for_engines(hosts, ranks_of))
    count = len(names) if request.engines is None else request.engines
    return tuple(EnginePlace(names[i % len(names)], ()) for i in range(count + request.eval_engines))


def _no_host_for_engines(hosts: Sequence[Host], ranks_of: _RanksOf) -> str:
    there = ", ".join(host.name for host in hosts if ranks_of[host.name])
    return (
        f"Engines are to share the hosts of the ranks ({there}) with rollout.engine.colocated=true, but none of these "
        f"has joined Ray; run `mfleet node` there and set cluster.nodes, or set rollout.engine.colocated=false."
    )


def _engines_on_devices(
    hosts: Sequence[Host], ranks_of: _RanksOf, request: PlacementRequest, colocated: bool
) -> tuple[EnginePlace, ...]:
    size = request.tensor_parallel
    free: list[tuple[Host, tuple[Device, ...]]] = []
    for host in hosts:
        if not host.rollout:
            continue
        taken = len(ranks_of[host.name])
        free.append((host, host.devices[:taken] if colocated else host.devices[taken:]))
    # Round-robin: the n-th engine of every host comes before the (n+1)-th of any.
    columns = [_engines_on(host, devices, size) for host, devices in free]
    places = [place for turn in zip_longest(*columns) for place in turn if place is not None]
    least = request.engines if request.engines is not None else 1 if colocated or not request.ranks else 0
    if len(places) >= least + request.eval_engines:
        return tuple(places if request.engines is None else places[: request.engines + request.eval_engines])
    raise UserError(_engines_do_not_fit([(host.name, len(devices)) for host, devices in free], request, colocated))


def engines_of_joined(inventory: Inventory, host: Host, tensor_parallel: int) -> list[EnginePlace]:
    """Return places of engines on a host that joins a run on these hosts; none if it has no GPUs and others do."""
    if not any(one.devices for one in (*inventory.hosts, host)):
        return [EnginePlace(host.name, ())]
    return _engines_on(host, host.devices, tensor_parallel)


def _engines_on(host: Host, devices: Sequence[Device], size: int) -> list[EnginePlace]:
    """Return places of engines on these devices of a host, as many as fit."""
    starts = range(0, len(devices) - size + 1, size)
    return [EnginePlace(host.name, tuple(device.index for device in devices[i : i + size])) for i in starts]


def _engines_do_not_fit(free: Sequence[tuple[str, int]], request: PlacementRequest, colocated: bool) -> str:
    """Return the error message. ``free``: hosts and the number of devices available to engines there."""
    size = request.tensor_parallel
    there, largest = sum(count for _, count in free), max((count for _, count in free), default=0)
    listed = ", ".join(f"{count} on {name}" for name, count in free) or "no host runs `mfleet node`"
    if not request.ranks:
        whose = "there are"
    else:
        asked = AUTO if request.colocated is None else str(request.colocated).lower()
        whose = f"the ranks {'have' if colocated else 'leave free'} with rollout.engine.colocated={asked}"
    parts, count = _DEVICE_PARTS, str(request.engines or 1)
    if request.eval_engines:
        parts = "(rollout.engine.replicas + eval.engines) × rollout.engine.tensor_parallel"
        count = f"({request.engines or 0} + {request.eval_engines})"
    wish = f"{parts} = {count} × {size} GPUs do not fit into the {there} that {whose} ({listed})"
    if size > largest:
        return f"{wish}, and an engine cannot extend over several hosts; lower rollout.engine.tensor_parallel."
    return f"{wish}; lower one of them, give the run more GPUs, or change the ranks."


def _transport(name: str, cuda: bool, colocated: bool, hosts: int) -> str:
    """Return the named transport, or the best one for the placement. User-defined transports are not checked."""
    works_where = {
        "shm": (not cuda and hosts == 1, "CPUs of one host"),
        "gloo": (not cuda, "CPUs"),
        "cuda_ipc": (cuda and colocated, "GPUs that ranks and engines share (rollout.engine.colocated=true)"),
        "nccl": (cuda and not colocated, "GPUs that ranks and engines do not share (rollout.engine.colocated=false)"),
    }
    if name == AUTO:
        return next(transport for transport, (works, _) in works_where.items() if works)
    works, where = works_where.get(name, (True, ""))
    if works:
        return name
    here = "GPUs" if cuda else "CPUs"
    shared = "" if not cuda else ", shared" if colocated else ", not shared"
    raise UserError(
        f"rollout.engine.transport={name} works with {where}, but ranks and engines are on {here} of {hosts} "
        f"{'host' if hosts == 1 else 'hosts'}{shared}; set it to auto or disk."
    )


def _gpus(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{len(host.devices)} on {host.name}" for host in hosts)
