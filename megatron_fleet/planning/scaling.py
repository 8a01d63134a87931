"""Simulated runs of a configuration on more and more GPUs, colocated and apart: the rows of ``mfleet plan --simulate``.

Twice the GPUs have twice the data-parallel replicas, twice the engines and twice the prompts of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.plan import devices_of
from megatron_fleet.planning.rollout import Engine
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.planning.simulation import LATENCY_SIGMA, Result, Setup, Simulation
from megatron_fleet.planning.step import trainer_phases
from megatron_fleet.planning.workload import Workload

MOST_GPUS = 1024
STALENESS, COLOCATED_STALENESS = (0, 1, 2, 4), (0, 1, 2)
"""Bounds that are simulated with engines on GPUs of their own, and on those of the trainer."""
LENGTHS = 2000
"""Quantiles of the distribution from which lengths are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A simulated run.

    Attributes:
        tokens_per_s: tokens of episodes per second and GPU.
    """

    gpus: int
    mode: str
    staleness: int
    tokens_per_s: float
    result: Result


def simulate(
    config: Config, gpu: Gpu, load: Workload, steps: int, failures: float, mtbf_hours: float, most: int = MOST_GPUS
) -> list[Row]:
    """Simulate a configuration on its GPUs, and on twice as many until ``most``.

    Args:
        failures: share of episodes that fail and are played again.
        mtbf_hours: mean hours between two failures of one GPU; 0: none fails.

    Raises:
        UserError: a number is out of its range, or an engine has no room for an episode.
    """
    if steps < 1 or not 0 <= failures < 1 or mtbf_hours < 0:
        raise UserError("--simulate needs --steps of at least 1, --failures from 0 to below 1, --mtbf of at least 0.")
    rows = []
    base = devices_of(config)
    for factor in _factors(base, most):
        bigger, more = scaled(config, factor), replace(load, episodes=load.episodes * factor)
        for mode, staleness, variant in variants(bigger):
            setup = setup_of(variant, gpu, more, staleness, failures, mtbf_hours)
            result = Simulation(setup).play(steps)
            gpus = devices_of(variant)
            rate = more.tokens / result.step_s / gpus
            rows.append(Row(gpus=gpus, mode=mode, staleness=staleness, tokens_per_s=rate, result=result))
    return rows


def _factors(base: int, most: int) -> list[int]:
    factors = [1]
    while base * factors[-1] * 2 <= most:
        factors.append(factors[-1] * 2)
    return factors


def scaled(config: Config, factor: int) -> Config:
    """Return the configuration on ``factor`` times its GPUs."""
    parallel = config.parallel.model_copy(update={"data": config.parallel.data * factor})
    engine = config.rollout.engine.model_copy(update={"replicas": config.rollout.engine.count * factor})
    flight = config.rollout.episodes_in_flight
    rollout = config.rollout.model_copy(
        update={
            "engine": engine,
            "episodes_in_flight": flight if flight == "auto" else flight * factor,
            "prompts_per_step": config.rollout.prompts_per_step * factor,
        }
    )
    return config.model_copy(update={"parallel": parallel, "rollout": rollout})


def variants(config: Config) -> list[tuple[str, int, Config]]:
    """Return mode, staleness and configuration of the runs to compare, on equal numbers of GPUs.

    A colocated configuration is also divided in two halves, trainer and engines, where its replicas allow that.
    """
    if config.rollout.engine.colocated is False:
        return [("apart", bound, _stale(config, bound)) for bound in STALENESS]
    found = [("colocated", bound, _stale(config, bound)) for bound in COLOCATED_STALENESS]
    if config.parallel.data % 2 == 0 and config.rollout.engine.count % 2 == 0:
        parallel = config.parallel.model_copy(update={"data": config.parallel.data // 2})
        engine = config.rollout.engine.model_copy(
            update={"replicas": config.rollout.engine.count // 2, "colocated": False}
        )
        halves = config.model_copy(
            update={"parallel": parallel, "rollout": config.rollout.model_copy(update={"engine": engine})}
        )
        found += [("apart", bound, _stale(halves, bound)) for bound in STALENESS]
    return found


def _stale(config: Config, bound: int) -> Config:
    batches = 1 + bound if config.rollout.engine.colocated is not False else max(1, bound)
    wanted = config.rollout.prompts_per_step * config.rollout.samples_per_prompt * batches
    flight = config.rollout.episodes_in_flight
    update = {"max_staleness": bound, "episodes_in_flight": flight if flight == "auto" else max(wanted, flight)}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})


def setup_of(
    config: Config, gpu: Gpu, load: Workload, staleness: int, failures: float = 0.0, mtbf_hours: float = 0.0
) -> Setup:
    """Return the simulation of a configuration, see `Setup`.

    Raises:
        UserError: an engine has no room for an episode.
    """
    hf_config, _ = shape_of(config.model.path)
    model = read_model(hf_config)
    engine = Engine.of(config, hf_config, model, gpu, load)
    if engine.slots < 1:
        raise UserError(
            f"The KV cache of an engine holds {engine.kv_tokens} tokens, less than an episode of {load.mean:.0f} has; "
            f"raise rollout.engine.tensor_parallel={config.rollout.engine.tensor_parallel}, or lower --tokens."
        )
    phases = trainer_phases(config, hf_config, model, gpu, load)
    seconds = {name: sum(parts.values()) for name, parts in phases.items()}
    sync = seconds.pop("weight sync")
    return Setup(
        engines=config.rollout.engine.count,
        slots=engine.slots,
        token_s=engine.token_s,
        lengths=load.lengths(LENGTHS) * load.sampled,
        waiting_s=load.waiting,
        tool_left_s=load.tool_s * math.exp(LATENCY_SIGMA**2) / 2,
        episodes=load.episodes,
        samples=config.rollout.samples_per_prompt,
        trainer_s=sum(seconds.values()),
        sync_s=sync,
        staleness=staleness,
        ahead=config.rollout.batch.ahead,
        window=config.rollout.batch.window,
        unfinished=config.rollout.unfinished,
        colocated=config.rollout.engine.colocated is not False,
        failures=failures,
        mtbf_hours=mtbf_hours,
        gpus_of_engine=config.rollout.engine.tensor_parallel,
        gpus_of_trainer=config.parallel.world_size,
        checkpoint_interval=config.checkpoint.interval or 10**9,
    )


def as_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return a table, a header first."""
    header = ["GPUs", "mode", "staleness", "step s", "tokens/s/GPU", "trainer busy", "engines busy", "slots used"]
    lines = [[*header, "mean staleness", "played again", "engines lost", "trainer lost"]]
    for row in rows:
        r = row.result
        lines.append(
            [
                *(str(row.gpus), row.mode, str(row.staleness), f"{r.step_s:.1f}", f"{row.tokens_per_s:,.0f}"),
                *(f"{share:.0%}" for share in (r.trainer_busy, r.engines_busy, r.slots_used)),
                *(f"{r.staleness:.2f}", str(r.replayed), str(r.engine_losses), str(r.trainer_losses)),
            ]
        )
    return lines


def as_json(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """Return the rows as JSON."""
    return [
        {
            "gpus": row.gpus,
            "mode": row.mode,
            "max_staleness": row.staleness,
            "tokens_per_second_per_gpu": row.tokens_per_s,
            **asdict(row.result),
        }
        for row in rows
    ]


def write_picture(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw throughput, utilisation and staleness over the number of GPUs."""
    from math import log2

    from megatron_fleet.telemetry.charts import Chart, Series, write_svg

    names = list(dict.fromkeys((row.mode, row.staleness) for row in rows))

    def lines(value: Any) -> tuple[Series, ...]:
        found = []
        for mode, bound in names:
            points = [(log2(row.gpus), value(row)) for row in rows if (row.mode, row.staleness) == (mode, bound)]
            found.append(Series(mode if mode == "colocated" else f"{mode}, staleness {bound}", tuple(points)))
        return tuple(found)

    rates = "Tokens per second and GPU, by the logarithm (base 2) of the number of GPUs"
    drawn = [
        Chart(rates, lines(lambda r: r.tokens_per_s)),
        Chart("Time in which the trainer works", lines(lambda r: r.result.trainer_busy), share=True),
        Chart("Slots of engines in use", lines(lambda r: r.result.slots_used), share=True),
        Chart("Mean staleness, in weight versions", lines(lambda r: r.result.staleness)),
        Chart("Seconds of a step", lines(lambda r: r.result.step_s)),
    ]
    write_svg(path, title, drawn)
