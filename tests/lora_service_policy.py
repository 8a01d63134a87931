"""Adapters of a real model at the stand-in service: trained by a Megatron rank in its process, sampled by vLLM.

Each adapter has a rank of its own, which is the whole world of its process group. The weights of a sampler are a folder
that the engine loads before it samples from them, as engines of a run do with ``transport=disk``.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.rollout.engine_arguments import environment
from megatron_fleet.trainer.base import AdamParams
from megatron_fleet.trainer.packing.pack_plan import plan_micro_batches
from megatron_fleet.trainer.process import prepare_process
from megatron_fleet.weights.hf_folder import read_config

TRANSPORT = "disk"
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Trained:
    """``policy``: a MegatronPolicy. ``sender``: of its weights. ``shape``: rank and seed of its adapters."""

    policy: Any
    sender: Any
    shape: tuple[int, int]


class LoraPolicy:
    """`tinker_service.Policy` of a folder's model."""

    @classmethod
    async def start(cls, model: Path, folder: Path, threads: int) -> LoraPolicy:
        """Start the engine. From here on, the output of this process and the engine's goes to a file in a new folder
        in ``folder``.

        Args:
            threads: of the rank.
        """
        # vLLM and torch read it when they are imported; a forked engine would inherit the locks of other threads.
        os.environ.update(environment(cuda=False) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
        config = load(["experiment=quickstart", f"model.path={model}", f"policy.threads={threads}"])
        prepare_process(config.policy, config.parallel)
        policy = cls(config, Path(tempfile.mkdtemp(prefix="engine-", dir=folder)))
        await policy._engine.start()
        return policy

    def __init__(self, config: Config, folder: Path) -> None:
        from megatron_fleet.rollout.engine_actor import EngineActor
        from megatron_fleet.trainer.megatron.policy import MegatronPolicy

        self.context = config.rollout.max_context
        self._config, self._folder = config, folder
        self._cost = SequenceCost.of(read_model(read_config(config.model.folder)))
        self._policy = MegatronPolicy
        self._rank = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._ends = json.loads(Path(config.model.folder, "generation_config.json").read_text())["eos_token_id"]
        self._base: Path | None = None
        self._engine = EngineActor(config, secrets.token_hex(8), folder / "engine.log", TRANSPORT)
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Condition()
        self._loaded: Path | None = None
        self._sampling = self._versions = 0

    # Training

    def make(self, rank: int, seed: int | None) -> Trained:
        shape = rank, secrets.randbits(31) if seed is None else seed
        return self._on_rank(lambda: self._build(shape, "hf"))

    def forward(self, adapters: Trained, data: Pairs) -> list[np.ndarray]:
        sequences = [datum_of(*pair, np.ones(len(pair[1]))) for pair in data]
        micro_batches, order = self._pack(sequences)
        found = self._on_rank(lambda: adapters.policy.forward(micro_batches))
        values = dict(zip(order, (row[1:] for several in found for row in several), strict=True))
        return [values[index] for index in range(len(data))]

    def backward(self, adapters: Trained, data: Pairs, slopes: Sequence[np.ndarray]) -> None:
        sequences = [datum_of(*pair, slope) for pair, slope in zip(data, slopes, strict=True)]
        micro_batches, _ = self._pack(sequences)
        self._on_rank(lambda: adapters.policy.forward_backward(micro_batches, weighted_sum))

    def step(self, adapters: Trained, adam: Mapping[str, float]) -> float:
        params = AdamParams(
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
            clip_grad=adam["grad_clip_norm"] or math.inf,
        )
        return float(self._on_rank(lambda: adapters.policy.optim_step(params)).grad_norm)

    def state(self, adapters: Trained) -> tuple[tuple[int, int], dict[str, bytes]]:
        with tempfile.TemporaryDirectory() as folder:
            self._on_rank(lambda: adapters.policy.save_state(Path(folder)))
            return adapters.shape, {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def load(self, state: tuple[tuple[int, int], dict[str, bytes]], optimizer: bool) -> Trained:
        assert optimizer, "a state is loaded as a whole"
        shape, files = state
        loaded = self._on_rank(lambda: self._build(shape, "none"))
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            self._on_rank(lambda: loaded.policy.load_state(Path(folder)))
        return loaded

    def export(self, adapters: Trained) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "adapters")
            self._on_rank(lambda: adapters.policy.export_hf(path))
            return {file.name: file.read_bytes() for file in path.iterdir()}

    def _on_rank(self, verb: Callable[[], Any]) -> Any:
        """Megatron's groups, and torch's settings of a thread, belong to one thread."""
        return self._rank.submit(verb).result()

    def _build(self, shape: tuple[int, int], init: str) -> Trained:
        import torch
        from megatron.core import parallel_state

        from megatron_fleet.platform.communicator import Alone
        from megatron_fleet.weight_sync.registry import make_sender

        c, (rank, seed) = self._config, shape
        lora = c.policy.lora.model_copy(update={"rank": rank, "alpha": 32.0, "export": "adapters"})
        update = {
            "policy": c.policy.model_copy(update={"lora": lora}),
            "run": c.run.model_copy(update={"seed": seed}),
        }
        # Groups of one rank are all alike, so earlier policies go on in those of the newest.
        parallel_state.destroy_model_parallel()
        policy = self._policy(c.model_copy(update=update), init)
        sender = make_sender(TRANSPORT, policy.weight_source(), Alone(), torch.device("cpu"), None)
        return Trained(policy, sender, shape)

    def _pack(self, data: Sequence[Datum]) -> tuple[list[list[Datum]], list[int]]:
        """Micro-batches as a run makes them, and the index of each of their sequences."""
        lengths, trained = [len(datum) for datum in data], [int(datum.loss_mask.sum()) for datum in data]
        capacity = self._config.policy.micro_batch_tokens
        (plan,) = plan_micro_batches(lengths, 1, capacity, self._cost(lengths, trained))
        return [[data[index] for index in members] for members in plan], [i for members in plan for i in members]

    # Sampling

    def weights(self, adapters: Trained | None) -> Path:
        if adapters is None:
            # New adapters change nothing.
            self._base = self._base or self.weights(self.make(1, 0))
            return self._base
        self._versions += 1
        folder = self._folder / f"weights-{self._versions}"
        self._on_rank(lambda: adapters.sender.send(self._versions, {"path": str(folder)}, None))
        return folder

    def sample(
        self, weights: Path, prompt: list[int], wanted: Mapping[str, Any], seed: int
    ) -> tuple[list[int], list[float], str]:
        stop = self._ends if wanted.get("stop") is None else wanted["stop"]
        params = SamplingParams(wanted["temperature"], wanted["max_tokens"], tuple(stop), seed)
        # Another session each time: what one has in the cache depends on the order of requests.
        session = secrets.token_hex(8)
        found: Generation = self._with(weights, lambda: self._engine._generate(prompt, params, session, ()))
        return found.token_ids.tolist(), found.logprobs.tolist(), found.finish_reason

    def score(self, weights: Path, prompt: list[int]) -> np.ndarray:
        (values,) = self._with(weights, lambda: self._engine.score([np.array(prompt, np.int32)]))
        return np.concatenate([[np.nan], values[1:]])

    def _with(self, weights: Path, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask the engine while it has these weights; from another thread than the engine's."""
        return asyncio.run_coroutine_threadsafe(self._asked(weights, ask), self._loop).result()

    async def _asked(self, weights: Path, ask: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turns:
            await self._turns.wait_for(lambda: self._loaded == weights or not self._sampling)
            if self._loaded != weights:
                await self._engine.open_transport({})
                await self._engine.begin_update()
                await self._engine.load({"path": str(weights)})
                await self._engine.finish_update(0)
                self._loaded = weights
                self._turns.notify_all()
            self._sampling += 1
        try:
            return await ask()
        finally:
            async with self._turns:
                self._sampling -= 1
                self._turns.notify_all()


def datum_of(inputs: np.ndarray, targets: np.ndarray, slopes: np.ndarray) -> Datum:
    """Args: ``slopes``: weights of the targets' log-probs; where they are 0 nothing is computed."""
    if not np.array_equal(inputs[1:], targets[:-1]):
        raise ValueError("targets must be the inputs without the first one, and one token more")
    values = np.concatenate([[0.0], slopes]).astype(np.float32)
    return Datum(
        token_ids=np.append(inputs, targets[-1]).astype(np.int32),
        loss_mask=values != 0,
        scaled_advantages=values,
        behaviour_logprobs=np.zeros_like(values),
    )


def weighted_sum(x: Any) -> tuple[Any, dict[str, Any]]:
    return (x.scaled_advantages * x.logprobs).sum(), {}
