"""The documentation in a real browser: from a folder and from a server, without a network."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import CHROMIUM, Opened, chromium

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"), pytest.mark.slow]
HAVE_LOADED = "[...document.images].every((image) => image.complete && image.naturalWidth > 0)"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def served(site) -> Iterator[str]:
    """The address of the site on a server of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.in_turn(number=0, of=2)
def test_every_page_is_shown_from_a_folder(browser, site):
    opened = Opened(browser, (site / "index.html").as_uri(), viewport={"width": 1280, "height": 900})
    pages = sorted(site.rglob("*.html"))
    images = 0
    for path in pages:
        if path.name == "404.html":  # made for the root of a server
            continue
        opened.page.goto(path.as_uri())
        opened.page.wait_for_function(HAVE_LOADED)
        images += opened.page.locator(".md-content img").count()
        assert opened.page.locator(".md-content h1").count() == 1, path
    assert len(pages) > 20 and images > 10
    assert opened.complaints == opened.failures == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    opened.context.close()


def find(opened: Opened, text: str) -> list[str]:
    """Addresses of the pages that the search finds."""
    opened.page.locator(".md-search__input").click()
    opened.page.keyboard.type(text)
    results = opened.page.locator(".md-search-result__link")
    sync_api.expect(results.first).to_be_visible()
    return [str(link.get_attribute("href")) for link in results.all()]


def test_the_search_finds_a_key_from_a_folder(browser, site):
    opened = Opened(browser, (site / "learn" / "quickstart.html").as_uri())
    assert any("reference/config.html" in url for url in find(opened, "max_staleness"))
    assert opened.complaints == opened.failures == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    opened.context.close()


def test_the_search_finds_a_key_from_a_server(browser, served):
    opened = Opened(browser, f"{served}index.html")
    assert any("reference/config.html" in url for url in find(opened, "max_staleness"))
    assert opened.complaints == opened.failures == []
    assert [url for url in opened.requests if not url.startswith((served, "data:"))] == []
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_in_light_and_dark(browser, site, scheme):
    opened = Opened(
        browser, (site / "index.html").as_uri(), viewport={"width": 390, "height": 844}, color_scheme=scheme
    )
    for name in ("index", "learn/your-tasks", "run/one-node", "reference/config", "understand/performance"):
        opened.page.goto((site / f"{name}.html").as_uri())
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        paper = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(float, paper.split("(")[1].rstrip(")").split(",")[:3])) > 3 * 128
        assert light == (scheme == "light"), name
    assert opened.complaints == opened.failures == []
    opened.context.close()
