"""Play servers of the public OpenEnv collection, unmodified, with the adapter that training uses.

    python tests/envs/collection.py --collection CHECKOUT_OF_HUGGINGFACE_OPENENV [--work FOLDER] [names…]

Needs the episode environment's interpreter. Every server gets a Python environment of its own, which sees the packages
of this interpreter and has in addition what the server's pyproject.toml names, or another version of OpenEnv.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collection_table import COLLECTION, Played

from megatron_fleet.config.sections.env import EnvConfig, OpenEnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.envs.openenv import OpenEnvEnvironment
from megatron_fleet.envs.registry import no_answer

START_S = 300.0
"""Longest wait for a server."""
TASK = Task("k1", "Do it.", "collection", "scored by the environment", env_variables={"TEXT": "twelve chars"})


class Unplayable(Exception):
    """A server could not be installed or started, or an episode went otherwise than its entry says."""


@dataclass(frozen=True)
class Episode:
    """One episode: its interface (mcp or action), number of tools offered and of calls, reward."""

    interface: str
    tools: int
    calls: int
    reward: float | None


def installed(played: Played, collection: Path, work: Path) -> Path:
    """The interpreter of the server's environment, which is made unless it is there. Raises Unplayable."""
    folder = work / played.package / "environment"
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    venv.create(folder, clear=True, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (own / "packages_of_the_base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    project = tomllib.loads((collection / "envs" / played.package / "pyproject.toml").read_text(encoding="utf-8"))
    named = [need for need in project["project"]["dependencies"] if not need.startswith(("openenv", *played.without))]
    run = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *named, *played.extra]
    failed = subprocess.run(run, capture_output=True, text=True)
    if failed.returncode:
        raise Unplayable(f"cannot be installed: {failed.stderr.strip().splitlines()[-1]}")
    done.touch()
    return python


@contextlib.contextmanager
def served(played: Played, python: Path, collection: Path, work: Path) -> Iterator[str]:
    """Its address, while it runs. Raises Unplayable."""
    folder = work / played.package
    log, run = folder / "server.log", folder / "run"
    run.mkdir(exist_ok=True)
    variables = dict(played.variables)
    if played.data is not None:
        (folder / "data").mkdir(exist_ok=True)
        variables |= played.data(folder / "data")
    sources = os.pathsep.join(map(str, (collection / "envs", collection / "envs" / played.package)))
    offline = {"PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | offline | variables | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    with socket.socket() as listener, log.open("w") as output:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url, fd = f"http://127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
        command = [str(python), "-m", "uvicorn", f"{played.package}.server.app:app", "--fd", str(fd)]
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd=run, env=environment, pass_fds=[fd])
    try:
        end = time.monotonic() + START_S
        while why := no_answer(url, 5):
            if server.poll() is not None or time.monotonic() > end:
                said = log.read_text(errors="replace").strip().splitlines()
                raise Unplayable(f"does not start: {said[-1] if said else why}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def play(played: Played, url: str, verbose: bool = False) -> Episode:
    """One episode as the entry says. Raises Unplayable, EnvLost or EnvBusy."""
    deadlines = {f"{verb}_timeout_s": 120 for verb in ("make", "reset", "step", "verify")}
    config = EnvConfig(kind="openenv", url=url, openenv=OpenEnvConfig.model_validate(played.openenv), **deadlines)
    session = OpenEnvEnvironment(config, url, config.openenv)
    try:
        first = await session.reset(TASK)
        _expect(played.opening, first.content, "reset", verbose)
        for number, (name, arguments) in enumerate(played.calls):
            shown = await session.step(ToolCall(name, arguments))
            text = shown.content if shown.error is None else f"{shown.error.kind}: {shown.error.message}"
            part = played.shows[number] if played.shows else ""
            if shown.error is not None and not part:
                raise Unplayable(f"{name} fails: {text}")
            _expect(part, text, name, verbose)
        reward = await session.verify(played.answer, [])
    finally:
        await session.close()
    least, most = played.reward if isinstance(played.reward, tuple) else (played.reward, played.reward)
    known = reward.value is not None and least is not None and most is not None
    if reward.value != least and not (known and least - 1e-6 <= reward.value <= most + 1e-6):  # type: ignore[operator]
        raise Unplayable(f"pays {reward.value} ({reward.reason}), not {played.reward}")
    interface = "mcp" if session._action is None else "action"
    return Episode(interface, len(first.tools), len(played.calls), reward.value)


def _expect(part: str, text: str, where: str, verbose: bool) -> None:
    if verbose:
        print(f"    {where}: {text[:400]}")
    if part not in text:
        raise Unplayable(f"{where} shows {text[:200]!r} without {part!r}")


def try_out(name: str, collection: Path, work: Path, verbose: bool = False) -> Episode:
    """Install, serve and play the server of that name. Raises Unplayable, EnvLost or EnvBusy."""
    played = COLLECTION[name]
    python = installed(played, collection, work)
    with served(played, python, collection, work) as url:
        return asyncio.run(play(played, url, verbose))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each server; 1 when one could not be played."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, required=True, help="checkout of huggingface/OpenEnv")
    parser.add_argument("--work", type=Path, help="folder for environments and data, kept; default: a temporary one")
    parser.add_argument("--verbose", action="store_true", help="print what the policy is shown")
    parser.add_argument("names", nargs="*", default=list(COLLECTION), help=f"some of {', '.join(COLLECTION)}")
    given = parser.parse_args(argv)
    failed = 0
    line = "{:<20}{:<10}{:>6}{:>7}{:>9}  {}"
    print(line.format("name", "interface", "tools", "calls", "reward", "result"))
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.names:
            try:
                episode = try_out(
                    name, given.collection.resolve(), (given.work or Path(temporary)).resolve(), given.verbose
                )
            except Exception as error:
                failed += 1
                print(line.format(name, "", "", "", "", f"{type(error).__name__}: {error}"), flush=True)
                continue
            reward = "none" if episode.reward is None else f"{episode.reward:.2f}"
            print(line.format(name, episode.interface, episode.tools, episode.calls, reward, "as expected"), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
