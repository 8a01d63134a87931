"""Processes on machines: the trainer's ranks and how long they are waited for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class Cluster(Section):
    ranks: Literal["local", "external"] = Field(
        "local",
        description="local: `mfleet train` starts the ranks on this machine; external: torchrun, srun or `mfleet node` "
        "does, and MFLEET_CONTROLLER and MFLEET_TOKEN tell them where this process listens.",
    )
    join_timeout_s: float = Field(600, gt=0, description="Deadline for all ranks to connect.")
    collective_timeout_s: float = Field(
        1800, gt=0, description="A collective of the ranks that takes longer ends them; no rank waits in one for verbs."
    )
    max_restarts: int = Field(
        3, ge=0, description="Restarts of a trainer that died, within an hour; each goes back to the last checkpoint."
    )
