"""Chat templates as other people keep them: instruct, thinking and coder variants, templates of other trainers.

They are edits of our own texts of the formats of Qwen 3 and Qwen3-Coder.
"""

import json
import re
import shutil

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.chat.template_check import check_template
from megatron_fleet.models.qwen3.chat import QWEN3_CHAT_TEMPLATE
from megatron_fleet.models.qwen3_5.chat import TOOLS_HEAD, TOOLS_TAIL

SWITCH = "{{- EMPTY_THINKING if enable_thinking is defined and enable_thinking is false }}"
OWN_SYSTEM = "{%- set leading = messages[0].role == 'system' %}"
THOUGHT = "{%- if loop.index0 > ns.question and (loop.last or thinking) %}"


def edited(*edits: tuple[str, str]) -> str:
    text = QWEN3_CHAT_TEMPLATE
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def without_thinking() -> str:
    """As Qwen3-Instruct-2507's."""
    text = re.sub(r"{%- set EMPTY_THINKING.*\n", "", edited((SWITCH, "")))
    text = re.sub(r"{%- set thinking = .*?(?={{- '<.im_start.>assistant)", "", text, flags=re.DOTALL)
    text = re.sub(r"{%- if loop.index0 > ns.question .*?{%- endif %}", "{{- content }}", text, flags=re.DOTALL)
    assert "<think>" not in text and "enable_thinking" not in text
    return text


OPENS = edited((SWITCH, "{{- '<think>\\n' }}"))
"""As Qwen3-Thinking-2507's."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
# The format of Qwen3-Coder in words of our own.
CODER = (
    f"{{%- set HEAD = {json.dumps(TOOLS_HEAD)} %}}{{%- set TAIL = {json.dumps(TOOLS_TAIL)} %}}"
    + r"""
{%- macro text(value) %}
    {{- value | tojson if value is mapping or value is sequence and value is not string else value | string }}
{%- endmacro %}
{%- macro elements(found, known) %}
    {%- for key, value in found.items() if key not in known %}
        {{- '\n<%s>%s</%s>' % (key, text(value), key) }}
    {%- endfor %}
{%- endmacro %}
{%- macro described(found) %}
    {{- '\n<description>' + found.description.strip() + '</description>' if 'description' in found }}
{%- endmacro %}
{%- for m in messages %}
    {%- set before, after = loop.previtem or {'role': ''}, loop.nextitem or {'role': ''} %}
    {%- if m.role != 'tool' or before.role != 'tool' %}
        {{- '<|im_start|>%s\n' % ('user' if m.role == 'tool' else m.role) }}
    {%- endif %}
    {{- '<tool_response>\n%s\n</tool_response>\n' % m.content if m.role == 'tool' else m.content }}
    {%- if m.role == 'system' and tools %}
        {{- '\n\n' + HEAD }}
        {%- for tool in tools | map(attribute='function') %}
            {{- '\n<function>\n<name>%s</name>' % tool.name + described(tool) + '\n<parameters>' }}
            {%- for name, value in tool.parameters.properties.items() %}
                {{- '\n<parameter>\n<name>%s</name>\n<type>%s</type>' % (name, value.type) + described(value) }}
                {{- elements(value, ['type', 'description']) + '\n</parameter>' }}
            {%- endfor %}
            {{- elements(tool.parameters, ['type', 'properties']) + '\n</parameters>\n</function>' }}
        {%- endfor %}
        {{- TAIL }}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '\n' if m.content or not loop.first }}{{- '\n' if m.content and loop.first }}
        {{- '<tool_call>\n<function=%s>\n' % call.function.name }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=%s>\n%s\n</parameter>\n' % (key, text(value)) }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' if m.role != 'tool' or after.role != 'tool' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}
"""
)
CODER_DIFFERS = r"differ from character .*; if the model was trained as ours, set rollout\.renderer=qwen3-coder "
# Tools as XML, as Qwen3-Coder's, and calls of another kind.
XML = CHATML + "{% for t in tools %}<function>\n<name>{{ t.function.name }}</name><parameters>{% endfor %}<call name=>"
ACCEPTED = ""
NEVER, ALWAYS = "do not think; set it to false", "always think; set it to true"
UNREAD = r"would leave it unread .*; choose another release of the model, or give a renderer of your own"

VARIANTS = {
    "as published": (QWEN3_CHAT_TEMPLATE, ACCEPTED, ACCEPTED),
    "a comment": ("{#- No <function=, no tool_call. -#}\n" + QWEN3_CHAT_TEMPLATE, ACCEPTED, ACCEPTED),
    "blanks inside tags": (QWEN3_CHAT_TEMPLATE.replace(" %}", "   %}"), ACCEPTED, ACCEPTED),
    "a default system text with a date": (
        edited(
            (
                OWN_SYSTEM,
                OWN_SYSTEM + "{%- if not leading %}{{- 'Today is ' + strftime_now('%d %b') }}{%- endif %}",
            )
        ),
        ACCEPTED,
        ACCEPTED,
    ),
    "the date before every system text": (
        edited((OWN_SYSTEM, OWN_SYSTEM + "{{- 'Today is ' + strftime_now('%d %b') }}")),
        "if as the template says, give a renderer of your own",
        "if the model was trained as ours, set rollout.renderer=qwen3",
    ),
    "TRL, empty thinking in every turn": (
        edited((THOUGHT, "{%- if true %}")),
        ACCEPTED,
        ACCEPTED,
    ),
    "instruct": (without_thinking(), ACCEPTED, NEVER),
    "instruct, a comment about thinking": (
        "{# has no enable_thinking and no <think> #}" + without_thinking(),
        ACCEPTED,
        NEVER,
    ),
    "instruct, with a switch that does nothing": (
        "{%- set unused = enable_thinking %}" + without_thinking(),
        r"; it agrees with ours if you set rollout\.renderer=qwen3-instruct\.$",
        r"; it agrees with ours if you set rollout\.renderer=qwen3-instruct and rollout\.thinking=false\.$",
    ),
    "thinking": (OPENS, ALWAYS, ACCEPTED),
    "thinking without a switch": (
        edited((SWITCH, "")),
        r"; it agrees with ours if you set rollout\.thinking=true\.$",
        ACCEPTED,
    ),
    "coder": (CODER, ACCEPTED, NEVER),
    "coder, lists otherwise": (CODER.replace("value is sequence", "value is none"), CODER_DIFFERS, NEVER),
    "coder, results otherwise": (CODER.replace("</tool_response>\\n'", "</tool_response>'"), CODER_DIFFERS, NEVER),
    "coder, calls otherwise": (CODER.replace("</parameter>\\n'", "</parameter>'"), CODER_DIFFERS, NEVER),
    "another form in XML": (XML, "writes tools or calls in a form .*" + UNREAD, UNREAD),
    "without tools": ("{# no tools #}" + CHATML, "writes no tools.*" + UNREAD, UNREAD),
}
"""Template → outcomes with rollout.thinking=false and true: accepted, or what is said."""


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_accepted_or_the_advice_is_right(variant, thinking, tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    template, *outcomes = VARIANTS[variant]
    (folder / "chat_template.jinja").write_text(template)
    if outcomes[thinking] == ACCEPTED:
        check_template(folder, thinking)
        return
    with pytest.raises(UserError, match=outcomes[thinking]):
        check_template(folder, thinking)
