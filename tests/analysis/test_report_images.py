"""Images on the page: small copies drawn anew, as many as there is room for."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path

import PIL.Image
import pytest

pytest.importorskip("jinja2")

from browser import CHROMIUM, Opened, chromium
from run_maker import RunMaker, groups

from megatron_fleet.analysis.render import html
from megatron_fleet.analysis.report import build
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.transcripts import THUMBNAIL_SIDE as SIDE
from megatron_fleet.analysis.transcripts import thumbnails, unpack
from megatron_fleet.envs.base import Image


def drawn(width: int, height: int, colour: str) -> Image:
    out = io.BytesIO()
    PIL.Image.new("RGB", (width, height), colour).save(out, "PNG")
    return Image("image/png", out.getvalue())


def named(image: Image) -> str:
    return hashlib.sha256(image.data).hexdigest()


SCREEN, BROKEN = drawn(1280, 720, "red"), Image("image/png", b"<script>hit=1</script>")


@pytest.fixture
def run(tmp_path) -> Path:
    played = groups({"t0": [1.0]})
    (episode,) = played[0].trajectories
    episode.images = {named(image): image for image in (SCREEN, BROKEN)}
    episode.messages[1]["images"] = [named(SCREEN), named(BROKEN)]
    RunMaker(tmp_path / "run").evaluate(0, played)
    return tmp_path / "run"


def test_the_page_holds_small_copies_and_nothing_of_the_files_themselves(run):
    page = html(*build(read_run(run))).decode()
    found = json.loads(re.search(r'id="images">(.*?)</script>', page)[1])
    assert list(found) == [named(SCREEN)]
    small = PIL.Image.open(io.BytesIO(base64.b64decode(found[named(SCREEN)].split(",")[1])))
    assert small.size == (SIDE, SIDE * 720 // 1280) and small.getpixel((5, 5))[0] > 240
    assert unpack(re.search(r'id="t-eval-0-0">(.*?)</script>', page)[1])["messages"][1][2] == [
        named(SCREEN),
        named(BROKEN),
    ]


def test_thumbnails_stay_within_their_bytes(run):
    others = [drawn(64, 64, colour) for colour in ("blue", "green", "white")]
    for image in others:
        (run / "images" / f"{named(image)}.png").write_bytes(image.data)
    names = [named(image) for image in others]
    cost = max(len(address) for address in thumbnails(run, names, 10**6).values()) + 80
    assert list(thumbnails(run, names, 2 * cost)) == names[:2]
    assert thumbnails(run, names, 0) == {} and thumbnails(run, ["0" * 64], 10**6) == {}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_a_browser_shows_them(run):
    sync_api = pytest.importorskip("playwright.sync_api")
    path = run / "report.html"
    path.write_bytes(html(*build(read_run(run))))
    with chromium() as browser:
        opened = Opened(browser, path.as_uri())
        page = opened.page
        page.locator(".row").first.click()
        shot = page.locator("#viewer img.shot")
        sync_api.expect(shot).to_have_count(1)
        assert shot.evaluate("(i) => i.decode().then(() => i.naturalWidth)") == SIDE
        assert "image 2: not on this page" in page.locator("#viewer").inner_text()
        assert opened.complaints == [] and page.evaluate("window.hit") is None
