"""Probe of an endpoint before anything is started: checks key, model, tools and sampling, and finds its dialect."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_fleet.agents.chat_client import (
    FURTHER_SAMPLING,
    OPENAI_SAMPLING,
    ChatClient,
    ChatParams,
    Dialect,
    RequestRefused,
    Unanswered,
)
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.evaluation import EndpointConfig

PROBE_TOKENS = 256
"""Upper bound; some models think before they answer, and some endpoints refuse when that is cut off."""
TRIES, PAUSE_S, MAX_PAUSE_S = 3, 1.0, 60.0
"""Number of attempts, pause between them, and longest requested pause that is honoured: nothing is running yet."""
SHOWN_MODELS = 8
_QUESTION = ({"role": "user", "content": "Answer with the word ok."},)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


async def probe(endpoint: EndpointConfig, timeout_s: float, temperatures: Sequence[float], max_tokens: int) -> Dialect:
    """Ask a trivial question at each temperature, with a tool; return the dialect in which the endpoint answers.

    Raises:
        UserError: the endpoint cannot be reached, or cannot serve the evaluation.
    """
    client = ChatClient(endpoint, timeout_s)
    try:
        for temperature in temperatures:
            await _agree(client, ChatParams(temperature, min(max_tokens, PROBE_TOKENS), seed=1))
        return client.dialect
    finally:
        await client.close()


async def _agree(client: ChatClient, params: ChatParams) -> None:
    """Adapt the client's dialect until a question is answered."""
    failures = 0
    while True:
        try:
            await client.ask(_QUESTION, (_TOOL,), params)
            return
        except Unanswered as failure:
            failures += 1
            pause = PAUSE_S if failure.wait_s is None else failure.wait_s
            if failures == TRIES or pause > MAX_PAUSE_S:
                raise UserError(
                    f"eval.endpoint.url={client.endpoint.url}: no answer in {failures} tries ({failure}); is the "
                    f"server up and the address complete, as https://host/v1?"
                ) from None
            await asyncio.sleep(pause)
        except RequestRefused as refusal:
            other = _other(client.dialect, refusal)
            if other is None:
                raise UserError(await _sentence(client, params, refusal)) from None
            client.dialect = other


def _other(dialect: Dialect, refusal: RequestRefused) -> Dialect | None:
    """Return a dialect without the refused parameters; ``None`` when something else was refused."""
    sent = {"seed", *OPENAI_SAMPLING, *FURTHER_SAMPLING} - dialect.refused
    named = {name for name in sent if _names(refusal, name)}
    if named:
        return replace(dialect, refused=dialect.refused | named)
    if dialect.limit == "max_tokens" and _names(refusal, "max_tokens"):
        return replace(dialect, limit="max_completion_tokens")
    if refusal.status in (400, 422) and not dialect.refused.issuperset(FURTHER_SAMPLING):  # not all name the parameter
        return replace(dialect, refused=dialect.refused | FURTHER_SAMPLING.keys())
    return None


def _names(refusal: RequestRefused, parameter: str) -> bool:
    """Return whether the endpoint objects to this request parameter."""
    if refusal.status not in (400, 422):
        return False
    return refusal.about == parameter or re.search(rf"\b{parameter}\b", str(refusal)) is not None


async def _sentence(client: ChatClient, params: ChatParams, refusal: RequestRefused) -> str:
    url, model, key = client.endpoint.url, client.endpoint.model, client.endpoint.api_key_env
    said = f"({refusal.status}: {str(refusal).rstrip('.')})"
    if refusal.status in (401, 403):
        known = f"the key in {key} is refused" if client.has_key else f"a key is needed, and {key} is not set"
        return f"eval.endpoint.url={url}: {known} {said}; set {key} to a key of this endpoint."
    if refusal.code == "insufficient_quota":
        return f"eval.endpoint.url={url}: the account has no quota left {said}; add some."
    if refusal.status == 404:
        names = await client.models()
        advice = (
            f"it has {', '.join(names[:SHOWN_MODELS])}" if names else "name one of its models, or correct the address"
        )
        return f"eval.endpoint.model={model}: {url} does not have this model {said}; {advice}."
    if _names(refusal, "temperature"):
        key = "rollout.sampling.temperature" if params.temperature else "eval.greedy"
        advice = "set it to 1" if params.temperature else "set it to false"
        value = f"{params.temperature:g}" if params.temperature else "true"
        return f"{key}={value}: {model} does not accept temperature={params.temperature:g} {said}; {advice}."
    if re.search(r"\btools?\b|tool_choice|tool-call", str(refusal)) or refusal.about.startswith("tool"):
        return (
            f"eval.endpoint.model={model}: {url} does not accept tools {said}; serve it with tool calling (for vLLM "
            f"--enable-auto-tool-choice and --tool-call-parser)."
        )
    return (
        f"eval.endpoint.url={url}: the server refuses a request to model {model} {said}; change the setting that it "
        f"names."
    )
