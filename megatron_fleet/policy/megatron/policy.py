"""MegatronPolicy: the Policy verbs on Megatron-Core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_fleet.algorithms.losses import LossFn
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.platform import device
from megatron_fleet.policy.base import LossReport, OptimReport, Rows
from megatron_fleet.policy.layout import row_alignment
from megatron_fleet.policy.megatron import build, optimizer, parallel, state, step
from megatron_fleet.policy.megatron.init import fill_random
from megatron_fleet.policy.megatron.reference import Reference
from megatron_fleet.policy.pack import PackedRow, pack_row, unpack_trained
from megatron_fleet.weights import export
from megatron_fleet.weights.communicator import TorchCommunicator
from megatron_fleet.weights.hf_folder import read_config
from megatron_fleet.weights.load import load_hf
from megatron_fleet.weights.source import MegatronWeightSource, megatron_place


class MegatronPolicy:
    """One rank's part of the trained model. SPMD: every rank constructs it and calls every method in the same order.

    Attributes:
        hf_config: content of the model's ``config.json``.
        model_chunks: this rank's GPTModel chunks, unwrapped.
        dp_rank, dp_size: which share of the data is this rank's. Ranks with equal ``dp_rank`` pass equal rows.
    """

    def __init__(self, config: Config, init: Literal["hf", "random"] = "hf") -> None:
        """Join the ranks, build this rank's stage, fill it and set up its optimizer.

        Args:
            init: ``hf`` loads ``model.path``; ``random`` needs only its ``config.json`` and draws the weights from
                ``run.seed``, equal in every layout.

        Raises:
            UserError: the world size, the model or the row size does not fit the layout.
        """
        row_tokens = config.policy.row_tokens
        if row_tokens % row_alignment(config.parallel):
            raise UserError(
                f"policy.row_tokens={row_tokens} is no multiple of parallel.tensor={config.parallel.tensor}; round it "
                f"up."
            )
        self._config = config
        device.prepare(config.policy.threads, config.run.seed)
        parallel.initialise(config.parallel, config.run.seed)
        self.hf_config = read_config(config.model.path)
        self._dtype = getattr(torch, config.model.dtype)
        self.model_chunks = [build.build_chunk(self.hf_config, config.parallel, self._dtype, row_tokens)]
        self._fill(init)
        self._wrapped = [optimizer.wrap(chunk) for chunk in self.model_chunks]
        self._optimizer = optimizer.build(self._wrapped, config.policy.optimizer, self._dtype)
        optimizer.clear(self._wrapped, self._optimizer)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._settings = step.Settings(row_tokens, config.rollout.sampling.temperature, config.policy.logprob_chunk)
        self._reference: Reference | None = None

    def _fill(self, init: str) -> None:
        if init == "random":
            std = self.hf_config.get("initializer_range", 0.02)
            fill_random(self.model_chunks, std, self._config.run.seed, self.hf_config["vocab_size"])
        else:
            load_hf(self.model_chunks, self._config.model.path)

    def _pack(self, rows: Rows) -> list[PackedRow]:
        return [pack_row(row, self._settings.row_tokens) for row in rows]

    def keep_reference(self) -> None:
        """Keep the present weights, in host memory, as the reference policy."""
        self._reference = Reference(self.model_chunks)

    def forward(
        self, rows: Rows, which: Literal["current", "reference"] = "current", temperature: float | None = None
    ) -> list[list[np.ndarray]]:
        """See `Policy.forward`.

        Raises:
            ValueError: ``reference`` without an earlier `keep_reference`.
        """
        settings = self._settings if temperature is None else replace(self._settings, temperature=temperature)
        if which == "current":
            return self._logprobs(rows, settings)
        if self._reference is None:
            raise ValueError("no reference weights: keep_reference() was not called")
        with self._reference.in_place():
            return self._logprobs(rows, settings)

    def _logprobs(self, rows: Rows, settings: step.Settings) -> list[list[np.ndarray]]:
        values = step.run_logprobs(self._wrapped, self._pack(rows), settings)
        arrays = step.share_from_last_stage([[v.cpu().numpy() for v in values]])
        return [unpack_trained(row, array) for row, array in zip(rows, arrays, strict=True)]

    def forward_backward(self, rows: Rows, loss: LossFn) -> LossReport:
        """See `Policy.forward_backward`. Several calls before one `optim_step` add up."""
        packed = self._pack(rows)
        per_row = step.run_loss(self._wrapped, packed, self._settings, loss)
        real = sum(row.real_tokens for row in packed)
        counts = {"row_tokens": real, "padded_tokens": len(packed) * self._settings.row_tokens - real}
        sums = step.reduce_sums(per_row, counts)
        tokens, padded = int(sums.pop("row_tokens")), int(sums.pop("padded_tokens"))
        return LossReport(loss=sums.pop("loss"), metrics=sums, tokens=tokens, padded_tokens=padded)

    def optim_step(self, lr: float) -> OptimReport:
        """See `Policy.optim_step`. The gradient norm is that before clipping."""
        clip = self._config.policy.optimizer.clip_grad
        norm, skipped = optimizer.step(self._wrapped, self._optimizer, lr, clip)
        return OptimReport(grad_norm=norm, lr=lr, skipped=skipped)

    def save_state(self, path: Path) -> None:
        """Write model and optimizer shards into the folder ``path``; collective."""
        state.save(Path(path), self._wrapped, self._optimizer)

    def load_state(self, path: Path) -> None:
        """Read what `save_state` wrote, in this or another layout; collective. Gradients are cleared."""
        state.load(Path(path), self._wrapped, self._optimizer)
        optimizer.clear(self._wrapped, self._optimizer)

    def weight_source(self) -> MegatronWeightSource:
        """The live weights as HF tensors; collective. It reads the parameters anew in every pass, so make it once."""
        return MegatronWeightSource(self.model_chunks, self.hf_config, dtype=self._dtype, place=megatron_place())

    def export_hf(self, path: Path) -> None:
        """Write the present weights as an HF folder beside the model's own tokenizer and config files; collective."""
        export.export_hf(self.weight_source(), self._config.model.path, path, world=TorchCommunicator())

    def close(self) -> None:
        """Leave the process groups."""
        parallel.shutdown()
