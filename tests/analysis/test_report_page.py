"""The page in a real browser: it works offline, its parts answer, what trajectories say is text and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Opened, chromium
from run_maker import RunMaker, groups, trajectory

from megatron_fleet.agents.trajectory import Group, Outcome
from megatron_fleet.analysis.report import write_report

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
TINY = Path(__file__).parents[2] / "assets" / "tiny"
EVIL = (
    "</script><script>window.hit=1</script><img src=x onerror=window.hit=1><svg onload=window.hit=1>'\"`${window.hit=1}"
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory) -> Path:
    """A run in which every text that an environment, a policy or a task file decides is hostile."""
    maker = RunMaker(tmp_path_factory.mktemp("evil") / "run", name=EVIL, model=str(TINY))
    said = [("system", EVIL), ("user", EVIL), ("assistant", f"<think>{EVIL}</think>{EVIL}"), ("tool", f"Error: {EVIL}")]
    hostile = {"messages": said, "reason": EVIL, "metrics": {EVIL: 1.0, "turns": 2.0}}
    env = EVIL.replace("/", "")  # metric names have a level per slash
    for step, reward in ((0, 0.0), (2, 1.0)):
        hostile["messages"] = [*said, ("assistant", f"{step} {EVIL} <done>")]
        collected = groups({f"{EVIL}{i}": [reward, None] for i in range(3)}, env, **hostile)
        lost = trajectory("plain", "bank", 0, None, Outcome.ENV_FAILED, reason="lost")
        maker.evaluate(step, [*collected, Group(9, "plain", "bank", [lost])])
        if step == 0:
            maker.train(1, groups({"t": [0.0, 1.0]}, env, **hostile))
    write_report(maker.folder)
    return maker.folder / "report.html"


def choose(row) -> None:
    """Click a row of the list and wait for its trajectory, which the page shows when it hears of the new address."""
    row.click()
    sync_api.expect(row).to_have_class(re.compile(r"\bopen\b"))


@pytest.fixture
def opened(browser, evil_run) -> Iterator[Opened]:
    page = Opened(browser, evil_run.as_uri(), viewport={"width": 1280, "height": 900})
    yield page
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("file:")] == []
    assert page.page.evaluate("window.hit") is None
    page.context.close()


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(opened):
    page = opened.page
    assert page.title() == f"Run {EVIL}"
    for pair in page.locator(".pair > summary").all():
        pair.click()
    sides = page.locator(".pair .sides").first
    assert "First difference: message 5" in sides.inner_text()
    assert f"0 {EVIL} <done>" in sides.inner_text() and f"2 {EVIL} <done>" in sides.inner_text()
    for row in range(page.locator(".row").count()):
        choose(page.locator(".row").nth(row))
        assert (EVIL in page.locator("#viewer .messages").inner_text()) == (
            page.locator("#viewer .message").count() == 5
        )
        page.get_by_role("button", name="Tokens").click()
    assert page.locator("main img, main script").count() == 0


@pytest.mark.slow
def test_even_markup_that_got_in_could_not_run(opened):
    opened.page.evaluate("(evil) => { document.querySelector('main').innerHTML = evil; }", EVIL)
    opened.page.evaluate("() => document.body.append(Object.assign(document.createElement('script'), {text: 'hit=1'}))")
    assert opened.page.evaluate("window.hit") is None
    assert opened.complaints and all("Content Security Policy" in text for text in opened.complaints)
    opened.complaints.clear()


def test_filters_narrow_the_list(opened):
    page, rows = opened.page, opened.page.locator(".row")
    everything = rows.count()
    assert everything == 16
    page.get_by_label("Outcome").select_option("env_failed")
    assert rows.count() == 2 and "unknown" in rows.first.inner_text()
    page.get_by_label("Set").select_option("eval 2")
    assert rows.count() == 1
    page.get_by_role("button", name="Reset").click()
    sync_api.expect(rows).to_have_count(everything)
    page.locator("select[name=failure]").select_option("false_completion")
    assert rows.count() == 4  # three of the first evaluation, one of training; unknown rewards are none
    page.get_by_role("button", name="Reset").click()
    page.get_by_label("Result").select_option("unknown")
    assert rows.count() == 8
    page.get_by_label("Result").select_option("solved")
    assert rows.count() == 4
    page.get_by_label("Task").fill("no such task")
    assert rows.count() == 0


def test_a_trajectory_opens_with_turns_reward_and_tokens(opened):
    page = opened.page
    page.locator("select[name=env]").select_option("bank")
    choose(page.locator(".row").first)
    viewer = page.locator("#viewer")
    assert "reward unknown" in viewer.inner_text() and "lost" in viewer.inner_text()
    assert viewer.locator(".message").count() == 3
    page.get_by_role("button", name="Tokens").click()
    sampled = viewer.locator(".tokens .s")
    assert sampled.count() == 2
    assert "id 8" in sampled.first.get_attribute("title") and "log-prob -0.5" in sampled.first.get_attribute("title")
    assert "weight version 2" in sampled.first.get_attribute("title")
    assert viewer.locator(".tokens .seen").count() == 3
    assert "‹" not in sampled.first.inner_text()  # the tokenizer of the run's model gave it a text


def test_links_keys_sorting_and_curves_answer(opened):
    page = opened.page
    page.locator("#errors td a").first.click()
    sync_api.expect(page).to_have_url(re.compile("#trajectory=eval-"))
    sync_api.expect(page.locator(".viewer h3")).to_have_count(1)
    first = page.url
    page.keyboard.press("j")
    sync_api.expect(page).not_to_have_url(first)
    column = page.locator("#behaviour table").first.locator("th").nth(1)
    column.click()
    column.click()
    cells = page.locator("#behaviour table").first.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert cells == sorted(cells, reverse=True) and len(set(cells)) == 2
    page.locator("#curves .plot").first.hover()
    sync_api.expect(page.locator("#curves .readout").first).to_have_text(re.compile("^step "))


def test_a_link_out_of_the_filtered_list_shows_and_marks_its_row(opened):
    page = opened.page
    page.get_by_label("Task").fill("no such task")
    page.locator("#errors td a").first.click()
    marked = page.locator(".row.open")
    sync_api.expect(page.locator(".row")).to_have_count(16)
    sync_api.expect(marked).to_have_count(1)
    assert marked.get_attribute("href") == "#" + page.url.split("#")[1]


@pytest.mark.slow
def test_a_name_that_turns_the_direction_turns_nothing_else(browser, tmp_path):
    maker = RunMaker(tmp_path / "run")
    for step, reward in ((0, 0.0), (3, 1.0)):
        maker.evaluate(step, groups({"turned \u202eyek": [reward]}))
    write_report(maker.folder)
    opened = Opened(browser, (maker.folder / "report.html").as_uri(), viewport={"width": 1280, "height": 900})
    parts = opened.page.locator(".pair > summary > span")
    task, reward = (parts.nth(i).bounding_box() for i in (1, 2))
    assert task["x"] + task["width"] <= reward["x"] + 1
    ends = """(text) => [0, text.length - 1].map((at) => {
        const range = document.createRange(), node = document.querySelector('.pair summary .quiet').firstChild;
        range.setStart(node, at); range.setEnd(node, at + 1); return range.getBoundingClientRect().x; })"""
    first, last = opened.page.evaluate(ends, parts.nth(2).inner_text())
    assert first < last
    opened.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, evil_run, scheme):
    opened = Opened(browser, evil_run.as_uri(), viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = opened.page
    choose(page.locator(".row").first)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    assert (sum(map(int, ink[4:-1].split(","))) > sum(map(int, paper[4:-1].split(",")))) == (scheme == "dark")
    assert opened.complaints == []
    opened.context.close()
