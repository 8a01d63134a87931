"""Describe the processes and files of a run before it starts: the text of ``mfleet train --dry-run``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_fleet.cluster.inventory import Host, Inventory, local_inventory
from megatron_fleet.cluster.placement import Placement, PlacementRequest, place
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections.hosted import HOSTED
from megatron_fleet.config.sections.rollout import VLLM
from megatron_fleet.planning.hosted_run import cost, make_hosted_plan
from megatron_fleet.planning.memory.check import describe_memory
from megatron_fleet.planning.memory.phases import run_memory
from megatron_fleet.planning.workload import Workload

GIB = 1 << 30


def as_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML with every key; control characters are escaped."""
    import yaml

    values = config.model_dump(mode="json")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=False)


def describe(config: Config, inventory: Inventory | None = None) -> str:
    """Describe a run: resolved configuration, processes, placement and memory, and outputs.

    Args:
        inventory: hosts to plan for; ``None``: this one.

    Raises:
        UserError: the processes do not fit.
    """
    sections = {"processes": processes(config)}
    if config.cluster.ranks == "external" or config.cluster.nodes:
        sections["placement"] = [_not_known_yet(config)]
    else:
        inventory = inventory or local_inventory(os.environ)
        sections["placement"] = draw(
            inventory, place(inventory, PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines))
        )
        if devices := inventory.hosts[0].devices:
            memory = _memory(config, min(device.memory_bytes for device in devices))
            sections["memory (computed, docs/understand/memory.md)"] = memory
    if config.policy.trainer == HOSTED:
        plan = make_hosted_plan(config, Workload.of(config.rollout, config.env))
        sections["cost (computed, as by mfleet plan)"] = cost(plan)
    sections["outputs"] = outputs(config)
    return "\n\n".join([as_yaml(config).rstrip(), *(_section(title, rows) for title, rows in sections.items())])


def _not_known_yet(config: Config) -> str:
    if config.cluster.ranks == "external":
        return "not known yet: by the hosts that the ranks connect from (cluster.ranks=external)"
    return f"not known yet: by the devices of the {config.cluster.nodes} hosts that join (cluster.nodes)"


def _memory(config: Config, device_bytes: int) -> list[str]:
    hf_config = read_object(Path(config.model.folder) / "config.json", "fetch the model again")
    return describe_memory(run_memory(config, hf_config, device_bytes), device_bytes, config.rollout.max_context)


def processes(config: Config) -> list[str]:
    """Return one line per kind of process, with the number of processes."""
    p, r = config.parallel, config.rollout
    server = "the embedded fleet, on 127.0.0.1" if config.env.about.embedded else config.env.url
    ranks = (
        f"ranks: {p.world_size} (tensor {p.tensor} × pipeline {p.pipeline} × context {p.context} × data {p.data}), "
        f"CPU threads of each: {config.policy.threads or 'default'}"
    )
    engines = "as many as there is room for" if r.engine.replicas == "auto" else r.engine.replicas
    vllm = f"vLLM, tensor parallel {r.engine.tensor_parallel} each"
    return [
        ranks if config.ranks else f"ranks: none, policy.trainer={config.policy.trainer}",
        "Ray: 1 local cluster, or the one at RAY_ADDRESS",
        f"engines: {engines} ({vllm if r.sampler == VLLM else f'rollout.sampler={r.sampler}'})",
        *([f"evaluation engines: {config.eval.engines}, of the same kind"] if config.eval.engines else []),
        f"episode workers: {r.workers} (up to {config.episodes} episodes in flight together)",
        f"environment server: {server or f'none, env.kind={config.env.kind}'}",
    ]


def draw(inventory: Inventory, placed: Placement) -> list[str]:
    """Draw a box for each host with its devices, and the ranks and engines on each device."""
    tables = [_host_rows(host, placed) for host in inventory.hosts]
    columns = zip(*(row for table in tables for row in table), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        for table in tables
    ]
    titles = [f"{host.name} ({host.address})" for host in inventory.hosts]
    width = max(len(text) for text in [*titles, *(line for table in lines for line in table)])
    drawing: list[str] = []
    for title, table in zip(titles, lines, strict=True):
        drawing.append(f"┌ {title} {'─' * (width - len(title))}┐")
        drawing += [f"│ {line.ljust(width)} │" for line in table]
        drawing.append(f"└{'─' * (width + 2)}┘")
    sharing = (
        "colocated: engines sleep while ranks train" if placed.colocated else "engines and ranks work side by side"
    )
    return [*drawing, f"{sharing}; weights by {placed.transport}"]


def _host_rows(host: Host, placed: Placement) -> list[list[str]]:
    """Return rows of device, its memory size, its ranks, its engines."""
    rows = []
    for device in host.devices:
        ranks = [p.rank for p in placed.ranks if (p.host, p.device) == (host.name, device.index)]
        size = f"{device.kind}, {device.memory_bytes / GIB:.0f} GiB"
        rows.append([f"GPU {device.index}", size, _numbered("rank", ranks), _engines(placed, host, device.index)])
    on_cpu = [p.rank for p in placed.ranks if p.host == host.name and p.device is None]
    engines = _engines(placed, host, None)
    if on_cpu or engines or not host.devices:
        rows.append(["CPU", "", _numbered("rank", on_cpu), engines])
    return rows


def _engines(placed: Placement, host: Host, device: int | None) -> str:
    """Name the engines on a device of a host; ``None``: on its CPU."""
    named = []
    for noun, places in (("engine", placed.engines), ("evaluation engine", placed.eval_engines)):
        here = (i for i, p in enumerate(places) if p.host == host.name)
        numbers = [i for i in here if (device in places[i].devices if device is not None else not places[i].devices)]
        named.append(_numbered(noun, numbers))
    return ", ".join(filter(None, named))


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """Format numbers as ``rank 3`` or ``ranks 0–3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}" if numbers else ""


def outputs(config: Config) -> list[str]:
    """List the files that a run writes to its folder."""
    c = config
    rows = [
        ("config.json", "this configuration, for `mfleet train --resolved`", True),
        ("metrics.jsonl", "one line per step and evaluation (docs/reference/metrics.md)", True),
        ("memory.json", "peak memory of each owner, in each phase", True),
        ("summary.json", "first and last evaluation, totals", True),
        ("curve.svg", "the learning curve", c.logging.plot),
        ("tensorboard/", "the same metrics as TensorBoard events", c.logging.tensorboard),
        ("trajectories/", "every conversation with its reward", True),
        ("dumped_evals/", "evaluations in Fleet's layout (docs/run/evaluation.md)", True),
        ("checkpoints/", f"the newest {c.checkpoint.keep}", True),
        ("dumps/", "failed updates, for `mfleet debug replay`", c.policy.safety.max_dumps > 0),
        ("hosted_states.txt", "states at the service", c.policy.trainer == HOSTED),
        ("hosted_tokens.json", "tokens that the service billed", c.policy.trainer == HOSTED),
        ("hf/", "the trained model as a Hugging Face folder", c.checkpoint.export.last),
        ("exports/", "checkpoints, likewise", c.checkpoint.export.every > 0 or c.checkpoint.export.best),
        ("logs/", "logs of engines, environment server and ranks", True),
    ]
    width = max(len(name) for name, _, written in rows if written)
    return [c.run.out] + [f"  {name:<{width}} {meaning}" for name, meaning, written in rows if written]


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([f"# {title}", *(f"#   {row}" for row in rows)])
