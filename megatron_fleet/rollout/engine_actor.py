"""Engine actor: one vLLM replica behind a socket, controlled over Ray.

Token ids are exchanged over the socket (``engine_server``); Ray transports only control: start, weight updates, scoring
and statistics. A Ray call per turn would cost more CPU than the model of a small run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fleet.agents.engine import EngineLost, Generation, SamplingParams
from megatron_fleet.cluster.launcher import write_output_to
from megatron_fleet.config.schema import Config
from megatron_fleet.models.images import PlacedImage, read_vision
from megatron_fleet.models.model import Mixer
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.platform.processes import killed_children_raise, stacks_written_after, take_normal_priority
from megatron_fleet.rollout.engine_images import ImageRequests, find_torchvision
from megatron_fleet.rollout.engine_server import EngineServer
from megatron_fleet.rollout.prefix_sharing import BLOCK, AttentionTiles, PrefixSharing
from megatron_fleet.weight_sync.registry import engine_backend
from megatron_fleet.weight_sync.vllm_plugin import DIE_WITH_PARENT, MIXER, TRANSPORT

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmParams
    from vllm.inputs.engine import EngineInput

CPU_ENV = {
    # Runs the worker inside the EngineCore process: saves one process, 7 s and 0.4 GB.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The sampler would otherwise be compiled at the first request, which takes seconds and needs a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    # OpenMP threads spin while idle and starve a trainer on the same cores.
    "OMP_NUM_THREADS": "1",
    # Otherwise vLLM pins its threads to cores, and two replicas to the same one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Keeps freed weight-sized blocks in the heap, so that an update does not fault every page again.
    "MALLOC_MMAP_THRESHOLD_": str(2 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}
COMMON_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    DIE_WITH_PARENT: "1",
}
CUDA_ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""CUDA IPC handles contain class objects that vLLM's safe serialiser rejects; they never leave this host."""

CPU_ATTENTION = {"backend_per_kind": {"mla_attention": "CPU_MLA"}}
"""vLLM 0.32 selects AMX_MLA on CPUs with AMX, which does not support float32. A fixed backend also makes results
independent of the CPU."""
CPU_LATENT = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""vLLM 0.32's rotary operator on CPU mishandles the three-dimensional queries of latent attention. Models with YaRN
never call it."""
CPU_KV_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS = 4096
"""Tokens of one scheduling step; a context longer than this raises the limit."""
WATCH_INTERVAL_S = 0.25
STACKS_AFTER = 0.9
"""Fraction of a deadline after which the stacks of the engine's processes are written to its log."""
IMAGE_ATTEMPTS = 2
"""vLLM's two image caches may differ, for example after a weight update. The first request affected fails with finish
reason ``error``, which repairs the caches for the next one (``MultiModalCacheMissError`` in vLLM 0.32)."""


def environment(cuda: bool) -> dict[str, str]:
    """Return the environment variables that an engine process needs before it starts."""
    return COMMON_ENV | (CUDA_ENV if cuda else CPU_ENV)


class EngineActor:
    """One engine replica. Only its `EngineSlot` calls its methods."""

    def __init__(self, config: Config, token: str, log: Path, transport: str, secrets: Mapping[str, str] | None = None):
        """Args: ``transport``: name of the weight transport. ``secrets``: environment variables that it reads."""
        write_output_to(log)
        take_normal_priority()
        os.environ.update(secrets or {})
        os.environ[TRANSPORT] = transport
        self._config, self._transport = config, transport
        self._server = EngineServer(self._generate, token)
        self._llm: Any = None
        self._sharing: PrefixSharing | None = None
        self._vision = read_vision(config.model.path)
        self._images: ImageRequests | None = None
        self._numbers = itertools.count()
        self._unusable: str | None = None
        self._asleep = False
        self._tokens = 0

    async def listen(self, host: str) -> str:
        """Bind the socket and return its address; requests wait until ``serve``."""
        return await self._server.listen(host)

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
        mixer = family_mixer(Path(self._config.model.path))
        if mixer is not None:
            os.environ[MIXER] = mixer.engine
        if mixer is not None or self._vision is not None:
            find_torchvision()
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(self._engine_args())
        cached = self._llm.vllm_config.cache_config.enable_prefix_caching
        if cached and current_platform.is_cpu() and self._config.run.deterministic:
            self._sharing = PrefixSharing(AttentionTiles.of(self._llm.model_config))
        if self._vision is not None:
            self._images = ImageRequests(self._llm.renderer, self._vision)

    async def serve(self) -> None:
        """Begin to answer requests, with the current weights."""
        self._server.open()

    def _engine_args(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        engine, cpu = self._config.rollout.engine, current_platform.is_cpu()
        device: dict[str, Any] = {"gpu_memory_utilization": engine.gpu_memory_utilization}
        context = _longest_sequence(Path(self._config.model.path), self._config.rollout.max_context)
        if cpu:
            device = _cpu_args(context) | cpu_model_args(Path(self._config.model.path))
        kv_cache = engine.kv_cache_bytes or (CPU_KV_CACHE_BYTES if cpu else None)
        return AsyncEngineArgs(
            **({"enforce_eager": engine.enforce_eager, "enable_prefix_caching": True} | device),
            model=self._config.model.path,
            dtype=self._config.model.dtype,
            seed=self._config.run.seed,
            # vLLM's image processors need a tokenizer to be constructed, although they get no text.
            skip_tokenizer_init=self._vision is None,
            language_model_only=self._vision is None,
            limit_mm_per_prompt={} if self._vision is None else {"video": 0},
            generation_config="vllm",
            max_model_len=context,
            max_num_seqs=engine.max_num_seqs,
            tensor_parallel_size=engine.tensor_parallel,
            kv_cache_memory_bytes=kv_cache,
            logprobs_mode="processed_logprobs",
            enable_return_routed_experts=engine.routing_replay,
            weight_transfer_config={"backend": engine_backend(self._transport)},
            enable_sleep_mode=bool(engine.colocated) and current_platform.is_sleep_mode_available(),
            disable_log_stats=True,
        )

    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        salt = self._sharing.salt(session, len(prompt)) if self._sharing is not None else None
        name, limit = str(next(self._numbers)), self._config.rollout.engine.request_timeout_s
        with _TurnDeadline(self._llm, name, limit) as deadline:
            output = await self._sampled(name, prompt, images, _vllm_params(params, len(prompt)), salt)
        completion = output.outputs[0]
        if deadline.passed and not completion.token_ids:
            raise EngineLost(f"the engine sampled no token within {limit:g} s (rollout.engine.request_timeout_s)")
        self._tokens += len(completion.token_ids)
        return Generation(
            np.asarray(completion.token_ids, np.int32),
            np.asarray(completion.logprobs.logprobs, np.float32),
            "deadline" if deadline.passed and completion.finish_reason == "abort" else completion.finish_reason,
            tuple((int(span.version), span.start, span.end) for span in completion.weight_versions),
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
            raise ValueError(f"model.path={self._config.model.path} sees no images, or its vision is not supported")
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
        try:
            async for output in self._llm.generate(request, params, name):
                last = output
            return last
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        except VLLMServerError as error:
            raise EngineLost(f"the engine failed: {error.__cause__ or error}") from error

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the log-probs of given tokens under the current weights at temperature 1.

        Args:
            sequences: int32 ``[T]`` each.

        Returns:
            float32 ``[T]`` each; entry t is log π(token t | tokens before it), entry 0 is 0.

        Raises:
            ValueError: a sequence contains image placeholders.
        """
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
        """Initialise the engine's side of the transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._updating():
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(init_info)))

    async def begin_update(self) -> None:
        """Stop scheduling and drop all caches of the old weights. Parameters are invalid until ``finish_update``."""
        async with self._updating():
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            if self._sharing is not None:
                self._sharing.forget()
            await self._llm.start_weight_update()

    async def load(self, message: Mapping[str, Any]) -> None:
        """Load the tensors of one update message."""
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
        """Release the device: weights and KV cache are lost, requests wait until both are awake.

        Returns:
            Reason why no memory was freed, if the platform cannot free it; everything else behaves the same then.
        """
        from vllm.platforms import current_platform

        async with self._updating("its falling asleep"):
            self._asleep = True
            await self._llm.sleep(level=2)
        if current_platform.is_sleep_mode_available():
            return None
        return f"vLLM frees no memory on platform {current_platform.device_name!r}"

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory for ``part``: first the weights, which then need an update, then the KV cache, to resume."""
        async with self._updating("its waking up"):
            if await self._llm.wake_up([part]):
                self._asleep = False

    async def _check_paused(self) -> None:
        """Refuse to load weights while scheduling: a request with uninitialised parameters would crash the engine."""
        if not await self._llm.is_paused():
            raise RuntimeError("a weight update without begin_update")

    @contextlib.asynccontextmanager
    async def _updating(self, what: str = "its weight update") -> AsyncIterator[None]:
        """Mark the engine as unusable, to be replaced, if the block fails: its model may be partly updated."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        limit = self._config.rollout.engine.update_timeout_s
        try:
            with stacks_written_after(STACKS_AFTER * limit):
                async with asyncio.timeout(limit):
                    yield
        except BaseException as error:
            self._unusable = f"{what} failed: {type(error).__name__}: {error}"
            raise RuntimeError(self._unusable) from error

    async def usable(self) -> bool:
        return self._unusable is None and not self._llm.errored

    async def watch(self) -> str:
        """Wait until the engine can no longer serve; returns the reason."""
        while await self.usable():
            await asyncio.sleep(WATCH_INTERVAL_S)
        return self._unusable or "the engine's core process died"

    async def sampled_tokens(self) -> int:
        """Return the number of tokens sampled since the start."""
        return self._tokens

    async def processes(self) -> list[int]:
        """Return the pids of this actor and all its child processes."""
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    async def shutdown(self) -> None:
        self._server.close()
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


def _cpu_args(context: int) -> dict[str, Any]:
    """Return vLLM's arguments on CPU. Chunked prefill is off: after a prompt chunk of a seeded request, vLLM 0.32 on
    CPU cannot rewind the request's generator (``gpu_model_runner._bookkeeping_sync``) and crashes."""
    return {
        "block_size": BLOCK,  # the smallest size on CPU, for the finest prefix cache
        "enforce_eager": True,
        "attention_config": CPU_ATTENTION,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, CPU_STEP_TOKENS),
    }


def cpu_model_args(model: Path) -> dict[str, Any]:
    """Return the vLLM arguments that ``model`` needs for correct results on CPU."""
    latent, mixer = _text_config(model).get("kv_lora_rank") is not None, family_mixer(model)
    return (CPU_LATENT if latent else {}) | ({} if mixer is None else mixer.cpu_engine)


def family_mixer(model: Path) -> type[Mixer] | None:
    """Return the layer that the model's family has in the place of attention; ``None`` for attention alone."""
    family = ARCHITECTURES.get(_config(model).get("model_type", ""))
    return None if family is None else family.mixer


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _text_config(model: Path) -> dict[str, Any]:
    config = _config(model)
    text: dict[str, Any] = config.get("text_config", config)
    return text


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


def _longest_sequence(model: Path, max_context: int) -> int:
    """Return one token more than an episode's maximum, so that a full episode can be scored (scoring generates a
    token), capped at the model's max_position_embeddings."""
    limit = _text_config(model).get("max_position_embeddings")
    return min(max_context + 1, limit) if limit and limit >= max_context else max_context + 1
