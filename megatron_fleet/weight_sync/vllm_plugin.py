"""What vLLM loads through the ``vllm.general_plugins`` entry point, in every process of an engine.

Registering in the parent alone would be lost, because engine processes are spawned, not forked. Nothing heavy is
imported until vLLM asks for an engine's half.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from megatron_fleet.weight_sync.registry import TRANSPORTS, engine_backend

DIE_WITH_PARENT = "MEGATRON_FLEET_DIE_WITH_PARENT"
"""Environment variable that a run sets for its engines, see ``register``."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the engines' halves of all transports known to vLLM. Idempotent, as the plugin rules ask.

    vLLM's EngineCore does not notice when the process that started it is killed, and would keep its memory for ever.
    This is the first code of ours that runs in it, so here it is tied to its parent.
    """
    if DIE_WITH_PARENT in os.environ and multiprocessing.parent_process() is not None:
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for name, halves in TRANSPORTS.items():
        if engine_backend(name) not in Factory._registry:
            module, _, attribute = halves.engine.partition(":")
            Factory.register_engine(engine_backend(name), module, attribute)


def _die_with_parent() -> None:
    process = multiprocessing.parent_process()
    assert process is not None  # vLLM starts it with multiprocessing
    parent = process.pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
