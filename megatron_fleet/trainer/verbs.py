"""Verbs of `trainer.base.Trainer` as executed by one rank on Megatron. Every rank executes every verb."""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.loss_inputs import LossFn, LossInputs, LossResult
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.cluster.rank_identity import controller_address
from megatron_fleet.config.schema import AlgorithmConfig, Config
from megatron_fleet.models.registry import use_family
from megatron_fleet.platform import device as devices
from megatron_fleet.platform.communicator import TorchCommunicator, join_at
from megatron_fleet.trainer import state_files
from megatron_fleet.trainer.base import PARTS, AdamParams, MicroBatches, Part, as_plain
from megatron_fleet.trainer.megatron.faults import find_faults
from megatron_fleet.trainer.megatron.memory import RankMemory
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.megatron.saving import Written
from megatron_fleet.trainer.messages import Identity, RankReady, results_to_plain
from megatron_fleet.weight_sync.base import Outbox, Sender
from megatron_fleet.weight_sync.engine_model import fp8_declaration, open_engine_model
from megatron_fleet.weight_sync.registry import make_sender

MicroBatchList = list[list[Datum]]


def join(config: str, who: Identity, rendezvous: str, address: str, listener: socket.socket | None) -> None:
    """Join the ranks' process group.

    Args:
        config: resolved, as JSON.
        rendezvous: ``host:port`` at which rank 0 listens.
        address: of this host, to which the other ranks connect.
        listener: rank 0's socket at ``rendezvous``.
    """
    if interface := _interface(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ["LOCAL_RANK"] = str(who.local_rank)  # Transformer Engine and our devices read it
    if torch.cuda.is_available():
        torch.cuda.set_device(devices.device())
    how: dict[str, Any] = {"backend": devices.backend(), "rank": who.rank, "size": who.world_size, "key": _prefix()}
    timeout_s = Config.model_validate_json(config).cluster.collective_timeout_s
    join_at(rendezvous, listener, timeout_s=timeout_s, **how)


def _prefix() -> str:
    """Prefix of the store's keys, derived from the run's token: what reaches the port without the token, such as a rank
    of another run, does not take part. It is not authentication: a store lists its keys to every client that asks.
    """
    _, token = controller_address(os.environ)
    return hmac.new(token.encode(), b"process group of the ranks", "sha256").hexdigest()


def _interface(address: str) -> str | None:
    """Network interface that has ``address``."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


class RankVerbs:
    """One rank's part of the trainer; collective: all ranks call the same method with their own data."""

    def __init__(self, config: str, init: Literal["hf", "random", "none"], sees_folder: bool = True) -> None:
        """Build this rank's part of the model. The process group must exist.

        Args:
            config: resolved, as JSON.
            init: see `MegatronPolicy`.
            sees_folder: see `RankReady`.

        Raises:
            UserError: configuration, model and machine do not fit each other.
        """
        self._config = Config.model_validate_json(config)
        use_family(self._config.model.family)
        self._policy = MegatronPolicy(self._config, init)
        self._world = TorchCommunicator()
        colocated = self._config.rollout.engine.colocated
        self._state = self._policy.train_state() if colocated else None
        self._memory = RankMemory(devices.device(), self._state)
        # Ranks that get equal data; messages between the hosts' CPUs.
        self._replica = self._world.split(self._policy.dp_rank, self._config.cluster.collective_timeout_s)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Written] | None = None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="checkpoint copies")
        self._leaving = threading.Event()
        self._sees_folder, self._fetched = sees_folder, dict[str, Path]()
        self._losses: RecordedLosses | None = None
        self._sender: Sender | None = None
        self._transport = ""

    def ready(self) -> dict[str, Any]:
        """`RankReady`, as plain values."""
        policy = self._policy
        sizes = self._memory.part_bytes()
        device = devices.device().type
        return as_plain(RankReady(policy.dp_rank, policy.dp_size, policy.vocab_size, device, sizes, self._sees_folder))

    def share_in_replica(self, bodies: Sequence[bytes], count: int) -> list[bytes]:
        """Distribute messages of the replica's first rank to every rank of the replica.

        Args:
            bodies: ``count`` messages on the first rank, none elsewhere.
        """
        mine = iter(bodies)
        return [self._replica.broadcast_bytes(next(mine, b""), 0) for _ in range(count)]

    def forward(
        self, micro_batches: MicroBatchList, which: Literal["current", "reference"], temperature: float | None
    ) -> list[list[Any]] | None:
        """Log-probs at trained positions, by micro-batch, from the replica's first rank."""
        values = self._policy.forward(micro_batches, which, temperature)
        if self._replica.rank > 0:
            return None
        return [results_to_plain(*pair) for pair in zip(micro_batches, values, strict=True)]

    def forward_backward(
        self, micro_batches: MicroBatchList, settings: Mapping[str, Any], per_sequence: bool
    ) -> dict[str, Any]:
        """Return the report, and the losses of sequences by micro-batch where this rank computed them."""
        loss = make_loss(AlgorithmConfig.model_validate(settings))
        self._losses = RecordedLosses(loss, micro_batches, per_sequence)
        report = self._policy.forward_backward(micro_batches, self._losses)
        return {"report": as_plain(report), "sequences": self._losses.sequences() if per_sequence else None}

    def optim_step(self, adam: Mapping[str, Any], hold_above: float) -> dict[str, Any]:
        return as_plain(self._policy.optim_step(AdamParams(**adam), hold_above))

    def discard_gradients(self) -> None:
        self._policy.discard_gradients()

    def examine(self) -> dict[str, Any]:
        """Return faults, equal on every rank, and the losses of micro-batches where this rank computed them."""
        self._policy.gathered()
        losses = [] if self._losses is None else self._losses.micro_batches()
        return {"faults": as_plain(find_faults(self._policy.model_chunks)), "micro_batches": losses}

    def keep_reference(self) -> None:
        self._policy.keep_reference()

    def save_state(self, path: str) -> Written:
        """Write this rank's share; returns its files, flushed to disk."""
        return self._policy.begin_save(Path(path), copy=False).write()

    def copy_state(self, path: str) -> None:
        """Copy this rank's share to host memory, and begin to write it in a thread."""
        if self._writing is not None and not self._writing.done():
            raise RuntimeError("copy_state before the last one was written")
        save = self._policy.begin_save(Path(path), copy=True)
        self._writing = self._writer.submit(save.write)

    def written_state(self) -> Future[Written]:
        """Return the files of the last `copy_state`, once they are flushed to disk."""
        assert self._writing is not None, "copy_state comes first"
        return self._writing

    def send_state(
        self, path: str, url: str, sizes: Mapping[str, int], ranks: Sequence[int], bytes_per_s: float | None
    ) -> Future[list[str]] | list[str]:
        """See `Ranks.send_state`; in a thread. ``ranks``: those that send. ``bytes_per_s``: limit of this one."""
        if self._world.rank not in ranks:
            return []
        own = state_files.own_files(self._world.rank, sizes)
        return self._copier.submit(state_files.send, Path(path), url, own, bytes_per_s, self._leaving)

    def fetch_state(self, url: str, path: str, files: Written) -> Future[None] | None:
        """See `Ranks.fetch_state`; in a thread of the first rank of each host."""
        if self._sees_folder:
            return None
        self._fetched[path] = state_files.fetched(Path(path))
        if os.environ["LOCAL_RANK"] != "0":
            return None
        return self._copier.submit(state_files.fetch, url, Path(path), files, self._leaving)

    def clear_state(self, folder: str) -> None:
        if not self._sees_folder and os.environ["LOCAL_RANK"] == "0":
            state_files.clear(Path(folder))

    def load_state(self, path: str) -> None:
        self._policy.load_state(self._fetched.get(path, Path(path)))

    def export_hf(self, path: str) -> None:
        self._policy.export_hf(Path(path))

    def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if self._sender is None or self._transport != transport:
            self._close_sender()
            source = self._policy.weight_source()
            config = self._config
            declared = fp8_declaration(config.model, config.precision, config.rollout.engine)
            model = open_engine_model(config.model.folder, declared)
            self._sender = make_sender(transport, source, self._world, devices.device(), model)
            self._transport = transport
        return dict(self._sender.prepare(options))

    def send_weights(self, version: int, options: Mapping[str, Any], outbox: Outbox) -> None:
        if self._sender is None:
            raise RuntimeError("send_weights without prepare_weights")
        self._policy.gathered()
        self._sender.send(version, options, outbox)

    def offload(self, parts: Sequence[Part] = PARTS) -> None:
        assert self._state is not None, "only a colocated trainer leaves its devices"
        self._policy.gathered()
        self._state.offload(parts)

    def onload(self, parts: Sequence[Part] = PARTS) -> None:
        assert self._state is not None, "only a colocated trainer leaves its devices"
        self._state.onload(parts)

    def memory(self, moment: Literal["begin", "end"], quiet: bool) -> dict[str, int]:
        """See `Ranks.memory`; for this rank."""
        return self._memory.memory(moment, quiet)

    def close(self) -> None:
        """Leave the process groups; copies that are under way are given up."""
        self._leaving.set()
        self._close_sender()
        self._policy.close()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class RecordedLosses:
    """Loss function that records its values, to find the non-finite ones.

    It is called once for each micro-batch, in order, on the last pipeline stage; elsewhere it records nothing.
    """

    def __init__(self, loss: LossFn, micro_batches: MicroBatches, per_sequence: bool) -> None:
        """Wrap ``loss``.

        Args:
            micro_batches: of this rank. Calls beyond them are for empty ones that the layout needs.
            per_sequence: evaluate each sequence alone too; costs a second evaluation of the loss and a device
                synchronisation.
        """
        self._loss, self._micro_batches = loss, micro_batches
        self._totals: list[torch.Tensor] = []
        self._sequences: list[list[float]] | None = [] if per_sequence else None

    def __call__(self, x: LossInputs) -> LossResult:
        number = len(self._totals)
        if self._sequences is not None and number < len(self._micro_batches):
            counts = [int(np.count_nonzero(datum.loss_mask)) for datum in self._micro_batches[number]]
            ends = np.cumsum(counts)
            with torch.no_grad():
                parts = [self._loss(_cut(x, end - n, end))[0] for n, end in zip(counts, ends, strict=True)]
            self._sequences.append([float(part) for part in parts])
        result = self._loss(x)
        # Left on the device: most steps never ask for the values.
        self._totals.append(result[0].detach())
        return result

    def micro_batches(self) -> list[float]:
        """Loss of each micro-batch. Synchronises with the device."""
        return torch.stack(self._totals).tolist()[: len(self._micro_batches)] if self._totals else []

    def sequences(self) -> list[list[float]] | None:
        """Loss of each sequence, by micro-batch; ``None`` when not requested."""
        return self._sequences


def _cut(x: LossInputs, start: int, end: int) -> LossInputs:
    """Slice the inputs to positions ``[start, end)``, all of one sequence."""
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    cut: dict[str, Any] = {name: v[start:end] for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(x, **cut, arrays={name: v[start:end] for name, v in x.arrays.items()})
