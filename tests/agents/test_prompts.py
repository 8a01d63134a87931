"""Prompts of the policy: order, stability, the user's own texts, and files that cannot be used."""

import dataclasses

import pytest
from agent_doubles import SETTINGS, TASK, ScriptedEngine, ScriptedEnvironment, Turn

from megatron_fleet.agents.prompts import Prompts, load_prompts
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.config.errors import UserError

SHIPPED = load_prompts(None)


@pytest.mark.parametrize("finish", ["done_tag", "tool"])
def test_the_shipped_texts_say_how_to_finish_and_leave_nothing_to_fill_in(finish):
    system, reminder = SHIPPED.system_text("desk", finish), SHIPPED.reminder_text(finish)
    assert SHIPPED.finish[finish] in system and SHIPPED.finish[finish] in reminder
    assert "{" not in system + reminder and len(system.split()) <= 60
    assert ("<done>" in system, "submit_final_answer" in system) == (finish == "done_tag", finish == "tool")
    assert set(SHIPPED.finish) == {"done_tag", "tool"}
    assert "{times}" in SHIPPED.repeated and "{turns}" in SHIPPED.removed


@pytest.mark.parametrize("finish", ["done_tag", "tool"])
def test_texts_without_tools_name_none(finish):
    texts = [SHIPPED.system_text("desk", finish, tools=False, several_turns=turns) for turns in (False, True)]
    assert "tool" not in texts[0] and SHIPPED.finish[finish] not in texts[0]
    assert SHIPPED.finish[finish] in texts[1] and SHIPPED.finish[finish] in SHIPPED.reminder_text(finish, tools=False)
    assert not [text for text in texts if "{" in text or "call one tool" in text]


def test_an_environment_may_have_a_hint():
    hinted, plain = (SHIPPED.system_text(env, "done_tag") for env in ("fostgres", "desk"))
    assert hinted.startswith(plain) and "information_schema" in hinted and "information_schema" not in plain


def test_the_task_comes_with_its_variables_and_its_own_date():
    task = dataclasses.replace(TASK, env_variables={"LOGGED_IN_USER": 7, "CURRENT_DATE": "2025-03-01", "TEAM": "ops"})
    expected = "Do it.\n\nCurrent date: 2025-03-01\nLogged-in user: 7\nTEAM: ops"
    assert SHIPPED.user_text(task, "Do it.") == expected
    assert SHIPPED.user_text(dataclasses.replace(TASK, env_variables={}), "Do it.") == "Do it."


async def test_tasks_of_one_environment_share_all_tokens_before_the_task(tokenizer, renderer):
    """Engines keep them in their prefix cache, so neither date nor user may come first."""
    prompts = []
    for day, prompt in (("2025-03-01", "Count the tickets."), ("1999-12-31", "Reply to one.")):
        task = dataclasses.replace(TASK, prompt=prompt, env_variables={"CURRENT_DATE": day})
        env = ScriptedEnvironment()
        env.reset_script[0] = dataclasses.replace(env.reset_script[0], content=prompt)
        engine = ScriptedEngine(tokenizer, [Turn("0 <done>")])
        await run_episode(task, env, engine, renderer, SETTINGS, None, session="s")
        prompts.append(engine.prompts[0])
    texts = [tokenizer.decode(p) for p in prompts]
    until_task = texts[0].index("Count the tickets.")
    assert texts[0][:until_task] == texts[1][:until_task]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert tokenizer.decode(prompts[0][:shared]) == texts[0][:until_task]


def test_an_own_file_replaces_texts_and_adds_to_tables(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        "system: 'Be quick. {finish}!'\nenvironments: {desk: Look first., fostgres: ''}\nfinish: {tool: Submit}\n"
    )
    own = load_prompts(path)
    assert own.system_text("desk", "tool") == "Be quick. Submit! Look first."
    assert own.system_text("fostgres", "done_tag") == f"Be quick. {SHIPPED.finish['done_tag']}!"
    untouched = set(Prompts.model_fields) - {"system", "environments", "finish"}
    assert untouched and all(getattr(own, name) == getattr(SHIPPED, name) for name in untouched)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file"),
        ("system: [", "not usable YAML"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("- a\n", "must be a table"),
        ("", "must be a table"),
        ("sytem: x", "unknown key 'sytem'; use system, system_without_tools, finish,"),
        ("system: 3", "system: Input should be a valid string"),
        ("finish: {tag: x}", "finish.tag"),
        ("environments: text", "environments: Input should be a valid dictionary"),
        ("environments: {desk: null}", "environments.desk"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        load_prompts(path)
    text = str(refused.value)
    assert said in text and str(path) in text and "agent.prompts" in text and "\n" not in text
