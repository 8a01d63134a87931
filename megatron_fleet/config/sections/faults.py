"""Section `env.faults`: latency and faults injected by the embedded fleet, for training and for tests."""

from __future__ import annotations

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class FaultRatesConfig(Section):
    slow_rate: float = Field(0, ge=0, le=1, description="Share of tool calls that take `slow_s` longer.")
    slow_s: float = Field(1.0, gt=0, description="Seconds that a slow tool call waits.")
    latency_median_s: float = Field(0, ge=0, description="Median seconds that every tool call waits, log-normal.")
    latency_sigma: float = Field(
        1.0, ge=0, description="Standard deviation of the logarithm of these waits; 1: one in 100 is 10 × as long."
    )
    hang_rate: float = Field(0, ge=0, le=1, description="Share of episodes in which a tool call never answers.")
    malformed_rate: float = Field(0, ge=0, le=1, description="Share of tool calls whose answer is damaged.")
    dead_session_rate: float = Field(0, ge=0, le=1, description="Share of episodes whose session dies under a call.")
    verifier_failure_rate: float = Field(0, ge=0, le=1, description="Share of verifications without a verdict.")
