"""Servers of the public OpenEnv collection are played, where a checkout of it is at hand; its page says how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from collection import play, served, try_out
from collection_table import COLLECTION, Played

CHECKOUT = os.environ.get("OPENENV_COLLECTION")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "openenv-servers.md"


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="OPENENV_COLLECTION names no checkout of github.com/huggingface/OpenEnv")
@pytest.mark.parametrize("name", COLLECTION)
def test_a_server_of_the_collection_pays_what_it_should(name, tmp_path):
    try_out(name, Path(CHECKOUT), tmp_path)


@pytest.mark.slow  # starts a process of OpenEnv's, and one that serves
@pytest.mark.in_turn(number=0, of=2)
async def test_the_server_that_openenv_makes_is_played_as_it_is(tmp_path):
    """The package has no other whole server; its command makes one that echoes, as the collection's first does."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "echo_env").mkdir()
    make = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(tmp_path / "envs")]
    # Without uv, which would fetch the server's dependencies.
    made = subprocess.run(make, env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    echo = Played(
        "echo_env",
        0.5,
        {"reward": "last"},
        calls=(("EchoAction", {"message": "hello, you"}), ("EchoAction", {"message": "hello"})),
        shows=('"message_length": 10', '"echoed_message": "hello"'),
        opening="Echo Env environment ready!",
    )
    with served(echo, Path(sys.executable), tmp_path, tmp_path) as url:
        episode = await play(echo, url)
    assert (episode.interface, episode.tools, episode.calls, episode.reward) == ("action", 1, 2, 0.5)


@pytest.mark.parametrize("name", COLLECTION)
def test_the_page_has_the_settings_that_were_played(name):
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    settings = COLLECTION[name].settings()
    assert len(rows) == 1
    assert f"| `{settings}` |" in rows[0] if settings else "| none |" in rows[0]
