"""Make the tiny model of this repository, assets/tiny: an imperfect agent for the embedded fleet, as a start for RL.

Usage: python tools/make_tiny.py [--out FOLDER] [--seed N]        about twenty minutes on one core

A small byte-pair tokenizer is trained on the embedded fleet's own text. A random Qwen3-shaped model is then trained on
the regular Megatron path, in three courses. First it copies rows of tables, the most important skill and the slowest to
learn from episodes alone. Then it reads scripted episodes whose agent errs on purpose: the model imitates the errors
too, which leaves room for reinforcement learning to improve it. Tool definitions are two thirds of a prompt and teach
nothing, so most episodes omit them; complete ones come last. Tasks and worlds differ from those that runs train and
evaluate on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from safetensors.torch import save_file

from megatron_fleet.agents.prompts import load_prompts
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import sft_loss
from megatron_fleet.config.load import ROOT, load
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.solver import demonstrate, solve
from megatron_fleet.embedded_fleet.tasks import SHIPPED_SEED, EmbeddedSession, generate
from megatron_fleet.embedded_fleet.tasktype import FinalAnswer
from megatron_fleet.envs.base import Observation, Reward, ToolCall
from megatron_fleet.models.chat.renderer import ChatRenderer, Renderer, to_json
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.models.qwen3.chat import IM_START, QWEN3_TOKENS, Qwen
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

MISTAKES = 0.3
"""Share of the scripted agent's choices that are wrong; about half of its episodes still succeed."""
MOVED = 0.3
"""Share of the copied rows whose first value differs from the table row's."""
LOG_EVERY = 250
TABLE_STEPS, SHORT_STEPS, WHOLE_STEPS = 1500, 3500, 600
OVERRIDES = (
    "policy.optimizer.betas=[0.9,0.95]",
    "policy.optimizer.weight_decay=0.01",
    "policy.threads=1",
    "rollout.max_context=1024",
)

VOCABULARY = 1024
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
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


@dataclass(frozen=True, slots=True)
class Course:
    """One phase of the training: its data, tokens per optimizer step, steps and peak learning rate."""

    name: str
    rows: Callable[[random.Random], Iterator[Datum]]
    micro_batch_tokens: int
    steps: int
    lr: float


class Demonstrator:
    """Environment and engine in one: the episode loop plays a scripted agent as if it were sampled.

    Demonstrations therefore match the policy's inputs and outputs token for token.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._session = EmbeddedSession(task)
        self._notes: list[str] = []
        self._agent = solve(task, MISTAKES, rng, self._notes)
        self._tokenizer = tokenizer
        self._turn = next(self._agent)

    async def reset(self, task: Task) -> Observation:
        return Observation(task.prompt, self._session.tools())

    async def step(self, call: ToolCall) -> Observation:
        observation = self._session.call(call)
        self._turn = self._agent.send(observation)
        return observation

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        return Reward(self._session.verify(final_answer), "scripted")

    async def close(self) -> None:
        self._session.close()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        text = turn_text(self._turn, self._notes)
        self._notes.clear()
        ids = np.array([*self._tokenizer.encode(text), params.stop_token_ids[0]], np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), "stop", ((0, 0, len(ids)),))


def turn_text(turn: ToolCall | FinalAnswer, notes: Sequence[str]) -> str:
    """Text of a turn as the policy writes it: the relevant table rows and conditions as thinking, then the call or
    answer.

    Writing a row down first turns a lookup into continuing a text, which a small model learns early.
    """
    if isinstance(turn, FinalAnswer):
        return f"{thinking(notes)}\n\n{turn.text} <done>"
    call = json.dumps({"name": turn.name, "arguments": turn.arguments})
    return f"{thinking(notes)}\n\n<tool_call>\n{call}\n</tool_call>"


def thinking(lines: Sequence[str]) -> str:
    return "<think>\n" + "".join(f"{line}\n" for line in lines) + "</think>"


def play_demonstration(
    task: Task, renderer: Renderer, settings: EpisodeSettings, rng: random.Random, whole: bool
) -> Datum:
    """Play one scripted episode and return it as a training sequence: cross-entropy on the agent's turns. Without
    ``whole`` it has no system turn.
    """
    actor = Demonstrator(task, renderer.tokenizer, rng)
    trajectory = asyncio.run(run_episode(task, actor, actor, renderer, settings, None, task.key))
    turns = np.flatnonzero(trajectory.token_ids == renderer.tokenizer.special[IM_START])
    start = 0 if whole else turns[1]
    return imitated(trajectory.token_ids[start:], trajectory.action_mask[start:])


def imitated(token_ids: np.ndarray, mask: np.ndarray) -> Datum:
    """A sequence whose tokens at ``mask`` the policy learns to write."""
    weights = mask.astype(np.float32)
    return Datum(token_ids, mask, weights, np.zeros_like(weights))


def episodes(tokenizer: Tokenizer, whole: bool) -> Callable[[random.Random], Iterator[Datum]]:
    """Generator of scripted episodes of new tasks, with or without the system turn that lists the tools."""
    config = load(["experiment=quickstart"])
    renderer = ChatRenderer(tokenizer, Qwen(hybrid=True, thinking=config.rollout.thinking))
    settings = EpisodeSettings.from_config(config.rollout, config.env, config.agent)

    def rows(rng: random.Random) -> Iterator[Datum]:
        for task in new_tasks(rng):
            yield play_demonstration(task, renderer, settings, rng, whole)

    return rows


def tables(tokenizer: Tokenizer) -> Callable[[random.Random], Iterator[Datum]]:
    """Generator of tables from an episode's tool results, followed by all their rows in random order.

    Some rows begin with a value that is unique in its column, wherever that is: this is how a row is selected.
    """

    def rows(rng: random.Random) -> Iterator[Datum]:
        for task in new_tasks(rng):
            results = [o.content for _, o in demonstrate(task).turns if o is not None and "\n" in o.content]
            lines = [line for result in results for line in written_again(result, rng)]
            rng.shuffle(lines)
            shown = "".join(f"<tool_response>\n{result}\n</tool_response>\n" for result in results)
            read, written = tokenizer.encode(shown), tokenizer.encode(thinking(lines))
            mask = np.array([False] * len(read) + [True] * len(written))
            if lines:
                yield imitated(np.array(read + written, np.int32), mask)

    return rows


def written_again(table: str, rng: random.Random) -> Iterator[str]:
    """Rows of a table, some with one value that is unique in its column moved to the front."""
    rows = [line.split() for line in table.split("\n")[1:]]
    for row in rows:
        telling = [i for i, value in enumerate(row) if sum(other[i] == value for other in rows) == 1]
        first = rng.choice(telling) if telling and rng.random() < MOVED else 0
        yield " ".join([row[first], *row[:first], *row[first + 1 :]])


def new_tasks(rng: random.Random) -> Iterator[Task]:
    """Endless stream of tasks, none of them shipped."""
    for seed in itertools.count(SHIPPED_SEED + 1):
        tasks = generate(seed, per_env=100)
        rng.shuffle(tasks)
        yield from tasks


def corpus(rng: random.Random) -> Iterator[str]:
    """Text as the tokenizer will see it: demonstrations written out."""
    prompts = load_prompts(None)
    for task in generate(SHIPPED_SEED + 1, per_env=200):
        demonstration = demonstrate(task, MISTAKES, rng)
        session = EmbeddedSession(task)
        yield prompts.system_text(task.env_key, "done_tag") + "\n".join(to_json(tool) for tool in session.tools())
        session.close()
        yield prompts.user_text(task, task.prompt)
        for turn, observation in demonstration.turns:
            yield turn_text(turn, ())
            if observation is not None:
                yield observation.content


def initial_weights(rng: torch.Generator) -> dict[str, torch.Tensor]:
    """HF tensors of an untrained model that copies readily, because the lookups that it must learn are copies.

    Value and output projections start as each other's transpose, so a head passes on what it attends to; query and key
    projections start equal above the first layer, so a head attends to similar tokens (Trockman & Kolter 2023,
    arXiv:2305.09828, "mimetic initialization"). Head ``h`` of the first layer attends ``h + 1`` tokens back, so that
    tokens know their predecessors: with the layer above, an induction head (Olsson et al. 2022, arXiv:2209.11895).
    """
    hidden, mlp, head = (ARCHITECTURE[name] for name in ("hidden_size", "intermediate_size", "head_dim"))

    def normal(*shape: int, scale: float = ARCHITECTURE["initializer_range"]) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * scale

    def orthogonal() -> torch.Tensor:
        return torch.linalg.qr(normal(hidden, hidden, scale=1.0))[0]

    common = normal(hidden, scale=1.0)
    common *= math.sqrt(hidden) / common.norm()
    weights = {
        # Large enough to survive the layers above. The component common to all tokens carries the positions.
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=1.0) + 0.5 * common,
        # The tied output weight is as large as the embeddings: this keeps the first logits moderate.
        "model.norm.weight": torch.full((hidden,), 0.1),
    }
    for layer in range(ARCHITECTURE["num_hidden_layers"]):
        value, alike = orthogonal(), 0.5 * orthogonal()
        query, key = (_looking_back(common), _looking_back(common, back=True)) if layer == 0 else (alike, alike)
        weights |= {
            f"model.layers.{layer}.{name}": tensor.contiguous()
            for name, tensor in {
                "input_layernorm.weight": torch.ones(hidden),
                "post_attention_layernorm.weight": torch.ones(hidden),
                "self_attn.q_proj.weight": query + normal(hidden, hidden),
                "self_attn.k_proj.weight": key + normal(hidden, hidden),
                "self_attn.v_proj.weight": value,
                "self_attn.o_proj.weight": value.T,
                "self_attn.q_norm.weight": torch.full((head,), 3.0 if layer == 0 else 1.0),
                "self_attn.k_norm.weight": torch.full((head,), 3.0 if layer == 0 else 1.0),
                "mlp.gate_proj.weight": normal(mlp, hidden),
                "mlp.up_proj.weight": normal(mlp, hidden),
                "mlp.down_proj.weight": normal(hidden, mlp),
            }.items()
        }
    return weights


def _looking_back(common: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Query (or key, ``back``) projection of heads that attend 1, 2, … tokens back.

    ``common`` is mapped to one fixed vector, for keys of head ``h`` rotated ``h + 1`` positions ahead: after the rotary
    embedding, the matching key is the one ``h + 1`` tokens before the query.
    """
    half = ARCHITECTURE["head_dim"] // 2
    angles = ARCHITECTURE["rope_theta"] ** (-torch.arange(half) / half)
    rows = []
    for turn in range(1, ARCHITECTURE["num_attention_heads"] + 1):
        ahead = angles * turn * back
        rows += [torch.cos(ahead) - torch.sin(ahead), torch.cos(ahead) + torch.sin(ahead)]
    return 8 * torch.outer(torch.cat(rows), common / common.norm() ** 2)


def run_course(policy: MegatronPolicy, course: Course, rng: random.Random) -> None:
    """Train one course; shows the mean loss per token of the latest steps."""
    stream = course.rows(rng)
    losses: deque[float] = deque(maxlen=100)
    waiting = next(stream)
    with Progress(*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.4f}")) as progress:
        bar = progress.add_task(course.name, total=course.steps, loss=math.nan)
        for step in range(course.steps):
            batch, room = [], course.micro_batch_tokens
            while len(waiting) <= room:
                batch.append(waiting)
                room -= len(waiting)
                waiting = next(stream)
            report = policy.forward_backward([normalised(batch)], sft_loss)
            policy.optim_step(course_lr(course, step))
            losses.append(report.loss)
            progress.update(bar, advance=1, loss=float(np.mean(losses)))
            if not progress.console.is_terminal and (step + 1) % LOG_EVERY == 0:
                print(f"{course.name}: step {step + 1}/{course.steps}, loss {np.mean(losses):.4f}", flush=True)


def normalised(batch: Sequence[Datum]) -> list[Datum]:
    """Scale the weights to sum to 1: the loss is then a mean over the trained tokens of the batch."""
    total = sum(int(np.count_nonzero(datum.loss_mask)) for datum in batch)
    return [replace(datum, loss_scale=1 / total, scaled_advantages=datum.scaled_advantages / total) for datum in batch]


def course_lr(course: Course, step: int) -> float:
    """Learning rate: short linear warm-up, then half a cosine down to a twentieth."""
    warm = min(1.0, (step + 1) / 50)
    return course.lr * warm * max(0.05, (1 + math.cos(math.pi * step / course.steps)) / 2)


def take_course(folder: Path, course: Course, seed: int, out: Path) -> None:
    """Train the model in ``folder`` and write the result to ``out``."""
    overrides = [
        f"model.path={folder}",
        f"run.seed={seed}",
        f"policy.micro_batch_tokens={course.micro_batch_tokens}",
        *OVERRIDES,
    ]
    config = load(["experiment=quickstart", *overrides])
    with closing(MegatronPolicy(config)) as policy:
        run_course(policy, course, random.Random(f"{course.name}/{seed}"))
        policy.export_hf(out)


def make_tiny(out: Path, seed: int) -> None:
    """Create tokenizer and model and write them to ``out`` as an HF folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "start"
        tokenizer = train_tokenizer(corpus(random.Random(seed)), VOCABULARY, folder, QWEN3_TOKENS)
        config = {**ARCHITECTURE, "vocab_size": VOCABULARY}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(initial_weights(torch.Generator().manual_seed(seed)), folder / "model.safetensors")
        courses = (
            Course("copying tables", tables(tokenizer), 1024, TABLE_STEPS, 3e-3),
            Course("without tool lists", episodes(tokenizer, whole=False), 1024, SHORT_STEPS, 3e-3),
            Course("whole episodes", episodes(tokenizer, whole=True), 4096, WHOLE_STEPS, 1e-3),
        )
        for course in courses:
            learned = out if course is courses[-1] else Path(scratch) / course.name.replace(" ", "-")
            take_course(folder, course, seed, learned)
            folder = learned


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "assets" / "tiny", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    make_tiny(args.out, args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
