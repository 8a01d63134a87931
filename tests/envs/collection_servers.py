"""OpenEnv servers for tests that do what servers of the public OpenEnv collection do otherwise than its examples."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastmcp import FastMCP
from pydantic import TypeAdapter, field_validator
from tool_servers import SCHEMAS, Counter, core

from openenv.core.env_server import (  # isort: skip  # after tool_servers, which hides what OpenEnv need not load
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

ANY_TOOL_ACTION: TypeAdapter[Any] = TypeAdapter(ListToolsAction | CallToolAction)


class TextCall(CallToolAction):
    """Arguments may also be JSON text. A class of its own: OpenEnv then takes no request to list tools for a step."""

    @field_validator("arguments", mode="before")
    @classmethod
    def parsed(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


class Quiz(MCPEnvironment):
    """Question and solution are in the metadata of the reset; the step that ends it is not a tool's observation."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.steps = 0
        server = FastMCP("quiz")

        @server.tool
        def look_up(word: str) -> str:
            return f"{word}: 12"

        @server.tool
        def submit_answer(answer: str) -> str:
            return "thank you"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.steps = 0
        return Observation(metadata={"question": "How many months?", "solution": "12", "history": []})

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        self.steps += 1
        shown = await super().step_async(action, timeout_s=timeout_s)
        if action.tool_name != "submit_answer":
            return shown
        right = action.arguments["answer"] == "12" and self.steps == 2
        return Observation(done=True, reward=float(right), metadata={"solution": "12"})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools here")

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


def quiz_app() -> Any:
    return core.create_app(Quiz, TextCall, CallToolObservation, "quiz", max_concurrent_envs=8)


def unlistable_app() -> Any:
    """Its action calls tools, but nobody can say which."""
    return core.create_app(Counter, TextCall, CallToolObservation, "unlistable", max_concurrent_envs=8)


class ToolUse(Action):
    """Either of OpenEnv's actions for tools."""

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Any:
        return ANY_TOOL_ACTION.validate_python(obj)


class Noted(Observation):
    """An observation of its own shape: results and errors have other places than in CallToolObservation."""

    tool_name: str | None = None
    tool_result: Any = None
    note: str | None = None
    error: str = ""


class NotedTools(ListToolsObservation):
    error: str = ""


class Sums(Environment):
    """Adds numbers. ``verify`` is not a tool of the list: it pays half for the sum 3, half for the answer "three"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total, self.world = 0, ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, world: str = "", **_: Any) -> Observation:
        if world == "locked":
            return Noted(done=True, metadata={"error": "no key"})
        if world == "over":
            return Noted(done=True)
        if world not in ("sums", "empty"):
            return Noted(error=f"no world {world!r}")
        self.total, self.world = 0, world
        return Noted(note="ready")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            if self.world == "empty":
                return NotedTools(tools=[], error="its process ended")
            return NotedTools(tools=[Tool(name="add", description="", input_schema=SCHEMAS["add"])])
        name, arguments = action.tool_name, action.arguments
        if name == "verify":
            if arguments.get("mode") != "strict":
                return Noted(error=f"no mode {arguments.get('mode')}", reward=0.0)
            return Noted(reward=(self.total == 3) / 2 + (arguments.get("text") == "three") / 2)
        if name != "add":
            return Noted(tool_name=name, error=f"no tool {name}", reward=-1.0)
        self.total += arguments["by"]
        return Noted(tool_name=name, tool_result={"total": self.total}, reward=0.0)

    @property
    def state(self) -> State:
        return State()


def sums_app() -> Any:
    return core.create_app(Sums, ToolUse, Noted, "sums", max_concurrent_envs=8)


class Walk(Action):
    by: int = 0
    evaluate: bool = False
    answer: str = ""


class Place(Observation):
    at: int = 0


class Walking(Environment):
    """Steps that lead nowhere raise; whether the walk was right is asked by an action."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def reset(self) -> Place:
        self.at = 0
        return Place()

    def step(self, action: Walk, timeout_s: float | None = None, **_: Any) -> Place:
        if action.evaluate:
            if self.at < 0:
                raise ValueError("nothing to evaluate")
            return Place(at=self.at, reward=self.at / 4 + (action.answer == "three") / 4, done=True)
        if abs(action.by) > 2:
            raise ValueError(f"a step of {action.by} is too long")
        self.at += action.by
        return Place(at=self.at)

    @property
    def state(self) -> State:
        return State()


def walking_app() -> Any:
    return core.create_app(Walking, Walk, Place, "walking", max_concurrent_envs=8)


class Click(Action):
    """A class of the server's, whose text is for its programmers."""

    at: int


class Page(Observation):
    """What a page shows at first; after a click there may be an error, too."""

    goal: str = "click 3"
    screenshot: list[list[list[int]]]
    html: str = "<p>" + "x" * 100_000


class ClickedPage(Page):
    error: str = ""


class Clicking(Environment):
    """A page whose screen is 200×300 pixels, of one colour for each number of clicks."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.clicks = 0

    def reset(self, **_: Any) -> Page:
        self.clicks = 0
        return Page(screenshot=self.screen())

    def step(self, action: Click, timeout_s: float | None = None, **_: Any) -> ClickedPage:
        self.clicks += 1
        right = action.at == 3
        error = "" if right else f"nothing at {action.at}"
        return ClickedPage(screenshot=self.screen(), error=error, done=right, reward=float(right))

    def screen(self) -> list[list[list[int]]]:
        return [[[255, 10 * self.clicks, 0]] * 300] * 200

    @property
    def state(self) -> State:
        return State()


def page_app() -> Any:
    return core.create_app(Clicking, Click, ClickedPage, "page", max_concurrent_envs=8)


def http_only_app() -> Any:
    """A server with routes of its own, and no WebSocket."""
    app = FastAPI()
    app.post("/reset")(lambda: {"observation": {}, "reward": 0.0, "done": False})
    return app
