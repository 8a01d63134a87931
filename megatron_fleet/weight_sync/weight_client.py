"""The control side of engines, as publishers see it."""

from __future__ import annotations

from typing import Any, Protocol


class WeightClient(Protocol):
    """All engines at once; structurally vLLM's ``VLLMWeightSyncClient``. Synchronous, rank 0 only."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None:
        """Generation stops until ``finish_weight_update``."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Returns when every engine has the whole update and stamps its samples with ``weight_version``."""
        ...


class VersionedClient:
    """Adds the version that vLLM's own trainer engines leave out when they finish an update.

    Attributes:
        version: of the update under way.
    """

    def __init__(self, client: WeightClient | None) -> None:
        self._client = client
        self.version: int | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engines.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._engines.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engines.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engines.finish_weight_update(weight_version or str(self.version))

    @property
    def _engines(self) -> WeightClient:
        assert self._client is not None, "rank 0 publishes and needs a client"
        return self._client
