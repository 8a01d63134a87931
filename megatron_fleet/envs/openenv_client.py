"""OpenEnv's client, imported lazily and kept from reconnecting; queries for a server's action schema and tools."""

from __future__ import annotations

import sys
from functools import cache, partial
from types import ModuleType
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.network import go_direct, through_proxy

NO_SESSIONS = (403, 404, 405)
"""HTTP statuses with which web servers refuse a WebSocket on a path without one."""


def import_openenv() -> ModuleType:
    """Import ``openenv.core`` without its web interface.

    OpenEnv imports gradio if it is installed, for a page that is never served here: three seconds and 70 MB per
    process. It works without gradio, which is therefore hidden while OpenEnv loads.

    Raises:
        UserError: OpenEnv is not installed in this Python environment.
    """
    hidden = "gradio" not in sys.modules
    if hidden:
        sys.modules["gradio"] = None  # type: ignore[assignment]
    try:
        import openenv.core

        return openenv.core
    except ImportError as error:
        raise UserError(
            f"This Python environment ({sys.prefix}) has no OpenEnv; run environments with the episode environment's "
            f"interpreter, or install openenv>=0.10,<0.11 here. ({error})"
        ) from error
    finally:
        if hidden:
            del sys.modules["gradio"]


@cache
def one_socket_client() -> type[Any]:
    """Return a ``GenericEnvClient`` class that never opens a second socket.

    OpenEnv's client silently reconnects after a timeout or a closed socket; the new socket belongs to a new session
    that was never reset.

    Raises:
        UserError: OpenEnv is not installed in this Python environment.
    """
    import_openenv()
    from openenv.core.generic_client import GenericEnvClient
    from websockets.exceptions import InvalidStatus
    from websockets.protocol import State

    class OneSocketClient(GenericEnvClient):
        _connected = False
        _heard = False

        async def _connect_async(self) -> OneSocketClient:
            if self._connected:
                # A full server says so and closes; until that is read, the closed socket holds the reason.
                if self._ws is None or (self._heard and self._ws.state is not State.OPEN):
                    raise ConnectionError("the session's socket is closed")
                return self
            go_direct(self._ws_url)
            try:
                await super()._connect_async()
            except ConnectionError as error:
                if isinstance(error.__cause__, InvalidStatus) and error.__cause__.response.status_code in NO_SESSIONS:
                    raise ConnectionError(
                        f"{error}; a server that has only HTTP routes, and no WebSocket at /ws, cannot be played, "
                        f"because they keep no episode apart from the others"
                    ) from error
                raise ConnectionError(f"{error}{through_proxy(self._ws_url)}") from error
            self._connected = True
            return self

        async def _receive(self) -> dict[str, Any]:
            message = await super()._receive()
            self._heard = True
            return message

        async def list_tools(self) -> list[dict[str, Any]]:
            """List the tools over the Model Context Protocol (JSON-RPC), which works with any action schema."""
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            answer = (await self._send_and_receive({"type": "mcp", "data": request}))["data"]
            if answer.get("error") is not None:
                raise RuntimeError(f"tools/list: {answer['error'].get('message')}")
            return answer["result"]["tools"]

    return OneSocketClient


async def action_schema(url: str) -> dict[str, Any]:
    """Fetch the JSON schema of the action taken by the server at ``url``.

    Raises ConnectionError, KeyError or ValueError.
    """
    return (await _schemas(url))["action"]


async def observation_schema(url: str) -> dict[str, Any]:
    """Fetch the JSON schema of the observations of the server at ``url``. Raises as `action_schema`."""
    return (await _schemas(url))["observation"]


async def _schemas(url: str) -> dict[str, Any]:
    import httpx

    base = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
    # Without TLS there is nothing to verify, and loading the CA certificates takes 30 ms.
    client = partial(httpx.AsyncClient, verify=base.startswith("https://"), timeout=None)
    try:
        async with client(trust_env=not go_direct(base)) as asking:
            answer = await asking.get(f"{base}/schema")
        answer.raise_for_status()
    except (httpx.HTTPError, ImportError) as error:  # httpx needs a package for SOCKS proxies
        raise ConnectionError(f"{base}/schema: {type(error).__name__}: {error}{through_proxy(base)}") from error
    return answer.json()
