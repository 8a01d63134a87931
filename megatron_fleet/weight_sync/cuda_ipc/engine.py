"""Engine side of the ``cuda_ipc`` transport, in vLLM's workers only: vLLM's own, plus a check for missing tensors."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

from megatron_fleet.weight_sync.reloading import WithOwnExperts, begin_reload, check_names, restore_passthrough


class CudaIpcEngine(IPCWeightTransferEngine):
    """Loads chunks of the ranks' buffer as they arrive."""

    model: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._received: set[str] = set()

    def start_weight_update(self) -> None:
        self._received.clear()
        self._loading = WithOwnExperts(self.model)
        begin_reload(self)

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        model = self.model
        self.model = self._loading  # all that vLLM does with it here is to load the tensors of the chunk
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model
        self._received.update(update_info.names)

    def finish_weight_update(self) -> None:
        """Finalise the layers. Raises ValueError if the update lacked tensors of the engine's folder."""
        check_names(self, self._received)
        restore_passthrough(self)
        super().finish_weight_update()
