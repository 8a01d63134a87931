"""The trainer as the controller sees it: verbs that are awaited, Tinker's first, and what they take and return.

Nothing here assumes Megatron, several processes or this machine: a trainer may be a group of ranks (`trainer.group`),
a fake of a test, or a hosted service. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.schema import Algorithm, Optimizer

MicroBatches = Sequence[Sequence[Datum]]
"""The micro-batches of one data-parallel rank: sequences packed behind each other, at most
``policy.micro_batch_tokens`` tokens each. Every rank passes the same number of them; a rank with less data
passes empty ones."""

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What a trainer can move off its devices and back."""

Files = Mapping[str, Mapping[str, Any]]
"""Files below a folder, by relative name: ``{"bytes": int, "sha256": hex}``."""

Deliver = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Hands an update message of a transport to the engines; returns when all engines have acted on it."""


class TrainerLost(Exception):
    """The trainer died or can no longer be trusted; its state is that of the last checkpoint. It may be restarted."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss, by name, with its settings: the section ``algorithm`` of the configuration as plain values.

    Attributes:
        per_sequence: report the loss of every sequence alone too (`LossReport.sequence_losses`).
    """

    name: str
    settings: Mapping[str, Any]
    per_sequence: bool = False

    @classmethod
    def of(cls, algorithm: Algorithm, per_sequence: bool = False) -> LossSpec:
        return cls(algorithm.loss, algorithm.model_dump(mode="json"), per_sequence)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one optimizer step: AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), clipped by global norm."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = math.inf

    @classmethod
    def of(cls, optimizer: Optimizer, lr: float) -> AdamParams:
        return cls(lr, optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.clip_grad)


@dataclass(slots=True)
class LossReport:
    """Sums over the global batch.

    Attributes:
        metrics: metric sums of the loss function, by its names.
        tokens: tokens of sequences, trained or not.
        padded_tokens: what else the micro-batches held.
        sequence_losses: loss of each Datum, in the order of the data; only when `LossSpec.per_sequence` asked for it.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    sequence_losses: list[float] | None = None


@dataclass(slots=True)
class OptimReport:
    """One optimizer step.

    Attributes:
        grad_norm: before clipping.
        held: the step was not taken because the norm was above ``hold_above``; the gradients are still there.
        skipped: the gradient was not finite, or was discarded; nothing was changed.
        spike: the norm is far above those of earlier steps; the guard says so.
        skipped_total: steps of the run skipped until here, this one included; the guard counts.
        gradient: by name, what ``policy.gradient_metrics`` found; empty when this step was not measured.
    """

    grad_norm: float
    lr: float
    skipped: bool
    held: bool = False
    spike: bool = False
    skipped_total: int = 0
    gradient: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """Loss of one micro-batch of the last `Trainer.forward_backward`. ``sequences``: indices into its data."""

    sequences: list[int]
    loss: float


@dataclass(frozen=True, slots=True)
class Examination:
    """Where values are not finite, in the model and in the last `Trainer.forward_backward`.

    Attributes:
        weights: names of parameters with a value that is not finite, from the input to the output of the model.
        gradients: the same of gradients, from the output to the input, in the order of a backward pass.
        parameters: number of parameters that the model has.
        micro_batches: losses; empty when the trainer has no such thing.
    """

    weights: list[str]
    gradients: list[str]
    parameters: int
    micro_batches: list[MicroBatchLoss] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What the controller must know of a trainer.

    Attributes:
        vocab_size: tokens of the model, without padding.
        max_tokens: the longest sequence that it can train.
        replicas: data-parallel copies of the model.
        device: ``cpu`` or ``cuda``.
        part_bytes: for each rank, bytes of each `Part` on its device; empty when nothing can be moved.
    """

    vocab_size: int
    max_tokens: int
    replicas: int = 1
    device: str = "cpu"
    part_bytes: Sequence[Mapping[str, int]] = ()


class Trainer(Protocol):
    """Verbs are executed in the order in which they were called; several may be in flight.

    Any verb raises UserError for something the user can mend, and `TrainerLost` when the trainer died.
    """

    @property
    def info(self) -> TrainerInfo: ...

    async def lost(self) -> TrainerLost:
        """Return, with the reason, when the trainer is lost; else never."""
        ...

    async def forward(
        self,
        data: Sequence[Datum],
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        """Log-probs, float32 ``[T]`` for each Datum, 0 where ``loss_scale`` is 0. No gradient.

        Args:
            temperature: ``None`` = that of the sampling.
        """
        ...

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        """Accumulate gradients of the SUM of ``loss`` over ``data``."""
        ...

    async def optim_step(self, adam: AdamParams, hold_above: float = math.inf) -> OptimReport:
        """Clip, step, zero the gradients.

        A gradient that is not finite never changes anything; with a finite ``hold_above`` the step is *held* then, or
        when the norm is above it: state and gradients stay as they are, until `optim_step` without a bound or
        `discard_gradients`. Without a bound such a step is skipped and its gradients are zeroed.
        """
        ...

    async def discard_gradients(self) -> None:
        """Zero the gradients, without a step."""
        ...

    async def examine(self) -> Examination:
        """Look for values that are not finite, before gradients are zeroed."""
        ...

    async def keep_reference(self) -> None:
        """Keep the present weights as the reference policy."""
        ...

    async def save_state(self, path: Path) -> Files:
        """Write weights and optimizer into the folder ``path``, which exists; the files, flushed to disk."""
        ...

    async def load_state(self, path: Path) -> None:
        """Read what `save_state` wrote, in this or another layout; gradients are zeroed."""
        ...

    async def export_hf(self, path: Path) -> None:
        """Write the present weights as a Hugging Face folder."""
        ...

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Get ready to send weights by ``transport``; repeated calls may pass more ``options``.

        Returns:
            What its controller's half asked for; see `weight_sync.base`.
        """
        ...

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        """Send the present weights by the transport that was prepared. ``deliver``: called for each message."""
        ...

    async def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Move ``parts`` off the devices; gradients are lost."""
        ...

    async def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Bring ``parts`` back."""
        ...

    async def memory(self, moment: Literal["begin", "end"], quiet: bool = False) -> list[dict[str, int]]:
        """Bytes by owner for each rank, at the beginning or the end of a phase; see `trainer.megatron.memory`.

        Args:
            quiet: at the end: no other process took device memory during the phase.
        """
        ...

    async def close(self) -> None:
        """End it. Idempotent."""
        ...


def as_plain(value: Any) -> dict[str, Any]:
    """A dataclass of this module as plain values, for a message."""
    return asdict(value)
