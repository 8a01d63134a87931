"""Client of an OpenAI-compatible endpoint: one chat completion per turn, retried where that can help."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeGuard

import openai

from megatron_fleet.agents.token_engine import EngineLost, EngineRefused
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import MAX_DEPTH, depth_exceeds
from megatron_fleet.config.network import go_direct, through_proxy
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.envs.base import clean_json

PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Initial and maximum pause before a retry, unless the endpoint names one; doubled each time, with jitter."""
MAX_ASKED_S = 600.0
"""Upper bound on a pause named by the endpoint."""
ERROR_CHARS = 300
"""Characters kept of an endpoint's error message."""
_AGAIN = {408, 409, 425, 429}
_NO_KEY = "none"
_TOO_LONG = re.compile(
    r"context length|context window|context_length|prompt is too long|too many tokens|"
    r"exceeds? the (?:[\w']+ ){0,3}context|exceeds? the maximum number of tokens",
    re.IGNORECASE,
)
"""Wording of OpenAI, vLLM, SGLang, llama.cpp, Anthropic and Google."""


class PromptTooLong(Exception):
    """The conversation does not fit into the endpoint's own context."""


class Unanswered(Exception):
    """One attempt failed in a way that a retry may not. ``wait_s``: the pause that the endpoint asked for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class RequestRefused(Exception):
    """The endpoint understood the request and refused it: the same request would fail again.

    Attributes:
        status: HTTP status.
        about: request parameter that the endpoint names; empty without one.
        code: the endpoint's error code.
    """

    def __init__(self, status: int, message: str, about: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.about, self.code = status, about, code

    @property
    def ends_everything(self) -> bool:
        """Whether every request of this evaluation would fail, because of the key, the model or the account."""
        return self.status in (401, 404) or self.code == "insufficient_quota"


OPENAI_SAMPLING: Mapping[str, float] = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
FURTHER_SAMPLING: Mapping[str, float] = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Values without effect of OpenAI's sampling parameters and of those that vLLM, SGLang and others add. A parameter that
is not sent has the server's default, which is often that of the model's generation_config.json."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Differences between endpoints: the name of the token limit, and the parameters that are not accepted."""

    limit: str = "max_tokens"
    refused: frozenset[str] = frozenset()

    def left_to_server(self, extra_body: Mapping[str, Any]) -> list[str]:
        """Return the names of sampling parameters whose values the server chooses."""
        return sorted(self.refused.difference(("seed", *extra_body)))


@dataclass(frozen=True, slots=True)
class ChatParams:
    """Sampling parameters of one request. ``temperature`` 0 is greedy; ``seed`` is below 2**31."""

    temperature: float
    max_tokens: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn from the endpoint; ``reasoning`` is part of ``completion``."""

    prompt: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn. ``message``: as received. ``usage``: ``None`` when the endpoint does not report it."""

    message: Mapping[str, Any]
    finish_reason: str
    usage: Usage | None


class ChatClient:
    """Sends the requests of many episodes to one model. The key comes from the environment and is redacted from errors.

    Attributes:
        dead: reason to assume that no request will be answered any more; all of them then fail immediately.
        extra: the user's own request parameters, which replace those of the same name.
    """

    def __init__(self, endpoint: EndpointConfig, timeout_s: float, dialect: Dialect | None = None) -> None:
        """``timeout_s``: deadline of one attempt. Raises UserError for a key or a proxy that cannot be used."""
        self.endpoint = endpoint
        self.dialect = dialect or Dialect()
        self.dead: str | None = None
        self._timeout_s = timeout_s
        self._answered = 0
        self._key = os.environ.get(endpoint.api_key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(
                f"{endpoint.api_key_env}: the key contains a character that an HTTP header cannot hold; copy it again."
            )
        self.extra: dict[str, Any] = clean_json(json.loads(endpoint.extra_body or "{}"))
        try:
            http = openai.DefaultAsyncHttpxClient(trust_env=not go_direct(endpoint.url or ""))
        except ImportError as error:  # httpx needs a package for SOCKS proxies
            raise UserError(f"eval.endpoint.url={endpoint.url}: {error}{through_proxy(endpoint.url or '')}.") from None
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.url, api_key=self._key or _NO_KEY, max_retries=0, timeout=timeout_s, http_client=http
        )

    @property
    def has_key(self) -> bool:
        """Whether the environment provides a key."""
        return bool(self._key)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        params: ChatParams,
        on_failure: Callable[[str, float], None],
    ) -> Answer:
        """Sample one turn.

        Args:
            on_failure: called after each failed attempt with the reason and the seconds that it and its pause cost.

        Raises:
            EngineLost: no attempt was answered, or every request will be refused.
            EngineRefused: the endpoint refuses the request.
            PromptTooLong: the endpoint refuses the request because of its length.
        """
        answered, reason = self._answered, ""
        for number in range(self.endpoint.max_retries + 1):
            if self.dead is not None:
                raise EngineLost(self.dead)
            began = time.monotonic()
            try:
                answer = await self.ask(messages, tools, params)
            except Unanswered as failure:
                reason = str(failure)
                pause = failure.wait_s
            except RequestRefused as refusal:
                raise self._given_up(refusal) from None
            else:
                self._answered += 1
                return answer
            last = number == self.endpoint.max_retries
            pause = 0.0 if last else _pause(number) if pause is None else pause
            on_failure(reason, time.monotonic() - began + pause)
            await asyncio.sleep(pause)
        if self._answered == answered:  # no other episode was answered meanwhile either
            self.dead = self.dead or f"the endpoint does not answer: {reason}"
        raise EngineLost(f"the endpoint gave no answer in {self.endpoint.max_retries + 1} tries: {reason}")

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], params: ChatParams
    ) -> Answer:
        """Make one attempt. Raises Unanswered or RequestRefused."""
        body: dict[str, Any] = {"model": self.endpoint.model, "messages": list(messages)}
        body |= {"temperature": params.temperature, self.dialect.limit: params.max_tokens}
        if tools:
            body["tools"] = list(tools)
        if params.seed is not None and "seed" not in self.dialect.refused:
            body["seed"] = params.seed
        body = clean_json(body)  # what cannot be sent is no fault of the endpoint
        sampling = {**OPENAI_SAMPLING, **FURTHER_SAMPLING}
        extra = {name: value for name, value in sampling.items() if name not in self.dialect.refused} | self.extra
        try:
            # Parsed by hand: endpoints do not always send what the library's types promise.
            raw = await self._client.chat.completions.with_raw_response.create(**body, extra_body=extra)
            return _read(_parsed(raw.text))
        except openai.APITimeoutError:
            raise Unanswered(f"no answer within {self._timeout_s:g} s{self._way()}") from None
        except openai.APIConnectionError as error:
            raise Unanswered(self._safe_text(error.__cause__ or error) + self._way()) from None
        except openai.APIStatusError as error:
            raise self._status(error) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unanswered(f"an answer that is not a chat completion ({self._safe_text(error)})") from None

    async def models(self) -> list[str]:
        """Return the names of the endpoint's models; empty when it does not list them."""
        try:
            return [model.id async for model in self._client.models.list()]
        except Exception:  # only improves an error message
            return []

    async def close(self) -> None:
        await self._client.close()

    def _status(self, error: openai.APIStatusError) -> Unanswered | RequestRefused:
        content: Any = error.body if isinstance(error.body, dict) else {}
        content = content["error"] if isinstance(content.get("error"), dict) else content
        message = self._safe_text(content.get("message") or error.message)
        code = _word(content.get("code") or content.get("type"))
        status = error.status_code
        if (status in _AGAIN or status >= 500) and code != "insufficient_quota":
            way = self._way() if status in (502, 503, 504) else ""
            return Unanswered(f"{status}: {message}{way}", _asked_pause(error.response.headers))
        if status == 407:
            message += self._way()
        return RequestRefused(status, message, _word(content.get("param")), code)

    def _given_up(self, refusal: RequestRefused) -> EngineLost | EngineRefused | PromptTooLong:
        if refusal.status in (400, 413, 422) and _TOO_LONG.search(f"{refusal.code} {refusal}"):
            return PromptTooLong(str(refusal))
        reason = f"the endpoint refuses ({refusal.status}): {refusal}"
        if refusal.ends_everything:
            self.dead = reason
            return EngineLost(reason)
        return EngineRefused(reason)

    def _way(self) -> str:
        return through_proxy(self.endpoint.url or "")

    def _safe_text(self, what: object) -> str:
        try:
            text = " ".join(str(what).split()) or type(what).__name__
        except RecursionError:
            text = type(what).__name__
        return (text.replace(self._key, "***") if self._key else text)[:ERROR_CHARS]


def _pause(number: int) -> float:
    """Return the seconds before the next attempt, after ``number`` + 1 failed ones."""
    return float(min(PAUSE_S * 2**number, MAX_PAUSE_S) * random.uniform(0.5, 1.0))


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, at most ``MAX_ASKED_S``; ``None`` without a valid one.

    The header holds a number or a date (RFC 9110 §10.2.3).
    """
    value = headers.get("retry-after", "")
    try:
        return min(max(0.0, float(value)), MAX_ASKED_S)
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, seconds), MAX_ASKED_S)


def _parsed(text: str) -> Any:
    """Parse the JSON of an answer and make it safe to send back with the next request.

    Lone surrogates are replaced and non-finite numbers become ``None``. Raises ValueError, also when the JSON is nested
    too deeply to be serialised again; RecursionError when it cannot even be parsed.
    """
    value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    if depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"its JSON is nested more than {MAX_DEPTH} levels deep")
    return clean_json(value)


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _word(value: Any) -> str:
    """Convert a name given by an endpoint to text; some give numbers."""
    return str(value) if isinstance(value, str | int) and value else ""


def _read(completion: Any) -> Answer:
    """Read a chat completion. Raises ValueError, LookupError, TypeError or AttributeError for anything else."""
    if not completion.get("choices") and completion.get("error"):
        raise ValueError(json.dumps(completion["error"]))
    choice = completion["choices"][0]
    if not isinstance(choice["message"], dict):
        raise TypeError("its message is not an object")
    return Answer(choice["message"], _word(choice.get("finish_reason")) or "stop", _usage(completion.get("usage")))


def _usage(counts: Any) -> Usage | None:
    if not isinstance(counts, dict) or not all(_is_count(counts.get(f"{n}_tokens")) for n in ("prompt", "completion")):
        return None
    details = counts.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return Usage(counts["prompt_tokens"], counts["completion_tokens"], reasoning if _is_count(reasoning) else 0)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 53
