"""Registry of transports by name. Nothing here imports torch or vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, imported, load
from megatron_fleet.config.names import is_path
from megatron_fleet.weight_sync.base import Sender, Transport

if TYPE_CHECKING:
    import torch

    from megatron_fleet.platform.communicator import Communicator
    from megatron_fleet.weights.exchange import WeightSource
    from megatron_fleet.weights.hf_model import HfModel


@dataclass(frozen=True, slots=True)
class TransportClasses:
    """The classes of a transport, as ``module:Class``; each is imported only where it is used.

    Attributes:
        controller: a `Transport`, constructed with ``options``.
        sender: a `Sender`, constructed with ``source``, ``world``, ``device`` and the engine's format; ``None``: ranks
            cannot send by it.
        engine: a ``WeightTransferEngine`` of vLLM; ``None``: vLLM cannot receive by it.
    """

    controller: str
    sender: str | None = None
    engine: str | None = None


class TransportFactory(Protocol):
    def __call__(self, /) -> TransportClasses:
        """Return the classes of the transport."""
        ...


OWN_TRANSPORT = Interface(
    "rollout.engine.transport", "weight sync transport", TransportFactory, "controller, trainer ranks, engines"
)


def _ours(package: str, controller: str, sender: str, engine: str) -> TransportClasses:
    base = f"megatron_fleet.weight_sync.{package}"
    return TransportClasses(f"{base}.controller:{controller}", f"{base}.sender:{sender}", f"{base}.engine:{engine}")


TRANSPORTS: dict[str, TransportClasses] = {
    "shm": _ours("shm", "ShmTransport", "ShmSender", "ShmEngine"),
    "cuda_ipc": _ours("cuda_ipc", "CudaIpcTransport", "CudaIpcSender", "CudaIpcEngine"),
    "nccl": _ours("broadcast", "NcclTransport", "NcclSender", "NcclEngine"),
    "gloo": _ours("broadcast", "GlooTransport", "GlooSender", "GlooEngine"),
    "disk": _ours("disk", "DiskTransport", "DiskSender", "DiskEngine"),
    "message": TransportClasses("megatron_fleet.weight_sync.message.controller:MessageTransport"),
}


def make_transport(name: str, options: Mapping[str, Any] | None = None) -> Transport:
    """Build the controller side of a transport.

    Args:
        options: ``nccl`` and ``gloo`` need ``address`` (of the host of trainer rank 0, as engines reach it), ``disk``
            needs ``url`` (a folder that trainer and engines can access, ``s3://…`` or ``gs://…``).

    Raises:
        UserError: there is no such transport, or an option is missing.
    """
    transport: Transport = imported(transport_classes(name).controller)(options or {})
    return transport


def make_sender(
    name: str,
    source: WeightSource,
    world: Communicator,
    device: torch.device,
    engine_model: HfModel | None,
) -> Sender:
    """Build the trainer side of a transport; collective over ``world``.

    Args:
        source: the trainer's weights.
        device: device of the weights.
        engine_model: the model as engines hold it, see `engine_model.open_engine_model`. Tensors quantised there are
            sent quantised; ``None``: nothing is quantised.

    Raises:
        UserError: there is no such transport.
    """
    from megatron_fleet.weight_sync.engine_format import EngineFormat

    path = transport_classes(name).sender
    assert path is not None, f"a rule of the configuration refuses {name} for ranks"
    sender: Sender = imported(path)(source, world, device, EngineFormat(engine_model))
    return sender


def engine_backend(name: str) -> str:
    """Name under which vLLM registers the engine side: ``weight_transfer_config={"backend": ...}``."""
    return f"fleet_{name}"


def transport_classes(name: str) -> TransportClasses:
    """Look up a transport by name, or a user-defined one by path.

    Raises:
        UserError: there is no such transport.
    """
    if is_path(name):
        own = load(OWN_TRANSPORT, name)()
        if not isinstance(own, TransportClasses):
            raise UserError(
                f"rollout.engine.transport={name} returned {type(own).__name__}; it must return TransportClasses."
            )
        return own
    if name not in TRANSPORTS:
        raise UserError(
            f"rollout.engine.transport={name}: there is no such transport; choose auto, {', '.join(TRANSPORTS)} or "
            f"package.module:name."
        )
    return TRANSPORTS[name]
