"""Statistics of engines: what each engine counts, and the metrics of a step made of it. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineStatistics:
    """Counts of one engine since they were read last, or the sum over several engines.

    An engine *step* computes one batch: one token, or several with speculative decoding, of each running request.

    Attributes:
        steps: engine steps.
        running, waiting: sum over the steps of the requests in their batch, and of those that waited after them.
        kv_usage: sum over the steps of the share of the KV cache that was in use after them.
        most_running, most_waiting, most_kv_usage: largest of these of any step.
        preemptions: times that a running request lost its KV cache to others and had to be computed again.
        prompt_tokens: tokens of prompts that were computed.
        generated_tokens: tokens that were sampled, those of aborted requests included.
        cache_queries, cache_hits: tokens of prompts that were looked up in the prefix cache, and those found there.
        drafts, draft_tokens, accepted_tokens: times that a drafter proposed tokens for a request, the tokens, and those
            that the model accepted.
        busy_s: seconds in which there were requests and the engine was not paused.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    most_running: int = 0
    most_waiting: int = 0
    most_kv_usage: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    busy_s: float = 0.0

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        values = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            values[field.name] = max(mine, theirs) if field.name.startswith("most_") else mine + theirs
        return EngineStatistics(**values)


def engine_metrics(engines: Sequence[EngineStatistics]) -> dict[str, float]:
    """Compute ``engine/`` over all engines; rates without a count to divide by are absent."""
    total = sum(engines, EngineStatistics())
    out: dict[str, float] = {
        "engine/running_max": total.most_running,
        "engine/waiting_max": total.most_waiting,
        "engine/kv_cache_usage_max": total.most_kv_usage,
        "engine/preemptions": total.preemptions,
        "engine/prompt_tokens": total.prompt_tokens,
        "engine/cached_prompt_tokens": total.cache_hits,
        "engine/generated_tokens": total.generated_tokens,
    }
    rates = {
        "running_mean": (total.running, total.steps),
        "waiting_mean": (total.waiting, total.steps),
        "kv_cache_usage_mean": (total.kv_usage, total.steps),
        "prefix_cache_hit_rate": (total.cache_hits, total.cache_queries),
        "draft_acceptance_rate": (total.accepted_tokens, total.draft_tokens),
        "tokens_per_draft": (total.drafts + total.accepted_tokens, total.drafts),
        "tokens_per_second": (total.generated_tokens, total.busy_s),
    }
    return out | {f"engine/{name}": count / of for name, (count, of) in rates.items() if of}
