"""Settings of an episode."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megatron_fleet.agents.prompts import Prompts, load_prompts
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig, EnvConfig, RolloutConfig

MIN_TURN_TOKENS = 16
"""A turn starts only if at least this many tokens (or a full turn, if shorter) still fit into the context."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Limits and prompts of an episode, defined by the configuration keys of the same names.

    Attributes:
        routing: record the experts of each token.
        images: show images to a vision model. Not in training, which computes log-probs from token ids alone.
    """

    max_context: int
    max_tokens_per_turn: int
    max_turns: int
    max_no_action_turns: int
    temperature: float
    episode_timeout_s: float
    verify_timeout_s: float
    close_timeout_s: float
    agent: AgentConfig
    prompts: Prompts
    routing: bool = False
    images: bool = True

    @classmethod
    def from_config(cls, rollout: RolloutConfig, env: EnvConfig, agent: AgentConfig) -> EpisodeSettings:
        """Build the settings from the configuration. Raises UserError when the prompts file cannot be used."""
        return cls(
            max_context=rollout.max_context,
            max_tokens_per_turn=rollout.sampling.max_tokens_per_turn,
            max_turns=rollout.sampling.max_turns,
            max_no_action_turns=rollout.max_no_action_turns,
            temperature=rollout.sampling.temperature,
            episode_timeout_s=rollout.episode_timeout_s,
            verify_timeout_s=env.verify_timeout_s,
            close_timeout_s=env.close_timeout_s,
            agent=agent,
            prompts=load_prompts(agent.prompts),
            routing=rollout.engine.routing_replay,
        )

    def fits(self, used: int) -> bool:
        """Return whether a turn fits into the context after ``used`` tokens."""
        return self.max_context - used >= min(MIN_TURN_TOKENS, self.max_tokens_per_turn)

    def turn_tokens(self, used: int) -> int:
        """Return the most tokens of a turn after ``used`` tokens."""
        return min(self.max_tokens_per_turn, self.max_context - used)

    def truncated(self, turn_tokens: int) -> Outcome:
        """Return the outcome of an episode whose turn was cut off after ``turn_tokens``."""
        return Outcome.CONTEXT_OVERFLOW if turn_tokens < self.max_tokens_per_turn else Outcome.GENERATION_TRUNCATED

    def status(self, used: int | None, turns: int) -> str:
        """Describe the use of context and turns to the policy. ``used``: tokens; ``None``: unknown."""
        known = "unknown" if used is None else used
        return f"Context: {known}/{self.max_context} tokens, turn {turns}/{self.max_turns}"


def stable_seed(*parts: int | str) -> int:
    """Derive a seed in ``[0, 2**63)`` from ``parts``; the same in every process and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
