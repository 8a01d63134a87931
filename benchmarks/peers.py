"""Seconds per trained episode of this project and of TRL's GRPOTrainer: the quickstart's model, tasks and limits.

Both sides train on the same tasks in the same order, every episode of every group, with equal prompts, tools, limits,
learning rate and threads, and against the embedded fleet's server. They take turns on the same cores; the first step of
each run is left out. TRL generates with transformers (1.16 is made for vLLM 0.22 to 0.31, none of which is used here)
and plays with its own loop of tool calls (`peers_trl.py`), in a Python environment of its own:

    python -m venv trl_env && trl_env/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu \\
        torch==2.13.0+cpu trl==1.16.0 openenv==0.10.0 jsonschema
    python benchmarks/peers.py --python trl_env/bin/python --out runs/peers [--rounds 2] [--steps 4]

Prints one line of JSON: `ratio`, TRL's seconds per episode ÷ ours, over all rounds, and of each in `ratios`;
`per_token`, the same for seconds per sampled token; and `sides` with what each did: mean tokens, turns and rewards, of
all steps and of the first, whose policy is the untrained model. A run that is there already (`--out`) is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from measured import ROOT, stamp

from megatron_fleet.agents.prompts import load_prompts
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import run_dataset
from megatron_fleet.data.sampler import make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.tasks import WORLDS
from megatron_fleet.models.chat.format import TOOLS_HEAD
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.qwen3.chat import TOOLS_TAIL

COMMON = (
    "eval=none", "checkpoint.interval=0", "checkpoint.export.last=false", "policy.optimizer.schedule=constant",
    "policy.optimizer.min_lr=0", "algorithm.group_filter=none", "rollout.max_no_action_turns=1",
)  # fmt: skip
"""As TRL does it: it trains on groups without signal too, and its episodes end with a turn without a call."""
FASTEST = {"cache_implementation": "static"}
"""With transformers' static cache TRL's steps take about half the time of those with its default one."""
WARM_UP = 1
"""First steps that are left out."""


def tools_of(env_key: str) -> list[dict[str, Any]]:
    """Tools of an embedded environment in the OpenAI function format."""
    return [{"type": "function", "function": spec} for spec in WORLDS[env_key].tools()]


def template(original: str) -> str:
    """The chat template for TRL: tools are in the system text already, and a turn looks the same before later ones."""
    return "{%- set tools = none %}" + original.replace("(loop.last or thinking)", "thinking")


def row(task: Task, config: Config) -> dict[str, Any]:
    """A row of TRL's dataset: the prompt with its tools as this project writes it, and the task."""
    prompts = load_prompts(config.agent.prompts)
    system = prompts.system_text(task.env_key, config.agent.finish)
    tools = "".join("\n" + to_json(tool) for tool in tools_of(task.env_key))
    messages = {"system": f"{system}\n\n{TOOLS_HEAD}{tools}{TOOLS_TAIL}", "user": prompts.user_text(task, task.prompt)}
    prompt = [{"role": role, "content": content} for role, content in messages.items()]
    return {"prompt": prompt, "environment": task.env_key, "task": json.dumps(asdict(task))}


def plan(config: Config, batch: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and the dataset of TRL's run, as `peers_trl.py` reads them, without the server's address."""
    rollout, optimizer, model = config.rollout, config.policy.optimizer, Path(str(config.model.path))
    sampler = make_sampler(
        run_dataset(config).split.train, rollout.prompts_per_step, config.run.seed, config.data.mixture
    )
    batches: Iterable[list[Task]] = iter(sampler.next, None)
    tasks = [task for tasks in islice(batches, config.run.steps) for task in tasks]
    chat = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "model": str(model),
        "template": template(chat),
        "rows": [row(task, config) for task in tasks],
        "tools": {env_key: tools_of(env_key) for env_key in sorted({task.env_key for task in tasks})},
        "steps": config.run.steps,
        "seed": config.run.seed,
        "prompts": rollout.prompts_per_step,
        "samples": rollout.samples_per_prompt,
        "max_context": rollout.max_context,
        "max_turns": rollout.sampling.max_turns,
        "max_tokens_per_turn": rollout.sampling.max_tokens_per_turn,
        "temperature": rollout.sampling.temperature,
        "lr": optimizer.lr,
        "clip": optimizer.clip_grad,
        "threads": config.policy.threads,
        "batch": batch,
        "more": more,
    }


def ours(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the quickstart; return the lists of `peers_trl.py`."""
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "megatron_fleet.cli", "train", "experiment=quickstart", "--out", str(folder)]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, env=environ)
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in found if "timing/step" in one]
    ends = [steps[0]["time"] - steps[0]["timing/step"], *(step["time"] for step in steps)]
    return {
        "seconds": [after - before for before, after in pairwise(ends)],
        "rollout_seconds": [step["timing/generate"] for step in steps],
        "tokens": [step["generate/action_tokens"] / step["accounting/episodes"] for step in steps],
        "turns": [step["environment/avg_turns"] for step in steps],
        "reward": [step["reward/avg_raw_reward"] for step in steps],
    }


def trl(folder: Path, python: Path, planned: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Train with TRL against a server of its own; return what `peers_trl.py` prints."""
    from megatron_fleet.cluster.launcher import episode_python
    from megatron_fleet.envs.embedded_server import EmbeddedFleet

    done = folder / "report.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fleet = EmbeddedFleet()
        url = fleet.start(config.env, folder / "fleet.log", episode_python())
        try:
            (folder / "plan.json").write_text(json.dumps({**planned, "url": url, "out": str(folder / "trl")}))
            environ = os.environ | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": str(planned["threads"]),
                "TRL_EXPERIMENTAL_SILENCE": "1",
            }
            command = [str(python), str(Path(__file__).with_name("peers_trl.py")), str(folder / "plan.json")]
            with (folder / "trl.log").open("w") as log:
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        finally:
            fleet.stop()
        done.write_text(run.stdout.splitlines()[-1])
    return json.loads(done.read_text())


def side(runs: Sequence[Mapping[str, Any]], episodes: int) -> dict[str, Any]:
    """Summary of one side's runs."""

    def mean(name: str) -> float:
        return fmean(value for run in runs for value in run[name][WARM_UP:])

    did = ("tokens", "turns", "reward")
    return {
        "seconds_per_episode": mean("seconds") / episodes,
        "rollout_share": mean("rollout_seconds") / mean("seconds"),
        "step_s": [run["seconds"][WARM_UP:] for run in runs],
        **{name: mean(name) for name in did},
        "untrained": {name: fmean(run[name][0] for run in runs) for name in did},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with TRL")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first included")
    parser.add_argument("--batch", type=int, default=16, help="TRL's per_device_train_batch_size")
    parser.add_argument("--trl", type=json.loads, default=FASTEST, help="more of TRL's GRPOConfig: %(default)s")
    parser.add_argument("overrides", nargs="*", help="further overrides of both sides, after --")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for number in range(given.rounds):
        overrides = [*COMMON, f"run.seed={number}", f"run.steps={given.steps}", *given.overrides]
        config = load(["experiment=quickstart", *overrides])
        runs["ours"].append(ours(given.out / f"ours_{number}", overrides))
        planned = plan(config, given.batch, given.trl)
        runs["trl"].append(trl(given.out / f"trl_{number}", given.python, planned, config))
    episodes = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    sides = {name: side(of, episodes) for name, of in runs.items()}
    pairs = zip(runs["ours"], runs["trl"], strict=True)
    ratio = sides["trl"]["seconds_per_episode"] / sides["ours"]["seconds_per_episode"]
    report = {
        "benchmark": "peers",
        "ratio": ratio,
        "ratios": [sum(b["seconds"][WARM_UP:]) / sum(a["seconds"][WARM_UP:]) for a, b in pairs],
        "per_token": ratio * sides["ours"]["tokens"] / sides["trl"]["tokens"],
        "sides": sides,
        "episodes_per_step": episodes,
        "steps": given.steps,
        "trl": {**runs["trl"][0]["versions"], "batch": given.batch, "more": given.trl},
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
