"""Plugin that vLLM loads through the ``vllm.general_plugins`` entry point in every process of an engine.

Registering in the parent alone is not enough, because engine processes are spawned, not forked. Nothing heavy is
imported until vLLM requests a transport's engine side.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import threading

from tqdm import tqdm

from megatron_fleet.config.names import is_path
from megatron_fleet.platform.processes import write_stacks_on_signal
from megatron_fleet.weight_sync.registry import TRANSPORTS, engine_backend, transport_classes

DIE_WITH_PARENT = "MEGATRON_FLEET_DIE_WITH_PARENT"
"""Environment variable that a run sets for its engines, see ``register``."""
TRANSPORT = "MEGATRON_FLEET_TRANSPORT"
"""Environment variable with the name or path of the run's transport."""
MIXER = "MEGATRON_FLEET_MIXER"
"""Environment variable that engines have whose model has layers of its family (`models.model.Mixer`): the module that
adapts vLLM on CPU to them. Its imports take a second."""
LOADER = "MEGATRON_FLEET_LOADER"
"""Environment variable that engines have which start with a loader of ours: its module."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register the engine side of the built-in transports, and of the run's own, and a loader with vLLM. Idempotent.

    vLLM's EngineCore does not notice when its parent process is killed, and would keep its memory forever. This is the
    first code of ours that runs in it, so it is tied to its parent here.
    """
    if multiprocessing.parent_process() is not None:
        gc.freeze()  # what was imported need not be looked through while the model is loaded
        gc.enable()  # see `children_import_uncollected`
        if DIE_WITH_PARENT in os.environ:
            _die_with_parent()
            write_stacks_on_signal()
            # tqdm's default lock is a semaphore in /dev/shm, which leaks when the process is killed.
            tqdm.set_lock(threading.RLock())
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    own = os.environ.get(TRANSPORT, "")
    for name in (*TRANSPORTS, *([own] if is_path(own) else [])):
        engine = transport_classes(name).engine
        if engine is not None and engine_backend(name) not in Factory._registry:
            module, _, attribute = engine.partition(":")
            Factory.register_engine(engine_backend(name), module, attribute)
    if MIXER in os.environ:
        _adapt_on_cpu(os.environ[MIXER])
    if LOADER in os.environ:
        importlib.import_module(os.environ[LOADER])


def _adapt_on_cpu(module: str) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        importlib.import_module(module).install()


def _die_with_parent() -> None:
    process = multiprocessing.parent_process()
    assert process is not None  # vLLM starts it with multiprocessing
    parent = process.pid
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
