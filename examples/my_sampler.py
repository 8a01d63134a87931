"""A sampler of your own, for my_trainer.py: `mfleet train rollout.sampler=my_sampler:Unigram` (see README.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from my_trainer import log_softmax

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.rollout.sampler import Sampler
from megatron_fleet.weights.hf_folder import read_config


class Unigram(Sampler):
    """Draws each token from one distribution, whatever came before."""

    async def start(self) -> None:
        self._logits = self._loaded = np.zeros(read_config(self._config.model.folder)["vocab_size"])
        self._version = 0

    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        if params.temperature == 0:
            values = log_softmax(self._logits)
            ids = np.full(params.max_tokens, values.argmax())
        else:
            values = log_softmax(self._logits / params.temperature)
            turn = None if params.seed is None else [params.seed, len(prompt)]
            ids = np.random.default_rng(turn).choice(len(values), params.max_tokens, p=np.exp(values))
        ends = np.flatnonzero(np.isin(ids, params.stop_token_ids))
        ids = ids[: ends[0] + 1] if len(ends) else ids
        self._tokens += len(ids)
        return Generation(
            ids.astype(np.int32),
            values[ids].astype(np.float32),
            "stop" if len(ends) else "length",
            ((self._version, 0, len(ids)),),
        )

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        values = log_softmax(self._logits)
        return [np.where(np.arange(len(ids)) > 0, values[ids], 0).astype(np.float32) for ids in sequences]

    async def load(self, message: Mapping[str, Any]) -> None:
        self._loaded = message["logits"]

    async def finish_update(self, version: int) -> None:
        self._logits, self._version = self._loaded, version
