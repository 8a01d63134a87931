"""Messages between the controller and the ranks, as parts of `cluster.frames`.

Rank to controller, after the hello of `cluster.handshake`::

    ["rank", proof, identity]           the first frame; identity: see `Identity`
    ["done", call, value, began, seconds]           began: unix time of this rank
    ["failed", call, kind, message, type]   kind: one of `FAILURES`; type: name of the exception's
    ["post", call, number, message]     `send_weights`: a message for the engines

Controller to rank::

    ["config", text]                    the answer: the resolved configuration as JSON
    ["call", call, verb, arguments, micro-batches that follow]
    ["data", call, sequences]           one micro-batch, to the first rank of a replica only
    ["delivered", call, number, error or nil]
    ["quit"]
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.cluster.frames import array_from_plain, array_to_plain
from megatron_fleet.cluster.inventory import LOOPBACK, Device, StartedRank
from megatron_fleet.trainer.base import Ranks, Trainer

USER, SYSTEM, OTHER = FAILURES = ("user", "system", "other")
"""Kinds of failure: a user error; an error of the operating system (e.g. a full disk), on all ranks
alike; any other.
"""


_PROMISED = {name for name, verb in (vars(Trainer) | vars(Ranks)).items() if inspect.iscoroutinefunction(verb)}
VERBS = frozenset(_PROMISED - {"start", "lost"} | {"written_state"})
"""Verbs that ranks execute: those of `Trainer` and `Ranks`, and the second half of `Ranks.copy_state`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a rank, as reported by itself.

    Attributes:
        host, pid: location of its process.
        source: origin of its rank number, see `cluster.rank_identity`.
        address: at which other hosts reach its host.
        device: the one that it uses, the fields of `cluster.inventory.Device`; ``None`` on a CPU.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    source: str
    address: str = LOOPBACK
    device: dict[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, value: Any) -> Identity:
        """Inverse of `to_plain`. Raises ValueError for anything else."""
        try:
            found = cls(**value)
        except TypeError as error:
            raise ValueError(str(error)) from None
        texts = found.host, found.source, found.address
        numbers = found.rank, found.world_size, found.local_rank, found.pid
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(n, int) for n in numbers):
            raise ValueError("fields of wrong types")
        return found

    def started(self) -> StartedRank:
        """Convert to the form of `cluster.inventory`. Raises ValueError when its device is invalid."""
        try:
            device = None if self.device is None else Device(**self.device)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return StartedRank(self.rank, self.local_rank, self.host, self.address, device)


@dataclass(frozen=True, slots=True)
class RankReady:
    """Properties that a rank knows once its part of the model exists.

    Attributes:
        replica: its data-parallel index; ranks of one replica get equal data.
        part_bytes: see `RanksInfo`.
        sees_folder: it sees the folder ``run.out`` of the controller.
    """

    replica: int
    replicas: int
    vocab_size: int
    device: str
    part_bytes: dict[str, int]
    sees_folder: bool = True


def datum_to_plain(datum: Datum) -> list[Any]:
    """Encode a Datum as a part of a frame, its arrays at the trained positions only: elsewhere they are 0."""
    mask = datum.loss_mask
    kept = {"advantages": datum.scaled_advantages, "behaviour": datum.behaviour_logprobs} | datum.arrays
    return [
        np.packbits(mask).tobytes(),
        array_to_plain(datum.token_ids),
        datum.loss_scale,
        {name: array_to_plain(values[mask]) for name, values in kept.items()},
        {name: array_to_plain(v) for name, v in datum.extras.items() if isinstance(v, np.ndarray)},
        {name: v for name, v in datum.extras.items() if not isinstance(v, np.ndarray)},
    ]


def datum_from_plain(values: Sequence[Any]) -> Datum:
    """Inverse of `datum_to_plain`; ``token_ids`` and arrays in ``extras`` are read-only."""
    bits, tokens, scale, kept, extra_arrays, extras = values
    token_ids = array_from_plain(tokens)
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(token_ids)).view(bool)

    def whole(plain: list[Any]) -> np.ndarray:
        there = array_from_plain(plain)
        found = np.zeros(len(mask), there.dtype)
        found[mask] = there
        return found

    arrays = {name: whole(plain) for name, plain in kept.items()}
    extras |= {name: array_from_plain(plain) for name, plain in extra_arrays.items()}
    return Datum(token_ids, mask, arrays.pop("advantages"), arrays.pop("behaviour"), scale, arrays, extras)


def results_to_plain(data: Sequence[Datum], values: Sequence[np.ndarray]) -> list[Any]:
    """Log-probs ``[T]`` of sequences, reduced to their trained positions; elsewhere they are 0."""
    return [array_to_plain(value[datum.loss_mask]) for datum, value in zip(data, values, strict=True)]


def results_from_plain(data: Sequence[Datum], values: Sequence[Any]) -> list[np.ndarray]:
    """Inverse of `results_to_plain`, float32 ``[T]`` each."""
    found = []
    for datum, value in zip(data, values, strict=True):
        whole = np.zeros(len(datum), np.float32)
        whole[datum.loss_mask] = array_from_plain(value)
        found.append(whole)
    return found
