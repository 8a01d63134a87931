"""Servers of the public OpenEnv collection are played, where a checkout of it is at hand; its page says how."""

import os
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from collection import try_out
from collection_table import COLLECTION

CHECKOUT = os.environ.get("OPENENV_COLLECTION")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "openenv-servers.md"


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="OPENENV_COLLECTION names no checkout of github.com/huggingface/OpenEnv")
@pytest.mark.parametrize("name", COLLECTION)
def test_a_server_of_the_collection_pays_what_it_should(name, tmp_path):
    try_out(name, Path(CHECKOUT), tmp_path)


@pytest.mark.parametrize("name", COLLECTION)
def test_the_page_has_the_settings_that_were_played(name):
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    settings = COLLECTION[name].settings()
    assert len(rows) == 1
    assert f"| `{settings}` |" in rows[0] if settings else "| none |" in rows[0]
