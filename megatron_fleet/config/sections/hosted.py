"""Section `hosted`: the service of policy.trainer=hosted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_fleet.config.remote_model import HubModel, remote_model
from megatron_fleet.config.sections.base import Rule, Section

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config

HOSTED = "hosted"
"""Trainer and sampler of a hosted service."""
LORA_ALPHA = 32.0
"""The scale of the service's adapters is this / rank; requests cannot set it."""


class PricesConfig(Section):
    """US dollars for a million tokens."""

    prefill: float | None = Field(
        None, ge=0, description="Of prompts. All four null: those of Thinking Machines' price list."
    )
    cached_prefill: float | None = Field(None, ge=0, description="Of prompts that are in the prefix cache.")
    sample: float | None = Field(None, ge=0, description="Of sampled tokens.")
    train: float | None = Field(None, ge=0, description="Of training sequences, for each pass over them.")


class HostedConfig(Section):
    """Thinking Machines' Tinker, or a server that speaks its protocol. The key is TINKER_API_KEY."""

    url: str | None = Field(
        None, description="Address of the service; null: TINKER_BASE_URL, else that of Thinking Machines."
    )
    base_model: str | None = Field(
        None, description="Name that the service has for the model; null: model.path, where that is an id on the hub."
    )
    losses: Literal["exact", "service"] = Field(
        "exact",
        description="exact: the formulas of this package, in two passes where the gradient depends on log-probs "
        "(docs/run/hosted.md). service: ppo_clip, cispo and importance_weighted are the service's ppo, cispo and "
        "importance_sampling, in one pass, whose ratio is over the sampler's policy.",
    )
    answer_timeout_s: float = Field(
        7200,
        gt=0,
        description="Seconds in which the service must answer a request of the trainer; after that its session counts "
        "as lost, and the run resumes in a new one. The package itself waits an hour for unpaid bills.",
    )
    prices: PricesConfig = PricesConfig()
    budget_usd: float | None = Field(
        None,
        gt=0,
        description="Save and end once this run has spent this many US dollars at the service, by its tokens and "
        "prices; checked after each step. null: no limit.",
    )

    def model(self, path: str) -> str | None:
        """Name of the model at the service; ``None``: not known. ``path``: `model.path`."""
        remote = remote_model(path)
        return self.base_model or (remote.repo if isinstance(remote, HubModel) else None)


def _both_or_none(c: Config) -> str | None:
    trainer, sampler = c.policy.trainer, c.rollout.sampler
    if (trainer == HOSTED) == (sampler == HOSTED):
        return None
    return (
        f"policy.trainer={trainer} with rollout.sampler={sampler}: a hosted trainer's weights stay at the service, and "
        f"only rollout.sampler={HOSTED} samples from them; set both to {HOSTED} (trainer={HOSTED}), or none."
    )


def _what_the_service_does(c: Config) -> str | None:
    if c.policy.trainer != HOSTED:
        return None
    if c.hosted.model(c.model.path) is None:
        return (
            f"policy.trainer={HOSTED} with model.path={c.model.path}: the service knows models by name, not by folder; "
            f"set hosted.base_model."
        )
    if c.policy.lora.rank == 0:
        return f"policy.trainer={HOSTED} trains adapters only; set policy.lora.rank."
    here = f"with policy.trainer={HOSTED}"
    for key, value, only, why in (
        ("policy.lora.alpha", c.policy.lora.alpha, LORA_ALPHA, "the service sets the adapters' scale"),
        ("rollout.sampling.temperature", c.rollout.sampling.temperature, 1.0, "the service trains at temperature 1"),
        ("algorithm.entropy_coef", c.algorithm.entropy_coef, 0.0, "the service returns no entropy"),
        ("rollout.engine.routing_replay", c.rollout.engine.routing_replay, False, "the service tells no experts"),
        ("policy.fake_quant", c.policy.fake_quant, "none", "the service trains its own number format"),
        ("policy.gradient_metrics.every", c.policy.gradient_metrics.every, 0, "the service shows no gradients"),
        ("policy.lora.export", c.policy.lora.export, "adapters", "the service gives the adapters alone"),
        ("checkpoint.export.check", c.checkpoint.export.check, False, "exports hold adapters alone"),
        ("checkpoint.export.every", c.checkpoint.export.every, 0, "checkpoints hold no weights"),
        ("checkpoint.export.best", c.checkpoint.export.best, False, "checkpoints hold no weights"),
    ):
        if value != only:
            said = f"{value:g}" if isinstance(value, float) else value
            plain = f"{only:g}" if isinstance(only, float) else str(only).lower()
            return f"{key}={said} {here}: {why}; set it to {plain}."
    return None


def _all_prices_or_none(c: Config) -> str | None:
    prices = c.hosted.prices.model_dump()
    missing = [name for name, value in prices.items() if value is None]
    if len(missing) in (0, len(prices)):
        return None
    return f"hosted.prices.{missing[0]} is null, but not all of hosted.prices are; set all four, or none."


RULES: tuple[Rule, ...] = (_both_or_none, _what_the_service_does, _all_prices_or_none)
