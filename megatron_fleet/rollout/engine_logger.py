"""Logger of statistics that vLLM calls after every step of an engine. Imported where vLLM runs only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from megatron_fleet.rollout.engine_statistics import EngineStatistics

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class StatisticsLogger(PrometheusStatLogger):
    """Counts of one engine. Derived from vLLM's own logger of this kind, which vLLM 0.32 adds where none is given, and
    which spends time on every token; nothing of it is used."""

    def __init__(self, vllm_config: Any = None, engine_indexes: list[int] | None = None) -> None:
        self._counts = EngineStatistics()
        self._busy_since: float | None = None

    def read(self) -> EngineStatistics:
        """Return the counts since the last call."""
        self._add_busy(time.monotonic())
        counts, self._counts = self._counts, EngineStatistics()
        return counts

    def begin(self) -> None:
        """Note that a request was added."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def pause(self) -> None:
        """Note that scheduling stops; it goes on with the next `record` or `begin`."""
        self._add_busy(time.monotonic())
        self._busy_since = None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one engine step. vLLM also reports without a step, when the last request has left."""
        counts, now = self._counts, time.monotonic()
        if iteration_stats is not None:
            counts.preemptions += iteration_stats.num_preempted_reqs
            counts.prompt_tokens += iteration_stats.prompt_token_stats.computed
            counts.generated_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is None:
            return
        running = scheduler_stats.num_running_reqs
        finished = 0 if iteration_stats is None else len(iteration_stats.finished_requests)
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if not (running or waiting or finished):
            self.pause()
            return
        counts.steps += 1
        counts.running += running + finished
        counts.waiting += waiting
        counts.kv_usage += scheduler_stats.kv_cache_usage
        counts.most_running = max(counts.most_running, running + finished)
        counts.most_waiting = max(counts.most_waiting, waiting)
        counts.most_kv_usage = max(counts.most_kv_usage, scheduler_stats.kv_cache_usage)
        counts.cache_queries += scheduler_stats.prefix_cache_stats.queries
        counts.cache_hits += scheduler_stats.prefix_cache_stats.hits
        if (drafted := scheduler_stats.spec_decoding_stats) is not None:
            counts.drafts += drafted.num_drafts
            counts.draft_tokens += drafted.num_draft_tokens
            counts.accepted_tokens += drafted.num_accepted_tokens
        self._add_busy(now)
        self._busy_since = now if running or waiting else None

    def log_metrics_info(self, type: str, config_obj: Any) -> None:
        """See `PrometheusStatLogger`; nothing is exported."""

    def log_engine_initialized(self) -> None:
        """See `PrometheusStatLogger`; nothing is exported."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """See `PrometheusStatLogger`; nothing is exported."""

    def record_admission_rejection(self, reason: str) -> None:
        """See `PrometheusStatLogger`; nothing is exported."""

    def _add_busy(self, now: float) -> None:
        if self._busy_since is not None:
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
