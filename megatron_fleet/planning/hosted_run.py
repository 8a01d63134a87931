"""Plan of a run at a hosted service: tokens, cost and seconds of a step. Nothing here asks the service.

An episode of m tokens, of which the policy samples the share s in t turns, sends its whole text as the prompt of each
turn. All of it but the m · (1 − s) tokens that are new to the service is found in the prefix cache, m · (t − 1) / 2 in
all. It is trained on once for each pass (see `hosted.passes`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_fleet.algorithms.loss_metrics import needs_proximal
from megatron_fleet.config.schema import Config
from megatron_fleet.hosted.passes import one_pass
from megatron_fleet.hosted.prices import Prices, Tokens, find_prices
from megatron_fleet.planning.rollout import assumptions as in_flight
from megatron_fleet.planning.workload import Workload

CYCLE_S = 10.0
"""Seconds of a clock cycle of the service, as its users report; a cycle runs the requests submitted before it."""
SAMPLED_PER_S = 50.0
"""Tokens per second that one request samples: an assumption, since the service publishes no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPlan:
    """A run at the service.

    Attributes:
        model: its name there.
        step, evaluation: tokens of a training step, and of an evaluation.
        steps: of the run; ``None``: its length is in epochs.
        evaluations: number of evaluations in the run.
        cycles: clock cycles of the service in a step.
        prices: ``None``: not known, for the reason `unpriced`.
    """

    config: Config
    model: str
    load: Workload
    step: Tokens
    evaluation: Tokens
    steps: int | None
    evaluations: int
    cycles: int
    prices: Prices | None
    unpriced: str

    @property
    def run(self) -> Tokens | None:
        """Tokens of the whole run."""
        return None if self.steps is None else self.step.times(self.steps) + self.evaluation.times(self.evaluations)

    @property
    def play_s(self) -> float:
        """Seconds of the longest of a step's episodes."""
        load = self.load
        longest = float(load.lengths(load.episodes)[-1]) * load.sampled / SAMPLED_PER_S + load.waiting
        return longest * max(1.0, load.episodes / self.config.rollout.most_in_flight())

    @property
    def seconds(self) -> float:
        """Seconds of a step, evaluations left out."""
        return self.play_s + self.cycles * CYCLE_S


def make_hosted_plan(config: Config, load: Workload) -> HostedPlan:
    """Plan a run at the service. Prices that are not in the configuration are read from Thinking Machines' list."""
    hosted, algo, updates = config.hosted, config.algorithm, config.policy.updates_per_batch
    model = hosted.model(config.model.path)
    assert model is not None, "the configuration's rules see to it"
    passes = 1 if one_pass(algo, updates > 1 and needs_proximal(algo), hosted.losses == "service") else 2
    before = int(updates > 1 and needs_proximal(algo))
    prices, unpriced = None, ""
    try:
        prices = find_prices(hosted, model)
    except LookupError as error:
        unpriced = str(error)
    played = tokens_of_episodes(load, load.episodes)
    scored = load.tokens if algo.kl.coef > 0 else 0.0
    trained = Tokens(prefill_uncached=round(scored), trained=round(load.tokens * (passes + before)))
    evaluated = (config.eval.tasks or 0) * (config.eval.samples + int(config.eval.greedy))
    return HostedPlan(
        config=config,
        model=model,
        load=load,
        step=played + trained,
        evaluation=tokens_of_episodes(load, evaluated),
        steps=config.run.steps,
        evaluations=evaluations_of(config),
        cycles=before + updates * passes,
        prices=prices,
        unpriced=unpriced,
    )


def tokens_of_episodes(load: Workload, episodes: int) -> Tokens:
    """Billed tokens of playing episodes."""
    whole = episodes * load.mean
    return Tokens(
        sampled=round(whole * load.sampled),
        prefill_cached=round(whole * (load.turns - 1) / 2),
        prefill_uncached=round(whole * (1 - load.sampled)),
    )


def evaluations_of(config: Config) -> int:
    """Number of evaluations in a run, those in between left out if its length is in epochs."""
    settings, steps = config.eval, config.run.steps
    between = (steps - 1) // settings.interval if settings.interval and steps else 0
    return int(settings.at_start) + between + int(settings.at_end)


def as_text(plan: HostedPlan) -> str:
    """Return the plan as text."""
    c, load = plan.config, plan.load
    sections = {
        "run": [
            f"model: {plan.model}, adapters of rank {c.policy.lora.rank}",
            f"batch: {load.episodes} episodes, {load.tokens / 1e6:.2f}M tokens",
            *([] if plan.steps is None else [f"{plan.steps} steps, {plan.evaluations} evaluations"]),
        ],
        "tokens, millions": [_counts(name, tokens) for name, tokens in _parts(plan).items()],
        "cost": cost(plan),
        "seconds of a step": [
            f"{plan.seconds:.0f}: the longest episode {plan.play_s:.0f}, cycles of the service "
            f"{plan.cycles * CYCLE_S:.0f} ({plan.cycles})",
            *([] if plan.steps is None else [f"{plan.seconds * plan.steps / 3600:.1f} hours, evaluations left out"]),
        ],
        "assumed": [
            *load.assumptions(),
            *in_flight(c, None),
            f"{SAMPLED_PER_S:g} tokens/s for each episode, cycles of {CYCLE_S:g} s, and a prefix cache that finds all "
            f"that was sent or sampled before",
            *(["evaluations of all held-out tasks (eval.tasks=null) are left out"] if c.eval.tasks is None else []),
        ],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def as_json(plan: HostedPlan) -> dict[str, Any]:
    """Return the plan as JSON."""
    parts = _parts(plan)
    return {
        "model": plan.model,
        "tokens": {name: asdict(tokens) for name, tokens in parts.items()},
        "steps": plan.steps,
        "evaluations": plan.evaluations,
        "usd": None if plan.prices is None else {name: plan.prices.usd(tokens) for name, tokens in parts.items()},
        "prices": None if plan.prices is None else asdict(plan.prices),
        "step_seconds": plan.seconds,
        "cycles": plan.cycles,
    }


def _parts(plan: HostedPlan) -> dict[str, Tokens]:
    parts = {"step": plan.step, "evaluation": plan.evaluation, "run": plan.run}
    return {name: tokens for name, tokens in parts.items() if tokens not in (None, Tokens())}


def _counts(name: str, tokens: Tokens) -> str:
    counts = (f"{kind.replace('_', ' ')} {count / 1e6:.2f}" for kind, count in asdict(tokens).items() if count)
    return f"{name}: {', '.join(counts)}"


def cost(plan: HostedPlan) -> list[str]:
    """Return lines about the cost of a step, an evaluation and the run."""
    if plan.prices is None:
        return [f"not known ({plan.unpriced}); set hosted.prices"]
    p, budget, usd = plan.prices, plan.config.hosted.budget_usd, plan.prices.usd
    lines = [
        ", ".join(f"{name} ${usd(tokens):,.2f}" for name, tokens in _parts(plan).items()),
        f"at ${p.prefill:g} for a million tokens of prompts (${p.cached_prefill:g} from the cache), ${p.sample:g} "
        f"sampled, ${p.train:g} trained",
    ]
    if budget is not None and plan.run is not None:
        whole = usd(plan.run)
        enough = "enough" if whole <= budget else f"{budget / whole:.0%} of what the run costs"
        lines.append(f"hosted.budget_usd={budget:g} is {enough}")
    return lines
