"""A trainer of your own: `mfleet train policy.trainer=my_trainer:Unigram` (see README.md).

Like a hosted service it has no ranks on the hosts of the run. Its policy is one distribution over the vocabulary."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import fingerprint
from megatron_fleet.trainer.base import AdamParams, LossReport, LossSpec, OptimReport, TrainerInfo, TrainerLost
from megatron_fleet.trainer.registry import RankHosts
from megatron_fleet.weight_sync.base import Deliver
from megatron_fleet.weights.hf_folder import read_config


class Unigram(AbstractAsyncContextManager["Unigram"]):
    """`trainer.base.Trainer` by REINFORCE and plain gradient descent; ``logits`` float64 ``[V]``."""

    ranks = None
    spending = None

    def __init__(self, config: Config, hosts: RankHosts) -> None:
        self.info = TrainerInfo(read_config(config.model.folder)["vocab_size"], config.policy.micro_batch_tokens)
        self._temperature = config.rollout.sampling.temperature

    async def start(self, reason: TrainerLost | None) -> None:
        self.logits = self._reference = np.zeros(self.info.vocab_size)
        await self.discard_gradients()

    async def lost(self) -> TrainerLost:
        return await asyncio.get_running_loop().create_future()  # there is nothing to lose

    async def forward(
        self, data: Sequence[Datum], which: str = "current", temperature: float | None = None
    ) -> list[np.ndarray]:
        logits = self.logits if which == "current" else self._reference
        values = log_softmax(logits / (temperature or self._temperature))
        return [np.where(d.loss_mask, values[d.token_ids], 0).astype(np.float32) for d in data]

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        if loss.name != "reinforce":
            raise UserError(f"algorithm.loss={loss.name}: this trainer supports only reinforce; set it to that.")
        values, total = log_softmax(self.logits / self._temperature), 0.0
        for datum in data:
            ids, advantages = datum.token_ids[datum.loss_mask], datum.scaled_advantages[datum.loss_mask]
            total -= float((advantages * values[ids]).sum())
            np.add.at(self._gradient, ids, -advantages / self._temperature)
            self._gradient += advantages.sum() * np.exp(values) / self._temperature
        trained = float(sum(np.count_nonzero(d.loss_mask) for d in data))
        metrics = {"policy_loss": total, "tokens": trained, "entropy": -float(np.exp(values) @ values) * trained}
        return LossReport(total, metrics, tokens=sum(len(d) for d in data))

    async def optim_step(self, adam: AdamParams) -> OptimReport:
        norm = float(np.linalg.norm(self._gradient))
        if math.isfinite(norm):
            self.logits = self.logits - adam.lr * self._gradient * min(1.0, adam.clip_grad / max(norm, 1e-12))
        await self.discard_gradients()
        return OptimReport(norm, adam.lr, skipped=not math.isfinite(norm))

    async def discard_gradients(self) -> None:
        self._gradient = np.zeros(self.info.vocab_size)

    async def keep_reference(self) -> None:
        self._reference = self.logits

    async def save_state(self, path: Path) -> Files:
        np.save(path / "logits.npy", self.logits)
        return {"logits.npy": fingerprint(path / "logits.npy", flush=True)}

    async def load_state(self, path: Path) -> None:
        self.logits = np.load(path / "logits.npy")

    async def export_hf(self, path: Path) -> None:
        raise UserError("my_trainer: cannot write a Hugging Face folder; set checkpoint.export.last=false.")

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        await deliver({"logits": self.logits})

    async def __aexit__(self, *error: object) -> None:
        """There is nothing to close."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[V]`` → ``[V]``."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
