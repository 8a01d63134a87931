"""OpenEnv servers for tests, of the two ways that there are to offer tools, and one that takes a single action."""

from __future__ import annotations

import base64
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from fastmcp.utilities.types import Image

from megatron_fleet.config.sections.env import EnvConfig, OpenEnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs import base
from megatron_fleet.envs.openenv_client import import_openenv
from megatron_fleet.envs.registry import make_environment

core = import_openenv()

from openenv.core.env_server import (  # noqa: E402
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    ListToolsAction,
    ListToolsObservation,
    MCPEnvironment,
    Observation,
    State,
    Tool,
)

PIXELS = b"\x89PNG pixels"


class Served:
    """An application on a free port, in a thread of this process."""

    def __init__(self, app: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def serving(apps: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Serve ``apps``; give the address of each."""
    servers = {name: Served(app) for name, app in apps.items()}
    yield {name: server.url for name, server in servers.items()}
    for server in servers.values():
        server.stop()


def environment(url: str, **openenv: Any) -> base.Environment:
    """Return an environment of the server at ``url``; ``openenv``: keys of ``env.openenv``."""
    return make_environment(EnvConfig(kind="openenv", url=url, openenv=OpenEnvConfig(**openenv)), url)


async def opened(url: str, task: Task, **openenv: Any) -> tuple[base.Environment, base.Observation]:
    """Return an environment and what its reset to ``task`` shows."""
    session = environment(url, **openenv)
    return session, await session.reset(task)


class Counter(Environment):
    """Add up to ``goal``. Each ``add`` pays 0.25; ``done`` ends it, ``verify`` scores it, ``submit`` does both."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total, self.goal, self.asked = 0, 0, ""
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        goal: int = 3,
        level: str = "",
        env_key: str = "",
        **_: Any,
    ) -> Observation:
        if env_key == "full":
            raise RuntimeError('{"code": "no_seat", "retryable": true}')
        self.total, self.goal, self.asked = 0, goal, f"{level}/{env_key}"
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"solution": "add(3)"})

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(
                tools=[Tool(name=n, description="", input_schema=s) for n, s in SCHEMAS.items()]
            )
        name, arguments = action.tool_name, action.arguments
        if name == "add":
            self.total += arguments["by"]
            over = self.total > 100
            return CallToolObservation(tool_name=name, result=self.total, reward=0.25, done=over, error=None)
        if name == "asked":
            return CallToolObservation(
                tool_name=name, result={"asked": self.asked, "goal": self.goal, "id": self._state.episode_id}
            )
        if name == "look":
            block = {"type": "image", "data": base64.b64encode(PIXELS).decode(), "mimeType": "image/webp"}
            result = {"content": [{"type": "text", "text": "here:"}, block], "structured_content": None, "data": None}
            return CallToolObservation(tool_name=name, result=result)
        if name == "fail":
            return CallToolObservation(
                tool_name=name, result={"content": [{"type": "text", "text": "no ink"}], "is_error": True}
            )
        right = self.total == self.goal
        if name == "done":
            return CallToolObservation(tool_name=name, result="bye", done=True)
        if name == "verify":
            return CallToolObservation(tool_name=name, result={"structured_content": {"score": float(right) / 2}})
        right = right and arguments["text"] == "three"
        return CallToolObservation(tool_name=name, result={"reason": arguments["text"]}, done=True, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


def _object(required: tuple[str, ...] = (), **types: str) -> dict[str, Any]:
    return {"type": "object", "properties": {k: {"type": t} for k, t in types.items()}, "required": list(required)}


SCHEMAS = {
    "add": _object(("by",), by="integer"),
    "asked": _object(),
    "look": _object(),
    "fail": _object(),
    "submit": _object(("text",), text="string", sure="boolean"),
    "done": _object(),
    "verify": _object(),
}


def counter_app() -> Any:
    return core.create_app(Counter, CallToolAction, CallToolObservation, "counter", max_concurrent_envs=8)


class FastCounter(MCPEnvironment):
    """The same game through FastMCP, with results as FastMCP shapes them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.total = 0
        server = FastMCP("counter")

        @server.tool
        def add(by: int) -> dict:
            self.total += by
            return {"total": self.total}

        @server.tool
        def words() -> list[str]:
            return ["a", "é"]

        @server.tool
        def nothing() -> None:
            return None

        @server.tool
        def look() -> Image:
            return Image(data=PIXELS, format="png")

        @server.tool
        def fail() -> str:
            raise ValueError("no ink")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.total = 0
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools here")

    @property
    def state(self) -> State:
        return State()


def fast_counter_app() -> Any:
    return core.create_app(FastCounter, CallToolAction, CallToolObservation, "fast", max_concurrent_envs=8)


class Guess(Action):
    """Guess the number."""

    guess: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """A game of one action: 0.1 for each guess, 1 for the right one, which ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        return Hint(hint="between 1 and 9", metadata={"solution": 7})

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        right = action.guess == 7
        return Hint(hint="yes" if right else "no", reward=1.0 if right else 0.1, done=right, metadata={"solution": 7})

    @property
    def state(self) -> State:
        return State()


def guessing_app(places: int = 8) -> Any:
    return core.create_app(Guessing, Guess, Hint, "guessing", max_concurrent_envs=places)


def template_app(folder: Path) -> Any:
    """The environment that OpenEnv writes for who begins one (``openenv init first_env``), imported from ``folder``."""
    names = {"__ENV_NAME__": "first_env", "__ENV_CLASS_NAME__": "First", "__ENV_TITLE_NAME__": "First"}

    def filled(text: str) -> str:
        for placeholder, name in names.items():
            text = text.replace(placeholder, name)
        return text

    template = Path(import_module("openenv.cli.templates").__path__[0]) / "openenv_env"
    for file in template.rglob("*.py"):
        copy = folder / "first_env" / filled(str(file.relative_to(template)))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(filled(file.read_text()))
    sys.path.append(str(folder))
    try:
        return import_module("first_env.server.app").app
    finally:
        sys.path.remove(str(folder))
