"""Section `env.fleet`: Fleet's hosted environments."""

from __future__ import annotations

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class FleetConfig(Section):
    package: str | None = Field(
        None, description="Folder that fleet-ai/OpenEnv was installed into with `pip install --no-deps --target`."
    )
    ttl_s: int = Field(1800, ge=1, description="Seconds after which Fleet deletes an instance that nobody deleted.")
    settle_s: float = Field(8.0, ge=0, description="Seconds between the making of an instance and its first request.")
    partial_reward: bool = Field(False, description="Score a failed verifier by the share of its checks that passed.")
    ca_file: str | None = Field(
        None,
        description="PEM file with the authorities of Fleet's hosts; reading all of the world's costs 30 ms per call.",
    )
