"""Whole episodes in every family's format: the policy sees the template's text, its own words are what is trained."""

import pytest
from agent_doubles import TASK, TOOLS, ScriptedEngine, ScriptedEnvironment, Turn
from family_tokenizers import make_folder
from waiting import HANG_S

from megatron_fleet.agents.prompts import load_prompts
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.envs.base import Observation, ToolCall
from megatron_fleet.models.chat.detection import FORMATS, make_format
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.template_check import Dialogue, Round, written
from megatron_fleet.models.chat.tokenizer import Tokenizer

MODES = [(family, thinking) for family in FORMATS for thinking in FORMATS[family].thinking]
SETTINGS = EpisodeSettings(
    max_context=8000,
    max_tokens_per_turn=1000,
    max_turns=6,
    max_no_action_turns=2,
    temperature=1.0,
    episode_timeout_s=HANG_S,
    verify_timeout_s=HANG_S,
    close_timeout_s=HANG_S,
    agent=AgentConfig(),
    prompts=load_prompts(None),
)


@pytest.mark.parametrize(("family", "thinking"), MODES)
async def test_an_episode_reads_as_the_template_writes_it(family, thinking, tmp_path):
    tokenizer = Tokenizer(make_folder(family, tmp_path))
    chat = make_format(tmp_path, tokenizer, thinking, family)
    renderer = ChatRenderer(tokenizer, chat)
    find, count = ToolCall("search", {"q": "größe"}), ToolCall("search", {"q": "x", "n": 3})
    thought = "first I look" if thinking else ""
    rounds = (
        Round(Spoken(thought, "Looking.", (find, count), 0), ("[1, 2]", '{"a": "é"}')),
        Round(Spoken(thought, "", (count,), 2), ("nothing",)),
    )
    answer = chat.spoken(Spoken(thought, "There are 3. <done>"))
    end_of_calls = (chat.close or chat.results([]))[0]
    script = [Turn(chat.spoken(r.spoken), stop_token=end_of_calls) for r in rounds]
    engine = ScriptedEngine(tokenizer, [*script, Turn(answer, stop_token=chat.stops[0])])
    env = ScriptedEnvironment(step_script=[Observation(text) for r in rounds for text in r.shown])

    t = await run_episode(TASK, env, engine, renderer, SETTINGS, 1, session="s")

    t.check()
    assert (t.outcome, t.final_answer, env.calls) == (Outcome.COMPLETED, "There are 3.", [find, count, count])
    chat.past_opening = chat.opening  # Qwen 3 without thinking: what the policy saw stays
    talk = Dialogue(t.messages[0]["content"], TOOLS, t.messages[1]["content"], rounds)
    assert tokenizer.decode(t.token_ids.tolist()) == written(chat, talk) + answer + chat.stops[0]
    sampled = [i for g in engine.generations for i in g.token_ids.tolist()]
    assert t.token_ids[t.action_mask].tolist() == sampled
    for prompt, generation in zip(engine.prompts, engine.generations, strict=True):
        seen = [*prompt, *generation.token_ids.tolist()]
        assert t.token_ids[: len(seen)].tolist() == seen
