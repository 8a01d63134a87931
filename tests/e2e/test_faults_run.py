"""A whole run on an embedded fleet that fails on purpose: all is accounted for, and what is unknown counts nowhere.

The live page is open from before its first step to its end.
"""

import statistics

import numpy as np
import pytest
from browser import CHROMIUM, Opened, chromium, live_page
from planted import found_in
from whole_runs import RUN_TIMEOUT_S, Run, wait_for

from megatron_fleet.telemetry.shards import Shard

pytestmark = pytest.mark.slow

FAULTS = (
    "run.steps=2",
    "eval=none",
    "rollout.max_retries=0",  # so that what is unknown stays to be seen
    "env.step_timeout_s=5",
    "env.faults.slow_rate=0.1",
    "env.faults.slow_s=0.5",
    "env.faults.hang_rate=0.15",
    "env.faults.malformed_rate=0.15",
    "env.faults.dead_session_rate=0.1",
    "env.faults.verifier_failure_rate=0.2",
)
FATES = ("trained", "filtered", "unknown", "too_few_known", "masked", "too_old", "no_tokens")


def advantages(episodes):
    """Sizes of GRPO's advantages and action tokens of the trained episodes, from the known rewards on record alone."""
    groups = {}
    for episode in episodes:
        if episode["reward"] is not None:
            groups.setdefault(episode["group"], []).append(episode)
    sizes, tokens = [], []
    for known in groups.values():
        rewards = [episode["reward"] for episode in known]
        if len(set(rewards)) > 1:
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
            sizes += [abs(reward - mean) / spread for reward in rewards]
            tokens += [episode["action_tokens"] for episode in known]
    return sizes, tokens


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The run and its process; a test waits for its end."""
    run = Run(tmp_path_factory.mktemp("faults") / "run", FAULTS)
    process = run.start()
    yield run, process
    process.kill()
    process.communicate()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_live_page_shows_a_run_from_its_start_to_its_end(started):
    sync_api = pytest.importorskip("playwright.sync_api")
    run, process = started
    wait_for(run.out / "status.json", process)
    with chromium() as browser, live_page(run.out) as url:
        opened = Opened(browser, url, viewport={"width": 1366, "height": 768})
        page, first = opened.page, opened.page.locator(".row[data-id^=step-1-]").first
        page.evaluate("window.loaded = 1")
        sync_api.expect(page.locator("#state")).to_have_text("running")
        assert page.locator(".row[data-id^=step]").count() == 0
        wait_for(run.out / "trajectories" / "step_000001.parquet", process)
        sync_api.expect(first).to_be_visible()
        first.click()
        sync_api.expect(page.locator(".message").first).to_be_visible()
        opened_one = page.locator(".viewer h3").inner_text()
        process.wait(RUN_TIMEOUT_S)
        sync_api.expect(page.locator("#state")).to_have_text("finished")
        sync_api.expect(page.locator(".fact").first).to_contain_text("2 of 2")
        sync_api.expect(page.locator("#bars .bar")).to_have_count(2)
        sync_api.expect(page.locator(".row[data-id^=step-2-]").first).to_be_attached()
        sync_api.expect(page.locator("#charts .plot").first).to_be_visible()
        assert page.locator(".viewer h3").inner_text() == opened_one
        assert page.evaluate("window.loaded") == 1 and opened.complaints == [] and opened.failures == []
        for path in ("", "data/now", "data/charts", "data/trajectories?limit=2000", "data/trajectory/step-1-0"):
            answer = opened.context.request.get(url.partition("?")[0] + path)
            assert answer.status == 200 and not found_in(answer.body())
        opened.context.close()


def test_unknown_rewards_are_counted_and_enter_nothing(started):
    run, process = started
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output[-3000:]
    run.assert_nothing_left()
    unknown = 0
    for row in run.metrics():
        episodes = Shard.open(run.out / "trajectories" / f"step_{row['step']:06d}.parquet").records()
        known = [e["reward"] for e in episodes if e["reward"] is not None]
        lost = len(episodes) - len(known)
        unknown += lost
        assert sum(row[f"accounting/{fate}"] for fate in FATES) == row["accounting/episodes"] == len(episodes) == 16
        assert row["accounting/attempts_started"] == 16 + row["accounting/attempts_aborted"]
        assert row["accounting/unknown"] == lost
        assert row["generate/unknown_reward_rate"] == lost / 16
        assert row["reward/avg_raw_reward"] == pytest.approx(np.mean(known))
        failed = [e["outcome"] for e in episodes if e["reward"] is None]
        assert set(failed) <= {"env_failed", "verifier_failed", "timeout"}
        assert not any(e["reason"].startswith("internal error") for e in episodes)
        assert row["accounting/attempts_aborted"] == 0
        sizes, tokens = advantages(episodes)
        assert row["accounting/trained"] == len(sizes)
        if sizes:
            expected = np.average(sizes, weights=tokens)
            assert row["loss/avg_raw_advantages_abs"] == pytest.approx(expected, rel=1e-4)
            assert row["accounting/trained_tokens"] == sum(tokens)
    assert 3 <= unknown <= 28  # of 32; half are expected
