"""A vLLM engine in a process of its own, obeying JSON lines.

``["rpc", method, arguments…]``, ``["transport", name]``, ``["generate", prompts, tokens]``, ``["score", sequences]``
(log-probs of all tokens but the first), ``["tower"]`` and ``["lose tower"]`` (of a model with vision). The answer to
each is ``["done", result]`` or ``["failed", message]``.

Started with a socket's file descriptor, from which it reads requests for engines (`engine_process.Template`): each is a
fork of this process. Its arguments: HF folder, dtype, transport, and other arguments of vLLM as JSON. With each come
descriptors of its input, of its log and of its answers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from engine_process import NEVER_S

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "megatron_fleet.rollout.engine_arguments",
)
"""Modules that every engine would import."""
LONGEST_REQUEST = 1 << 18


def use_transport(wrapper: Any, backend: str) -> None:
    """Give a worker the engine's half of another transport, as if it had been started with it."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    worker = wrapper.worker
    worker.weight_transfer_engine.shutdown()
    config = worker.vllm_config
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, worker.device, worker.model_runner.get_model()
    )


def tower(wrapper: Any) -> list[float]:
    """A number for each parameter of the vision tower."""
    return [p.double().sum().item() for p in _tower(wrapper)]


def lose_tower(wrapper: Any) -> None:
    """Do to the vision tower what sleep of level 2 does on CUDA."""
    for parameter in _tower(wrapper):
        parameter.data.zero_()
    wrapper.worker.vllm_config.model_config.enable_sleep_mode = True


def _tower(wrapper: Any) -> list[Any]:
    named = wrapper.worker.model_runner.get_model().named_parameters()
    found = [parameter for name, parameter in named if name.startswith("visual.")]
    assert found
    return found


def obey(engine: Any, command: str, arguments: list[Any]) -> Any:
    from vllm import SamplingParams

    from megatron_fleet.weight_sync.registry import engine_backend

    if command == "rpc":
        method, *rest = arguments
        return engine.collective_rpc(method, args=tuple(rest))[0]
    if command == "transport":
        return engine.collective_rpc(use_transport, args=(engine_backend(arguments[0]),))[0]
    if command in ("tower", "lose tower"):
        return engine.collective_rpc(tower if command == "tower" else lose_tower)[0]
    prompts, *tokens = arguments
    more = {"max_tokens": tokens[0]} if command == "generate" else {"max_tokens": 1, "prompt_logprobs": 0}
    engine.reset_prefix_cache()
    outputs = engine.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **more),
        use_tqdm=False,
    )
    if command == "generate":
        return [list(o.outputs[0].token_ids) for o in outputs]
    known = [zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True) for o in outputs]
    return [[scores[token].logprob for token, scores in row] for row in known]


def main(number: int) -> None:
    os.environ |= SETTINGS
    from megatron_fleet.rollout.engine_images import find_torchvision

    find_torchvision()  # before vLLM looks for it
    for module in IMPORTED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.freeze()  # what was imported need not be looked through at each collection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the engines
    with socket.socket(fileno=number) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 3)
            if not request:  # the tests have ended
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become_engine(*json.loads(request), *descriptors)
                os._exit(0)
            requests.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)


def become_engine(arguments: list[str], environment: dict[str, str], asked: int, log: int, answering: int) -> None:
    found = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}  # torchvision is there
    os.environ.clear()
    os.environ.update(environment | SETTINGS | found)
    os.dup2(asked, 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        serve(*arguments, answering)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def serve(folder: str, dtype: str, transport: str, more: str, answering: int) -> None:
    from megatron_fleet.rollout.engine_arguments import CPU_ATTENTION, cpu_model_args, family_mixer
    from megatron_fleet.weight_sync.vllm_plugin import MIXER

    if (mixer := family_mixer(Path(folder))) is not None:
        os.environ[MIXER] = mixer.engine
    from vllm import LLM

    from megatron_fleet.weight_sync.registry import engine_backend

    arguments: dict[str, Any] = {
        "dtype": dtype,
        "enforce_eager": True,
        "attention_config": CPU_ATTENTION,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "weight_transfer_config": {"backend": engine_backend(transport)},
        **cpu_model_args(Path(folder)),
    } | json.loads(more)
    engine = LLM(folder, **arguments)
    # After it has started: this imports numba, with which vLLM 0.32 cannot replace the Triton kernels of Qwen3.5.
    from megatron_fleet.weight_sync.broadcast import group as update_group

    update_group.STALL_S = NEVER_S
    with os.fdopen(answering, "w") as answers:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            try:
                answer = ["done", obey(engine, command, arguments)]
            except Exception as error:
                answer = ["failed", f"{type(error).__name__}: {error}"]
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
