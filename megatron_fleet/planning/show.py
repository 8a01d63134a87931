"""A plan as text, as JSON and as a picture."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fleet.planning.memory.check import describe_memory
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.modes import describe_modes
from megatron_fleet.planning.plan import Plan
from megatron_fleet.planning.rollout import assumptions as in_flight
from megatron_fleet.planning.rollout import in_play
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.planning.step import StepTime, step_time

if TYPE_CHECKING:
    from megatron_fleet.telemetry.charts import Chart

GB = 10**9


def as_text(plan: Plan, price: float | None) -> str:
    """Return the tables of a plan. ``price``: of a GPU-hour."""
    sections = {
        "run": _run(plan),
        "memory": _memory(plan),
        "disk, GB": [", ".join(f"{name} {size / GB:,.0f}" for name, size in plan.disk.items())],
    }
    if plan.step is not None:
        sections["seconds of a step"] = _seconds(plan.step)
        sections["seconds of a step in other modes"] = describe_modes(plan.modes)
        sections["engines"] = _engines(plan)
        sections["cost"] = [_cost(plan, price)]
    sections["assumed"] = assumptions(plan)
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _run(plan: Plan) -> list[str]:
    p, engine = plan.config.parallel, plan.config.rollout.engine
    whole, active = plan.parameters
    shared = engine.colocated is not False
    return [
        f"model: {whole / 1e9:.2f}B parameters, {active / 1e9:.2f}B of them for a token; {plan.source}",
        f"GPUs: {plan.devices} {plan.gpu.name} on {plan.hosts} host{'s' if plan.hosts > 1 else ''}",
        f"trainer: {p.world_size} ranks, tensor {p.tensor} × pipeline {p.pipeline} × context {p.context} × data "
        f"{p.data}" + (f", expert {p.expert}" if plan.model.experts else ""),
        f"engines: {engine.count} of {engine.tensor_parallel} GPUs, "
        f"{'on those of the ranks' if shared else 'on GPUs of their own'}",
        *_evaluation_engines(plan),
        f"batch: {plan.load.episodes} episodes, {plan.load.tokens / 1e6:.2f}M tokens, "
        f"{plan.flops_per_token / 1e9:.1f} GFLOP a token (forward and backward)",
    ]


def _evaluation_engines(plan: Plan) -> list[str]:
    count, size = plan.config.eval.engines, plan.config.rollout.engine.tensor_parallel
    if not count:
        return []
    return [
        f"evaluation engines: {count} of {size} GPUs; an evaluation adds nothing to a step, unless it still plays when "
        f"the next one is due: then the update waits for it (timing/eval_wait)"
    ]


def _memory(plan: Plan) -> list[str]:
    """The table of `planning.memory`, of equal stages of a pipeline only those that differ."""
    memory = plan.memory
    first: dict[tuple[Any, ...], int] = {}
    for index, device in enumerate(memory.devices):
        first.setdefault((device.holds, *(tuple(phase.parts.items()) for phase in device.phases)), index)
    kept = type(memory)(
        tuple(memory.devices[i] for i in first.values()), memory.host, memory.kv_tokens, memory.sequences
    )
    return describe_memory(kept, plan.gpu.memory, plan.config.rollout.max_context)


def _seconds(step: StepTime) -> list[str]:
    rows = []
    for phase, parts in step.phases.items():
        spent = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
        rows.append(f"{phase:<20} {step.seconds(phase):8.1f}   {spent}")
    longest, part = step.binds
    together = "the longer of rollout and trainer" if step.concurrent else "their sum"
    rows.append(f"{'step':<20} {step.total:8.1f}   {together}; bottleneck: {longest}, {part}")
    rows.append(f"training uses {step.mfu:.0%} of its GPUs' peak (model FLOPs)")
    return rows


def _engines(plan: Plan) -> list[str]:
    step = plan.step
    assert step is not None
    engine = step.engine
    return [
        f"{engine.slots} episodes at once in each, bound by {engine.bound}; its KV cache holds "
        f"{engine.kv_tokens:,} tokens",
        f"{1000 * engine.step_s(engine.slots):.1f} ms a token with all of them, {1000 * engine.step_s(1):.1f} ms with "
        f"one; {engine.tokens_per_s():,.0f} tokens/s of each engine, its episodes' waiting for tools included",
    ]


def _cost(plan: Plan, price: float | None) -> str:
    text = f"{plan.gpu_hours:.2f} GPU-hours a step, {plan.tokens_per_s:,.0f} tokens/s of each GPU"
    return text if price is None else f"{text}, {plan.gpu_hours * price:,.2f} a step at {price:g} a GPU-hour"


def assumptions(plan: Plan) -> list[str]:
    """Return what no configuration says."""
    load, drafter = plan.load, plan.config.rollout.engine.speculative
    drafts = [
        f"{load.accepted:.0%} of the {drafter.tokens} tokens that {drafter.method} drafts are accepted (--accepted)"
    ]
    rollout, step = plan.config.rollout, plan.step
    over = rollout.unfinished == "continue" and rollout.engine.colocated is not False and in_play(plan.config) > 1
    opened = [] if step is None else [
        f"environments of unfinished episodes stay open during up to {max(1, rollout.max_staleness)} updates of "
        f"{step.trainer:.0f} s each (env.fleet.ttl_s must allow for it)"
    ]  # fmt: skip
    return [
        *load.assumptions(),
        *in_flight(plan.config, None if plan.step is None else plan.step.engine),
        *(drafts if drafter.method != "none" else []),
        *(opened if over else []),
        f"{plan.gpu.name}: {plan.gpu.flops / 1e12:.0f} TFLOP/s, {plan.gpu.hbm / 1e12:.2f} TB/s, NVLink "
        f"{plan.gpu.nvlink / GB:.0f} GB/s, network {plan.gpu.network / GB:.0f} GB/s a GPU, of which the shares in "
        f"docs/run/planning.md are reached; errors of these estimates are there too",
    ]


def as_json(plan: Plan, price: float | None) -> dict[str, Any]:
    """Return a plan as JSON."""
    step, whole = plan.step, plan.parameters
    found: dict[str, Any] = {
        "fits": plan.problem is None,
        "problem": plan.problem,
        "model": {"parameters": whole[0], "active_parameters": whole[1], "source": plan.source},
        "flops_per_token": plan.flops_per_token,
        "gpu": plan.gpu.name,
        "gpus": plan.devices,
        "hosts": plan.hosts,
        "memory_bytes": [
            {
                "holds": device.holds,
                "devices": [device.devices.start, device.devices.stop - 1],
                "phases": {phase.name: dict(phase.parts) for phase in device.phases},
            }
            for device in plan.memory.devices
        ],
        "host_bytes": dict(plan.memory.host),
        "disk_bytes": dict(plan.disk),
        "kv_tokens": plan.memory.kv_tokens,
        "assumed": assumptions(plan),
    }
    if step is not None:
        found |= {
            "seconds": {phase: dict(parts) for phase, parts in step.phases.items()},
            "step_seconds": step.total,
            "concurrent": step.concurrent,
            "binds": list(step.binds),
            "mfu": step.mfu,
            "modes": [asdict(mode) for mode in plan.modes],
            "episodes_per_engine": step.engine.slots,
            "gpu_hours": plan.gpu_hours,
            "tokens_per_second_per_gpu": plan.tokens_per_s,
        }
        if price is not None:
            found["cost"] = plan.gpu_hours * price
    return found


def write_picture(plan: Plan, path: Path) -> None:
    """Draw how step time and memory depend on the length of episodes, at the plan's layout."""
    from megatron_fleet.telemetry.charts import Chart, Series, write_svg

    shape, _ = shape_of(plan.config.model.path)
    longest = min(plan.load.longest, 2 * plan.memory.kv_tokens)
    means = [longest * share / 20 for share in range(1, 16)]
    steps = {mean: step_time(plan.config, shape, plan.model, plan.gpu, replace(plan.load, mean=mean)) for mean in means}
    names = list(dict.fromkeys(phase for step in steps.values() for phase in step.phases))
    lines = [
        Series(name, tuple((mean / 1000, step.seconds(name)) for mean, step in steps.items()))
        for name in names
        if any(step.seconds(name) > 0.02 * step.total for step in steps.values())
    ]
    lines.append(Series("step", tuple((mean / 1000, step.total) for mean, step in steps.items())))
    rates = tuple((mean / 1000, plan.load.episodes * mean / step.total / plan.devices) for mean, step in steps.items())
    drawn = [
        Chart("Seconds of a step, by thousands of tokens in an episode", tuple(lines)),
        Chart("Tokens per second and GPU", (Series("tokens/s", rates),)),
        _memory_chart(plan),
    ]
    write_svg(path, f"{plan.config.run.name} on {plan.devices} {plan.gpu.name}", drawn)


def _memory_chart(plan: Plan) -> Chart:
    """GiB of each phase over the groups of equal devices."""
    from megatron_fleet.telemetry.charts import Chart, Series

    names = list(dict.fromkeys(phase.name for device in plan.memory.devices for phase in device.phases))
    series = []
    for name in names:
        points = [
            (float(number), phase.total / GIB)
            for device in plan.memory.devices
            for phase in device.phases
            if phase.name == name
            for number in (device.devices.start, device.devices.stop - 1)
        ]
        series.append(Series(name, tuple(sorted(set(points)))))
    ends = (0.0, float(max(device.devices.stop - 1 for device in plan.memory.devices)))
    series.append(Series(f"a {plan.gpu.name}", tuple((end, plan.gpu.memory / GIB) for end in sorted(set(ends)))))
    return Chart("GiB of a GPU, by its number", tuple(series))
