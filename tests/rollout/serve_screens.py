"""A program of the episode environment: an OpenEnv server whose one tool shows a screenshot, until its input ends.

Usage: python serve_screens.py FOLDER_OF_TOOL_SERVERS     prints its address
"""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import PIL.Image
import PIL.ImageDraw

sys.path.insert(0, sys.argv[1])
from tool_servers import (
    CallToolAction,
    CallToolObservation,
    Environment,
    ListToolsAction,
    ListToolsObservation,
    Observation,
    Served,
    State,
    Tool,
    core,
)

SIZES = [(200, 96), (96, 128)]


class Screens(Environment):
    """Each look pays a quarter and shows how often there was one before."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.looks = 0
        return Observation()

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            schema = {"type": "object", "properties": {}}
            return ListToolsObservation(tools=[Tool(name="look", description="", input_schema=schema)])
        drawn = PIL.Image.new("RGB", SIZES[self.looks % 2], "white")
        PIL.ImageDraw.Draw(drawn).text((8, 8), f"look {self.looks}", fill="black")
        file = io.BytesIO()
        drawn.save(file, "PNG")
        self.looks += 1
        block = {"type": "image", "data": base64.b64encode(file.getvalue()).decode(), "mimeType": "image/png"}
        content = [{"type": "text", "text": "The screen:"}, block]
        return CallToolObservation(tool_name="look", result={"content": content}, reward=0.25)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = core.create_app(Screens, CallToolAction, CallToolObservation, "screens", max_concurrent_envs=8)
    print(Served(app).url, flush=True)
    sys.stdin.read()
