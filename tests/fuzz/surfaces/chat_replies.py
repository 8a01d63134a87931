"""Answers of an OpenAI-compatible endpoint: status, headers, body; and the next request, which says it again.

The first request holds what environments and task files gave.
"""

from __future__ import annotations

import asyncio
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
from fuzz.engine import Surface
from fuzz.trees import bytes_of, received, value_of

from megatron_fleet.agents.chat_client import ChatClient, ChatParams, RequestRefused, Unanswered
from megatron_fleet.agents.chat_turn import ToolNames, read_turn
from megatron_fleet.config.sections.evaluation import EndpointConfig

URL = "http://endpoint/v1"
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
MESSAGE = {"role": "assistant", "content": "hm", "reasoning_content": "r", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 1}}
COMPLETION = {"id": "1", "choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}], "usage": USAGE}
ERROR = {"error": {"message": "too many", "code": "rate_limit", "type": "x", "param": "max_tokens"}}


def seeds() -> list[Any]:
    json_type = {"content-type": "application/json"}
    said = {"role": "user", "content": "find it"}
    shown = {"role": "tool", "tool_call_id": "c1", "content": "\ud800"}
    return [
        {"status": 200, "headers": json_type, "body": COMPLETION, "messages": [said], "tools": [TOOL]},
        {"status": 200, "headers": json_type, "body": COMPLETION, "messages": [said, MESSAGE, shown]},
        {"status": 200, "headers": json_type, "body": json.dumps(COMPLETION).encode()},
        {"status": 429, "headers": json_type | {"retry-after": "3"}, "body": ERROR},
        {"status": 503, "headers": {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, "body": "later"},
        {"status": 400, "headers": json_type, "body": {"error": {"message": "context length exceeded"}}},
    ]


def check(tree: Any, folder: Path) -> bool:
    tree = tree if isinstance(tree, dict) else {}
    return asyncio.run(_asked(_response(tree), _objects(tree.get("messages")), _objects(tree.get("tools"))))


def _objects(tree: Any) -> list[dict[str, Any]]:
    value = received(tree)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _response(tree: dict[str, Any]) -> httpx.Response:
    status, headers = tree.get("status"), value_of(tree.get("headers"))
    given = headers.items() if isinstance(headers, dict) else ()
    given = [(k, v) for k, v in given if isinstance(v, str | int | float)]
    plain = {str(k): str(v) for k, v in given if f"{k}{v}".isascii() and f"{k}{v}".isprintable() and str(k).strip()}
    plain.pop("content-encoding", None)
    code = status if type(status) is int and 200 <= status < 600 else 200
    return httpx.Response(code, headers=list(plain.items()), content=bytes_of(tree.get("body")))


@cache
def _client() -> ChatClient:
    return ChatClient(EndpointConfig(url=URL, model="m"), timeout_s=5)


async def _asked(response: httpx.Response, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    requests: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.read())
        return response if len(requests) == 1 else httpx.Response(200, json=COMPLETION)

    client, transport = _client(), httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client._client = openai.AsyncOpenAI(base_url=URL, api_key="k", max_retries=0, http_client=transport)
    try:
        told = await client.ask(messages, tools, ChatParams(0.5, 100))
    except Unanswered as failure:
        assert requests, f"nothing was sent: {failure}"
        assert str(failure) and (failure.wait_s is None or 0 <= failure.wait_s <= 3600), failure.wait_s
        return True
    except RequestRefused as refusal:
        assert str(refusal) and isinstance(refusal.ends_everything, bool)
        return True
    assert isinstance(told.finish_reason, str)
    for count in () if told.usage is None else (told.usage.prompt, told.usage.completion, told.usage.reasoning):
        assert 0 <= float(count) < math.inf
    turn = read_turn(told.message, 1, return_reasoning=True, names=ToolNames(()))
    refused = [{"role": "tool", "tool_call_id": i, "content": "no"} for i in turn.error_ids]
    again = [{"role": "user", "content": "find it"}, turn.message, *refused]
    await client.ask(again, (), ChatParams(0.5, 100))
    assert json.loads(requests[1])["messages"][1]["role"] == "assistant"
    return True


WORDS = ("retry-after", "inf", "nan", "1e30", "-5", "Fri, 01 Jan 99999 00:00:00 +9999", "insufficient_quota", "choices")
SURFACE = Surface("chat_replies", 300, seeds, check, words=WORDS)
