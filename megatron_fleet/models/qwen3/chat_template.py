"""Qwen3 chat format as a Jinja template, for the tokenizer folders that we create ourselves.

Renders the same text as the template published with the Qwen3 models (thinking and non-thinking), so that
``transformers`` and vLLM can chat with our models and the renderer can be checked against ``apply_chat_template``.
"""

import json

from megatron_fleet.models.chat.format import TOOLS_HEAD

TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
EMPTY_THINKING = "<think>\n\n</think>\n\n"

_CALLS = r"""
{%- macro calls(message, after_text) %}
    {%- for call in message.tool_calls or [] %}
        {%- set f = call.function or call %}
        {{- '\n' if after_text or not loop.first }}
        {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
        {{- f.arguments if f.arguments is string else f.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""

# With tools, the system turn exists even without a system message.
_SYSTEM = r"""
{%- set leading = messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content + '\n\n' if leading }}
    {{- TOOLS_HEAD }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- TOOLS_TAIL + '<|im_end|>\n' }}
{%- elif leading %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""

# Thinking survives only after the last real question; a user turn that wraps a tool response does not count.
_LAST_QUESTION = r"""
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and m.content is string
           and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.question < 0 %}
    {%- set ns.question = messages | length - 1 %}
{%- endif %}
"""

_TURNS = r"""
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thinking = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if m.reasoning_content is not string and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thinking) %}
            {{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- calls(m, content) + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- EMPTY_THINKING if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""

QWEN3_CHAT_TEMPLATE = (
    "".join(
        "{%- set " + name + " = " + json.dumps(value) + " %}\n"
        for name, value in (("TOOLS_HEAD", TOOLS_HEAD), ("TOOLS_TAIL", TOOLS_TAIL), ("EMPTY_THINKING", EMPTY_THINKING))
    )
    + (_CALLS + _SYSTEM + _LAST_QUESTION + _TURNS).strip()
)
