"""The live page in a real browser, while a run goes on: it follows, it keeps the reader's place, it runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from browser import CHROMIUM, Opened, chromium, live_page
from run_maker import RunMaker, groups, trajectory

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.telemetry.status import Alert, PhaseStatus, RunStatus

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
EVIL = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1><svg onload=window.hit=1>'\"`"
LAPTOP = {"width": 1366, "height": 768}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as running:
        yield running


def step(maker: RunMaker, number: int, task: str = "order", rewards: tuple[float | None, ...] = (0.0, 1.0)) -> None:
    maker.train(number, groups({f"{task}_{number}": list(rewards)}))


def place(locator) -> float:
    return locator.bounding_box()["y"]


@pytest.mark.slow
def test_steps_and_trajectories_appear_while_the_reader_stays(browser, make_run):
    for number in range(1, 30):
        step(make_run, number)
    with live_page(make_run.folder) as url:
        opened = Opened(browser, url, viewport=LAPTOP)
        page = opened.page
        assert "token" not in page.url
        fact = page.locator(".fact").first
        sync_api.expect(fact).to_contain_text("29 of 4")
        page.evaluate("window.loaded = 1")
        row = page.locator(".row").nth(12)
        row.click()
        viewer = page.locator("#viewer")
        sync_api.expect(viewer.locator(".message")).to_have_count(3)
        page.get_by_role("button", name="Tokens").click()
        page.locator("#list").evaluate("(list) => { list.scrollTop = 300; }")
        page.evaluate("scrollBy(0, 150)")
        curve = page.locator(".plot").first
        drawn = curve.get_attribute("data-chart")
        before = place(row), place(viewer), place(viewer.locator(".tokens"))

        step(make_run, 30)
        alerts = [Alert(1e9, "WARNING", f"alert {i}") for i in range(4)]
        status = RunStatus(
            "demo", "demo_1", "running", "node-0", 1, 1e9, 0.0, 30, 40, 1e9, [PhaseStatus("rollout", 1e9)]
        )
        replace(status, alerts=alerts).write(make_run.folder)

        sync_api.expect(fact).to_contain_text("30 of 40")
        new = page.locator(".row", has_text="order_30")
        sync_api.expect(new).to_have_count(2)
        sync_api.expect(page.locator("#alert-list li")).to_have_count(4)
        sync_api.expect(curve).not_to_have_attribute("data-chart", drawn)
        moved = page.locator(".row").nth(14)  # two came before it
        assert moved.evaluate("(row) => row.classList.contains('open')")
        after = place(moved), place(viewer), place(viewer.locator(".tokens"))
        assert after == pytest.approx(before, abs=2)
        assert page.evaluate("window.loaded") == 1  # never reloaded
        assert opened.complaints == [] and opened.failures == []
        opened.context.close()


@pytest.mark.slow
def test_filters_select_and_links_open(browser, make_run):
    make_run.train(1, groups({"a": [0.0, 1.0]}) + groups({"b": [None]}, "bank"))
    make_run.evaluate(1, groups({"c": [1.0]}))
    with live_page(make_run.folder) as url:
        opened = Opened(browser, url, viewport=LAPTOP)
        page, rows = opened.page, opened.page.locator(".row")
        sync_api.expect(rows).to_have_count(4)
        page.locator("select[name=env]").select_option("bank")
        sync_api.expect(rows).to_have_count(1)
        sync_api.expect(rows).to_contain_text("unknown")
        page.get_by_role("button", name="Reset").click()
        sync_api.expect(rows).to_have_count(4)
        page.locator("select[name=reward]").select_option("solved")
        sync_api.expect(rows).to_have_count(2)
        page.locator("select[name=kind]").select_option("eval")
        sync_api.expect(rows).to_have_count(1)
        rows.click()
        sync_api.expect(page).to_have_url(re.compile("#trajectory=eval-1-0$"))
        page.reload()  # the cookie stands for the token, and the address for the open trajectory
        sync_api.expect(page.locator(".viewer h3")).to_have_text("c #0")
        assert opened.complaints == []
        opened.context.close()


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(browser, tmp_path):
    maker = RunMaker(tmp_path / "run", name=EVIL)
    said = [("system", EVIL), ("assistant", f"<think>{EVIL}</think>"), ("tool", f"Error: {EVIL}")]
    env = EVIL.replace("/", "")
    shown = trajectory(EVIL, env, 0, 0.5, messages=said, reason=EVIL, metrics={EVIL: 1.0})
    maker.train(1, [Group(0, EVIL, env, [shown])])
    status = RunStatus(EVIL, EVIL, "running", EVIL, 1, 1e9, 0.0, 1, 2, 1e9, [PhaseStatus(EVIL, 1e9)])
    replace(status, alerts=[Alert(1e9, EVIL, EVIL)]).write(maker.folder)
    with live_page(maker.folder) as url:
        opened = Opened(browser, url, viewport=LAPTOP)
        page = opened.page
        page.locator(".row").click()
        sync_api.expect(page.locator(".message")).to_have_count(3)
        assert EVIL in page.locator("#viewer .messages").inner_text()
        for where in ("h1", "#alert-list", "#environment-table", "#facts", "#charts", ".viewer h3"):
            sync_api.expect(page.locator(where)).to_contain_text("window.hit=1")
        assert page.locator("main img, main script").count() == 0
        assert opened.complaints == []
        page.evaluate("document.addEventListener('securitypolicyviolation', () => { document.body.className += 'x'; })")
        page.evaluate("(evil) => { document.querySelector('main').innerHTML = evil; }", EVIL)
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'hit=1'}))")
        sync_api.expect(page.locator("body")).to_have_class(re.compile("xx"))  # the handlers, and the script
        assert page.evaluate("window.hit") is None
        opened.context.close()


@pytest.mark.slow
def test_a_browser_without_the_token_sees_nothing(browser, make_run):
    step(make_run, 1, task="secret")
    with live_page(make_run.folder) as url:
        for address in (url.partition("?")[0], url[:-1]):
            opened = Opened(browser, address)
            assert "printed" in opened.page.content() and "demo" not in opened.page.content()
            assert opened.context.request.get(url.partition("?")[0] + "data/now").status == 403
            opened.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, make_run, scheme):
    step(make_run, 1, task="a_long_name_of_a_task_" * 4)
    with live_page(make_run.folder) as url:
        opened = Opened(browser, url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
        opened.page.locator(".row").first.click()
        sync_api.expect(opened.page.locator(".message")).to_have_count(3)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        opened.context.close()
