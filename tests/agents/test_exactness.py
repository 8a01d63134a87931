"""Random episodes in every format: what is trained is what the engine saw and said, to the token, in every segment."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from agent_doubles import SETTINGS, TASK, TOOLS, ScriptedEnvironment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_fixtures import CORPUS

from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.token_engine import EngineLost, Generation, SamplingParams
from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.algorithms.batch import build_data, split_batch
from megatron_fleet.config.schema import AgentConfig, AlgorithmConfig
from megatron_fleet.envs.base import Observation, ToolCall, ToolError
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.glm4 import chat as glm
from megatron_fleet.models.glm4.chat import Glm
from megatron_fleet.models.kimi import chat as kimi
from megatron_fleet.models.kimi.chat import Kimi
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS, Qwen
from megatron_fleet.models.qwen3_5 import chat as qwen3_5
from megatron_fleet.models.qwen3_5.chat import Qwen35
from megatron_fleet.models.qwen3_coder.chat import Qwen3Coder

FORMATS = {
    "qwen3": (QWEN3_TOKENS, Qwen(True, True)),
    "qwen3 quiet": (QWEN3_TOKENS, Qwen(True, False)),
    "glm-4.5": (glm.TOKENS, Glm(False, True)),
    "glm-4.7": (glm.TOKENS, Glm(True, True)),
    "kimi-k2.5": (kimi.TOKENS, Kimi("k2.5", True)),
    "qwen3.5": (qwen3_5.TOKENS, Qwen35(True, json_scalars=False)),
    "qwen3.6 quiet": (qwen3_5.TOKENS, Qwen35(False, json_scalars=True)),
    "qwen3-coder": (qwen3_5.TOKENS, Qwen3Coder()),
}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory) -> dict[str, ChatRenderer]:
    out = {}
    for name, (tokens, chat) in FORMATS.items():
        folder = tmp_path_factory.mktemp("format")
        train_tokenizer(CORPUS, 400, folder, tokens)
        out[name] = ChatRenderer(Tokenizer(folder), chat)
    return out


@dataclass(frozen=True)
class Said:
    """One turn to be sampled: what it says, the stop token that ends it, and a piece of text after it or instead."""

    spoken: Spoken
    stop: int = 0
    rest: str = ""
    raw: bool = False


@dataclass
class HonestEngine:
    """Says the script within the limits of the requests, and remembers every request and answer."""

    renderer: ChatRenderer
    chat: object
    script: list[Said]
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    async def generate(self, prompt_ids, params, session, images=()) -> Generation:
        if not self.script:
            raise EngineLost("the script is over")
        said = self.script.pop(0)
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        text = said.rest if said.raw else self.chat.spoken(said.spoken) + said.rest
        ids = [*self.renderer.tokenizer.encode(text), params.stop_token_ids[said.stop % len(params.stop_token_ids)]]
        kept = np.array(ids[: params.max_tokens], np.int32)
        n, number = len(kept), len(self.generations)
        logprobs = -(np.arange(n, dtype=np.float32) + 1 + 1000 * number)
        versions = ((number, 0, n // 2), (number + 1, n // 2, n))
        done = "stop" if n == len(ids) else "length"
        self.generations.append(Generation(kept, logprobs, done, versions))
        return self.generations[-1]


words = st.text(st.sampled_from("ab 7\n{}<é"), max_size=12)
local_calls = st.one_of(
    st.builds(lambda n: ToolCall("manage_context", {"keep_recent_turns": n}), st.integers(-1, 3)),
    st.builds(lambda i, p: ToolCall("view_tool_output", {"id": i, "page": p}), st.integers(0, 3), st.integers(1, 4)),
    st.just(ToolCall("check_context", {})),
    st.builds(lambda p: ToolCall("search_history", {"pattern": p}), st.sampled_from(["a", "é", "none"])),
)
env_calls = st.builds(lambda q: ToolCall("search", {"q": q}), st.sampled_from(["x", "y", "a\nb"]))
turns = st.builds(
    Said,
    st.builds(
        Spoken,
        thinking=words,
        content=words,
        calls=st.lists(st.one_of(env_calls, local_calls), max_size=3).map(tuple),
    ),
    stop=st.integers(0, 2),
    rest=st.sampled_from(["", "", "", " <done>", "<tool_call>{", "</think>x", "<think>open"]),
    raw=st.sampled_from([False, False, False, True]),
)
shown = st.one_of(
    st.builds(Observation, st.sampled_from(["", "[1, 2]", "<|im_end|>", "row é\n" * 60, "z" * 900])),
    st.just(Observation("", error=ToolError("execution_error", "no"))),
)
agents = st.builds(
    AgentConfig,
    finish=st.sampled_from(["done_tag", "tool"]),
    max_tool_output_chars=st.just(200),
    paging=st.booleans(),
    context_tools=st.booleans(),
    context_status=st.booleans(),
    repeat_feedback=st.sampled_from([None, 2]),
    step_wise=st.booleans(),
)


def requests_of(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[float]]]:
    """Per turn, by the trajectory alone: its prompt, what was sampled, at which log-probs."""
    out: dict[int, tuple[list[int], list[int], list[float]]] = {}
    for segment in trajectory.segments():
        for span in trajectory.spans:
            if span.kind == "action" and segment.start <= span.start < segment.stop:
                prompt = trajectory.token_ids[segment.start : span.start].tolist()
                _, ids, logprobs = out.setdefault(span.turn, (prompt, [], []))
                ids += trajectory.token_ids[span.start : span.end].tolist()
                logprobs += trajectory.behaviour_logprobs[span.start : span.end].tolist()
    return [out[turn] for turn in sorted(out)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(turns, max_size=6), results=st.lists(shown, min_size=18, max_size=18), agent=agents, data=st.data()
)
def test_what_is_trained_is_what_was_sampled(renderers, name, script, results, agent, data):
    renderer, chat = renderers[name], FORMATS[name][1]
    engine = HonestEngine(renderer, chat, list(script))
    env = ScriptedEnvironment(step_script=list(results))
    limits = dataclasses.replace(
        SETTINGS, agent=agent, max_context=data.draw(st.sampled_from([1500, 2500, 6000])), max_tokens_per_turn=120
    )
    trajectory = asyncio.run(run_episode(TASK, env, engine, renderer, limits, None, "s"))
    trajectory.check()
    seen = list(zip(engine.prompts, engine.generations, strict=True))
    expected = [(prompt, g.token_ids.tolist(), g.logprobs.tolist()) for prompt, g in seen if len(g.token_ids)]
    assert requests_of(trajectory) == expected
    assert trajectory.metrics["turns"] == len(engine.generations)
    assert all(len(p) + q.max_tokens <= limits.max_context for p, q in zip(engine.prompts, engine.params, strict=True))
    assert len(trajectory.segments()) == 1 or agent.step_wise or agent.context_tools
    if agent.step_wise and trajectory.outcome is not Outcome.PROMPT_TOO_LONG:
        assert len(engine.generations) <= len(trajectory.segments()) <= len(engine.generations) + 1
    assert_every_prompt_has_the_task(engine, renderer)
    assert_data_are_what_was_sampled(trajectory, expected)


def assert_every_prompt_has_the_task(engine: HonestEngine, renderer: ChatRenderer) -> None:
    texts = [renderer.tokenizer.decode(prompt) for prompt in engine.prompts]
    head = texts[0][: texts[0].index(TASK.prompt) + len(TASK.prompt)] if texts else ""
    assert all(text.startswith(head) for text in texts)
    assert all(TOOLS[0]["function"]["name"] in text for text in texts)


def assert_data_are_what_was_sampled(trajectory: Trajectory, expected: list) -> None:
    """The sequences of a batch, put together again, are the turns in order; together they weigh what one would."""
    if not expected:
        return
    whole = dataclasses.replace(trajectory, reward=1.0)
    other = dataclasses.replace(trajectory, reward=0.0, sample=1)
    algo = AlgorithmConfig(reduction="sequence_mean", masked_outcomes=())
    batch = build_data([Group(0, "t", "e", [whole, other])], algo)
    (data,) = split_batch(batch, 1, algo)
    own = [datum for datum, origin in zip(data, batch.origin, strict=True) if origin.sample == 0]
    assert [int(i) for d in own for i in d.token_ids[d.loss_mask]] == [i for _, ids, _ in expected for i in ids]
    assert [p for d in own for p in d.behaviour_logprobs[d.loss_mask]] == [p for _, _, ps in expected for p in ps]
    assert sum(d.loss_mask.sum() * d.loss_scale for d in own) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "speaker"),
    [("qwen3", Qwen(True, False)), ("qwen3 quiet", Qwen(True, False)), ("glm-4.5", Glm(False, False))],
)
def test_prompts_rendered_anew_are_the_ones_that_grew(renderers, name, speaker):
    """Without thinking there is nothing to leave out, so both ways show the engine the same ids."""
    calls = [ToolCall("search", {"q": q}) for q in "xyz"]
    spoken = [
        Spoken(content="look", calls=tuple(calls[:2])),
        Spoken("", "hm"),
        Spoken(calls=(calls[2],)),
        Spoken("", "3"),
    ]
    prompts = []
    for step_wise in (False, True):
        script = [Said(s, stop=i, rest=" <done>" * (i == 3)) for i, s in enumerate(spoken)]
        engine = HonestEngine(renderers[name], speaker, script)
        env = ScriptedEnvironment(step_script=[Observation(str(i)) for i in range(3)])
        changed = dataclasses.replace(SETTINGS, agent=AgentConfig(step_wise=step_wise))
        trajectory = asyncio.run(run_episode(TASK, env, engine, renderers[name], changed, None, "s"))
        assert trajectory.outcome is Outcome.COMPLETED
        prompts.append(engine.prompts)
    assert prompts[0] == prompts[1] and len(prompts[0]) == 4
