"""Section `cluster`: hosts, trainer ranks and their timeouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_fleet.config.sections.base import Section


class ClusterConfig(Section):
    ranks: Literal["local", "external"] = Field(
        "local",
        description="local: `mfleet train` starts the ranks, on this machine or through cluster.nodes; external: "
        "torchrun or srun does, and MFLEET_CONTROLLER and MFLEET_TOKEN tell them where this process listens.",
    )
    nodes: int = Field(
        0, ge=0, description="Hosts that run `mfleet node`, this one included if it does; 0: all is on this machine."
    )
    join_timeout_s: float = Field(600, gt=0, description="Deadline for all hosts, and for all ranks, to connect.")
    collective_timeout_s: float = Field(
        1800,
        gt=0,
        description="A collective between ranks that takes longer ends the ranks; none is pending while they wait for "
        "the controller.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a failed trainer allowed within an hour; each resumes from the last checkpoint.",
    )
