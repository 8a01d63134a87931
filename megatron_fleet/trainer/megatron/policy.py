"""MegatronPolicy: one rank's half of the trainer's verbs, on Megatron-Core."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_fleet.algorithms.losses import LossFn
from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import (
    check_micro_batch_tokens,
    logprob_chunk,
    micro_batch_alignment,
    sequence_alignment,
    validate,
)
from megatron_fleet.platform import device
from megatron_fleet.platform.communicator import TorchCommunicator, together
from megatron_fleet.platform.megatron.spec import has_transformer_engine
from megatron_fleet.trainer.base import AdamParams, LossReport, MicroBatches, OptimReport
from megatron_fleet.trainer.megatron import build, lora, optimizer, parallel, routing, state, step
from megatron_fleet.trainer.megatron.build import fill_random
from megatron_fleet.trainer.megatron.fake_quant import quantise_experts
from megatron_fleet.trainer.megatron.fused_gradients import FusedWeightGradients
from megatron_fleet.trainer.megatron.gradient_overlap import GradientOverlap, overlap_arguments
from megatron_fleet.trainer.megatron.gradients import GradientProbe
from megatron_fleet.trainer.megatron.offload import HostCopy, TrainState
from megatron_fleet.trainer.megatron.parameter_overlap import ParameterOverlap
from megatron_fleet.trainer.megatron.precision import filled_in_full, precision_arguments
from megatron_fleet.trainer.megatron.reference import BaseReference, Reference
from megatron_fleet.trainer.megatron.saving import Save
from megatron_fleet.trainer.packing.pack import PackedMicroBatch, micro_batch_width, pack_micro_batch, unpack_trained
from megatron_fleet.trainer.precision import check_machine, check_precision
from megatron_fleet.weights import export
from megatron_fleet.weights.adapters import AdapterSource, ViewedWeightSource, export_adapters
from megatron_fleet.weights.hf_folder import read_config
from megatron_fleet.weights.shards import load_hf
from megatron_fleet.weights.source import megatron_place


class MegatronPolicy:
    """One rank's part of the trained model. SPMD: every rank constructs it and calls every method in the same order.

    Attributes:
        hf_config: content of the model's ``config.json``.
        vocab_size: tokens of the model, without padding.
        model_chunks: this rank's GPTModel chunks, unwrapped.
        dp_rank, dp_size: this rank's share of the data. Ranks with equal ``dp_rank`` pass equal data.
    """

    def __init__(self, config: Config, init: Literal["hf", "random", "none"] = "hf") -> None:
        """Join the ranks, build this rank's stage, fill it and set up its optimizer.

        Args:
            init: ``hf`` loads ``model.path``; ``random`` needs only its ``config.json`` and draws the weights from
                ``run.seed``, equal in every layout; ``none`` leaves them to `load_state`.

        Raises:
            UserError: world size, model, capacity of a micro-batch, precision or machine do not fit each other.
        """
        self._config = config
        self.hf_config = read_config(config.model.folder)
        self._model = read_model(self.hf_config)
        self.vocab_size = self._model.vocab
        self._align = micro_batch_alignment(config.parallel, config.precision)
        self._check()
        device.prepare(self._threads(), config.run.seed)
        parallel.initialise(config.parallel, config.run.seed, config.cluster.collective_timeout_s)
        self._dtype = getattr(torch, config.model.dtype)
        self._build(init)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        chunk = logprob_chunk(config.policy, cuda=device.device().type == "cuda")
        self._settings = step.Settings(config.rollout.sampling.temperature, chunk)
        self._reference: Reference | BaseReference | None = None
        measured = config.policy.gradient_metrics
        self._probe = GradientProbe(self.model_chunks, measured) if measured.every else None
        self._reduced: optimizer.ReducedGradients | None = None

    def _threads(self) -> int:
        """CPU threads of this rank. On a CPU their number may change results, so it follows no property of the host."""
        policy = self._config.policy
        offloaded = policy.optimizer.offload_fraction > 0 and device.device().type == "cuda"
        return policy.threads or (device.cores_of_rank() if offloaded else 1)

    def _check(self) -> None:
        """Refuse configurations that cannot be trained here."""
        config = self._config
        check_micro_batch_tokens(config.policy.micro_batch_tokens, config.parallel, config.precision)
        validate(self.hf_config, config.parallel, config.policy.recompute, config.policy.lora.rank)
        check_precision(self._model, config.parallel, config.precision)
        check_machine(config.policy, config.precision)
        if config.policy.kernels == "torch" and has_transformer_engine():
            raise RuntimeError("prepare_process() must come before the first import of Megatron")

    def _build(self, init: str) -> None:
        """Build this rank's chunks with their parameters, gradient buffers and optimizer."""
        config = self._config
        experts = self._model.experts > 0
        more = precision_arguments(config.precision, config.policy.optimizer, experts)
        sizes = config.parallel, self._dtype, config.policy.micro_batch_tokens, config.policy.recompute
        routers = routing.expert_arguments(config.model, config.policy, config.parallel) if experts else {}
        self.model_chunks = build.build_chunks(self.hf_config, *sizes, **more.transformer | routers)
        for chunk in self.model_chunks:
            routing.attach(chunk)
        with filled_in_full(self.model_chunks, self._dtype):
            # Checkpoints of adapters do not hold the base model.
            self._fill("hf" if init == "none" and config.policy.lora.rank else init)
        self._adapters: list[lora.Adapters] = []
        if config.policy.lora.rank:
            self._adapters = lora.attach(self.model_chunks, self.hf_config, config.policy.lora, config.run.seed)
        self._views = lora.views(self._adapters) | quantise_experts(self.model_chunks, config.policy)
        gradients = more.gradients | overlap_arguments(config.policy, cuda=torch.cuda.is_available())
        self._wrapped = [optimizer.wrap(chunk, gradients) for chunk in self.model_chunks]
        self._overlap, self._gather = GradientOverlap(self._wrapped), ParameterOverlap(self._wrapped)
        # Fake-quantised experts compute with other tensors than their parameters.
        self._fused = FusedWeightGradients(self._wrapped, self._views, overwrites=config.precision.fp8)
        self._optimizer = optimizer.build(self._wrapped, config.policy.optimizer, self._dtype, more.optimizer)
        self._host: HostCopy | None = None
        self._clear()

    def gathered(self) -> None:
        """Wait for the parameters of the last update, before they are accessed other than by `forward` and
        `forward_backward`. The other methods do so themselves.
        """
        self._gather.wait()

    def _clear(self) -> None:
        """Zero the gradients."""
        self._overlap.abandon()
        optimizer.clear(self._wrapped, self._optimizer)
        self._accumulated = False

    def _fill(self, init: str) -> None:
        if init == "random":
            std = self.hf_config.get("initializer_range", 0.02)
            fill_random(self.model_chunks, std, self._config.run.seed, self.vocab_size)
        elif init == "hf":
            load_hf(self.model_chunks, self._config.model.folder)

    def _pack(self, micro_batches: MicroBatches) -> list[PackedMicroBatch]:
        """Pack the micro-batches, each as wide as needed, followed by empty ones if the layout needs them."""
        p = self._config.parallel
        # Interleaved stages need a number of micro-batches that is a multiple of the pipeline size.
        missing = -len(micro_batches) % p.pipeline if p.virtual > 1 else 0
        filled = [*micro_batches, *([[]] * missing)]
        align = sequence_alignment(p)
        widths = [micro_batch_width([*map(len, micro_batch)], align, self._align) for micro_batch in filled]
        if p.pipeline > 1:
            # Activations sent between stages have one shape per pass.
            widths = [max(widths)] * len(widths)
        return [pack_micro_batch(micro_batch, width, align) for micro_batch, width in zip(filled, widths, strict=True)]

    def keep_reference(self) -> None:
        """Keep the current weights, in host memory, as the reference policy; with adapters it is the base model."""
        self.gathered()
        self._reference = BaseReference(self._adapters) if self._adapters else Reference(self.model_chunks)

    def forward(
        self,
        micro_batches: MicroBatches,
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[list[np.ndarray]]:
        """See `Trainer.forward`; the results have the shape of ``micro_batches``.

        Raises:
            ValueError: ``reference`` without an earlier `keep_reference`.
        """
        settings = self._settings if temperature is None else replace(self._settings, temperature=temperature)
        if which == "current":
            return self._logprobs(micro_batches, settings)
        if self._reference is None:
            raise ValueError("no reference weights: keep_reference() was not called")
        self.gathered()
        with self._reference.in_place():
            return self._logprobs(micro_batches, settings)

    def _logprobs(self, micro_batches: MicroBatches, settings: step.Settings) -> list[list[np.ndarray]]:
        values = step.run_logprobs(self._wrapped, self._pack(micro_batches), settings)
        arrays = step.share_from_last_stage([v.cpu().numpy() for v in values])[: len(micro_batches)]
        return [unpack_trained(micro_batch, array) for micro_batch, array in zip(micro_batches, arrays, strict=True)]

    def forward_backward(self, micro_batches: MicroBatches, loss: LossFn) -> LossReport:
        """See `Trainer.forward_backward`. Several calls before one `optim_step` accumulate."""
        if self._reduced is not None:
            raise RuntimeError("a held optimizer step must be taken or discarded before more gradients are added")
        packed = self._pack(micro_batches)
        probe = self._probe
        self._overlap.begin(again=self._accumulated)
        self._fused.start(probe.observed if probe else (), again=self._accumulated)
        self._accumulated = True
        with probe.watching([micro_batch.real_tokens > 0 for micro_batch in packed]) if probe else nullcontext():
            per_micro_batch = step.run_loss(self._wrapped, packed, self._settings, loss)
        self._overlap.end()
        real = sum(micro_batch.real_tokens for micro_batch in packed)
        width = sum(len(micro_batch.tokens) for micro_batch in packed)
        counts = {"micro_batch_tokens": real, "padded_tokens": width - real}
        sums = step.reduce_sums(per_micro_batch, counts)
        if self._config.rollout.engine.routing_replay:
            sums |= routing.collect(self._wrapped, packed)
        tokens, padded = int(sums.pop("micro_batch_tokens")), int(sums.pop("padded_tokens"))
        return LossReport(loss=sums.pop("loss"), metrics=sums, tokens=tokens, padded_tokens=padded)

    def optim_step(self, adam: AdamParams | float, hold_above: float = math.inf) -> OptimReport:
        """See `Ranks.optim_step`; a number is a learning rate, with the configuration's other settings."""
        if not isinstance(adam, AdamParams):
            adam = AdamParams.of(self._config.policy.optimizer, adam)
        if self._reduced is None:
            # There may have been no pass.
            self.gathered()
            self._overlap.end()
            self._reduced = optimizer.reduce_gradients(self._wrapped, self._optimizer)
        norm = self._reduced.norm
        if hold_above < math.inf and not norm <= hold_above:
            return OptimReport(grad_norm=norm, lr=adam.lr, skipped=False, held=True)
        before = self._probe.weights() if self._probe else []
        skipped = optimizer.step(self._wrapped, self._optimizer, self._reduced, adam)
        self._reduced, self._accumulated = None, False
        if not skipped:
            self._gather.start()
        if before:
            self.gathered()
        found = self._probe.finish(before, skipped) if self._probe else {}
        return OptimReport(grad_norm=norm, lr=adam.lr, skipped=skipped, gradient=found)

    def discard_gradients(self) -> None:
        self._clear()
        self._reduced = None
        if self._probe:
            self._probe.finish([], skipped=True)

    def save_state(self, path: Path) -> None:
        """Write model and optimizer shards into the folder ``path``; collective."""
        save = self.begin_save(path, copy=False)
        with together(TorchCommunicator()):
            save.write()

    def begin_save(self, path: Path, copy: bool) -> Save:
        """Describe this rank's share of a checkpoint; collective. `Save.write` then writes it, alone.

        Args:
            copy: copy it to host memory, for a write in another thread, during which the model may change. One at a
                time: the memory is used again.
        """
        self.gathered()
        if copy and self._host is None:
            self._host = HostCopy(pinned=torch.cuda.is_available())
        return Save(Path(path), self._wrapped, self._optimizer, self._host if copy else None)

    def load_state(self, path: Path) -> None:
        """Read what `save_state` wrote, in this or another layout; collective. Gradients are cleared."""
        self.gathered()
        state.load(Path(path), self._wrapped, self._optimizer)
        self._clear()

    def weight_source(self) -> ViewedWeightSource:
        """Live weights as HF tensors, adapters merged; collective. Create it once: it reads the parameters again in
        every pass.
        """
        how = {"dtype": self._dtype, "place": megatron_place(), "views": self._views}
        return ViewedWeightSource(self.model_chunks, self.hf_config, **how)

    def adapter_source(self) -> AdapterSource:
        """The adapters under peft's names; collective."""
        low, rank = lora.low_rank(self._adapters), self._config.policy.lora.rank
        how = {"dtype": self._dtype, "place": megatron_place()}
        return AdapterSource(self.model_chunks, self.hf_config, adapters=low, rank=rank, **how)

    def export_hf(self, path: Path) -> None:
        """Write the current weights as an HF folder with the model's own tokenizer and config files, or the adapters as
        a peft folder; collective.
        """
        self.gathered()
        settings, base, world = self._config.policy.lora, self._config.model.folder, TorchCommunicator()
        if lora.exports_adapters(settings):
            source = self.adapter_source()
            export_adapters(source, path, base=base, rank=settings.rank, alpha=settings.alpha, world=world)
        else:
            export.export_hf(self.weight_source(), base, path, world=world)

    def train_state(self) -> TrainState:
        """Parts of this rank's state that can be offloaded between passes. Create it once: it keeps the host memory."""
        return TrainState(self._wrapped, self._optimizer)

    def close(self) -> None:
        """Leave the process groups and release the model, which cannot be used afterwards."""
        parallel.shutdown()
        for wrapped in self._wrapped:
            # MoE layers keep a tensor whose autograd graph refers back to all layers through Megatron's gradient
            # hooks. The garbage collector cannot see this reference cycle, because it passes through C++ objects.
            wrapped.module = None
