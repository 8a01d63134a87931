"""Section `agent`: prompts, and tools in addition to the environment's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_fleet.config.names import NameOrPath
from megatron_fleet.config.sections.base import Rule, Section

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


AGENT_NAMES = ("tools",)


class AgentConfig(Section):
    kind: Annotated[str, NameOrPath(AGENT_NAMES)] = Field(
        "tools", description="What plays an episode: turns of tool calls (agents/episode.py), or an agent of your own."
    )
    prompts: str | None = Field(
        None, description="YAML file whose texts replace those of megatron_fleet/agents/prompts.yaml, key by key."
    )
    finish: Literal["done_tag", "tool"] = Field(
        "done_tag",
        description="How the policy gives its final answer: as text before <done>, or by the tool submit_final_answer.",
    )
    max_tool_output_chars: int = Field(4000, ge=100, description="Length in characters at which tool results are cut.")
    paging: bool = Field(
        False,
        description="Offer view_tool_output and search_tool_output, which show the rest of a result that was cut.",
    )
    context_tools: bool = Field(
        False,
        description="Offer check_context, manage_context and search_history; manage_context removes old turns from the "
        "prompt, never the task.",
    )
    context_status: bool = Field(
        False, description="End what the policy is shown after a turn with [Context: a/b tokens, turn i/N]."
    )
    repeat_feedback: int | None = Field(
        3, ge=2, description="Warn the policy after this many identical consecutive tool calls; null: never."
    )
    step_wise: bool = Field(
        False,
        description="Each turn is prompted and trained without the thinking of earlier turns, as a training sequence "
        "of its own; a trajectory weighs the same as without.",
    )


def _step_wise_has_thinking(c: Config) -> str | None:
    if not c.agent.step_wise or c.rollout.thinking:
        return None
    return (
        "agent.step_wise=true leaves out the thinking of earlier turns, but with rollout.thinking=false there is none; "
        "set agent.step_wise=false or rollout.thinking=true."
    )


RULES: tuple[Rule, ...] = (_step_wise_has_thinking,)
