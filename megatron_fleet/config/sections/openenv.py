"""Section `env.openenv`: tools, termination and reward of an environment behind an OpenEnv server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section

Value = str | int | float | bool


class OpenEnvConfig(Section):
    interface: Literal["auto", "mcp", "action"] = Field(
        "auto",
        description="mcp: the server lists tools and calls them; action: its action is the one tool; auto: mcp if it "
        "lists tools when asked, or if its action calls a tool. A server with a very lenient action takes the question "
        "for an action.",
    )
    action_tool: str | None = Field(None, description="Name of the one tool; null: the title of the action's schema.")
    finish_tool: str | None = Field(
        None, description="Tool that ends an episode, called with the final answer and hidden from the policy."
    )
    verify_tool: str | None = Field(
        None, description="Tool that scores the episode, called at its end and hidden from the policy."
    )
    final_calls: dict[str, dict[str, Value]] = Field(
        {},
        description="Arguments of finish_tool and verify_tool, by their names; without: the final answer where a "
        "listed tool has a place for it. `episode:final_answer` stands for it, `task:FIELD` as in reset_kwargs. A name "
        "here need not be a tool that the server lists; with interface=action it names an action, its fields.",
    )
    reward: Literal["finish", "last", "sum"] = Field(
        "finish",
        description="finish: of verify_tool, finish_tool or the step that ended the episode; last: the last one given; "
        "sum: of all steps.",
    )
    unfinished_reward: float | None = Field(
        0.0,
        description="Of an episode in which the policy did not act, or stopped before the environment ended it: the "
        "environment's lowest. null: unknown, which lets a policy dodge a negative reward.",
    )
    reset_kwargs: dict[str, Value | dict[str, Value]] = Field(
        {},
        description="More arguments of reset; `task:data_key` or `task:env_variables.NAME` stand for the task's value.",
    )
    shown_metadata: tuple[str, ...] = Field(
        (),
        description="Fields of the reset observation's metadata that the policy sees, such as question. The others, "
        "which may hold the solution, it never sees.",
    )
