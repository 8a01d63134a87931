"""Pre-run check that our renderer produces the same text as the model's own chat template.

A few fixed conversations are rendered both ways and compared as text. An almost correct renderer silently costs reward,
so any difference aborts the run. The conversations avoid the cases where an append-only sequence has to differ (listed
in ``renderer.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.detection import detect, fitting, make_format, read_template
from megatron_fleet.models.chat.format import ChatFormat, Spoken
from megatron_fleet.models.chat.parser import ToolResult
from megatron_fleet.models.chat.template_process import render
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import around, read_vision

log = logging.getLogger(__name__)

_BEFORE, _SHOWN = 20, 80
"""Characters shown before the first difference, and in total."""


@dataclass(frozen=True, slots=True)
class Round:
    """A policy turn and the reply it receives: a result for each call or, without calls, a message."""

    spoken: Spoken
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Everything before a turn to be sampled. ``images``: the positions ``[image n]`` have images."""

    system: str
    tools: tuple[dict[str, Any], ...]
    user: str
    rounds: tuple[Round, ...]
    has_images: bool = False


def check_template(folder: str | Path, thinking: bool) -> None:
    """Compare the renderer that ``auto`` selects for ``folder`` with the folder's chat template.

    Warns if there is no template to compare with.

    Raises:
        UserError: no renderer matches, the template cannot be used, or the texts differ; shows the first difference.
    """
    tokenizer, template = Tokenizer(folder), read_template(folder)
    name = detect(folder, tokenizer, template)
    chat = make_format(folder, tokenizer, thinking, name)
    if template is None:
        log.warning(
            "%s: it has no chat template, so the format %s is taken; a base model has never seen it: fine-tune it on "
            "this format first, or choose an instruct release",
            folder,
            name,
        )
        return
    talks = list(_examples(thinking, read_vision(folder) is not None))
    try:
        [found] = _compare(template, [(chat, talks)])
    except ValueError as e:
        raise UserError(
            f"{folder}: its chat template cannot be rendered ({e}); repair it, or set rollout.renderer={name} to leave "
            f"it unread if the model was trained in that format."
        ) from None
    if found is None:
        return
    if (agreeing := _agreeing(folder, tokenizer, template, name)) is not None:
        other, value = agreeing
        settings = [f"rollout.renderer={other}"] if other != name else []
        settings += [f"rollout.thinking={str(value).lower()}"] if value != thinking else []
        raise UserError(f"{folder}: {found}; it agrees with ours if you set {' and '.join(settings)}.")
    raise UserError(
        f"{folder}: {found}; if the model was trained as ours, set rollout.renderer={name} to leave the template "
        f"unread; if as the template says, give a renderer of your own (rollout.renderer=package.module:name)."
    )


def _agreeing(folder: str | Path, tokenizer: Tokenizer, template: str, name: str) -> tuple[str, bool] | None:
    """Find a format and a value of rollout.thinking with which ``template`` agrees, first of ``name``'s family."""
    family, images = name.split("-")[0], read_vision(folder) is not None
    formats = sorted(fitting(tokenizer), key=lambda entry: (entry[0] != name, entry[0].split("-")[0] != family))
    modes = [(other, thinking) for other, named in formats for thinking in named.thinking]
    asked = [(make_format(folder, tokenizer, t, other), list(_examples(t, images))) for other, t in modes]
    try:
        differences = _compare(template, asked)
    except ValueError:  # the template refuses the arguments of some format
        return None
    return next((mode for mode, found in zip(modes, differences, strict=True) if found is None), None)


def _compare(template: str, asked: Sequence[tuple[ChatFormat, Sequence[Dialogue]]]) -> list[str | None]:
    """Describe, for each format, the first difference of its texts from the template's; ``None`` if they agree.

    Raises:
        ValueError: the template cannot be rendered.
    """
    texts = iter(render(template, [v for chat, talks in asked for v in _variables(chat, talks)]))

    def first_difference(chat: ChatFormat, talks: Sequence[Dialogue]) -> str | None:
        pairs = [(talk, next(texts)) for talk in talks]
        wrong = [(t, theirs) for t, theirs in pairs if theirs not in (written(chat, t), written(chat, t, kept=True))]
        return difference(written(chat, wrong[0][0]), wrong[0][1]) if wrong else None

    return [first_difference(chat, talks) for chat, talks in asked]


def difference(ours: str, theirs: str) -> str:
    """Describe the first difference between two unequal texts."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = slice(max(0, at - _BEFORE), max(0, at - _BEFORE) + _SHOWN)
    return (
        f"our renderer and the model's chat template differ from character {at} on: ours {ours[shown]!r}, "
        f"the template {theirs[shown]!r}"
    )


def written(chat: ChatFormat, talk: Dialogue, kept: bool = False) -> str:
    """Render ``talk`` with our renderer, assuming the policy follows the template.

    ``kept``: each turn keeps the opening with which it was sampled, as in an episode and in the templates of trainers
    that need a longer conversation to begin with the shorter one.
    """
    pieces = [*chat.head(talk.system, talk.tools), *chat.user(talk.user, _images(talk, talk.user))]
    asked = max((i for i, round_ in enumerate(talk.rounds) if not round_.spoken.calls), default=-1)
    for i, round_ in enumerate(talk.rounds):
        # A turn before the last question has no thinking, whatever the template writes for the others.
        pieces += [
            *(chat.opening if kept else chat.unthought.opening if i <= asked else chat.past_opening),
            chat.spoken(round_.spoken),
            *chat.close,
        ]
        calls, first = round_.spoken.calls, round_.spoken.index
        if calls:
            shown = zip(calls, round_.shown, strict=True)
            results = [
                ToolResult(c.name, text, first + i, images=_images(talk, text)) for i, (c, text) in enumerate(shown)
            ]
            pieces += chat.results(results)
        else:
            pieces += chat.user(round_.shown[0], _images(talk, round_.shown[0]))
    return "".join([*pieces, *chat.opening])


def messages(talk: Dialogue) -> Iterator[dict[str, Any]]:
    """Convert ``talk`` to the OpenAI chat format."""
    yield {"role": "system", "content": talk.system}
    yield {"role": "user", "content": _content(talk, talk.user)}
    for round_ in talk.rounds:
        said = round_.spoken
        turn: dict[str, Any] = {"role": "assistant", "content": said.content, "reasoning_content": said.thinking}
        ids = [f"functions.{call.name}:{said.index + i}" for i, call in enumerate(said.calls)]
        if not said.calls:
            yield turn
            yield {"role": "user", "content": _content(talk, round_.shown[0])}
            continue
        functions = [{"name": c.name, "arguments": c.arguments} for c in said.calls]
        turn["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
        yield turn
        for call, call_id, text in zip(said.calls, ids, round_.shown, strict=True):
            yield {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": _content(talk, text)}


def _images(talk: Dialogue, text: str) -> tuple[Image, ...]:
    return (Image("image/png", b""),) * (text.count("[image ") if talk.has_images else 0)


def _content(talk: Dialogue, text: str) -> str | list[dict[str, str]]:
    """Convert ``text`` to the form that templates accept: a list of parts if there are images."""
    if not talk.has_images:
        return text
    first, *rest = around(text, len(_images(talk, text)))
    parts = [{"type": "text", "text": first}]
    for part in rest:
        parts += [{"type": "image"}, {"type": "text", "text": part}]
    return [part for part in parts if part.get("text") != ""]


def render_template(template: str, chat: ChatFormat, talks: Sequence[Dialogue]) -> list[str]:
    """Render each of ``talks`` with a Jinja chat template. Raises ValueError as `template_process.render` does."""
    return render(template, _variables(chat, talks))


def _variables(chat: ChatFormat, talks: Sequence[Dialogue]) -> list[dict[str, Any]]:
    shared = {"add_generation_prompt": True, **chat.template_arguments}
    return [{"messages": list(messages(t)), **shared, **chat.template_tools(t.tools)} for t in talks]


def _examples(thinking: bool, images: bool) -> Iterator[Dialogue]:
    properties = {
        "query": {"type": "string", "description": "Words – «any» language", "minLength": 1},
        "filters": {
            "type": "object",
            "properties": {"status": {"type": "array", "items": {"type": "string", "enum": ["open", "closed"]}}},
            "required": ["status"],
        },
        "limit": {"type": ["integer", "null"], "default": 10},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    search = {"name": "search", "description": "Finds tickets.\nSecond line.", "parameters": parameters}
    now = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = tuple({"type": "function", "function": f} for f in (search, now))
    thought = "I look first." if thinking else ""
    find = ToolCall("search", {"query": 'größe "x" </b>', "filters": {"status": ["open"]}, "limit": 3})
    one = Round(Spoken(thought, "Let me look.", (find,)), ("2 tickets:\n- a\n- ä",))
    two = Round(Spoken(thought, "", (ToolCall("now", {}), find), 1), ("noon", '{"rows": []}'))
    yield Dialogue("You are an agent.", tools, "How many tickets are open?", ())
    yield Dialogue("You are an agent.", (), "How many tickets are open?", ())
    yield Dialogue("You are an agent.", tools, "How many tickets are open?", (one,))
    yield Dialogue("You are an agent.", tools, "How many tickets are open?", (one, two))
    if images:
        screen = Round(Spoken(thought, "", (find,)), ("[image 1]\na page[image 2]",))
        yield Dialogue("You are an agent.", tools, "See [image 1] and click.", (screen,), has_images=True)
    if not thinking:  # a question after a turn makes templates drop the thinking before it
        asked = Round(Spoken("", "Which tickets?"), ("Call one tool, or finish.",))
        yield Dialogue("You are an agent.", tools, "How many tickets are open?", (asked, one))
