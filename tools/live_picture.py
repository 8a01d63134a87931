"""Draw ``docs/run/live.png``: the live page of a run that this script makes up, so that the picture shows no path or
host of the machine on which it is drawn. Needs Chromium. Usage: python tools/live_picture.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.status import EngineStatus, EnvironmentStatus, PhaseStatus, RunStatus

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "run" / "live.png"
GIB = 1 << 30
SIZE = {"width": 1326, "height": 855}
STEPS, LAST = 40, 8
ENVIRONMENTS = {"booking": 0.44, "ledger": 0.31, "tickets": 0.52}
"""Mean reward before training."""


def metrics_of(step: int) -> dict[str, float]:
    """Metrics of a finished step: rewards rise, and every third step is evaluated."""
    rise = 0.03 * step + (0.02 if step % 2 else -0.02)
    found = {
        "timing/step": 21.0 + step % 3,
        "timing/generate": 9.0 + 0.4 * (step % 4),
        "timing/compute_advantages_and_returns": 0.1,
        "timing/policy_train": 10.0 + step % 3,
        "timing/sync_weights": 0.7,
        "generate/tokens_per_second": 1400.0 + 20 * step,
        "reward/avg_raw_reward": 0.42 + rise,
        "memory/train/process": 3.1,
        "memory/roll/process": 2.4,
    }
    if step % 3 == 0:
        found |= {"timing/eval": 8.0, "eval/all/pass_at_1": 0.4 + rise}
    for env, start in ENVIRONMENTS.items():
        found |= {
            f"reward/{env}/avg_raw_reward": start + rise,
            f"reward/{env}/signal_ratio": 0.75,
            f"environment/{env}/avg_turns": 3.2,
            f"environment/{env}/tool_error_rate": 0.06,
            f"environment/{env}/infrastructure_failure_rate": 0.0,
            f"environment/{env}/verifier_unknown_rate": 0.0,
            f"timing/episode_s/{env}": 4.1,
        }
        if step % 3 == 0:
            found[f"eval/{env}/pass_at_1"] = start + rise
    return found


def status(now: float) -> RunStatus:
    """State of the run in the step after `LAST`: the trainer works."""
    phases = [
        PhaseStatus("rollout", now - 16, 9.6, 128, 128),
        PhaseStatus("compute_advantages_and_returns", now - 6.4, 0.1),
        PhaseStatus("policy_train", now - 6.3),
    ]
    environments = {
        env: EnvironmentStatus(43, 43, start + 0.03 * LAST, 140, 9, 0) for env, start in ENVIRONMENTS.items()
    }
    memory = {
        "controller": GIB // 4,
        "ranks": 3 * GIB,
        "rollout": 4 * GIB,
        "host_used": 9 * GIB,
        "host_total": 32 * GIB,
    }
    return RunStatus(
        "quickstart", "quickstart_ab12cd34", "running", "node-0", 4711, now, now - 300, LAST, STEPS, now - 16, phases,
        [EngineStatus("engine 0", True, 31.0, 0.0, 0.18, 1630.0)], environments, 0, 0, memory,
    )  # fmt: skip


def write_run(folder: Path) -> None:
    """Write what the page reads of a run."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"run": {"name": "quickstart", "steps": STEPS}, "model": {"path": "assets/tiny"}}
    (folder / "config.json").write_text(json.dumps(config))
    log = MetricsLog(folder / "metrics.jsonl", None, started=time.time() - 300)
    log.write(0, {"eval/all/pass_at_1": 0.4} | {f"eval/{env}/pass_at_1": start for env, start in ENVIRONMENTS.items()})
    for step in range(1, LAST + 1):
        log.write(step, metrics_of(step))
    log.close()
    status(time.time()).write(folder)


def draw(picture: Path) -> None:
    """Serve the page as a user would, and write what Chromium shows."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary, "quickstart")
        write_run(folder)
        command = [sys.executable, "-m", "megatron_fleet.cli", "report", str(folder), "--serve", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = re.search(r"http://\S+", server.stdout.readline())  # type: ignore[union-attr]
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
                status(time.time()).write(folder)
                page.goto(address[0])  # type: ignore[index]
                page.locator("#environment-table tbody tr").nth(len(ENVIRONMENTS) - 1).wait_for()
                page.screenshot(path=picture)
                browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    draw(PICTURE)
