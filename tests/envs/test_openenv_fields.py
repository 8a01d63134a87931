"""Fields of an OpenEnv server's observations: hidden by name, pixels as images; descriptions of its tools."""

import json
from functools import partial

import pytest

pytest.importorskip("openenv")

import tool_servers
from collection_servers import page_app, sums_app
from tool_servers import counter_app, environment, serving

from megatron_fleet.agents.images import view_images
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvRefused, ToolCall
from megatron_fleet.models.images import readable, size_of

TASK = Task("k1", "Do it.", "page", "scored by the environment")
opened = partial(tool_servers.opened, task=TASK)


@pytest.fixture(scope="module")
def urls():
    with serving({"page": page_app(), "counter": counter_app(), "sums": sums_app()}) as urls:
        yield urls


async def test_a_hidden_field_is_neither_shown_at_reset_nor_later(urls):
    session, shown = await opened(urls["page"], hidden_fields=["screenshot", "html"])
    assert (shown.content, shown.images) == ('Do it.\n\n{"goal": "click 3"}', ())
    shown = await session.step(ToolCall("Click", {"at": 1}))
    assert (json.loads(shown.content), shown.images) == ({"goal": "click 3", "error": "nothing at 1"}, ())
    await session.close()


async def test_a_screen_is_an_image_at_reset_and_later(urls):
    session, shown = await opened(urls["page"], hidden_fields=["html"])
    assert shown.content == 'Do it.\n\n{"goal": "click 3", "screenshot": "[image 1]"}'
    (image,) = shown.images
    assert size_of(image) == (300, 200) and readable(image)
    view = await view_images(shown.content, shown.images, None, "[a screen]")
    assert view.text == 'Do it.\n\n{"goal": "click 3", "screenshot": "[a screen]"}' and view.unseen == 1
    shown = await session.step(ToolCall("Click", {"at": 1}))
    assert json.loads(shown.content)["screenshot"] == "[image 1]"
    assert len(shown.images) == 1 and shown.images[0] != image
    await session.close()


async def test_a_field_that_only_later_observations_have_can_be_hidden(urls):
    session, _ = await opened(urls["page"], hidden_fields=["screenshot", "html", "error"])
    assert json.loads((await session.step(ToolCall("Click", {"at": 1}))).content) == {"goal": "click 3"}
    await session.close()


async def test_a_hidden_field_of_an_observation_after_a_tool(urls):
    session, shown = await opened(urls["sums"], hidden_fields=["note"], reset_kwargs={"world": "sums"})
    assert shown.content == "Do it."
    assert json.loads((await session.step(ToolCall("add", {"by": 1}))).content) == {"tool_result": {"total": 1}}
    await session.close()


@pytest.mark.parametrize("server", ["page", "sums"])
async def test_a_misspelt_hidden_field_is_found_at_the_first_reset(urls, server):
    session = environment(urls[server], hidden_fields=["screenshots"], reset_kwargs={"world": "sums"})
    with pytest.raises(EnvRefused, match=r"hidden_fields=screenshots: the observations have no such field") as e:
        await session.reset(TASK)
    there = {"page": "they have goal, screenshot, html, error", "sums": "they have tool_name, tool_result, note, error"}
    assert str(e.value).endswith(there[server])
    await session.close()


async def test_a_description_replaces_the_servers(urls):
    text = "Click a number of the page."
    for openenv, name in (({}, "Click"), ({"action_tool": "click"}, "click")):
        session, shown = await opened(urls["page"], tool_descriptions={name: text}, **openenv)
        (tool,) = shown.tools
        assert (tool["function"]["name"], tool["function"]["description"]) == (name, text)
        assert list(tool["function"]["parameters"]["properties"]) == ["at"]
        assert (await session.step(ToolCall(name, {"at": 3}))).done
        await session.close()
    session, shown = await opened(urls["counter"], finish_tool="submit", tool_descriptions={"look": text})
    said = {tool["function"]["name"]: tool["function"]["description"] for tool in shown.tools}
    assert said == {"add": "", "asked": "", "look": text, "fail": "", "done": "", "verify": ""}
    await session.close()


@pytest.mark.parametrize("name", ["lok", "submit"])  # the second is not the policy's
async def test_a_description_of_no_tool_is_found_at_the_first_reset(urls, name):
    session = environment(urls["counter"], finish_tool="submit", tool_descriptions={name: "Look."})
    with pytest.raises(EnvRefused, match=rf"env\.openenv\.tool_descriptions={name}: .* it has add, .*look"):
        await session.reset(TASK)
    await session.close()
