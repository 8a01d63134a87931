"""Measure the report of a long run: size, time and memory to build it, time to open it. Prints one line of JSON.

The run is made by `make_run`: 1,000 steps of 200 episodes (about 12 turns, 5,000 tokens and 20,000 characters each) in
ten environments, with all reward, environment and generation metrics of each step, computed from the episodes, and an
evaluation every 50 steps, all written through the sinks of a real run. To make it in minutes, ``--distinct`` steps have
episodes of their own, and the other files are links to theirs.

``build``: of ``mfleet report``, in a process of its own: seconds, and peak memory without the interpreter and its
libraries (``--version`` of the same command). ``open``: milliseconds in Chromium until the page has loaded and painted,
median and worst of ``--opens`` fresh ones, and processor milliseconds of its process, which a busy machine changes
less. Times need a quiet machine.

    python benchmarks/report.py [--steps 1000] [--episodes 200] [--distinct 40] [--opens 7]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measured import stamp

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.telemetry.episodes import eval_metrics, rollout_metrics
from megatron_fleet.telemetry.registry import METRICS
from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.trajectories import TrajectoryLog

ENVIRONMENTS = [f"environment{number}" for number in range(10)]
GROUP = 8
EVERY = 50
PHASES = ("step", "generate", "policy_train", "sync_weights")
VOCABULARY = 4096
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
"""Milliseconds from the start of the navigation until the loaded page has been drawn."""


class Writer:
    """Maker of episodes from a pool of sentences."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        words = ["".join(map(chr, self.rng.integers(97, 123, self.rng.integers(2, 10)))) for _ in range(5000)]
        self.sentences = [" ".join(self.rng.choice(words, 12)) + "." for _ in range(8000)]

    def text(self, sentences: int) -> str:
        return " ".join(self.sentences[i] for i in self.rng.integers(0, len(self.sentences), sentences))

    def group(self, index: int, task: str, env: str, samples: int, skill: float) -> Group:
        return Group(index, task, env, [self.episode(task, env, sample, skill) for sample in range(samples)])

    def episode(self, task: str, env: str, sample: int, skill: float) -> Trajectory:
        """Make an episode; one in fifty has no known reward."""
        rng = self.rng
        turns = int(rng.integers(4, 20))
        lost = rng.random() < 0.02
        messages = [{"role": "system", "content": self.text(30)}, {"role": "user", "content": self.text(4)}]
        errors = 0
        for turn in range(turns):
            call = f'<tool_call>{{"name": "find", "arguments": {{"key": {rng.integers(10**6)}}}}}</tool_call>'
            messages.append({"role": "assistant", "content": f"<think>{self.text(8)}</think>{call}"})
            failed = rng.random() < 0.1
            errors += failed
            result = f"Error: no record with key {turn}" if failed else self.text(8)
            messages.append({"role": "tool", "content": result})
        spans, at = [Span("prompt", 0, 600, 0)], 600
        for turn in range(turns):
            spans += [Span("action", at, at + 180, turn, 1), Span("observation", at + 180, at + 360, turn)]
            at += 360
        mask = np.zeros(at, bool)
        for span in spans:
            mask[span.start : span.end] = span.kind == "action"
        metrics = {"turns": turns, "tool_calls": turns, "tool_errors": errors, "seconds": float(rng.uniform(5, 90))}
        return Trajectory(
            task_key=task,
            env_key=env,
            group=0,
            sample=sample,
            token_ids=rng.integers(0, VOCABULARY, at).astype(np.int32),
            action_mask=mask,
            behaviour_logprobs=np.where(mask, -rng.exponential(0.5, at), 0).astype(np.float32),
            spans=tuple(spans),
            reward=None if lost else float(rng.random() < skill),
            reward_reason="verifier: " + self.text(1),
            outcome=Outcome.VERIFIER_FAILED if lost else Outcome.COMPLETED if rng.random() < 0.9 else Outcome.MAX_TURNS,
            final_answer=self.text(1),
            metrics=metrics,
            messages=messages,
        )


def make_run(folder: Path, steps: int, episodes: int, distinct: int) -> None:
    """Write a run's folder, see the module."""
    writer = Writer(0)
    folder.mkdir(parents=True)
    config = {"run": {"name": "long", "steps": steps}, "model": {"path": "model"}, "eval": {"pass_threshold": 1.0}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics = MetricsLog(folder / "metrics.jsonl", None, started=time.time())
    log = TrajectoryLog(folder / "trajectories", None)
    others = [m.pattern for m in METRICS if not m.pattern.startswith(("reward/", "environment/", "generate/", "eval/"))]
    others = [name for name in others if "{" not in name] + [f"timing/{p}" for p in PHASES]
    groups: list[Group] = []
    for step in range(steps + 1):
        row: dict[str, float] = {}
        if step:
            written = 1 + (step - 1) * distinct // steps * steps // distinct
            if step == written or not groups:
                groups = [
                    writer.group(i, f"task-{writer.rng.integers(2000)}", ENVIRONMENTS[i % 10], GROUP, 0.2 + step / 2000)
                    for i in range(episodes // GROUP)
                ]
                newest = log.write(step, groups)[0]
                computed = rollout_metrics(groups, 1.0)
            else:
                os.link(newest, newest.with_name(f"step_{step:06d}{newest.suffix}"))
            row |= computed | {name: float(writer.rng.normal(1, 0.1)) for name in others}
            row["accounting/episodes"] = episodes
        if step % EVERY == 0:
            skill = 0.2 + step / 2000
            sampled = [writer.group(i, f"held-{i}", ENVIRONMENTS[i % 10], 3, skill) for i in range(120)]
            greedy = [writer.group(i, f"held-{i}", ENVIRONMENTS[i % 10], 1, skill) for i in range(120)]
            row |= eval_metrics(sampled, greedy, 1.0)
            log.write(step, sampled, "eval")
            log.write(step, greedy, "greedy")
        metrics.write(step, row)
    metrics.close()


def build(folder: Path, page: Path) -> dict[str, float]:
    """Build the report in a process of its own."""
    _, _, base = command("--version")
    text = page.with_suffix(".md")
    seconds, cpu, peak = command("report", str(folder), "--out", str(page), "--markdown", str(text))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_mb": round((peak - base) / 1e6, 1),
        "page_mb": round(page.stat().st_size / 1e6, 3),
        "markdown_mb": round(text.stat().st_size / 1e6, 3),
        "trajectories": page.read_bytes().count(b'<script type="text/plain" id="t-'),
    }


PROGRAM = """
import sys, time
from megatron_fleet.cli import main
began = time.monotonic()
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("measured", time.monotonic() - began, time.process_time(), peak * 1024)
sys.exit(status)
"""


def command(*arguments: str) -> tuple[float, float, int]:
    """Return seconds, processor seconds and peak resident bytes of an ``mfleet`` command, its imports included."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu, peak = done.stdout.splitlines()[-1].split()[1:]
    return float(seconds), float(cpu), int(peak)


def open_page(page: Path, opens: int) -> dict[str, float] | None:
    """Open the page in fresh browsers' contexts; ``None`` without Chromium."""
    if CHROMIUM is None:
        return None
    from playwright.sync_api import sync_playwright

    times, cpu, rows = [], [], 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(opens):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            opened = context.new_page()
            opened.set_default_timeout(120_000)
            developer = context.new_cdp_session(opened)
            developer.send("Performance.enable")
            opened.goto(page.as_uri())
            times.append(float(opened.evaluate(PAINTED)))
            metrics = {m["name"]: m["value"] for m in developer.send("Performance.getMetrics")["metrics"]}
            cpu.append(1000 * metrics["ProcessTime"])
            rows = opened.locator(".row").count()
            context.close()
        browser.close()
    middle = {"median_ms": round(statistics.median(times)), "cpu_ms": round(statistics.median(cpu))}
    return middle | {"worst_ms": round(max(times)), "opens": opens, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=200, help="in a step")
    parser.add_argument("--distinct", type=int, default=40, help="steps with episodes of their own")
    parser.add_argument("--opens", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="of the run, which is kept, and used if it is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        if not folder.exists():
            make_run(folder, given.steps, given.episodes, min(given.distinct, given.steps))
        shards = [path.stat().st_size for path in (folder / "trajectories").iterdir()]
        page = Path(temporary) / "report.html"
        report: dict[str, Any] = {
            "benchmark": "report",
            "steps": given.steps,
            "episodes": given.steps * given.episodes,
            "metrics_mb": round((folder / "metrics.jsonl").stat().st_size / 1e6, 1),
            "trajectories_gb": round(sum(shards) / 1e9, 3),
            "build": build(folder, page),
            "open": open_page(page, given.opens),
        }
        print(json.dumps(report | stamp(__file__)))


if __name__ == "__main__":
    main()
