"""Statistics of engines: what vLLM reports is counted, and becomes metrics that the registry knows."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from megatron_fleet.rollout import engine_logger
from megatron_fleet.rollout.engine_logger import StatisticsLogger
from megatron_fleet.rollout.engine_statistics import EngineStatistics, engine_metrics
from megatron_fleet.telemetry import registry


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the logger sees, set by the test."""
    now = [0.0]
    monkeypatch.setattr(engine_logger.time, "monotonic", lambda: now[0])
    return now


def scheduler(running: int, waiting: int = 0, usage: float = 0.0, **more) -> SchedulerStats:
    return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage, **more)


def iteration(tokens: int, prompt: int = 0, preempted: int = 0, finished: int = 0) -> IterationStats:
    stats = IterationStats()
    stats.num_generation_tokens, stats.num_preempted_reqs = tokens, preempted
    stats.prompt_token_stats.computed = prompt
    stats.finished_requests = [FinishedRequestStats(finish_reason=None)] * finished
    return stats


def test_vllm_reports_to_our_logger_alone(monkeypatch):
    """vLLM would add a logger for Prometheus to any that is not derived from its own."""
    manager = StatLoggerManager(None, custom_stat_loggers=[StatisticsLogger], enable_default_loggers=False)
    (logger,) = manager.stat_loggers
    assert isinstance(logger, StatisticsLogger)
    manager.log_engine_initialized()
    manager.record(scheduler(1), iteration(1))
    manager.record_sleep_state(1, 2)
    manager.record_admission_rejection("max_num_queued_reqs")
    manager.log()
    assert logger.read().generated_tokens == 1


def test_steps_are_counted_and_reading_begins_anew(clock):
    logger = StatisticsLogger()
    drafts = SpecDecodingStats(3, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=4)
    logger.record(scheduler(3, 2, 0.5, prefix_cache_stats=PrefixCacheStats(queries=90, hits=30)), iteration(3, 60))
    logger.record(scheduler(2, 0, 0.75, spec_decoding_stats=drafts, num_skipped_waiting_reqs=1), iteration(6, 0, 1, 2))
    logger.record(scheduler(2, 0, 0.25), None)  # a part of a long prompt
    logger.record(scheduler(0, 0, 0.0), None)  # not a step
    logger.record(None, iteration(0))
    counts = logger.read()
    assert (counts.steps, counts.running, counts.waiting, counts.kv_usage) == (3, 9, 3, 1.5)
    assert (counts.most_running, counts.most_waiting, counts.most_kv_usage) == (4, 2, 0.75)
    assert (counts.generated_tokens, counts.prompt_tokens, counts.preemptions) == (9, 60, 1)
    assert (counts.cache_queries, counts.cache_hits) == (90, 30)
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (2, 6, 4)
    assert logger.read() == EngineStatistics()


def test_an_engine_is_busy_from_its_first_request_to_its_last_but_not_while_paused(clock):
    logger = StatisticsLogger()
    clock[0] = 10.0
    logger.begin()
    clock[0] = 11.0
    logger.begin()  # a second request
    clock[0] = 12.0
    logger.record(scheduler(2), iteration(2))
    clock[0] = 13.0
    assert logger.read().busy_s == 3.0
    clock[0] = 15.0
    logger.pause()
    clock[0] = 25.0
    logger.record(scheduler(1), iteration(2, finished=1))
    clock[0] = 26.0
    logger.record(scheduler(0), iteration(1, finished=1))
    clock[0] = 40.0
    assert logger.read().busy_s == 3.0


def test_metrics_over_all_engines_by_hand():
    one = EngineStatistics(steps=4, running=8, waiting=2, kv_usage=1.0, most_running=3, most_kv_usage=0.5, busy_s=2.0)
    one.generated_tokens, one.prompt_tokens, one.cache_queries, one.cache_hits = 100, 70, 40, 10
    two = EngineStatistics(steps=6, running=12, most_running=2, most_waiting=5, preemptions=3, busy_s=3.0)
    two.generated_tokens, two.drafts, two.draft_tokens, two.accepted_tokens = 50, 10, 30, 15
    metrics = engine_metrics([one, two])
    assert metrics == {
        "engine/running_mean": 2.0,
        "engine/running_max": 3,
        "engine/waiting_mean": 0.2,
        "engine/waiting_max": 5,
        "engine/kv_cache_usage_mean": 0.1,
        "engine/kv_cache_usage_max": 0.5,
        "engine/preemptions": 3,
        "engine/prompt_tokens": 70,
        "engine/cached_prompt_tokens": 10,
        "engine/generated_tokens": 150,
        "engine/tokens_per_second": 30.0,
        "engine/prefix_cache_hit_rate": 0.25,
        "engine/draft_acceptance_rate": 0.5,
        "engine/tokens_per_draft": 2.5,
    }
    others = {"engine/engines", "engine/episodes_allowed", "engine/episodes_in_flight_mean"}
    assert {m.pattern for m in registry.METRICS if m.pattern.startswith("engine/")} == set(metrics) | others


def test_rates_of_nothing_are_absent():
    assert set(engine_metrics([])) == {
        "engine/running_max",
        "engine/waiting_max",
        "engine/kv_cache_usage_max",
        "engine/preemptions",
        "engine/prompt_tokens",
        "engine/cached_prompt_tokens",
        "engine/generated_tokens",
    }
