"""Episodes of a step: how many, how long, how much of them is sampled, how long tools take.

Lengths are log-normal, as those of agents' episodes are, cut off at ``rollout.max_context``. What a configuration does
not say (the mean, the spread, the tools' latency) is an assumption here, which the command line can replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig, RolloutConfig

MEAN_SHARE = 0.3
"""Mean length of an episode, as a share of ``rollout.max_context``: the users' episodes end having used 0.28 to 0.7."""
SAMPLED_SHARE = 0.4
"""Share of an episode's tokens that the policy sampled; the rest is prompt, tools and their results."""
SIGMA = 0.7
"""Standard deviation of the logarithm of an episode's length."""
TURNS = 20
TOOL_S = 2.0
START_S = 10.0
"""Seconds until an environment is ready for its episode."""
ACCEPTED: Mapping[str, float] = {"none": 0.0, "ngram": 0.15, "mtp": 0.6}
"""Share of a drafter's tokens that are accepted (``engine/draft_acceptance_rate``), a guess: n-grams repeat tool calls
and names, and find nothing in most steps; prediction layers are trained to predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Episodes of one step.

    Attributes:
        episodes: number of them.
        mean: mean number of tokens.
        longest: where lengths are cut off.
        sampled: share of the tokens that the policy sampled.
        sigma: standard deviation of the logarithm of lengths.
        turns: mean number of turns.
        tool_s: mean seconds of a turn's tool calls.
        start_s: seconds until an environment is ready.
        accepted: share of a drafter's tokens that are accepted; 0 without one.
    """

    episodes: int
    mean: float
    longest: int
    sampled: float = SAMPLED_SHARE
    sigma: float = SIGMA
    turns: float = TURNS
    tool_s: float = TOOL_S
    start_s: float = START_S
    accepted: float = 0.0

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        env: EnvConfig,
        mean: float | None = None,
        sampled: float | None = None,
        turns: float | None = None,
        tool_s: float | None = None,
        accepted: float | None = None,
    ) -> Workload:
        """Return the workload of a configuration; ``None``: an assumption of this module.

        Raises:
            UserError: a number is out of its range, or of a drafter that there is not.
        """
        drafter = rollout.engine.speculative.method
        if accepted is not None and drafter == "none":
            raise UserError(
                f"--accepted {accepted:g} needs a drafter, but rollout.engine.speculative.method=none; set that, or "
                f"leave --accepted out."
            )
        accepted = ACCEPTED[drafter] if accepted is None else accepted
        mean = MEAN_SHARE * rollout.max_context if mean is None else mean
        sampled = SAMPLED_SHARE if sampled is None else sampled
        turns = float(min(TURNS, rollout.sampling.max_turns)) if turns is None else turns
        for flag, value, low, high in (
            ("--tokens", mean, 1, rollout.max_context),
            ("--sampled", sampled, 0.001, 1),
            ("--turns", turns, 1, rollout.sampling.max_turns),
            ("--tool-seconds", TOOL_S if tool_s is None else tool_s, 0, 86400),
            ("--accepted", accepted, 0, 1),
        ):
            if not low <= value <= high:
                raise UserError(f"{flag} {value:g} is out of its range; give a number from {low:g} to {high:g}.")
        return cls(
            episodes=rollout.prompts_per_step * rollout.samples_per_prompt,
            mean=mean,
            longest=rollout.max_context,
            sampled=sampled,
            turns=turns,
            tool_s=TOOL_S if tool_s is None else tool_s,
            start_s=START_S if env.about.hosted else 0.0,
            accepted=accepted,
        )

    @property
    def tokens(self) -> float:
        """Tokens of all episodes."""
        return self.episodes * self.mean

    def lengths(self, count: int) -> np.ndarray:
        """Return quantiles of the distribution, float64 ``[count]``, ascending, in whole tokens, with the mean that is
        asked for, up to rounding.
        """
        return _lengths(self.mean, self.longest, self.sigma, count)

    def pairs(self) -> float:
        """Return the mean number of attended query-key pairs of an episode."""
        lengths = self.lengths(200)
        return float((lengths * (lengths + 1) / 2).mean())

    def assumptions(self) -> list[str]:
        """Return lines that describe the episodes, with the flags that change them."""
        return [
            f"episodes of {self.mean:,.0f} tokens on average (--tokens), log-normal with sigma {self.sigma:g}, at most "
            f"{self.longest:,}; {self.sampled:.0%} of them sampled (--sampled)",
            f"{self.turns:g} turns (--turns) whose tools take {self.tool_s:g} s each (--tool-seconds); an environment "
            f"is ready after {self.start_s:g} s",
        ]

    @property
    def waiting(self) -> float:
        """Seconds that an episode spends outside of the engine."""
        return self.start_s + self.turns * self.tool_s


@lru_cache(maxsize=256)
def _lengths(mean: float, longest: int, sigma: float, count: int) -> np.ndarray:
    inverse = NormalDist().inv_cdf
    normal = np.array([inverse((i + 0.5) / count) for i in range(count)])
    low, high = 0.0, 60.0
    for _ in range(50):  # the location at which the cut-off distribution has the mean
        middle = (low + high) / 2
        if np.minimum(np.exp(middle + sigma * normal), longest).mean() < mean:
            low = middle
        else:
            high = middle
    # NumPy's exp differs from CPU to CPU in the last bits; rounded, equal seeds give equal simulations everywhere.
    lengths = np.maximum(np.rint(np.minimum(np.exp(high + sigma * normal), longest)), 1.0)
    lengths.flags.writeable = False  # kept for the next one who asks
    return lengths
