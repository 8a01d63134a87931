"""``fleet_shm``: weights reach vLLM through shared memory.

The trainer writes HF-named tensors into memory of its own and sends only their names and shapes, once. Every vLLM
worker maps the same memory, so nothing is copied on the way, whatever the engine's tensor parallelism.

vLLM finds the backend through the ``vllm.general_plugins`` entry point (``register``), which it loads in every process
of an engine; registering in the parent alone would be lost, because engine processes are spawned, not forked.
Nothing heavy is imported until vLLM asks for the engine class.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

BACKEND = "fleet_shm"

DIE_WITH_PARENT = "MEGATRON_FLEET_DIE_WITH_PARENT"
"""Environment variable that a run sets for its engines, see ``register``."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the backend known to vLLM. Idempotent, as the plugin rules ask.

    vLLM's EngineCore does not notice when the process that started it is killed, and would keep its memory for ever.
    This is the first code of ours that runs in it, so here it is tied to its parent.
    """
    if DIE_WITH_PARENT in os.environ and multiprocessing.parent_process() is not None:
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "megatron_fleet.weight_sync.vllm_shm_engine", "ShmWeightTransferEngine")


def _die_with_parent() -> None:
    process = multiprocessing.parent_process()
    assert process is not None  # vLLM starts it with multiprocessing
    parent = process.pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
