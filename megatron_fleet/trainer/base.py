"""Protocols of a trainer: awaitable verbs, modelled on Tinker's, with their arguments and results.

Every trainer has the verbs of `Trainer`, which a hosted service can provide as well as ranks of this run. A trainer
with ranks on hosts also has those of `Ranks`; the controller uses them if ``Trainer.ranks`` is not ``None``. Nothing
here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig, OptimizerConfig
from megatron_fleet.storage.folder import Files
from megatron_fleet.weight_sync.base import Deliver

MicroBatches = Sequence[Sequence[Datum]]
"""Micro-batches of one data-parallel rank: sequences packed behind each other, at most ``policy.micro_batch_tokens``
tokens each. Every rank passes the same number of them; a rank with less data passes empty ones.
"""

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts that a trainer can offload from its devices."""


class TrainerLost(Exception):
    """The trainer died or is no longer trusted; its state is that of the last checkpoint. It may be restarted."""


class BudgetSpent(UserError):
    """The run has spent its budget."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Loss by name with its settings: the ``algorithm`` section of the configuration as plain values.

    Attributes:
        per_sequence: also report the loss of every single sequence (`LossReport.sequence_losses`).
    """

    name: str
    settings: Mapping[str, Any]
    per_sequence: bool = False

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, per_sequence: bool = False) -> LossSpec:
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
    def of(cls, optimizer: OptimizerConfig, lr: float) -> AdamParams:
        return cls(lr, optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.clip_grad)


@dataclass(slots=True)
class LossReport:
    """Sums over the global batch.

    Attributes:
        metrics: metric sums of the loss function, by its names.
        tokens: tokens of sequences, trained or not.
        padded_tokens: all other tokens of the micro-batches.
        sequence_losses: loss of each Datum, in the order of the data; only when `LossSpec.per_sequence` is set.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    sequence_losses: list[float] | None = None


@dataclass(slots=True)
class OptimReport:
    """Result of one optimizer step.

    Attributes:
        grad_norm: before clipping; ``None``: the trainer does not tell.
        held: the step was not taken because the norm was above ``hold_above``; the gradients are kept.
        skipped: the gradient was not finite, or was discarded; nothing was changed.
        spike: the norm is far above those of earlier steps; set by the guard.
        skipped_total: steps of the run skipped so far, including this one; counted by the guard.
        gradient: metrics of ``policy.gradient_metrics`` by name; empty when this step was not measured.
    """

    grad_norm: float | None
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
    """Locations of non-finite values in the model and in the last `Trainer.forward_backward`.

    Attributes:
        weights: names of parameters with a non-finite value, from the input to the output of the model.
        gradients: names of parameters with a non-finite gradient, from the output to the input (backward order).
        parameters: number of parameters of the model.
        micro_batches: their losses; empty when the trainer has no micro-batches.
    """

    weights: list[str]
    gradients: list[str]
    parameters: int
    micro_batches: list[MicroBatchLoss] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """Properties of a trainer.

    Attributes:
        vocab_size: tokens of the model, without padding.
        max_tokens: the longest sequence that it can train.
    """

    vocab_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RanksInfo(TrainerInfo):
    """Properties of a trainer's ranks.

    Attributes:
        replicas: data-parallel copies of the model.
        device: ``cpu`` or ``cuda``.
        part_bytes: for each rank, bytes of each `Part` on its device; empty when nothing can be offloaded.
        hosts_apart: some ranks write their files where the controller does not see them.
    """

    replicas: int = 1
    device: str = "cpu"
    part_bytes: Sequence[Mapping[str, int]] = ()
    hosts_apart: bool = False


class Trainer(Protocol):
    """Verbs of a trainer, executed in the order in which they were called; several may be in flight.

    Any verb raises UserError for something the user can fix, and `TrainerLost` when the trainer died.
    """

    @property
    def info(self) -> TrainerInfo:
        """Its properties; after `start`."""
        ...

    @property
    def ranks(self) -> Ranks | None:
        """The additional verbs of ranks on the hosts of the run; ``None`` for a trainer without such ranks."""
        ...

    @property
    def spending(self) -> Spending | None:
        """Costs of the trainer and the engines, after `start`; ``None``: they are not billed by token."""
        ...

    async def start(self, reason: TrainerLost | None) -> None:
        """Start with the initial weights of the model, or start again after a loss.

        Args:
            reason: the loss.

        Raises:
            UserError: it was lost too often, or does not fit the model or the machine.
        """
        ...

    async def lost(self) -> TrainerLost:
        """Return the reason once the trainer is lost; otherwise never return."""
        ...

    async def forward(
        self,
        data: Sequence[Datum],
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        """Log-probs, float32 ``[T]`` for each Datum, 0 where ``loss_mask`` is false. No gradient.

        Args:
            temperature: ``None`` = the sampling temperature.
        """
        ...

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        """Accumulate gradients of the SUM of ``loss`` over ``data``."""
        ...

    async def optim_step(self, adam: AdamParams) -> OptimReport:
        """Clip, step, zero the gradients. When the gradient, or a loss that it is of, is not finite, the step is
        skipped: nothing changes.
        """
        ...

    async def discard_gradients(self) -> None:
        """Zero the gradients without a step."""
        ...

    async def keep_reference(self) -> None:
        """Keep the current weights as the reference policy."""
        ...

    async def save_state(self, path: Path) -> Files:
        """Save to the existing folder ``path`` what `load_state` needs to resume: weights and optimizer, or the address
        of a copy that is stored elsewhere. Returns the files, flushed to disk.
        """
        ...

    async def load_state(self, path: Path) -> None:
        """Restore what `save_state` wrote, in this or another layout; gradients are zeroed."""
        ...

    async def export_hf(self, path: Path) -> None:
        """Write the current weights as a Hugging Face folder."""
        ...

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Prepare to send weights by ``transport``; repeated calls may pass more ``options``.

        Returns:
            Answer for the transport's controller half; see `weight_sync.base`.
        """
        ...

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        """Send the current weights by the prepared transport. ``deliver``: called for each message."""
        ...


class Spending(Protocol):
    """Costs of a run at a service that bills tokens."""

    @property
    def usd(self) -> float | None:
        """US dollars so far, all attempts together; ``None``: prices are not known."""
        ...

    def record(self, engines: Mapping[str, float]) -> dict[str, float]:
        """Count the tokens of the engines since the last call, and return metrics of all tokens billed since then.

        Args:
            engines: see `rollout.engine_statistics.engine_metrics`.
        """
        ...

    def check(self) -> None:
        """Raises BudgetSpent: nothing more may be spent."""
        ...


class Ranks(Protocol):
    """Additional verbs of a trainer whose ranks run on hosts of the run. They concern devices, host memory and disks.

    Order and errors are those of `Trainer`.
    """

    @property
    def info(self) -> RanksInfo: ...

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Host and pid of each connected rank."""
        ...

    async def optim_step(self, adam: AdamParams, hold_above: float = math.inf) -> OptimReport:
        """`Trainer.optim_step`, *held* when the gradient norm is above a finite ``hold_above``, or not finite.

        State and gradients of a held step stay as they are, until `optim_step` without a bound or
        `Trainer.discard_gradients`.
        """
        ...

    async def examine(self) -> Examination:
        """Look for non-finite values, before gradients are zeroed."""
        ...

    async def copy_state(self, path: Path) -> Awaitable[Files]:
        """Copy weights and optimizer to host memory; when this returns, they may change. One checkpoint at a time.

        Returns:
            Resolves to the files once they are in the existing folder ``path`` and flushed to disk.
        """
        ...

    async def send_state(
        self, path: Path, url: str, sizes: Mapping[str, int], bytes_per_s: float | None
    ) -> Collection[str]:
        """Copy files of a saved state from ``path`` to the folder ``url``: each host, but for the controller's, those
        that its own ranks wrote. Returns the names of those that are there now.

        Args:
            sizes: the files by name, with their bytes.
            bytes_per_s: limit for all hosts together.
        """
        ...

    async def fetch_state(self, url: str, path: Path, files: Files) -> None:
        """Copy a saved state from ``url`` to each host that does not see the controller's ``path``, for the next
        `Trainer.load_state` of ``path``.
        """
        ...

    async def clear_state(self, folder: Path) -> None:
        """Remove what unfinished saves and `fetch_state` left in ``folder``, on hosts that do not see that of the
        controller.
        """
        ...

    async def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Offload ``parts`` from the devices; gradients are lost."""
        ...

    async def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Onload ``parts``."""
        ...

    async def memory(self, moment: Literal["begin", "end"], quiet: bool = False) -> list[dict[str, int]]:
        """Bytes by owner for each rank, at the beginning or the end of a phase; see `trainer.megatron.memory`.

        Args:
            quiet: at the end: no other process allocated device memory during the phase.
        """
        ...


def as_plain(value: Any) -> dict[str, Any]:
    """Convert a dataclass of this module to plain values, for a message."""
    return asdict(value)


def as_message(value: Any) -> Any:
    """Convert an argument of a verb to plain values: a path to its absolute text, a dataclass to its fields."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Mapping):
        return {key: as_message(part) for key, part in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [as_message(part) for part in value]
    return as_plain(value) if is_dataclass(value) else value
