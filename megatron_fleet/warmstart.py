"""Remake the tiny model that the repository ships: an imperfect agent for the embedded fleet, ready to be improved.

A small byte-pair tokenizer is trained on the embedded fleet's own text. A random Qwen3-shaped model is then trained,
through the same Megatron path as everything else, on scripted episodes whose agent errs on purpose: the model imitates
the errors too, so reinforcement learning has something to mend. Three courses, because a model this small learns to
look things up slowly: drills (rows of a table, then the same rows in another order), episodes without tool
definitions in the prompt, and whole episodes. Tasks and worlds are others than those that runs train and evaluate on.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from megatron_fleet.agents import prompts
from megatron_fleet.agents.engine import Generation, SamplingParams
from megatron_fleet.agents.episode import EpisodeSettings, run_episode
from megatron_fleet.agents.renderer import Qwen3Renderer, to_json
from megatron_fleet.agents.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import sft_loss
from megatron_fleet.config.load import load
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Observation, Reward, ToolCall
from megatron_fleet.envs.embedded.booking import KINDS as ROOM_KINDS
from megatron_fleet.envs.embedded.booking import SLOTS
from megatron_fleet.envs.embedded.ledger import KINDS as ACCOUNT_KINDS
from megatron_fleet.envs.embedded.session import EmbeddedSession
from megatron_fleet.envs.embedded.solver import demonstrate, solve
from megatron_fleet.envs.embedded.tasks import SHIPPED_SEED, generate
from megatron_fleet.envs.embedded.tasktype import Answer
from megatron_fleet.envs.embedded.tickets import PRIORITIES, STATUSES, SUBJECTS
from megatron_fleet.envs.embedded.world import PEOPLE
from megatron_fleet.policy.megatron.policy import MegatronPolicy
from megatron_fleet.weights.communicator import TorchCommunicator
from megatron_fleet.weights.export import export_hf
from megatron_fleet.weights.source import MegatronWeightSource, megatron_shard

MISTAKES = 0.2
"""Share of the scripted agent's choices that are wrong; about 0.4 of its episodes then succeed."""
ROW_TOKENS = 4096
OVERRIDES = (
    f"policy.row_tokens={ROW_TOKENS}",
    "policy.optimizer.betas=[0.9,0.95]",
    "policy.optimizer.weight_decay=0.01",
)

VOCABULARY = 1024
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "dtype": "float32",
}

DRILL_WORDS = [*SUBJECTS, *STATUSES, *PRIORITIES, *ROOM_KINDS, *ACCOUNT_KINDS, *SLOTS, "frozen", "paid", "free"]


@dataclass(frozen=True, slots=True)
class Course:
    """A part of the training: what is read, for how many optimizer steps, up to which learning rate."""

    name: str
    rows: Callable[[random.Random], Iterator[Datum]]
    steps: int
    lr: float


class Demonstrator:
    """Environment and engine in one: the episode loop plays a scripted agent as if it were sampled.

    So demonstrations have, to the token, the form of what the policy will see and say.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, mistakes: float, rng: random.Random, tools: bool) -> None:
        self._session = EmbeddedSession(task)
        self._agent = solve(task, mistakes, rng)
        self._tokenizer, self._tools = tokenizer, tools
        self._turn = next(self._agent)

    async def reset(self, task: Task) -> Observation:
        return Observation(task.prompt, self._session.tools() if self._tools else ())

    async def step(self, call: ToolCall) -> Observation:
        observation = self._session.call(call)
        self._turn = self._agent.send(observation)
        return observation

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        return Reward(self._session.verify(final_answer), "scripted")

    async def close(self) -> None:
        self._session.close()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, session: str) -> Generation:
        ids = np.array([*self._tokenizer.encode(turn_text(self._turn)), params.stop_token_ids[0]], np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), "stop", ((0, 0, len(ids)),))


def turn_text(turn: ToolCall | Answer) -> str:
    """How the policy writes a turn."""
    if isinstance(turn, Answer):
        return f"{turn.text} <done>"
    return "<tool_call>\n" + json.dumps({"name": turn.name, "arguments": turn.arguments}) + "\n</tool_call>"


def play_demonstration(
    task: Task, renderer: Qwen3Renderer, settings: EpisodeSettings, mistakes: float, rng: random.Random, tools: bool
) -> Datum:
    """One scripted episode as a training row: cross-entropy on the agent's turns."""
    actor = Demonstrator(task, renderer.tokenizer, mistakes, rng, tools)
    trajectory = asyncio.run(run_episode(task, 0, 0, actor, actor, renderer, settings, None, task.key))
    mask = trajectory.action_mask.astype(np.float32)
    return Datum(trajectory.token_ids, mask, mask, np.zeros_like(mask))


def episodes(
    renderer: Qwen3Renderer, settings: EpisodeSettings, mistakes: float, tools: bool
) -> Callable[[random.Random], Iterator[Datum]]:
    """Scripted episodes of ever new tasks."""

    def rows(rng: random.Random) -> Iterator[Datum]:
        seed = SHIPPED_SEED
        while True:
            seed += 1
            tasks = generate(seed, per_env=100)
            rng.shuffle(tasks)
            for task in tasks:
                yield play_demonstration(task, renderer, settings, mistakes, rng, tools)

    return rows


def drills(tokenizer: Tokenizer) -> Callable[[random.Random], Iterator[Datum]]:
    """Tables of words and ids, each followed by its rows in other orders: looking up and copying, many times a row."""

    def rows(rng: random.Random) -> Iterator[Datum]:
        while True:
            yield _drill(tokenizer, rng)

    return rows


def _drill(tokenizer: Tokenizer, rng: random.Random) -> Datum:
    words = [*DRILL_WORDS, *PEOPLE]
    table = {key: _drill_values(words, rng) for key in rng.sample(words, rng.randint(3, 8))}
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(3):
        for key in rng.sample(list(table), len(table)):
            asked, answer = tokenizer.encode("\n" + key), tokenizer.encode(" " + table[key])
            ids += asked + answer
            mask += [0] * len(asked) + [int(turn > 0)] * len(answer)
    weights = np.array(mask, np.float32)
    return Datum(np.array(ids, np.int32), weights, weights, np.zeros_like(weights))


def _drill_values(words: list[str], rng: random.Random) -> str:
    kinds = [*words, str(rng.randint(10, 400)), f"2026-03-{rng.randint(11, 20)}"]
    identity = f"{rng.choice('TRBAI')}-{rng.randint(10, 99)}"
    return " ".join([*(rng.choice(kinds) for _ in range(rng.randint(1, 3))), identity])


def corpus(mistakes: float, rng: random.Random) -> Iterator[str]:
    """Text as the tokenizer will meet it: demonstrations spelt out."""
    for task in generate(SHIPPED_SEED + 1, per_env=200):
        demonstration = demonstrate(task, mistakes, rng)
        session = EmbeddedSession(task)
        yield prompts.system_prompt(task.env_key) + "\n".join(to_json(tool) for tool in session.tools())
        session.close()
        yield prompts.user_prompt(task, task.prompt)
        for turn, observation in demonstration.turns:
            yield turn_text(turn)
            if observation is not None:
                yield observation.content


def run_course(policy: MegatronPolicy, course: Course, rng: random.Random) -> float:
    """Train one course; returns the mean loss per token of its last steps."""
    stream = course.rows(rng)
    losses: list[float] = []
    waiting = next(stream)
    for step in track(range(course.steps), description=f"{course.name:>10}"):
        batch, room = [], ROW_TOKENS
        while len(waiting) <= room:
            batch.append(waiting)
            room -= len(waiting)
            waiting = next(stream)
        report = policy.forward_backward([normalised(batch)], sft_loss)
        policy.optim_step(course_lr(course, step))
        losses.append(report.loss)
    return float(np.mean(losses[-50:]))


def normalised(batch: Sequence[Datum]) -> list[Datum]:
    """Rows whose weights add up to 1: the loss is a mean over the trained tokens of the batch."""
    total = sum(float(datum.mask.sum()) for datum in batch)
    return [replace(datum, mask=datum.mask / total, weights=datum.weights / total) for datum in batch]


def course_lr(course: Course, step: int) -> float:
    """Short linear warm-up, then half a cosine down to a twentieth."""
    warm = min(1.0, (step + 1) / 50)
    return course.lr * warm * max(0.05, (1 + math.cos(math.pi * step / course.steps)) / 2)


def make_tiny(out: Path, seed: int = 0) -> None:
    """Make tokenizer and model and write them to ``out`` as an HF folder. Takes about half an hour on two cores."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = train_tokenizer(corpus(MISTAKES, rng), VOCABULARY, folder)
        (folder / "config.json").write_text(json.dumps({**ARCHITECTURE, "vocab_size": VOCABULARY}, indent=2) + "\n")
        config = load(["experiment=quickstart", f"model.path={folder}", f"run.seed={seed}", *OVERRIDES])
        renderer = Qwen3Renderer(tokenizer, config.rollout.thinking)
        settings = EpisodeSettings.from_config(config.rollout, config.env)
        courses = (
            Course("drills", drills(tokenizer), steps=600, lr=2e-3),
            Course("short", episodes(renderer, settings, MISTAKES, tools=False), steps=2500, lr=2e-3),
            Course("whole", episodes(renderer, settings, MISTAKES, tools=True), steps=1200, lr=1e-3),
        )
        with closing(MegatronPolicy(config, init="random")) as policy:
            for course in courses:
                loss = run_course(policy, course, rng)
                print(f"{course.name}: loss {loss:.4f} after {course.steps} steps", flush=True)
            source = MegatronWeightSource(
                policy.model_chunks, policy.hf_config, dtype=torch.float32, shard=megatron_shard()
            )
            export_hf(source, folder, out, world=TorchCommunicator())
