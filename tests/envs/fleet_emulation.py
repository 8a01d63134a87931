"""Emulation of Fleet's servers: the control plane's HTTP, and each instance's manager and MCP endpoints.

The shapes are those that fleet-python and FleetTaskEnv send and read. Verifiers are not run: an episode scores 1 when
ticket 7 was closed, unless ``script`` says what the next executions answer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PNG = base64.b64encode(b"\x89PNG a screen").decode()
NEVER_S = 3600.0
"""For answers that no test waits for."""


def _tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"name": name, "description": f"{name} it", "inputSchema": schema | {"required": list(properties)}}


TOOLS = [
    _tool("search", query="string"),
    _tool("close_ticket", ticket="integer"),
    _tool("boom"),
    _tool("computer", action="string"),
]


@dataclass
class Script:
    """Faults to inject, and the calls seen."""

    make: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Answers of the next makes (status, body); then they succeed."""
    make_s: float = 0.0
    list_s: float = 0.0
    call_s: float = 0.0
    call_status: int = 200
    verify: list[dict[str, Any]] = field(default_factory=list)
    """Answers of the next executions; the last one stays."""
    verify_s: float = 0.0
    made: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    executed: list[dict[str, Any]] = field(default_factory=list)
    """Keyword arguments of each execution."""
    called: list[tuple[str, Any]] = field(default_factory=list)
    live: dict[str, set[int]] = field(default_factory=dict)
    """Instance → the tickets closed in it."""


class FleetEmulation:
    """The server, in a thread. ``url`` is what FLEET_BASE_URL must be."""

    def __init__(self) -> None:
        self.script = Script()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True  # without what still sleeps
        self._thread.join()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/env/instances", self._make, methods=["POST"]),
                Route("/v1/env/instances/{instance}", self._delete, methods=["DELETE"]),
                Route("/v1/verifiers/check", self._check),
                Route("/v1/verifiers/execute", self._execute, methods=["POST"]),
                Route("/inst/{instance}/api/v1/env/reset", self._reset, methods=["POST"]),
                Route("/inst/{instance}/mcp", self._mcp, methods=["POST", "GET", "DELETE"]),
                Route("/inst/{instance}/api/v1/mcp", self._mcp, methods=["POST", "GET", "DELETE"]),
            ]
        )

    async def _make(self, request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep(self.script.make_s)
        if self.script.make:
            status, answer = self.script.make.pop(0)
            return JSONResponse(answer, status)
        instance = uuid.uuid4().hex[:8]
        self.script.made.append(body)
        self.script.live[instance] = set()
        root = f"{self.url}/inst/{instance}/"
        kinds = ("api", "docs", "reset", "diff", "snapshot", "execute_verifier_function")
        manager = dict.fromkeys((*kinds, "execute_verifier_function_with_upload"), f"{root}api/v1/env")
        urls = {"root": root, "app": [root], "manager": manager}
        return JSONResponse(self._instance(instance, body["env_key"]) | {"status": "running", "urls": urls})

    async def _delete(self, request: Request) -> Response:
        instance = request.path_params["instance"]
        self.script.deleted.append(instance)
        self.script.live.pop(instance, None)
        return JSONResponse(self._instance(instance, "e") | {"status": "stopped"})

    def _instance(self, instance: str, env_key: str) -> dict[str, Any]:
        named = {"instance_id": instance, "subdomain": instance, "env_key": env_key, "version": "v0"}
        return named | dict.fromkeys(("created_at", "updated_at", "team_id", "region"), "x")

    async def _check(self, _: Request) -> Response:
        return JSONResponse({"success": False, "key": None, "verifier_id": None})

    async def _execute(self, request: Request) -> Response:
        body = await request.json()
        self.script.executed.append(pickle.loads(base64.b64decode(body["args"]))["kwargs"])
        await asyncio.sleep(self.script.verify_s)
        if self.script.verify:
            answer = self.script.verify.pop(0) if len(self.script.verify) > 1 else self.script.verify[0]
        else:
            closed = self.script.live.get(body["args_array"][-1]["env"], set())
            answer = {"success": True, "result": float(7 in closed)}
        return JSONResponse({"execution_id": "x1", "execution_time_ms": 1, "stdout": ""} | answer)

    async def _reset(self, _: Request) -> Response:
        return JSONResponse({"observation": {"ok": True}, "reward": None, "done": False})

    async def _mcp(self, request: Request) -> Response:
        if request.method != "POST":
            return Response(status_code=405)
        body = await request.json()
        if "id" not in body:
            return Response(status_code=202)
        answer = await self._rpc(request.path_params["instance"], body["method"], body.get("params") or {})
        if isinstance(answer, int):
            return Response(status_code=answer)
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": answer})

    async def _rpc(self, instance: str, method: str, params: dict[str, Any]) -> dict[str, Any] | int:
        if method == "initialize":
            version = params["protocolVersion"]
            server = {"name": "emulated", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        if method == "tools/list":
            await asyncio.sleep(self.script.list_s)
            return {"tools": TOOLS}
        name, arguments = params["name"], params.get("arguments") or {}
        self.script.called.append((name, arguments))
        await asyncio.sleep(self.script.call_s)
        if self.script.call_status != 200:
            return self.script.call_status
        return self._call(instance, name, arguments)

    def _call(self, instance: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "boom":
            return {"content": [{"type": "text", "text": "kaboom"}], "isError": True}
        if name == "computer":
            if arguments.get("action") == "screenshot":
                return {"content": [{"type": "image", "data": PNG, "mimeType": "image/png"}]}
            return _json({"base64_image": f"data:image/png;base64,{PNG}"})
        if name == "close_ticket":
            self.script.live[instance].add(arguments["ticket"])
            return _json({"ok": True})
        return _json([] if arguments.get("query") == "nothing" else [{"id": 7}])


def _json(value: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": json.dumps(value)}]}
