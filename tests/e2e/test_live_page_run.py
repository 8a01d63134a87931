"""The live page beside a real run, from before its first step to its end."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Opened, chromium, live_page
from planted import found_in
from whole_runs import RUN_TIMEOUT_S, Run, wait_for

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


def test_a_run_from_its_start_to_its_end(tmp_path):
    run = Run(tmp_path / "run", ("run.steps=2",))
    process = run.start()
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
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        assert process.returncode == 0, output[-3000:]
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
    run.assert_nothing_left()
