"""Section `env`: environments and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_fleet.config.extension import Open
from megatron_fleet.config.sections.base import Section
from megatron_fleet.config.sections.faults import FaultRatesConfig
from megatron_fleet.config.sections.fleet import FleetConfig
from megatron_fleet.config.sections.openenv import OpenEnvConfig
from megatron_fleet.config.sections.provisioning import ProvisioningConfig

ENVIRONMENT_NAMES = ("embedded", "openenv", "fleet")


class EnvConfig(Section):
    kind: Annotated[str, Open(ENVIRONMENT_NAMES)] = Field(
        "embedded",
        description="embedded: the fleet in this package, started for the run; openenv: a server at `url`; fleet: "
        "Fleet's hosted environments (FLEET_API_KEY); package.module:name: a class of your own (examples/).",
    )
    sandbox: Literal["full", "available"] = Field(
        "available",
        description="Of the verifiers of kind=embedded. full: refuse machines without user namespaces or Landlock; "
        "available: warn of what is missing. Without seccomp none starts.",
    )
    url: str | None = Field(
        None, description="Base URL of the OpenEnv server; for kind=openenv, and for a class of your own that reads it."
    )
    start_timeout_s: float = Field(60, gt=0, description="Deadline of the environment server's start.")
    make_timeout_s: float = Field(30, gt=0, description="Deadline of connecting to, or making, one environment.")
    reset_timeout_s: float = Field(30, gt=0, description="Deadline of one reset.")
    step_timeout_s: float = Field(30, gt=0, description="Deadline of one tool call.")
    verify_timeout_s: float = Field(30, gt=0, description="Deadline of one verification.")
    close_timeout_s: float = Field(5, gt=0, description="Deadline of giving one environment back.")
    outage_limit_s: float = Field(
        1800,
        ge=0,
        description="While no reward of a step is known, the run waits and plays the step again; after this long it "
        "stops, resumable. The run's own server, if it keeps dying, is restarted for the same time.",
    )
    openenv: OpenEnvConfig = OpenEnvConfig()
    fleet: FleetConfig = FleetConfig()
    faults: FaultRatesConfig = FaultRatesConfig()
    provisioning: ProvisioningConfig = ProvisioningConfig()
