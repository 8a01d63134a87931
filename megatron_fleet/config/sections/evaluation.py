"""Section `eval`: schedule, sampling and endpoint of evaluations."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json
from megatron_fleet.config.sections.base import Rule, Section, bucket_problem, url_problem
from megatron_fleet.config.sections.hosted import HOSTED

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


class EndpointConfig(Section):
    url: str | None = Field(
        None, description="Address of an OpenAI-compatible server, as https://host/v1, that `mfleet eval` plays with."
    )
    model: str | None = Field(None, description="Name of the model there.")
    api_key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable that holds the key; a server without keys needs none."
    )
    max_retries: int = Field(
        8, ge=0, description="Further tries of a request that met a rate limit, a failing server or a deadline."
    )
    images: bool = Field(True, description="Show the images of observations; false: the model takes text only.")
    return_reasoning: bool = Field(
        False, description="Give the reasoning of a turn back with later requests; some models need it, some refuse it."
    )
    extra_body: str | None = Field(
        None, description='JSON object that is added to every request, as {"reasoning_effort": "low"}.'
    )


class EvalConfig(Section):
    at_start: bool = Field(True, description="Evaluate before the first step.")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    interval: int = Field(0, ge=0, description="Steps between evaluations; 0 = none in between.")
    tasks: int | None = Field(
        100,
        ge=1,
        description="Held-out tasks used, the same every time, round-robin over environments; null: all of them.",
    )
    samples: int = Field(4, ge=1, le=10_000, description="Samples per task at the training temperature.")
    greedy: bool = Field(True, description="Also one greedy sample per task.")
    pass_threshold: float = Field(
        1.0,
        gt=0,
        description="Minimum reward of an episode that counts as solved, in pass@k of training and evaluation and in "
        "reports; smaller ones, as env.fleet.partial_reward gives, count as not solved.",
    )
    budget_s: float | None = Field(
        None,
        gt=0,
        description="Seconds an evaluation may take; episodes open then are abandoned, their rewards unknown. null: "
        "as long as it takes.",
    )
    overlap: bool = Field(
        False,
        description="Evaluate beside training. Engines on devices of their own play the evaluation while the trainer "
        "computes the next update; colocated ones during the next step's rollout, in the places that its last episodes "
        "leave free. Not with eval.engines.",
    )
    engines: int = Field(
        0,
        ge=0,
        description="Dedicated evaluation engines, besides rollout.engine.replicas and on separate devices. They "
        "evaluate during training; an evaluation may take several steps. The one after the last step runs on the "
        "rollout engines. 0: all evaluations run on the rollout engines.",
    )
    upload: str | None = Field(
        None,
        description="s3://… or gs://bucket/prefix: evaluations are copied to evals/<run.id>/global_step_<N>/ below it.",
    )
    endpoint: EndpointConfig = EndpointConfig()

    @property
    def in_training(self) -> bool:
        """Whether a training run evaluates at all and thus needs held-out tasks."""
        return self.at_start or self.at_end or self.interval > 0


def sharing_problem(engines: int) -> str:
    """Return why evaluation engines cannot be beside engines that share the ranks' devices. ``engines``: the key."""
    return (
        f"eval.engines={engines} needs rollout.engine.colocated=false, because weights that are passed within a device "
        f"do not reach engines on other devices; set that, or eval.engines=0 and eval.overlap=true, which evaluates in "
        f"the places that the next rollout leaves free."
    )


def _engines(c: Config) -> str | None:
    e = c.eval
    if not e.engines:
        return None
    if c.policy.trainer == HOSTED:
        return (
            f"eval.engines={e.engines} with policy.trainer={HOSTED}: all its engines ask the same service; set "
            f"eval.engines=0, and eval.overlap=true to evaluate beside training."
        )
    if not e.at_start and not e.interval:
        return (
            f"eval.engines={e.engines} with eval.at_start=false and eval.interval=0: nothing is evaluated before the "
            f"last step; set eval.interval, or eval.engines=0."
        )
    if e.overlap:
        return (
            f"eval.engines={e.engines} with eval.overlap=true: evaluation engines evaluate during training in any "
            f"case; set only one of them."
        )
    return sharing_problem(e.engines) if c.rollout.engine.colocated else None


def _upload(c: Config) -> str | None:
    return bucket_problem("eval.upload", c.eval.upload)


def _endpoint_url(c: Config) -> str | None:
    url, instead = c.eval.endpoint.url, "set the variable that eval.endpoint.api_key_env names instead"
    return None if url is None else url_problem("eval.endpoint.url", url, instead=instead)


def _endpoint_key(c: Config) -> str | None:
    name = c.eval.endpoint.api_key_env
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return None
    return f"eval.endpoint.api_key_env={name!r} cannot name a variable; write one such as OPENAI_API_KEY."


def _endpoint_extra_body(c: Config) -> str | None:
    body, where = c.eval.endpoint.extra_body, "eval.endpoint.extra_body"
    if body is None:
        return None
    try:
        added = parse_json(body.encode(), where, "correct it")
    except UserError as error:
        return str(error)
    return None if isinstance(added, dict) else f"{where} must be a JSON object, as {{}}; correct it."


RULES: tuple[Rule, ...] = (
    _engines,
    _upload,
    _endpoint_url,
    _endpoint_key,
    _endpoint_extra_body,
)
