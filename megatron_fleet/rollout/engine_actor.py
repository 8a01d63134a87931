"""The sampler ``vllm``: one vLLM replica as an engine actor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fleet.agents.token_engine import EngineLost, Generation, SamplingParams
from megatron_fleet.config.schema import Config
from megatron_fleet.models.images import PlacedImage, read_vision
from megatron_fleet.platform.processes import (
    children_import_uncollected,
    imports_uncollected,
    killed_children_raise,
    stacks_written_after,
)
from megatron_fleet.rollout.engine_arguments import engine_args, family_mixer
from megatron_fleet.rollout.engine_images import ImageRequests, find_torchvision
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.prefix_sharing import AttentionTiles, PrefixSharing
from megatron_fleet.rollout.sampler import STACKS_AFTER, Sampler
from megatron_fleet.weight_sync.engine_model import FP8_FORMAT, FP8_LOADER
from megatron_fleet.weight_sync.vllm_plugin import LOADER, MIXER, TRANSPORT

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmParams
    from vllm.inputs.engine import EngineInput

    from megatron_fleet.rollout.engine_logger import StatisticsLogger

HEALTH_INTERVAL_S = 10.0
"""Seconds between two questions to the core process whether it works."""
IMAGE_ATTEMPTS = 2
"""vLLM's two image caches may differ, for example after a weight update. The first request affected fails with finish
reason ``error``, which repairs the caches for the next one (``MultiModalCacheMissError`` in vLLM 0.32)."""


_ERROR = re.compile(r"^\(.* ERROR .*\] ((?!\S*EngineDeadError)[\w.]*(?:Error|Exception|Interrupt): .+)$", re.MULTILINE)
"""The last line of a traceback in vLLM's log; an EngineDeadError only says that there was another one."""
_TAIL_BYTES, _LONGEST_ERROR = 1 << 18, 500


class EngineActor(Sampler):
    """`Sampler` of vLLM."""

    def __init__(self, config: Config, token: str, log: Path, transport: str, secrets: Mapping[str, str] | None = None):
        super().__init__(config, token, log, transport, secrets)
        os.environ[TRANSPORT] = transport
        self._llm: Any = None
        self._sharing: PrefixSharing | None = None
        self._vision = read_vision(config.model.folder)
        self._images: ImageRequests | None = None
        self._numbers = itertools.count()
        self._statistics: StatisticsLogger | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asleep = False
        self._interruptions = 0
        self._leaving = False
        self._awake = asyncio.Event()
        self._awake.set()

    async def start(self) -> None:
        """Load the model (seconds to minutes). Blocks only this actor.

        Raises:
            ChildKilled: the engine's core process was killed meanwhile.
        """
        limit = self._config.rollout.engine.start_timeout_s
        with killed_children_raise(), stacks_written_after(STACKS_AFTER * limit):
            self._start()
        await self._llm.update_weight_version("0")

    def _start(self) -> None:
        mixer = family_mixer(Path(self._config.model.folder))
        if mixer is not None:
            os.environ[MIXER] = mixer.engine
        if mixer is not None or self._vision is not None:
            find_torchvision()
        with imports_uncollected():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from megatron_fleet.rollout.engine_logger import StatisticsLogger

        platform = {"cpu": current_platform.is_cpu(), "can_sleep": current_platform.is_sleep_mode_available()}
        arguments = self._arguments(**platform)
        if arguments["load_format"] == FP8_FORMAT:
            os.environ[LOADER] = FP8_LOADER
        with children_import_uncollected():
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments),
                usage_context=UsageContext.LLM_CLASS,  # of its defaults, vLLM then takes those for throughput
                stat_loggers=[StatisticsLogger],
            )
        loggers = self._llm.logger_manager.stat_loggers
        (self._statistics,) = (logger for logger in loggers if isinstance(logger, StatisticsLogger))
        cached = self._llm.vllm_config.cache_config.enable_prefix_caching
        if cached and current_platform.is_cpu() and self._config.run.deterministic:
            self._sharing = PrefixSharing(AttentionTiles.of(self._llm.model_config))
        if self._vision is not None:
            self._images = ImageRequests(self._llm.renderer, self._vision)

    def _arguments(self, *, cpu: bool, can_sleep: bool) -> dict[str, Any]:
        """Return vLLM's arguments; see `engine_args`."""
        return engine_args(self._config, self._transport, cpu=cpu, can_sleep=can_sleep)

    async def serve(self) -> None:
        await super().serve()
        if self._asking is None:
            self._asking = asyncio.create_task(self._watch_core())

    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        if self._leaving:
            return Generation(np.empty(0, np.int32), np.empty(0, np.float32), "interrupted", ())
        await self._awake.wait()  # before the deadline begins, and before a prefix of older weights could be named
        interruptions = self._interruptions
        salt = self._sharing.salt(session, len(prompt)) if self._sharing is not None else None
        name, limit = str(next(self._numbers)), self._config.rollout.engine.turn_timeout_s(params.max_tokens)
        with _TurnDeadline(self._llm, name, limit) as deadline:
            output = await self._sampled(name, prompt, images, _vllm_params(params, len(prompt)), salt)
        completion = output.outputs[0]
        self._tokens += len(completion.token_ids)
        reason = completion.finish_reason
        if reason == "abort":
            if self._interruptions != interruptions:
                reason = "interrupted"
            elif deadline.passed:
                reason = "deadline"
        return Generation(
            np.asarray(completion.token_ids, np.int32),
            np.asarray(completion.logprobs.logprobs if completion.token_ids else (), np.float32),
            reason,
            tuple((int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
            None if params.routing_start is None else _routing(completion.routed_experts),
        )

    async def _sampled(
        self, name: str, prompt: list[int], images: Sequence[PlacedImage], params: VllmParams, salt: str | None
    ) -> RequestOutput:
        """Run a request with its images, see ``_run``; an ``error`` finish is retried up to ``IMAGE_ATTEMPTS``."""
        from vllm.inputs.engine import tokens_input

        if not images:
            return await self._run(name, tokens_input(prompt, cache_salt=salt), params)
        if self._images is None:
            raise ValueError(
                f"model.path={self._config.model.path} is a model without vision, or its vision is not supported"
            )
        for _ in range(IMAGE_ATTEMPTS):
            output = await self._run(name, await self._images.make(prompt, images, salt), params)
            if output.outputs[0].finish_reason != "error":
                return output
        raise EngineLost(f"the engine failed {IMAGE_ATTEMPTS} times to hold the images of a prompt")

    async def _run(self, name: str, request: EngineInput, params: VllmParams) -> RequestOutput:
        """Run one request to its end.

        Raises:
            EngineLost: the engine is gone.
            ValueError: it refuses the request.
        """
        from vllm.exceptions import VLLMClientError, VLLMServerError

        if self._unusable is not None:
            raise EngineLost(self._unusable)
        if self._statistics is not None:
            self._statistics.begin()
        try:
            async for output in self._llm.generate(request, params, name):
                last = output
            return last
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        except VLLMServerError as error:
            raise EngineLost(f"the engine failed: {error.__cause__ or error}") from error

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        from vllm import SamplingParams as VllmParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if self._vision is not None and any((ids == self._vision.placeholder_id).any() for ids in sequences):
            raise ValueError("sequences with images cannot be scored")

        params = VllmParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        requests = [(str(next(self._numbers)), tokens_input(ids.tolist())) for ids in sequences]
        outputs = await asyncio.gather(*(self._run(name, request, params) for name, request in requests))
        return [_prompt_logprobs(output) for output in outputs]

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._updating():
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(init_info)))

    async def begin_update(self) -> None:
        """Stop scheduling and drop all caches of the old weights. Parameters are invalid until ``finish_update``."""
        async with self._updating():
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            if self._statistics is not None:
                self._statistics.pause()
            if self._sharing is not None:
                self._sharing.forget()
            await self._llm.start_weight_update()

    async def load(self, message: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._updating():
            await self._check_paused()
            await self._llm.update_weights(WeightTransferUpdateRequest(dict(message)))

    async def finish_update(self, version: int) -> None:
        """Complete the update, stamp all tokens sampled from now on with ``version``, and resume unless asleep."""
        async with self._updating():
            await self._check_paused()
            await self._llm.finish_weight_update(str(version))
            if not self._asleep:
                await self._llm.resume_generation()

    async def sleep(self) -> str | None:
        """Release the device: weights and KV cache are lost. Requests in flight are answered with the tokens sampled so
        far, as ``interrupted``; new ones wait until both are awake.

        Returns:
            Reason why no memory was freed, if the platform cannot free it; everything else behaves the same then.
        """
        from vllm.platforms import current_platform

        async with self._updating("its falling asleep"):
            self._asleep = True
            self._interruptions += 1
            self._awake.clear()
            self._server.tell(asleep=True)
            await self._llm.sleep(level=2, mode="abort")
        if current_platform.is_sleep_mode_available():
            return None
        return f"vLLM frees no memory on platform {current_platform.device_name!r}"

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory for ``part``: first the weights, which then need an update, then the KV cache, to resume."""
        async with self._updating("its waking up"):
            if await self._llm.wake_up([part]):
                self._asleep = False
                self._awake.set()
                self._server.tell(asleep=False)

    async def interrupt(self) -> None:
        self._interruptions += 1
        self._leaving = True
        await self._llm.pause_generation(mode="abort", clear_cache=False)
        await super().interrupt()

    async def _check_paused(self) -> None:
        """Refuse to load weights while scheduling: a request with uninitialised parameters would crash the engine."""
        if not await self._llm.is_paused():
            raise RuntimeError("a weight update without begin_update")

    async def usable(self) -> bool:
        return await super().usable() and not self._llm.errored

    def _why_unusable(self) -> str:
        return super()._why_unusable() or f"the engine's core process died{_last_error(self._log)}"

    async def _watch_core(self) -> None:
        while self._unusable is None:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._ask_core()

    async def _ask_core(self) -> None:
        """Ask the core process whether it works; mark the engine as unusable if it does not answer in time.

        A core that is busy with an update is not expected to answer: the update has a deadline of its own.
        """
        if self._changing:
            return
        limit, changes = self._config.rollout.engine.health_timeout_s, self._changes
        asking = asyncio.ensure_future(self._llm.is_paused())
        with stacks_written_after(STACKS_AFTER * limit):
            await asyncio.wait({asking}, timeout=limit)
        if asking.done():
            asking.exception()  # vLLM marks itself as failed when its core is dead, see `usable`
        elif changes == self._changes:
            self._unusable = f"its core process did not answer within {limit:g} s (rollout.engine.health_timeout_s)"

    async def read_statistics(self) -> EngineStatistics:
        return EngineStatistics() if self._statistics is None else self._statistics.read()

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._asking is not None:
            self._asking.cancel()
        if self._llm is not None:
            self._llm.shutdown(timeout=0)


class _TurnDeadline:
    """Abort a turn at its deadline; vLLM then answers it with the tokens sampled so far."""

    def __init__(self, llm: Any, name: str, seconds: float) -> None:
        self._llm, self._name, self._seconds = llm, name, seconds
        self._abort: asyncio.Task[None] | None = None

    @property
    def passed(self) -> bool:
        return self._abort is not None

    def __enter__(self) -> _TurnDeadline:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self._abort = asyncio.ensure_future(self._llm.abort(self._name))


def _last_error(log: Path) -> str:
    """Return ``: `` and the last error of vLLM's processes in an engine's log, in a line; empty where there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        found = _ERROR.findall(file.read().decode(errors="replace"))
        if found:
            return f": {found[-1][:_LONGEST_ERROR]}"
    return ""


def _routing(experts: np.ndarray | None) -> np.ndarray | None:
    """Convert vLLM's uint8 or uint16 ``[R, layers, k]`` to the dtypes of ``Generation.routing``."""
    return experts if experts is None or experts.dtype == np.uint8 else experts.astype(np.int16)


def _vllm_params(params: SamplingParams, prompt_tokens: int) -> VllmParams:
    """Convert sampling parameters. ``ignore_eos``: only the request's stop tokens end a turn, not the model's own."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        seed=params.seed,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=prompt_tokens if params.routing_start is None else params.routing_start,
    )


def _prompt_logprobs(output: RequestOutput) -> np.ndarray:
    scores = np.zeros(len(output.prompt_token_ids), np.float32)
    for t, token in enumerate(output.prompt_token_ids[1:], start=1):
        scores[t] = output.prompt_logprobs[t][token].logprob
    return scores
