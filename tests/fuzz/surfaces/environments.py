"""Replies of an environment's server: observations, tools, schemas, content blocks, rewards; and images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import PIL.Image
from fuzz.engine import Surface
from fuzz.trees import received

from megatron_fleet.config.sections.env import EnvConfig, OpenEnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs import openenv
from megatron_fleet.envs.base import EnvBusy, EnvLost, Image, Observation, ToolCall
from megatron_fleet.envs.openenv import OpenEnvEnvironment
from megatron_fleet.models.images import readable, size_of

TASK = Task("t", "find it", "shop", "def verify(env): ...")
SCHEMA = {"type": "object", "title": "Move", "properties": {"column": {"type": "integer"}, "metadata": {}}}
TOOL = {"name": "find", "description": "d", "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
FINISH = {"name": "finish", "inputSchema": {"properties": {"answer": {"type": "string"}}, "required": ["answer"]}}


def _png() -> bytes:
    out = io.BytesIO()
    PIL.Image.new("RGB", (3, 2)).save(out, "PNG")
    return out.getvalue()


def seeds() -> list[Any]:
    picture = base64.b64encode(_png()).decode()
    blocks = [{"type": "text", "text": "two"}, {"type": "image", "data": picture, "mimeType": "image/png"}]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    listed = {"tools": [TOOL, FINISH]}
    fast = {"content": blocks, "structured_content": None, "data": None, "is_error": False}
    mcp = {
        "kind": "mcp",
        "replies": [
            [{"board": "empty", "metadata": {"solution": 1}}, None, False],
            [listed, None, False],
            [{"result": fast}, 0.0, False],
            [{"result": [*blocks, url, {"type": "resource", "resource": {"uri": "a", "text": "t"}}]}, 0.5, False],
            [{"error": {"error_type": "invalid_args", "message": "no"}}, None, False],
            [{"result": {"structured_content": {"score": 1, "reason": "good"}}}, 1.0, True],
        ],
    }
    action = {
        "kind": "action",
        "schema": SCHEMA,
        "replies": [[{"board": "x"}, None, False], [{"board": "y"}, 1, True, {"question": "q"}]],
    }
    return [mcp, action, {"image": _png()}]


@dataclass
class _Reply:
    """As of OpenEnv's client."""

    observation: Any
    reward: Any
    done: Any
    metadata: Any = None


class _Client:
    """Gives prepared replies in their order."""

    def __init__(self, replies: list[Any]) -> None:
        self._replies = replies

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def reset(self, **arguments: Any) -> _Reply:
        return self._next()

    async def step(self, action: Any) -> _Reply:
        json.dumps(action)
        return self._next()

    async def list_tools(self) -> Any:
        return self._next().observation

    def _next(self) -> _Reply:
        reply = self._replies.pop(0) if self._replies else [{}, None, True]
        if not isinstance(reply, list) or len(reply) not in (3, 4):
            raise RuntimeError(f"{reply!r:.100} (code: VALIDATION_ERROR)")
        return _Reply(*reply)


def check(tree: Any, folder: Path) -> bool:
    tree = tree if isinstance(tree, dict) else {}
    if isinstance(tree.get("image"), bytes):
        image = Image("image/png", tree["image"])
        try:
            width, height = size_of(image)
        except ValueError:
            assert not readable(image)
            return False
        assert width > 0 and height > 0
        return readable(image)
    tree = received(tree) or {}
    replies = tree.get("replies")
    return asyncio.run(_played(tree.get("kind"), tree.get("schema"), replies if isinstance(replies, list) else []))


async def _played(kind: Any, schema: Any, replies: list[Any]) -> bool:
    async def action_schema(url: str) -> Any:
        return schema

    client = _Client(list(replies))
    if kind == "action":
        settings = OpenEnvConfig(interface="action", reward="sum")
    else:
        settings = OpenEnvConfig(interface="mcp", finish_tool="finish", reward="last")
    with (
        patch.object(OpenEnvEnvironment, "_new_client", lambda self: client),
        patch.object(openenv, "action_schema", action_schema),
    ):
        env = OpenEnvEnvironment(EnvConfig(kind="openenv", url="http://localhost"), "http://localhost", settings)
        try:
            shown = await env.reset(TASK)
            _check(shown)
            for tool in shown.tools:
                name = tool["function"]["name"]
                for arguments in ({}, {"q": "x"}, {"column": 3}):
                    _check(await env.step(ToolCall(name, arguments)))
        except (EnvLost, EnvBusy):
            return False
        finally:
            reward = await env.verify("42", [{"role": "user", "content": "x"}])
            assert reward.value is None or isinstance(reward.value, float)
            await env.close()
    return True


def _check(observation: Observation) -> None:
    assert isinstance(observation.content, str) and isinstance(observation.done, bool)
    assert all(isinstance(image, Image) and image.data for image in observation.images)
    assert observation.error is None or isinstance(observation.error.message, str)
    json.dumps(observation.tools)


WORDS = ("score", "reward", "result", "is_error", "isError", "data", "content", "image_url", "resource", "metadata")
SURFACE = Surface("environments", 1250, seeds, check, words=WORDS)
