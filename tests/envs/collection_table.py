"""Games with servers of the public OpenEnv collection: for each its settings, a few calls, what they should pay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collection_data import agent_world_model, finqa, miniwob, terminal_bench

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Played:
    """One server and one episode with it.

    Attributes:
        package: folder of the server in the collection's ``envs``, which also is the package that is served.
        reward: what the episode must pay: a number, least and most, or ``None`` for a server that pays nothing.
        openenv: keys of ``env.openenv``.
        calls: tools and their arguments, in order.
        shows: a part of what each call shows, or of its error.
        answer: the policy's final answer.
        opening: what the policy must be shown at reset.
        variables: of the server's process.
        data: writes files that the server reads into a folder; which variables name them.
        extra: packages that the server needs and does not name, and versions that fit together.
        without: packages that it names and that no episode needs.
    """

    package: str
    reward: float | tuple[float, float] | None
    openenv: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[tuple[str, Arguments], ...] = ()
    shows: tuple[str, ...] = ()
    answer: str | None = None
    opening: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    data: Callable[[Path], Mapping[str, str]] | None = None
    extra: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def settings(self) -> str:
        """Its keys of ``env.openenv``, with values as a command line has them."""
        return " ".join(f"{key}={_written(value)}" for key, value in self.openenv.items())


def _written(value: Any) -> str:
    """A value as Hydra's command line takes it, in quotes where a shell needs them."""
    text = _plain(value)
    return f"'{text}'" if set(text) & set("{}[ ") else text


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) and not re.fullmatch(r"[A-Za-z]\w*", value) else str(value)


def acts(tool: str, name: str, *values: Any) -> tuple[tuple[str, Arguments], ...]:
    """Calls of the one tool of a server that takes an action with one field."""
    return tuple((tool, {name: value}) for value in values)


UP, DOWN, LEFT, RIGHT = range(4)
"""Actions of the maze."""
THROUGH_THE_MAZE = (
    RIGHT, RIGHT, DOWN, DOWN, LEFT, LEFT, DOWN, DOWN, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT, DOWN, RIGHT, RIGHT, DOWN, DOWN,
)  # fmt: skip
TOWER = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
"""Moves of a tower of three discs."""

COLLECTION: Mapping[str, Played] = {
    "echo": Played(
        "echo_env",
        None,
        {"reward": "sum", "shown_metadata": ["message"]},
        (("echo_message", {"message": "hello"}), ("echo_with_length", {"message": "hello"})),
        ("hello", '"length": 5'),
        opening="Echo environment ready!",
    ),
    "finqa": Played(
        "finqa_env",
        1.0,
        {"finish_tool": "submit_answer", "shown_metadata": ["question", "company"]},
        (
            ("get_descriptions", {"company_name": "acme"}),
            (
                "sql_query",
                {
                    "company_name": "acme",
                    "table_name": "income",
                    "query": "SELECT amount FROM income WHERE item = 'sales'",
                },
            ),
        ),
        ("income", "120"),
        "120",
        "How much did acme sell?",
        data=finqa,
    ),
    "agent_world_model": Played(
        "agent_world_model_env",
        1.0,
        {
            "verify_tool": "verify",
            "final_calls": {"verify": {"verifier_mode": "code", "final_answer": "episode:final_answer"}},
            "reset_kwargs": {"scenario": "notebook", "task_idx": 0},
        },
        (("add_note", {"text": "milk"}), ("list_notes", {})),
        ("milk", "milk"),
        "1",
        "Note that milk is needed",
        data=agent_world_model,
    ),
    "reasoning_gym": Played(
        "reasoning_gym_env",
        1.0,
        {
            "finish_tool": "ReasoningGymAction",
            "reset_kwargs": {"dataset_name": "leg_counting", "seed": 7, "size": 1},
        },
        answer="188",
        opening="legs",
    ),
    "connect4": Played(
        "connect4_env",
        1.0,
        {"shown_metadata": ["next_player"]},
        acts("Connect4Action", "column", 0, 1, 0, 1, 0, 1, 0),
        opening='"next_player": 1',
    ),
    "maze": Played(
        "maze_env",
        9.15,
        {"reward": "sum", "shown_metadata": ["maze", "exit_cell"]},
        acts("MazeAction", "action", *THROUGH_THE_MAZE),
        opening='"exit_cell": [7, 7]',
    ),
    "grid_world": Played(
        "grid_world_env",
        0.3,
        {"reward": "sum"},
        acts("GridWorldAction", "action", *4 * ["DOWN"], *4 * ["RIGHT"]),
        opening="Goal is at [4, 4]",
    ),
    "textarena": Played(
        "textarena_env",
        1.0,
        {},
        acts("TextArenaAction", "message", *TOWER),
        opening="disk",
        variables={"TEXTARENA_ENV_ID": "TowerOfHanoi-v0", "TEXTARENA_DOWNLOAD_NLTK": "0"},
    ),
    "openspiel": Played(
        "openspiel_env",
        1.0,
        {},
        acts("OpenSpielAction", "action_id", 4, 2, 6),
        opening="legal_actions",
        variables={"OPENSPIEL_GAME": "tic_tac_toe", "OPENSPIEL_OPPONENT_POLICY": "first"},
        extra=("open_spiel",),
    ),
    "coding": Played(
        "coding_env",
        0.1,
        {"reward": "last"},
        acts("CodeAction", "code", "x = 6 * 7", "print(x)"),
        ("", "42"),
    ),
    "repl": Played(
        "repl_env",
        1.0,
        {
            "finish_tool": "final",
            "final_calls": {"final": {"is_final": True, "final_answer": "episode:final_answer"}},
            "reset_kwargs": {"context": "task:env_variables.TEXT", "expected_answer": "12"},
        },
        acts("REPLAction", "code", "print(len(context))"),
        ("12",),
        "12",
        "Context loaded (12 chars)",
    ),
    "chess": Played(
        "chess_env",
        (-0.1, 0.0),
        {"reward": "sum"},
        acts("ChessAction", "move", "e2e4"),
        opening="legal_moves",
    ),
    "wildfire": Played(
        "wildfire_env",
        (-100.0, 100.0),
        {"reward": "sum"},
        (("WildfireAction", {"action": "wait"}), ("WildfireAction", {"action": "water", "x": 0, "y": 0})),
        opening="humidity",
    ),
    "dm_control": Played(
        "dm_control_env",
        (0.0, 3.0),
        {"reward": "sum", "reset_kwargs": {"domain_name": "cartpole", "task_name": "balance", "seed": 1}},
        acts("DMControlAction", "values", [0.1], [-0.1], [0.0, 0.0], [0.0]),
        ("velocity", "velocity", "doesn't match", "velocity"),
        opening="position",
        extra=("mujoco<4",),
    ),
    "atari": Played(
        "atari_env",
        (-21.0, 21.0),
        {"reward": "sum"},
        acts("AtariAction", "action_id", 0, 2, 99),
        ('"screen": "[image 1]"', '"screen": "[image 1]"', "Invalid action_id"),
        opening='"screen": "[image 1]"',
    ),
    "browsergym": Played(
        "browsergym_env",
        1.0,
        {
            "hidden_fields": ["screenshot", "axtree_txt", "pruned_html"],
            "tool_descriptions": {
                "BrowserGymAction": 'Acts on the page. action_str is one call, such as click("12") or fill("12", "a '
                'text"), where 12 is the number in brackets before an element.'
            },
            "reset_kwargs": {"seed": 7},
        },
        acts("BrowserGymAction", "action_str", 'click("99")', 'click("13")'),
        ('"last_action_error": true', "Click Test Task"),
        opening='"goal": "Click button ONE."',
        variables={
            "BROWSERGYM_TASK_NAME": "click-test-2",
            "BROWSERGYM_VIEWPORT_WIDTH": "332",
            "BROWSERGYM_VIEWPORT_HEIGHT": "214",
        },
        data=miniwob,
        extra=("openenv==0.3.1", "miniwob==1.1.0"),
    ),
    "carla": Played(
        "carla_env",
        (-100.0, 100.0),
        {"reward": "sum"},
        (("CarlaAction", {"action_type": "observe"}), ("CarlaAction", {"action_type": "emergency_stop"})),
        opening="scene_description",
        variables={"CARLA_MODE": "mock"},
    ),
    "tbench2": Played(
        "tbench2_env",
        1.0,
        {
            "finish_tool": "evaluate",
            "final_calls": {"evaluate": {"action_type": "evaluate"}},
            "reset_kwargs": {"task_id": "greeting"},
        },
        (("Tbench2Action", {"action_type": "exec", "command": "echo hello > greeting.txt"}),),
        opening="Write hello",
        data=terminal_bench,
        without=("docker",),
    ),
}
