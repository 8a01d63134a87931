"""Controller's half of a trainer made of ranks: plans, sends each replica its data once, gathers, monitors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.cluster import frames
from megatron_fleet.cluster.inventory import LOOPBACK, local_inventory
from megatron_fleet.cluster.launcher import LocalRanks, RankStarter
from megatron_fleet.cluster.placement import PlacementRequest, place, ranks_by_host
from megatron_fleet.cluster.rank_identity import run_token
from megatron_fleet.cluster.restarts import OutOfRestarts, Restarts
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import micro_batch_alignment, sequence_alignment
from megatron_fleet.models.registry import use_family
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.trainer.base import (
    Examination,
    Files,
    LossReport,
    LossSpec,
    MicroBatchLoss,
    OptimReport,
    Ranks,
    RanksInfo,
    Trainer,
    TrainerLost,
    as_message,
)
from megatron_fleet.trainer.links import Call, RankLink, RankListener
from megatron_fleet.trainer.messages import SYSTEM, USER, RankReady, datum_to_plain, results_from_plain
from megatron_fleet.trainer.packing.pack_plan import Plan, plan_micro_batches
from megatron_fleet.trainer.registry import RankHosts
from megatron_fleet.weight_sync.base import Deliver
from megatron_fleet.weights.hf_folder import read_config

Init = Literal["hf", "random", "none"]
"""Source of the weights; see `MegatronPolicy`."""

LAST_WORDS_S = 2.0
"""Time after a rank's failure for the others to report theirs; they may hang in a collective that never completes."""
WRITING = ("save_state", "written_state")
"""Verbs of which ranks touch the file system after their last collective: a full disk ends one of them long before the
others have written their share, and they do end."""
SHARES_AT_ONCE = 8
"""Replicas that are sent their data concurrently; each holds an encoded micro-batch in memory."""
QUIT_S = 20.0
"""Time for ranks to leave their process groups and exit."""


P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]


def _forwarded(verb: Method[P, R], answer: Callable[[list[Any]], Any] = lambda _: None) -> Method[P, R]:
    """Return a verb of `Trainer` or `Ranks` as a method that every rank executes with the same arguments.

    Args:
        answer: makes the verb's result of what the ranks answer, by rank.
    """
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    async def method(self: TrainerGroup, *args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        _, *arguments = given.arguments.items()
        answers = await self._call(verb.__name__, {name: as_message(value) for name, value in arguments})
        result: R = answer(answers)
        return result

    return method


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _merged(answers: Sequence[Files]) -> Files:
    """Files of all ranks, sorted by name."""
    return dict(sorted((name, entry) for files in answers for name, entry in files.items()))


class TrainerGroup:
    """`trainer.base.Trainer` over ranks, with what `trainer.base.Ranks` adds. It may be lost, and started again."""

    spending = None

    def __init__(
        self,
        config: Config,
        listener: RankListener,
        starter: RankStarter,
        token: str,
        cost: SequenceCost,
        init: str = "hf",
    ) -> None:
        """Args: ``token``: secret of the run. ``cost``: cost model of sequences. ``init``: see `MegatronPolicy`."""
        self._config, self._listener, self._starter, self._token = config, listener, starter, token
        self._cost, self._init = cost, init
        cluster = config.cluster
        where = f"Logs of the ranks are in {config.run.out}/logs; the same command resumes from the newest checkpoint."
        self.restarts = Restarts("the trainer", where, cluster.max_restarts)
        self._links: list[RankLink] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ready: list[RankReady] = []
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._sending = asyncio.Lock()
        self._lost: asyncio.Future[TrainerLost] = asyncio.get_running_loop().create_future()
        self._plan: Plan = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._gathering: asyncio.Task[None] | None = None
        self._closing = False

    # Life

    @property
    def ranks(self) -> Ranks:
        return self

    def begin(self) -> None:
        """Begin to `gather` the ranks for `start`, in the background: they import Megatron while other things start."""
        self._gathering = asyncio.create_task(self.gather())

    async def start(self, reason: TrainerLost | None) -> None:
        """See `Trainer.start`; after `begin`."""
        if reason is not None:
            await self.restart(reason)
            return
        assert self._gathering is not None, "begin() comes first"
        await self._gathering
        await self.build()

    async def gather(self) -> None:
        """Start the ranks and wait until they are connected; they continue with their imports meanwhile.

        Raises:
            TrainerLost: not all ranks connected.
            UserError: a lost host does not come back.
        """
        try:
            await self._starter.start(self._listener.address, self._token)
            self._links = await self._listener.gather(self._config.cluster.join_timeout_s, self._starter.failed)
        except ConnectionError as error:
            raise TrainerLost(str(error)) from None
        self._readers = [asyncio.create_task(self._read(rank, link)) for rank, link in enumerate(self._links)]

    async def build(self) -> None:
        """Make the ranks join each other and build the model.

        Raises:
            TrainerLost: a rank died.
            UserError: model, layout and machine do not fit.
        """
        (rendezvous, *_) = await self._call("bind", only=1)
        probe = Path(self._config.run.out).absolute() / f".seen-{secrets.token_hex(8)}"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            arguments = {"rendezvous": rendezvous, "init": self._init, "probe": str(probe)}
            self._ready = [RankReady(**value) for value in await self._call("build", arguments)]
        finally:
            probe.unlink(missing_ok=True)

    async def restart(self, reason: TrainerLost) -> None:
        """Replace lost ranks, retrying until all are up or the restart limit is reached.

        Raises:
            UserError: the limit was reached, or the ranks cannot be built.
        """
        while True:
            self._disconnect()
            await self._starter.stop(0.0)
            try:
                await self.restarts.pause(str(reason))
                self._lost = asyncio.get_running_loop().create_future()
                await self.gather()
                await self.build()
            except OutOfRestarts as error:
                raise UserError(str(error)) from None
            except TrainerLost as error:
                reason = error
                continue
            self.restarts.done()
            return

    async def close(self) -> None:
        """End the ranks. Idempotent."""
        self._closing = True
        if self._gathering is not None:
            self._gathering.cancel()
        for link in self._links:
            await link.send("quit")
        alive = bool(self._links) and not self._lost.done()
        await self._starter.stop(QUIT_S if alive else 0.0)
        self._disconnect()
        self._listener.close()

    @property
    def processes(self) -> list[tuple[str, int]]:
        return [(link.who.host, link.who.pid) for link in self._links]

    def _disconnect(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for link in self._links:
            link.close()
        self._links, self._readers = [], []

    async def lost(self) -> TrainerLost:
        return await asyncio.shield(self._lost)

    def _lose(self, reason: str) -> None:
        if self._lost.done() or self._closing:
            return
        error = TrainerLost(reason)
        self._lost.set_result(error)
        for call in self._calls.values():
            call.fail(error)
        self._disconnect()  # closing the connection ends ranks that hang in a collective

    # Frames

    async def _call(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        shares: Sequence[Sequence[Sequence[Datum]]] | None = None,
        deliver: Deliver | None = None,
        only: int | None = None,
    ) -> list[Any]:
        """Run a verb on all ranks, or on the first ``only`` ones; returns their answers by rank. ``shares``: data by
        replica.
        """
        if self._lost.done():
            raise self._lost.result()
        links = self._links[:only]
        number, call = next(self._numbers), Call(verb, len(links), deliver)
        try:
            async with self._sending:
                self._calls[number] = call
                await self._send(number, verb, dict(arguments or {}), links, shares)
            return await call.result
        finally:
            self._calls.pop(number, None)

    async def _send(
        self,
        number: int,
        verb: str,
        arguments: dict[str, Any],
        links: Sequence[RankLink],
        shares: Sequence[Sequence[Sequence[Datum]]] | None,
    ) -> None:
        if shares is None:
            await asyncio.gather(*(link.send("call", number, verb, arguments, 0) for link in links))
            return
        leaders = self._leaders()
        heads: list[Awaitable[None]] = []
        for rank, link in enumerate(links):
            count = len(shares[self._ready[rank].replica])
            following = count if rank in leaders else 0
            heads.append(link.send("call", number, verb, arguments | {"micro_batches": count}, following))
        await asyncio.gather(*heads)
        places = asyncio.Semaphore(SHARES_AT_ONCE)
        shared = ((links[rank], shares[self._ready[rank].replica]) for rank in sorted(leaders))
        await asyncio.gather(*(self._send_share(number, link, share, places) for link, share in shared))

    @staticmethod
    async def _send_share(
        number: int, link: RankLink, share: Sequence[Sequence[Datum]], places: asyncio.Semaphore
    ) -> None:
        """Send a share one micro-batch at a time, so that it is never encoded as a whole."""
        async with places:
            for micro_batch in share:
                body = frames.body("micro-batch", *map(datum_to_plain, micro_batch))
                await link.send_content("data", number, body)

    def _leaders(self) -> set[int]:
        """First rank of each replica."""
        firsts: dict[int, int] = {}
        for rank, ready in enumerate(self._ready):
            firsts.setdefault(ready.replica, rank)
        return set(firsts.values())

    async def _read(self, rank: int, link: RankLink) -> None:
        try:
            await self._answer(rank, link)
        except (ValueError, TypeError, LookupError) as error:
            self._lose(f"rank {rank} sent a message that is not part of the protocol ({error})")
        if not self._closing and not self._lost.done():
            self._lose(await self._starter.how_ended(rank))

    async def _answer(self, rank: int, link: RankLink) -> None:
        posted: dict[int, asyncio.Task[None]] = {}
        while (frame := await link.read()) is not None:
            kind, number, *rest = frame
            call = self._calls.get(number)
            if kind == "post":
                before = posted.get(number)
                posted[number] = self._spawn(self._deliver(link, number, call, rest[0], rest[1], before))
            elif call is None:
                continue  # the caller no longer waits
            elif kind == "done":
                value, began, seconds = rest
                TIMELINE.add("trainer", f"rank {rank}", call.verb, began, seconds)
                call.done(rank, value)
            else:
                call.failed(rank, *rest)
                self._spawn(self._settle(call))

    async def _deliver(
        self,
        link: RankLink,
        number: int,
        call: Call | None,
        index: int,
        message: Mapping[str, Any],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await before
        error = None
        if call is None or call.deliver is None:
            error = "this message came too late"
        else:
            try:
                await call.deliver(message)
            except Exception as failure:
                call.fail(failure)
                error = str(failure) or type(failure).__name__
        await link.send("delivered", number, index, error)

    async def _settle(self, call: Call) -> None:
        """After a rank's failure, wait for the others' reports, then decide on the error to raise."""
        deadline = asyncio.get_running_loop().time() + LAST_WORDS_S

        def all_will_end() -> bool:
            return call.verb in WRITING and (call.failure() or ("",))[0] == SYSTEM and not call.result.done()

        while not call.complete and (asyncio.get_running_loop().time() < deadline or all_will_end()):
            await asyncio.sleep(0.02)
        failure = call.failure()
        if call.result.done() or failure is None:
            return
        kind, message = failure
        if kind == USER:
            call.fail(UserError(message))
        elif kind == SYSTEM and call.complete:
            call.fail(OSError(message))
        else:
            self._lose(message)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Verbs

    @property
    def info(self) -> RanksInfo:
        """See `Ranks.info`. After `build`."""
        first = self._ready[0]
        sizes = [ready.part_bytes for ready in self._ready] if first.part_bytes else []
        tokens, apart = self._config.policy.micro_batch_tokens, not all(ready.sees_folder for ready in self._ready)
        return RanksInfo(first.vocab_size, tokens, first.replicas, first.device, sizes, apart)

    def plan(self, data: Sequence[Datum]) -> Plan:
        """Plan the micro-batches of each replica as indices into ``data``; equal data give equal plans.

        Raises:
            UserError: a sequence is longer than a micro-batch.
        """
        parallel, capacity = self._config.parallel, self._config.policy.micro_batch_tokens
        lengths = [len(datum) for datum in data]
        trained = [int(np.count_nonzero(datum.loss_mask)) for datum in data]
        align, micro_batch_align = sequence_alignment(parallel), micro_batch_alignment(parallel, self._config.precision)
        return plan_micro_batches(
            lengths, self.info.replicas, capacity, self._cost(lengths, trained), align, micro_batch_align
        )

    # Verbs that every rank executes with the same arguments

    optim_step = _forwarded(Ranks.optim_step, lambda answers: OptimReport(**answers[0]))
    discard_gradients = _forwarded(Trainer.discard_gradients)
    keep_reference = _forwarded(Trainer.keep_reference)
    save_state = _forwarded(Trainer.save_state, _merged)
    fetch_state = _forwarded(Ranks.fetch_state)
    clear_state = _forwarded(Ranks.clear_state)
    load_state = _forwarded(Trainer.load_state)
    export_hf = _forwarded(Trainer.export_hf)
    prepare_weights = _forwarded(Trainer.prepare_weights, _first)
    offload = _forwarded(Ranks.offload)
    onload = _forwarded(Ranks.onload)
    memory = _forwarded(Ranks.memory, list)

    async def forward(
        self,
        data: Sequence[Datum],
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        plan = self.plan(data)
        arguments = {"which": which, "temperature": temperature}
        answers = await self._call("forward", arguments, _shares(plan, data))
        found: dict[int, np.ndarray] = {}
        for rank in self._leaders():
            for members, values in zip(plan[self._ready[rank].replica], answers[rank], strict=True):
                found |= zip(members, results_from_plain([data[i] for i in members], values), strict=True)
        return [found[index] for index in range(len(data))]

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        self._plan = self.plan(data)
        arguments = {"settings": dict(loss.settings), "per_sequence": loss.per_sequence}
        answers = await self._call("forward_backward", arguments, _shares(self._plan, data))
        report = LossReport(**answers[0]["report"])
        if loss.per_sequence:
            by_replica = self._by_replica([answer["sequences"] for answer in answers])
            found: dict[int, float] = {}
            for micro_batches, losses in zip(self._plan, by_replica, strict=True):
                for members, values in zip(micro_batches, losses, strict=False):
                    found |= zip(members, values, strict=True)
            report.sequence_losses = [found[index] for index in range(len(data))]
        return report

    async def examine(self) -> Examination:
        answers = await self._call("examine")
        by_replica = self._by_replica([answer["micro_batches"] for answer in answers])
        losses = [
            MicroBatchLoss(list(members), float(loss))
            for micro_batches, values in zip(self._plan, by_replica, strict=False)
            for members, loss in zip(micro_batches, values, strict=False)
            if members
        ]
        return Examination(**answers[0]["faults"], micro_batches=losses)

    async def copy_state(self, path: Path) -> Awaitable[Files]:
        await self._call("copy_state", {"path": str(path.absolute())})
        written = asyncio.create_task(self._written())
        written.add_done_callback(lambda task: task.cancelled() or task.exception())  # there may be no waiter
        return written

    async def _written(self) -> Files:
        return _merged(await self._call("written_state"))

    async def send_state(
        self, path: Path, url: str, sizes: Mapping[str, int], bytes_per_s: float | None
    ) -> Collection[str]:
        here = socket.gethostname()
        ranks = [rank for rank, link in enumerate(self._links) if link.who.host != here]
        if not ranks:
            return []
        limit = None if bytes_per_s is None else bytes_per_s / (len(ranks) + 1)
        where = {"path": str(path.absolute()), "url": url, "sizes": dict(sizes)}
        sent = await self._call("send_state", where | {"ranks": ranks, "bytes_per_s": limit})
        return [name for names in sent for name in names]

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        await self._call("send_weights", {"version": version, "options": dict(options)}, deliver=deliver)

    def _by_replica(self, values: Sequence[Any]) -> list[Any]:
        """Results by replica, from the ranks of the last pipeline stage; those of earlier stages have none."""
        found: list[Any] = [[]] * self.info.replicas
        for ready, value in zip(self._ready, values, strict=True):
            found[ready.replica] = found[ready.replica] or value or []
        return found


def _shares(plan: Plan, data: Sequence[Datum]) -> list[list[list[Datum]]]:
    return [[[data[i] for i in members] for members in micro_batches] for micro_batches in plan]


@asynccontextmanager
async def open_trainer(config: Config, init: Init = "hf") -> AsyncIterator[TrainerGroup]:
    """Start a trainer's ranks on this machine, connected and built; its logs are below ``run.out``.

    Raises:
        UserError: model, layout and machine do not fit each other.
        TrainerLost: a rank died.
    """
    token, world, inventory = run_token(os.environ), config.parallel.world_size, local_inventory(os.environ)
    (ranks,) = ranks_by_host(
        place(inventory, PlacementRequest(world, engines=0)), inventory, config.policy.threads or 1
    ).values()
    listener = RankListener(token, None, world)
    await listener.listen(LOOPBACK, 0)
    starter = LocalRanks(ranks, Path(config.run.out, "logs"))
    async with open_group(config, listener, starter, token, init) as group:
        await group.gather()
        await group.build()
        yield group


@asynccontextmanager
async def megatron(config: Config, hosts: RankHosts) -> AsyncIterator[TrainerGroup]:
    """`TrainerFactory` of ``policy.trainer=megatron``: `open_group` of ranks that are started in the background."""
    async with open_group(config, hosts.listener, hosts.starter(), hosts.token) as group:
        group.begin()
        yield group


@asynccontextmanager
async def open_group(
    config: Config, listener: RankListener, starter: RankStarter, token: str, init: Init = "hf"
) -> AsyncIterator[TrainerGroup]:
    """Open a trainer for the ranks that connect to ``listener``, which `TrainerGroup.gather` starts; leaving ends all
    of them.
    """
    run = config.run.model_copy(update={"out": str(Path(config.run.out).absolute())})
    listener.configure(config.model_copy(update={"run": run}).model_dump_json())
    use_family(config.model.family)
    cost = SequenceCost.of(read_model(read_config(config.model.folder)))
    group = TrainerGroup(config, listener, starter, token, cost, init)
    try:
        yield group
    finally:
        await group.close()
