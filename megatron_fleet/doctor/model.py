"""Probes of the model and the environments: files against their hashes, a token of an engine, a step."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.remote_model import remote_model
from megatron_fleet.config.schema import ModelConfig
from megatron_fleet.config.secrets import of_environments, without_secrets
from megatron_fleet.doctor.probe import Probe, ProbeContext, Result, output, with_config
from megatron_fleet.weights.fetch.cache import look_up
from megatron_fleet.weights.fetch.hub import damaged_files
from megatron_fleet.weights.hf_folder import read_headers
from megatron_fleet.weights.model_check import check_model, check_resumed

HASHING_S = 3600.0
"""A model of a trillion parameters on a network file system."""
LOAD_S = 600.0
"""Time that an engine may take beyond ``rollout.engine.start_timeout_s`` for its compilers."""


@lru_cache(maxsize=2)
def elements(folder: str) -> int | None:
    """Number of values in the weights of a model's folder; ``None``: its files are not here, or damaged."""
    try:
        return sum(math.prod(tensor.shape) for tensor in read_headers(folder).values())
    except UserError:
        return None


def engine_bytes(model: ModelConfig) -> int | None:
    """Bytes of the weights that are sent to the engines of one host through shared memory."""
    values = elements(model.folder)
    return None if values is None else values * (4 if model.dtype == "float32" else 2)


def model_files(here: ProbeContext) -> Result:
    """Check the model's folder as a run does at its start, and its files against the hashes that the hub states."""
    config = here.config
    assert config is not None
    model, folder = remote_model(config.model.path), Path(config.model.folder)
    if model is not None and not any(folder.glob("*.safetensors")):
        missing = look_up(model).missing_bytes()
        storage = next(path for path in (model.storage(here.environ), *folder.parents) if path.is_dir())
        free = shutil.disk_usage(storage).free
        seen = f"{model}: {missing / 1e9:.1f} GB are not here yet, {free / 1e9:.1f} GB are free at {storage}"
        if missing > free:
            return Result("failed", seen, "free some space, or set HF_HOME to a larger disk")
        return Result("warning", seen, f"the run begins with the download; `mfleet model fetch {model}` does it now")
    checked = check_model(config.model, config.rollout.engine.speculative)
    assert checked is not None  # its weights are here
    check_resumed(config.run, config.policy.lora, checked)
    tensors = checked.stored
    size = sum(tensor.nbytes for tensor in tensors.values())
    seen = f"{len(tensors)} tensors, {size / 1e9:.1f} GB in {folder}"
    if here.quick:
        return Result("ok", f"{seen}; their content was left out by --quick")
    compared, damaged = damaged_files(folder)
    if damaged:
        fix = f"remove {'it' if len(damaged) == 1 else 'them'} and run `mfleet model fetch {config.model.path}` again"
        return Result("failed", f"{', '.join(damaged)} in {folder}: not what the hub states (hash)", fix)
    return Result("ok", f"{seen}; {f'{compared} hashes are right' if compared else 'their hashes are not known'}")


def engine_token(here: ProbeContext) -> Result:
    """Start an engine of the configuration on this host and let it sample one token."""
    config = here.config
    assert config is not None
    if elements(config.model.folder) is None:
        return Result("skipped", "the model is not here")
    wanted, devices = config.rollout.engine.tensor_parallel, here.host.devices
    if devices and wanted > len(devices):
        return Result("skipped", f"an engine takes {wanted} GPUs, on several hosts")
    environ = without_secrets(here.environ)
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in devices[:wanted])  # none: the CPU
    deadline_s = config.rollout.engine.start_timeout_s + LOAD_S
    found = _ask(
        sys.executable, "megatron_fleet.rollout.engine_smoke", config.model_dump(mode="json"), environ, deadline_s
    )
    return Result("ok", f"token {found['token']} after {found['seconds']:.0f} s")


def environment_step(here: ProbeContext) -> Result:
    """Start each environment of the tasks as the run would, reset it to a task, and call one tool."""
    from megatron_fleet.data.dataset import run_dataset

    config = here.config
    assert config is not None
    split = run_dataset(config).split
    first = {task.env_key: task for task in reversed([*split.train, *split.held_out])}
    request = {
        "env": config.env.model_dump(mode="json"),
        "seed": config.run.seed,
        "tasks": [{name: getattr(task, name) for name in task.__slots__} for task in first.values()],
    }
    env = config.env
    one_s = env.make_timeout_s + env.reset_timeout_s + env.step_timeout_s
    deadline_s = env.start_timeout_s + len(first) * one_s + LOAD_S
    environ = without_secrets(here.environ, of_environments(config.env))
    found = _ask(str(episode_python()), "megatron_fleet.envs.first_step", request, environ, deadline_s)["environments"]
    wrong = [one for one in found if not one.get("works")]
    said = "; ".join(map(_first_step, sorted(wrong or found, key=lambda one: str(one["environment"]))))
    if wrong:
        return Result("failed", said, "see these tasks' env_key, the environment server's log, and env.step_timeout_s")
    return Result("ok", said)


def _first_step(one: Mapping[str, Any]) -> str:
    if "problem" in one:
        return f"{one['environment']} {one['problem']}"
    did = f"{one['tool'] or 'no tool'} {one['answer']}"
    return f"{one['environment']}, task {one['task']}: {one['tools']} tools, {did}, {one['seconds']:.1f} s"


def _ask(python: str, module: str, request: Mapping[str, Any], environ: Mapping[str, str], deadline_s: float) -> Any:
    """Run a module with a request on its standard input; returns what the last line of its output holds."""
    said = output([python, "-m", module], environ, deadline_s, json.dumps(request)).strip().splitlines()
    answer = json.loads(said[-1])
    if "problem" in answer:
        raise UserError(answer["problem"])
    return answer


def _with_own_model(here: ProbeContext) -> bool:
    config = here.config
    return config is not None and config.eval.endpoint.url is None and config.reads_weights


PROBES = (
    Probe("model files", model_files, _with_own_model, "runs with a model of their own", deadline_s=HASHING_S),
    Probe("engine", engine_token, _with_own_model, "runs with a model of their own", deadline_s=HASHING_S, slow=True),
    Probe("environment", environment_step, with_config, "runs", deadline_s=HASHING_S, slow=True),
)
