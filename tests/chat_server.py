"""An OpenAI-compatible server for tests: real HTTP, messages checked and made with OpenAI's own types.

Needs ``openai``, ``starlette`` and ``uvicorn``, which both environments have.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_fleet.agents.prompts import load_prompts
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.solver import solve
from megatron_fleet.embedded_fleet.tasktype import FinalAnswer
from megatron_fleet.envs.base import Observation, ToolCall, ToolError

MODEL = "org/model"
PROBE = "Answer with the word ok."
PROMPTS = load_prompts(None)
REQUEST = TypeAdapter(CompletionCreateParamsNonStreaming)

Said = dict[str, Any] | Response
"""A message of the assistant, or an answer that is none."""


@dataclass
class ChatServer:
    """``speak`` gets each request's body, except for probes unless ``probes``; its number counts from 0."""

    speak: Callable[[int, dict[str, Any]], Said]
    key: str = ""
    probes: Callable[[dict[str, Any]], Response | None] = lambda body: None
    usage: bool = True
    finish: Callable[[dict[str, Any]], str] = lambda body: "stop"
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    probed: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    in_flight: int = 0
    most_in_flight: int = 0

    def complete(self, body: dict[str, Any]) -> Response:
        if body["model"] != MODEL:
            return error(404, f"The model `{body['model']}` does not exist.", code="model_not_found")
        REQUEST.validate_python(body)
        if body["messages"][0].get("content") == PROBE:
            self.probed.append(body)
            return self.probes(body) or JSONResponse(self.completion({"content": "ok"}, body))
        self.bodies.append(body)
        check_names(body)
        check_history(body["messages"])
        said = self.speak(len(self.bodies) - 1, body)
        return said if isinstance(said, Response) else JSONResponse(self.completion(said, body))

    def completion(self, message: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {"id": call.get("id", f"c{i}"), "type": "function", "function": call["function"]}
            for i, call in enumerate(message.get("tool_calls", ()))
        ]
        said = {"role": "assistant", "content": None, "refusal": None} | message
        if calls:
            said["tool_calls"] = calls
        counts = {"prompt_tokens": prompt_tokens(body), "completion_tokens": 7}
        counts |= {"total_tokens": counts["prompt_tokens"] + 7}
        choice = {"index": 0, "message": said, "logprobs": None}
        finish = self.finish(body) if not calls else "tool_calls"
        made = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice | {"finish_reason": finish}],
        }
        ChatCompletion.model_validate(made)
        return made | ({"usage": counts} if self.usage else {})


def prompt_tokens(body: dict[str, Any]) -> int:
    """As good as any tokenizer: ten for each message."""
    return 10 * len(body["messages"])


def check_names(body: dict[str, Any]) -> None:
    """OpenAI's rule for the names of tools that are offered and of those that were called."""
    called = [call for message in body["messages"] for call in message.get("tool_calls") or ()]
    for tool in (*body.get("tools", ()), *called):
        assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", tool["function"]["name"]), tool


def check_history(messages: Sequence[dict[str, Any]]) -> None:
    """Rules of strict servers: every call is answered, at once, and its arguments are a JSON object."""
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
            continue
        assert not open_calls, f"calls without an answer: {open_calls}"
        for call in message.get("tool_calls") or ():
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            open_calls.append(call["id"])
    assert not open_calls


def error(status: int, message: str, headers: dict[str, str] | None = None, **fields: Any) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, **fields}}, status, headers)


def call(name: str, arguments: Any, call_id: str = "call-1") -> dict[str, Any]:
    """One tool call of a message; ``arguments`` that are text go as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


@contextlib.contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    """Serve on 127.0.0.1 within."""

    async def completions(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        server.keys.add(given)
        if server.key and given != server.key:
            return error(401, f"Incorrect API key provided: {given}.", code="invalid_api_key")
        server.in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            return server.complete(await request.json())
        finally:
            server.in_flight -= 1

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]})

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
        ]
    )
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        running.should_exit = True
        thread.join(10)


@dataclass
class Oracle:
    """Solves the embedded fleet's tasks from nothing but the conversation; stateless, as a server is."""

    tasks: Sequence[Task]

    def __call__(self, number: int, body: dict[str, Any]) -> Said:
        user = next(m["content"] for m in body["messages"] if m["role"] == "user")
        task = next(task for task in self.tasks if user == PROMPTS.user_text(task, task.prompt))
        agent = solve(task)
        turn = next(agent)
        for message in body["messages"]:
            if message["role"] == "tool":
                turn = agent.send(seen(message["content"]))
        if isinstance(turn, FinalAnswer):
            return {"content": f"{turn.text} <done>"}
        assert isinstance(turn, ToolCall)
        assert turn.name in {tool["function"]["name"] for tool in body["tools"]}
        return {"tool_calls": [call(turn.name, turn.arguments, f"call-{number}")]}


def seen(text: str) -> Observation:
    """A tool message as the solver takes it."""
    if text.startswith("Error ("):
        return Observation("", error=ToolError("execution_error", text))
    return Observation(text)
