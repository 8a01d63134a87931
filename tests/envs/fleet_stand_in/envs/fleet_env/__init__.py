"""FleetTaskEnv with the interface and the habits of fleet-ai/OpenEnv's, so that the adapter is tested without it.

Kept: one instance per object, a pause before the tools are listed, cancellations swallowed while it lists them, retries
until a deadline, empty results lost from the observation, results lost that are objects, a close that deletes nothing,
and 0 where there is no instance. Shortened: the pauses between retries.
"""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import httpx
from fleet._async.tasks import Task

RETRIES, PAUSE_S = 3, 0.05


class Instance:
    def __init__(self, made: dict[str, Any]) -> None:
        self.instance_id, self.root = made["instance_id"], made["urls"]["root"]

    async def close(self) -> None:
        async with _control_plane() as client:
            await client.delete(f"/v1/env/instances/{self.instance_id}")


class Tools:
    def __init__(self, urls: tuple[str, ...]) -> None:
        self.initial_wait, self.call_deadline_s = 8.0, 90.0
        self._urls = urls

    async def list_tools(self) -> list[dict[str, Any]]:
        await asyncio.sleep(self.initial_wait)
        listed: list[dict[str, Any]] = []
        for url in self._urls:
            for tool in await self._listed(url):
                function = {"name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}
                if tool["name"] not in {t["function"]["name"] for t in listed}:
                    listed.append({"type": "function", "function": function})
        return listed

    async def _listed(self, url: str) -> list[dict[str, Any]]:
        for _ in range(RETRIES):
            try:
                return (await _rpc(url, "tools/list", {}))["tools"]
            except Exception:
                await asyncio.sleep(PAUSE_S)
        raise RuntimeError(f"list_tools failed after {RETRIES} attempts")

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        end = asyncio.get_running_loop().time() + self.call_deadline_s
        while True:
            try:
                return _result(await _rpc(self._urls[0], "tools/call", {"name": name, "arguments": arguments}))
            except Exception as error:
                if asyncio.get_running_loop().time() + PAUSE_S > end:
                    raise RuntimeError(f"call_tool({name}) failed after {RETRIES} attempts") from error
                await asyncio.sleep(PAUSE_S)


class FleetTaskEnv:
    def __init__(
        self, task_config, api_key=None, ttl_seconds=None, max_steps=50, request_timeout_s=60.0, reset_timeout_s=10.0,
        partial_reward=False,
    ):  # fmt: skip
        if not (api_key or os.environ.get("FLEET_API_KEY")):
            raise ValueError("Fleet API key required")
        self.task, self.ttl_seconds, self.max_steps = task_config, ttl_seconds, max_steps
        self._orch: Any = None
        self._tools: Any = None
        self._steps, self._done = 0, False
        self._rollout_completed_emitted = False
        self.conversation_messages = self.verifier_error = self._last_verifier_execution_id = None

    async def _ensure_provisioned(self) -> None:
        if self._orch is not None:
            return
        task = self.task
        body = {"env_key": task["env_key"], "version": task["env_version"], "ttl_seconds": self.ttl_seconds}
        body |= {"data_key": task["data_key"], "data_version": task["data_version"]}
        body |= {"env_variables": task["env_variables"]}
        async with _control_plane() as client:
            answer = await client.post("/v1/env/instances", json=body)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        instance = Instance(answer.json())
        computer = task["task_modality"] == "computer_use"
        paths = ("api/v1/mcp",) if computer else ("mcp", "api/v1/mcp")
        self._orch = SimpleNamespace(_fleet_env=instance)
        self._tools = Tools(tuple(instance.root + path for path in paths))

    async def reset_async(self, seed=None) -> dict[str, Any]:
        await self._ensure_provisioned()
        tools = await self._tools.list_tools()
        computer = self.task["task_modality"] != "tool_use"
        tools = [t for t in tools if (t["function"]["name"] == "computer") == computer]
        if not computer and "submit_final_answer" in self.task["prompt"]:
            tools.append({"type": "function", "function": {"name": "submit_final_answer", "parameters": {}}})
        shown = {"prompt": self.task["prompt"], "observation": {}, "step": 0, "tools": tools}
        if computer:
            shown["initial_screenshot"] = await self._tools.call_tool("computer", {"action": "screenshot"})
        return shown

    async def step_async(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool, dict[str, Any]]:
        if self._done:
            raise RuntimeError("Episode is done. Call reset() to start a new episode.")
        self._steps += 1
        name, result, kwargs = action.get("tool"), None, {}
        info: dict[str, Any] = {"step": self._steps}
        if name == "submit_final_answer":
            kwargs["final_answer"] = action["params"].get("answer", "")
            action = {"done": True}
        elif name:
            try:
                result = info["tool_result"] = await self._tools.call_tool(name, action["params"])
                if isinstance(result, dict) and result.get("error"):
                    info["tool_error"] = result["error"]
            except Exception as error:
                info["tool_error"], result = str(error), {"error": str(error)}
        self._done = action.get("done", False) or self._steps >= self.max_steps
        reward = await self._compute_reward(kwargs) if self._done else 0.0
        return {"observation": result or {}}, reward, self._done, info

    async def _compute_reward(self, kwargs: dict[str, Any]) -> float | None:
        self._rollout_completed_emitted = True
        instance = self._orch and self._orch._fleet_env
        if not instance:
            return 0.0
        task = Task(self.task["task_key"], self.task["prompt"], self.task["env_key"], self.task["verifier_code"])
        if self.conversation_messages and "conversation" in self.task["verifier_code"]:
            kwargs["conversation"] = json.dumps(self.conversation_messages, default=str)
        for _ in range(RETRIES):
            response = await task.verify_detailed_async(instance, **kwargs)
            judge_failed = "JUDGE ERROR:" in (response.stdout or "")
            if response.success and not judge_failed:
                break
            await asyncio.sleep(PAUSE_S)
        if not response.success or judge_failed:
            self.verifier_error = "Verifier failed: " + ("judge LLM call errored" if judge_failed else "result=None")
            return None
        try:
            self._last_verifier_execution_id = response.execution_id
            return 1.0 if response.result is None else float(response.result)
        except Exception as error:
            self.verifier_error = f"Verifier exception: {error}"
            return None

    async def close_async(self) -> None:
        if not self._rollout_completed_emitted:
            await self._compute_reward({})
        if self._orch and self._orch._fleet_env:
            self._orch._fleet_env.close()  # never awaited
        self._orch = self._tools = None


def _control_plane() -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=os.environ["FLEET_BASE_URL"], timeout=60, verify=False)


async def _rpc(url: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "stand-in", "version": "1"}}
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        for number, (name, body) in enumerate((("initialize", hello), (method, params))):
            try:
                answer = await client.post(url, json={"jsonrpc": "2.0", "id": number, "method": name, "params": body})
            except asyncio.CancelledError as error:
                if method != "tools/list":
                    raise
                raise ConnectionError("cancelled") from error
            answer.raise_for_status()
    return answer.json()["result"]


def _result(result: dict[str, Any]) -> Any:
    if result.get("isError"):
        return {"error": result["content"][0]["text"]}
    (block,) = result["content"]
    if block["type"] == "image":
        return [{"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}]
    value = json.loads(block["text"])
    if isinstance(value, dict) and "base64_image" in value:
        return [{"type": "image_url", "image_url": {"url": value["base64_image"]}}]
    return value
