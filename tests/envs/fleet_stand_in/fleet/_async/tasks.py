"""Task: executes a verifier on Fleet's side."""

from __future__ import annotations

import base64
import os
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx


@dataclass
class Task:
    key: str
    prompt: str
    env_id: str
    verifier_func: str

    async def verify_detailed_async(self, env: Any, **kwargs: Any) -> SimpleNamespace:
        arguments = base64.b64encode(pickle.dumps({"args": (None,), "kwargs": kwargs})).decode()
        body = {"key": self.key, "args": arguments, "args_array": [{"env": env.instance_id}]}
        async with httpx.AsyncClient(base_url=os.environ["FLEET_BASE_URL"], timeout=60, verify=False) as client:
            answer = (await client.post("/v1/verifiers/execute", json=body)).json()
        return SimpleNamespace(**({"result": None, "error": None, "stdout": None, "execution_id": None} | answer))
