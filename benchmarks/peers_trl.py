"""TRL's half of `peers.py`, for an environment with TRL: GRPO on the tasks of a plan, played on its server.

Prints one line of JSON with lists, one value per step: seconds, those of them until all rewards were known, and mean
sampled tokens, turns and reward of an episode. `peers.py` writes the plan and starts the server.

    python benchmarks/peers_trl.py plan.json
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Message = Mapping[str, Any]
DONE = "<done>"
PYTHON_TYPES: Mapping[str, type] = {"string": str, "integer": int}


class Loop:
    """An event loop in a thread of its own, for a trainer that calls environments synchronously."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Start ``work``; the returned function waits for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result


class Played:
    """An environment as TRL wants one: ``reset``, and a method per tool (see `environment`). It is reset many times."""

    def __init__(self, url: str, loop: Loop) -> None:
        self._url, self._loop = url, loop
        self._session: Any = None
        self._begun: Callable[[], Any] = lambda: None

    def reset(self, task: str, **_: Any) -> None:
        """Begin a task in a new session, while others begin too: the first call of a tool waits for it."""
        from megatron_fleet.config.sections.env import EnvConfig
        from megatron_fleet.data.task import Task
        from megatron_fleet.envs.registry import make_environment

        self._session = make_environment(EnvConfig(kind="embedded"), self._url)
        self._begun = self._loop.begin(self._session.reset(Task(**json.loads(task))))

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from megatron_fleet.envs.base import ToolCall

        self._begun()
        shown = self._loop.begin(self._session.step(ToolCall(name, arguments)))()
        return shown.content if shown.error is None else f"Error ({shown.error.kind}): {shown.error.message}"

    async def _verdict(self, answer: str | None, messages: list[Message]) -> float | None:
        await asyncio.to_thread(self._begun)
        try:
            return (await self._session.verify(answer, messages)).value
        finally:
            await self._session.close()


def environment(tools: Sequence[Mapping[str, Any]]) -> type[Played]:
    """A class of environments with a method for each of ``tools`` (OpenAI function format)."""
    return type("Environment", (Played,), {t["function"]["name"]: method(t["function"]) for t in tools})


def method(function: Mapping[str, Any]) -> Callable[..., str]:
    """A method that calls a tool, with the signature and docstring that TRL reads. The model is not shown these."""

    def call(self: Played, **arguments: Any) -> str:
        return self._call(function["name"], arguments)

    types = {name: PYTHON_TYPES[s["type"]] for name, s in function["parameters"]["properties"].items()}
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=t) for n, t in types.items()]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__name__, call.__annotations__ = function["name"], types
    call.__signature__ = inspect.Signature([first, *named])  # type: ignore[attr-defined]
    call.__doc__ = "\n".join([function["description"], "", "Args:", *(f"    {name}: The {name}." for name in types)])
    return call


def final_answer(messages: Sequence[Message]) -> str | None:
    """The text before a ``<done>`` that ends the last turn, if that turn called no tool."""
    last = messages[-1]
    text = str(last.get("content") or "").strip()
    if last["role"] != "assistant" or last.get("tool_calls") or not text.endswith(DONE):
        return None
    return text.removesuffix(DONE).rstrip()


def train(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Train as planned, and return what is printed."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template

    torch.set_num_threads(plan["threads"])
    loop = Loop()
    scored: list[float] = []
    stepped: list[float] = []
    turns: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            stepped.append(time.perf_counter())

        on_step_end = on_train_begin

    def verifier(completions: list[list[Message]], environments: list[Played], **_: Any) -> list[float | None]:
        async def verdicts() -> list[float | None]:
            ended = zip(environments, completions, strict=True)
            return await asyncio.gather(*(e._verdict(final_answer(messages), messages) for e, messages in ended))

        rewards = loop.begin(verdicts())()
        turns.append(sum(m["role"] == "assistant" for messages in completions for m in messages) / len(completions))
        scored.append(time.perf_counter())
        return rewards

    tokenizer = AutoTokenizer.from_pretrained(plan["model"], padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = plan["template"], qwen3_template
    episodes = plan["prompts"] * plan["samples"]
    trainer = trl.GRPOTrainer(
        model=plan["model"],
        reward_funcs=verifier,
        args=trl.GRPOConfig(
            output_dir=plan["out"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=plan["steps"],
            per_device_train_batch_size=plan["batch"],
            gradient_accumulation_steps=episodes // plan["batch"],
            num_generations=plan["samples"],
            learning_rate=plan["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=plan["clip"],
            temperature=plan["temperature"],
            max_completion_length=plan["max_context"],
            max_tool_calling_iterations=plan["max_turns"] - 1,
            generation_kwargs={"max_new_tokens": plan["max_tokens_per_turn"]},
            mask_truncated_completions=True,
            model_init_kwargs={"dtype": "float32", "max_position_embeddings": plan["max_context"]},
            shuffle_dataset=False,
            seed=plan["seed"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **plan["more"],
        ),
        train_dataset=Dataset.from_list(plan["rows"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
        environment_factory={
            name: partial(environment(tools), plan["url"], loop) for name, tools in plan["tools"].items()
        },
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "seconds": [after - before for before, after in pairwise(stepped)],
        "rollout_seconds": [after - before for before, after in zip(stepped, scored, strict=False)],
        "tokens": [row["completions/mean_length"] for row in logged],
        "turns": turns,
        "reward": [row["reward"] for row in logged],
        "versions": {module.__name__: module.__version__ for module in (trl, transformers, torch)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="JSON file")
    print(json.dumps(train(json.loads(parser.parse_args().plan.read_text()))))


if __name__ == "__main__":
    main()
