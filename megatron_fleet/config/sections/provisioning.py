"""Section `env.provisioning`: starting environments across all workers, and the circuit breaker."""

from __future__ import annotations

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class ProvisioningConfig(Section):
    lookahead: int = Field(
        4,
        ge=0,
        le=100_000,
        description="Environments that are reset before a place for their episode is free; over all workers.",
    )
    starts_at_once: int = Field(
        8,
        ge=1,
        description="Resets under way per environment key at first, over all workers; then what the server bears.",
    )
    max_starts_at_once: int = Field(256, ge=1, description="The most that may ever be under way, likewise.")
    quick_s: float = Field(1.0, gt=0, description="Resets faster than this are no sign of a queue at the server.")
    wait_s: float = Field(600, gt=0, description="Longest wait for an environment: the queue, resets and retries.")
    breaker_window: int = Field(
        20, ge=1, description="Newest episodes of an environment key that a worker's breaker looks at."
    )
    breaker_threshold: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of them without a reward, by the environment's fault, that opens the breaker.",
    )
    breaker_pause_s: float = Field(
        60, gt=0, description="Seconds without new episodes, then one is tried; each failed try doubles the pause."
    )

    def share(self, worker: int, workers: int) -> ProvisioningConfig:
        """Return the limits of worker number ``worker`` of ``workers``; the shares add up to the totals."""

        def part(total: int) -> int:
            return total // workers + (worker < total % workers)

        totals = ("lookahead", "starts_at_once", "max_starts_at_once")
        return self.model_copy(update={name: part(getattr(self, name)) for name in totals})
