"""What vLLM loads through the ``vllm.general_plugins`` entry point, in every process of an engine.

Registering in the parent alone would be lost, because engine processes are spawned, not forked. Nothing heavy is
imported until vLLM asks for an engine's half.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading

from tqdm import tqdm

from megatron_fleet.config.extension import is_path
from megatron_fleet.platform import stacks
from megatron_fleet.weight_sync.registry import TRANSPORTS, engine_backend, halves

DIE_WITH_PARENT = "MEGATRON_FLEET_DIE_WITH_PARENT"
"""Environment variable that a run sets for its engines, see ``register``."""
TRANSPORT = "MEGATRON_FLEET_TRANSPORT"
"""The same, for the transport whose half they have."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the engines' halves of our transports, and of the run's own, known to vLLM. Idempotent.

    vLLM's EngineCore does not notice when the process that started it is killed, and would keep its memory for ever.
    This is the first code of ours that runs in it, so here it is tied to its parent.
    """
    if DIE_WITH_PARENT in os.environ and multiprocessing.parent_process() is not None:
        _die_with_parent()
        stacks.write_on_signal()
        # Its own lock is a semaphore in /dev/shm, which stays there when the process is killed.
        tqdm.set_lock(threading.RLock())
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    own = os.environ.get(TRANSPORT, "")
    for name in (*TRANSPORTS, *([own] if is_path(own) else [])):
        if engine_backend(name) not in Factory._registry:
            module, _, attribute = halves(name).engine.partition(":")
            Factory.register_engine(engine_backend(name), module, attribute)


def _die_with_parent() -> None:
    process = multiprocessing.parent_process()
    assert process is not None  # vLLM starts it with multiprocessing
    parent = process.pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
