"""Sampler of a hosted service: an engine actor that passes requests on. Each weight version is a sampler there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types

from megatron_fleet.agents.token_engine import EngineLost, Generation, SamplingParams
from megatron_fleet.config.errors import UserError
from megatron_fleet.hosted.service import ServiceLost, service_errors
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.sampler import Sampler


class HostedSampler(Sampler):
    """Requests begun before an update end with the weights with which they began."""

    async def start(self) -> None:
        self._loaded: tinker.SamplingClient | None = None
        self._current: tuple[int, tinker.SamplingClient] | None = None
        self._counted = EngineStatistics()

    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        if images:
            raise ValueError("policy.trainer=hosted: images are not sent to the service yet")
        if self._current is None:
            raise EngineLost("the service has no weights yet")
        version, client = self._current
        wanted = types.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            # An empty list would switch off the end of the model's turn as well.
            stop=list(params.stop_token_ids) or None,
            temperature=params.temperature,
        )
        try:
            with service_errors("Sampling"):
                answer = await client.sample(types.ModelInput.from_ints(prompt), 1, wanted)
                (sequence,) = answer.sequences
                ids = np.array(sequence.tokens, np.int32)
                logprobs = np.array([] if sequence.logprobs is None else sequence.logprobs, np.float32)
                if not len(ids) or len(logprobs) != len(ids):
                    raise ServiceLost(f"the service returned {len(ids)} tokens with {len(logprobs)} log-probs")
        except ServiceLost as error:
            if isinstance(error.__cause__, tinker.NotFoundError):
                # The session is gone. A new actor asks the trainer for weights, which notices that.
                self._unusable = str(error)
            raise EngineLost(str(error)) from error
        except UserError as error:
            raise ValueError(str(error)) from error
        self._tokens += len(ids)
        hits = answer.prompt_cache_hit_tokens or 0
        self._counted += EngineStatistics(
            prompt_tokens=len(prompt) - hits,
            generated_tokens=len(ids),
            cache_queries=len(prompt),
            cache_hits=hits,
        )
        return Generation(ids, logprobs, str(sequence.stop_reason), ((version, 0, len(ids)),))

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        assert self._current is not None, "weights come first"
        _, client = self._current
        prompts = [types.ModelInput.from_ints(ids.tolist()) for ids in sequences]
        with service_errors("Scoring"):
            scores = await asyncio.gather(*(client.compute_logprobs(prompt).coroutine() for prompt in prompts))
        self._counted += EngineStatistics(prompt_tokens=sum(len(ids) for ids in sequences))
        return [np.array([0.0 if value is None else value for value in score], np.float32) for score in scores]

    async def load(self, message: Mapping[str, Any]) -> None:
        # The constructor waits for the service.
        self._loaded = await asyncio.to_thread(tinker.SamplingClient.from_sampler_handle, message["sampler"])

    async def finish_update(self, version: int) -> None:
        assert self._loaded is not None, "load() comes first"
        self._current = version, self._loaded

    async def read_statistics(self) -> EngineStatistics:
        counted, self._counted = self._counted, EngineStatistics()
        return counted
