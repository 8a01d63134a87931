"""`trainer.base.Trainer` at a hosted service.

The service runs the requests of a session in the order in which they were submitted, in clock cycles of some seconds.
So an update is submitted as a whole, gradients, step and the weights to sample from, before any answer is awaited.
Losses that need the policy's log-probs first take one cycle more (`hosted.losses`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tinker
from tinker import types

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.explicit_losses import Loss, TrainedTokens
from megatron_fleet.cluster.restarts import OutOfRestarts, Restarts
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import AlgorithmConfig, Config
from megatron_fleet.hosted.address import address
from megatron_fleet.hosted.data import logprobs_of, to_service, untrained, weighted
from megatron_fleet.hosted.export import export_adapters
from megatron_fleet.hosted.losses import loss_of, trained_weights
from megatron_fleet.hosted.passes import CROSS_ENTROPY, OnePass, one_pass
from megatron_fleet.hosted.prices import Tokens, prices_of_run
from megatron_fleet.hosted.service import ServedModel, ServiceLost, service_errors
from megatron_fleet.hosted.spending import SPENT, Spending
from megatron_fleet.hosted.states import STATE, States
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import fingerprint, write_atomically
from megatron_fleet.trainer.base import AdamParams, LossReport, LossSpec, OptimReport, TrainerInfo, TrainerLost
from megatron_fleet.trainer.registry import RankHosts
from megatron_fleet.weight_sync.base import Deliver
from megatron_fleet.weights.hf_folder import read_config

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""Seconds to end a session; the package itself would try for five minutes."""


class HostedTrainer:
    """Adapters of one model at the service, trained with AdamW.

    When a session fails, a new one is opened and the run resumes from its newest checkpoint, as it does when ranks are
    lost.
    """

    ranks = None

    def __init__(self, config: Config) -> None:
        self._config, self._hosted = config, config.hosted
        base_model = self._hosted.model(config.model.path)
        assert base_model is not None, "the configuration's rules see to it"
        self._base_model, self._run = base_model, config.run.id or "run"
        where = "The same command resumes from the newest checkpoint."
        self._restarts = Restarts("the session at the service", where, config.cluster.max_restarts)
        self._states = States(Path(config.run.out), config.checkpoint.store, self._delete)
        self._order = asyncio.Lock()
        self._lost: asyncio.Future[TrainerLost] = asyncio.get_running_loop().create_future()
        self._info: TrainerInfo | None = None
        self._spending: Spending | None = None
        self._service: tinker.ServiceClient | None = None
        self._client: tinker.TrainingClient | None = None
        self._reference: tinker.SamplingClient | None = None
        self._sampler: Awaitable[tinker.SamplingClient] | None = None
        self._samplers: list[tinker.SamplingClient] = []
        self._updates = 0
        self._skip = False

    # Life

    @property
    def info(self) -> TrainerInfo:
        assert self._info is not None, "start() comes first"
        return self._info

    @property
    def spending(self) -> Spending:
        assert self._spending is not None, "start() comes first"
        return self._spending

    async def start(self, reason: TrainerLost | None) -> None:
        """See `Trainer.start`."""
        if self._spending is None:
            prices = await asyncio.to_thread(prices_of_run, self._hosted, self._base_model)
            self._spending = Spending(Path(self._config.run.out) / SPENT, prices, self._hosted.budget_usd)
        while True:
            try:
                if reason is not None:
                    await self._close("errored")
                    await self._restarts.pause(str(reason))
                    self._lost = asyncio.get_running_loop().create_future()
                await self._open()
            except OutOfRestarts as error:
                raise UserError(str(error)) from None
            except ServiceLost as error:
                reason = TrainerLost(str(error))
                continue
            if reason is not None:
                self._restarts.done()
            return

    async def _open(self) -> None:
        with service_errors("Opening a session"):
            rest = await self._rest()
            models = (await rest.get_server_capabilities()).supported_models
            run = self._config.run
            about = {"run": self._run, "name": run.name}
            self._service = service = tinker.ServiceClient(about, display_name=run.name, base_url=address(self._hosted))
            await asyncio.to_thread(lambda: service.holder)  # which waits for the service
        ServedModel(self._base_model, self._config.rollout.max_context).check(models)
        vocab_size = read_config(self._config.model.folder)["vocab_size"]
        self._info = TrainerInfo(vocab_size, self._config.policy.micro_batch_tokens)
        self._client = self._reference = self._sampler = None
        self._samplers, self._updates, self._skip = [], 0, False

    async def close(self) -> None:
        """End the session, and delete states that no checkpoint refers to, as far as the service does both in time."""
        with suppress(ServiceLost, UserError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._states.clear()
        await self._close("success")

    async def _close(self, status: Literal["success", "errored"]) -> None:
        service, self._service = self._service, None
        if service is not None:
            with suppress(ServiceLost, UserError), service_errors("Ending the session"):
                async with asyncio.timeout(CLOSE_S):
                    await service.close(status)

    async def lost(self) -> TrainerLost:
        return await asyncio.shield(self._lost)

    @asynccontextmanager
    async def _verb(self, what: str) -> AsyncIterator[None]:
        """Errors of a verb, see `service_errors`; a lost service is a lost trainer, for all later verbs, too."""
        if self._lost.done():
            raise TrainerLost(str(self._lost.result()))
        try:
            async with asyncio.timeout(self._hosted.answer_timeout_s):
                with service_errors(what):
                    yield
        except (ServiceLost, TrainerLost, TimeoutError) as error:
            late = f"{what}: no answer in {self._hosted.answer_timeout_s:g} s (hosted.answer_timeout_s)"
            lost = TrainerLost(late if isinstance(error, TimeoutError) else str(error))
            if not self._lost.done():
                self._lost.set_result(lost)
            raise lost from error

    async def _rest(self) -> tinker.RestClient:
        # The constructor waits for the service.
        return await asyncio.to_thread(lambda: tinker.RestClient(base_url=address(self._hosted)))

    async def _training(self) -> tinker.TrainingClient:
        """The client of the adapters, which are made when they are needed first: after `load_state`, they exist."""
        if self._client is None:
            assert self._service is not None, "start() comes first"
            lora = self._config.policy.lora
            self._client = await self._service.create_lora_training_client(
                self._base_model,
                rank=lora.rank,
                seed=self._config.run.seed,
                train_mlp="mlp" in lora.targets or "experts" in lora.targets,
                train_attn="attention" in lora.targets,
                train_unembed=False,
            )
        return self._client

    # Training

    async def forward(
        self,
        data: Sequence[Datum],
        which: Literal["current", "reference"] = "current",
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        """See `Trainer.forward`; the temperature is 1."""
        if not data:
            return []
        if which == "reference":
            assert self._reference is not None, "keep_reference() comes first"
            async with self._verb("Scoring by the reference policy"):
                found = await reference_logprobs(self._reference, data)
                self.spending.add(Tokens(prefill_uncached=tokens_in(data)))
                return found
        async with self._verb("A forward pass"):
            async with self._order:
                future = (await self._training()).forward(untrained(data), CROSS_ENTROPY)
            return self._logprobs(data, await future)

    def _logprobs(self, data: Sequence[Datum], output: types.ForwardBackwardOutput) -> list[np.ndarray]:
        """Return the log-probs of a pass, and count its tokens."""
        self.spending.add(Tokens(trained=tokens_in(data)))
        return logprobs_of(data, output.loss_fn_outputs)

    async def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> LossReport:
        """See `Trainer.forward_backward`."""
        algo = AlgorithmConfig.model_validate(dict(loss.settings))
        several_updates = any("proximal" in datum.arrays for datum in data)
        request = one_pass(algo, several_updates, self._hosted.losses == "service")
        if request is None:
            return await self._in_two_passes(algo, data)
        async with self._verb("Computing gradients"):
            async with self._order:
                future = submit(await self._training(), request, data)
            output = await future
            logprobs = self._logprobs(data, output)
        found = loss_of(algo, tokens_of(request, data, logprobs))
        async with self._verb("Computing gradients"):
            if not (is_finite(found) and math.isfinite(output.metrics["loss:sum"])):
                # The step behind it is submitted: whether the service takes a step that is not finite is not known.
                raise ServiceLost("the loss of an update is not finite")
        return report(found, data)

    async def _in_two_passes(self, algo: AlgorithmConfig, data: Sequence[Datum]) -> LossReport:
        async with self._order:  # no request of another verb comes between them
            async with self._verb("Computing log-probs"):
                logprobs = self._logprobs(data, await (await self._training()).forward(untrained(data), CROSS_ENTROPY))
            found = loss_of(algo, TrainedTokens.of(data, logprobs))
            if not is_finite(found):
                self._skip = True
                return report(found, data)
            async with self._verb("Computing gradients"):
                future = (await self._training()).forward_backward(weighted(data, -found.gradient), CROSS_ENTROPY)
        async with self._verb("Computing gradients"):
            self._logprobs(data, await future)
        return report(found, data)

    async def optim_step(self, adam: AdamParams) -> OptimReport:
        """See `Trainer.optim_step`. After the last update of a batch, also request a sampler of the new weights."""
        async with self._verb("An optimizer step"):
            async with self._order:
                if self._skip:
                    self._skip = False
                    return OptimReport(math.nan, adam.lr, skipped=True)
                client = await self._training()
                step = client.optim_step(
                    types.AdamParams(
                        learning_rate=adam.lr,
                        beta1=adam.betas[0],
                        beta2=adam.betas[1],
                        eps=adam.eps,
                        weight_decay=adam.weight_decay,
                        grad_clip_norm=adam.clip_grad if math.isfinite(adam.clip_grad) else 0.0,
                    )
                )
                self._updates += 1
                last_of_batch = self._updates % self._config.policy.updates_per_batch == 0
                self._sampler = client.save_weights_and_get_sampling_client() if last_of_batch else None
            metrics = (await step).metrics or {}
            norm = metrics.get("grad_norm", metrics.get("grad_norm:mean"))
            return OptimReport(norm, adam.lr, skipped=norm is not None and not math.isfinite(norm))

    async def discard_gradients(self) -> None:
        """Never needed: gradients and step are submitted together."""

    async def keep_reference(self) -> None:
        """See `Trainer.keep_reference`. Adapters change nothing before the first update, so it is the base model."""
        async with self._verb("Keeping the reference policy"):
            assert self._service is not None and self._client is None, "it comes before everything else"
            self._reference = await self._service.create_sampling_client(base_model=self._base_model)

    # State

    async def save_state(self, path: Path) -> Files:
        """Save weights and optimizer at the service, and their address in ``path``."""
        # A name of its own for each attempt: the service refuses, or keeps waiting for, one that exists.
        name = f"{self._run}-{path.name.strip('.').partition('.')[0]}-{secrets.token_hex(4)}"
        async with self._verb("Saving the state"):
            client = await self._training()
        # Before it exists, so that one whose answer never comes is not forgotten.
        self._states.add(f"tinker://{client.model_id}/weights/{name}")
        async with self._verb("Saving the state"):
            async with self._order:
                saving = client.save_state(name)
            saved = (await saving).path
        self._states.add(saved)
        state = {
            "path": saved,
            "base_model": self._base_model,
            "rank": self._config.policy.lora.rank,
            # For resuming on a machine that has only the checkpoint.
            "saved": self._states.saved(),
            "tokens": asdict(self.spending.tokens),
        }
        write_atomically(path / STATE, json.dumps(state, indent=1).encode())
        with suppress(ServiceLost, UserError):
            await self._states.clear()
        return {STATE: fingerprint(path / STATE, flush=True)}

    async def load_state(self, path: Path) -> None:
        """See `Trainer.load_state`; on any machine with a key of the same project.

        Raises:
            UserError: the state is another model's, or the service has deleted it.
        """
        state = read_object(path / STATE, "use another checkpoint")
        expected = {"base_model": self._base_model, "rank": self._config.policy.lora.rank}
        for name, key in (("base_model", "hosted.base_model"), ("rank", "policy.lora.rank")):
            if state.get(name) != expected[name]:
                raise UserError(
                    f"{path}: was saved with {key}={state.get(name)}, not {expected[name]}; set it to that."
                )
        async with self._verb(f"Loading {state['path']}"):
            assert self._service is not None, "start() comes first"
            try:
                self._client = await self._service.create_training_client_from_state_with_optimizer(state["path"])
            except tinker.NotFoundError as error:
                raise UserError(
                    f"{path}: the service has no state {state['path']} any more; resume from another checkpoint."
                ) from error
        self._sampler = None
        self._states.add(*state.get("saved", []), state["path"], *await self._saved_by(state["path"]))
        self.spending.at_least(Tokens(**state.get("tokens", {})))

    async def _saved_by(self, address_of_state: str) -> list[str]:
        """List this run's states of the session that saved a state, including any not recorded on this machine.
        Empty if the service does not list them.
        """
        training_run = address_of_state.removeprefix("tinker://").partition("/")[0]
        with suppress(UserError, ServiceLost), service_errors("Listing saved states"):
            checkpoints = (await (await self._rest()).list_checkpoints(training_run)).checkpoints
            names = (found.tinker_path for found in checkpoints if found.checkpoint_type == "training")
            return [path for path in names if path.rpartition("/")[2].startswith(f"{self._run}-")]
        return []

    async def _delete(self, address_of_state: str) -> None:
        """Delete a saved state; one that is gone is fine."""
        with service_errors(f"Deleting {address_of_state}"):
            rest = await self._rest()
            with suppress(tinker.NotFoundError):
                await rest.delete_checkpoint_from_tinker_path(address_of_state)

    async def export_hf(self, path: Path) -> None:
        """See `Trainer.export_hf`; the adapters, in peft's format."""
        async with self._verb("Exporting the adapters"):
            rest = await self._rest()
            name = f"{self._run}-hf-{secrets.token_hex(4)}"
            async with self._order:
                client = await self._training()
            await export_adapters(client, rest, name, path, self._base_model)

    # Weights

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        """Deliver the handle of a sampler with the current weights, which names no key."""
        async with self._verb("Saving the weights to sample from"):
            saving, self._sampler = self._sampler, None
            if saving is None:  # not after an update, or once more: a new sampler shows whether the session is alive
                async with self._order:
                    saving = (await self._training()).save_weights_and_get_sampling_client()
            sampler = await saving
        # The service may drop a sampler whose client is gone; the last but one may still answer requests.
        self._samplers = [*self._samplers[-1:], sampler]
        await deliver({"sampler": sampler.get_sampler_handle()})


@asynccontextmanager
async def open_hosted(config: Config, hosts: RankHosts) -> AsyncIterator[HostedTrainer]:
    """`trainer.registry.TrainerFactory` of the hosted trainer."""
    trainer = HostedTrainer(config)
    try:
        yield trainer
    finally:
        await trainer.close()


def submit(
    client: tinker.TrainingClient, request: OnePass, data: Sequence[Datum]
) -> tinker.APIFuture[types.ForwardBackwardOutput]:
    """Submit a loss that takes one pass."""
    if request.name == CROSS_ENTROPY:
        return client.forward_backward(weighted(data, trained_weights(data)), CROSS_ENTROPY)
    sent = [
        to_service(
            datum,
            advantages=np.where(datum.loss_mask, datum.scaled_advantages, 0),
            logprobs=np.where(datum.loss_mask, datum.behaviour_logprobs, 0),
        )
        for datum in data
    ]
    return client.forward_backward(sent, request.name, request.settings or None)


def tokens_of(request: OnePass, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> TrainedTokens:
    """Trained tokens for the metrics of a loss; the service's own formulas take the ratio to the sampler's policy."""
    tokens = TrainedTokens.of(data, logprobs)
    if request.name == CROSS_ENTROPY:
        return tokens
    return replace(tokens, arrays={**tokens.arrays, "proximal": tokens.behaviour})


def is_finite(loss: Loss) -> bool:
    return math.isfinite(loss.value) and bool(np.isfinite(loss.gradient).all())


def report(loss: Loss, data: Sequence[Datum]) -> LossReport:
    return LossReport(loss.value, loss.sums, tokens=tokens_in(data))


def tokens_in(data: Sequence[Datum]) -> int:
    return sum(len(datum) for datum in data)


async def reference_logprobs(sampler: tinker.SamplingClient, data: Sequence[Datum]) -> list[np.ndarray]:
    """Log-probs of a sampler's model, float32 ``[T]`` for each Datum, 0 where ``loss_mask`` is false."""
    prompts = [types.ModelInput.from_ints(datum.token_ids.tolist()) for datum in data]
    scores = await asyncio.gather(*(sampler.compute_logprobs(prompt).coroutine() for prompt in prompts))
    found = []
    for datum, score in zip(data, scores, strict=True):
        values = np.array([math.nan if value is None else value for value in score], np.float32)
        if values.shape != datum.loss_mask.shape or np.isnan(values[datum.loss_mask]).any():
            raise ServiceLost("the service returned no log-probs for some tokens of the reference policy")
        found.append(np.where(datum.loss_mask, values, np.float32(0)))
    return found
