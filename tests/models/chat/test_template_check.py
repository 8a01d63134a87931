"""The check before a run: the model's own template against our renderer, on Jinja templates of our own."""

import shutil

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.chat.template_check import check_template
from megatron_fleet.models.qwen3.chat import QWEN3_CHAT_TEMPLATE


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "model")


def said(caplog) -> list[str]:
    """What the project has logged: clients of other tests in this process may log, too, as long as they live."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("megatron_fleet")]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_folder_whose_template_agrees_passes(folder, thinking, caplog):
    check_template(folder, thinking)
    assert not said(caplog)


def test_a_folder_without_a_template_may_hold_a_base_model(folder, caplog):
    (folder / "tokenizer_config.json").unlink()
    check_template(folder, thinking=False)
    [warning] = said(caplog)
    assert warning.startswith(f"{folder}: it has no chat template, so the format qwen3 is taken; ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</tool_response>", "</tool_result>"),  # seen only when a tool has answered
        ("call one or more functions", "call functions"),  # only with tools
        ("messages[loop.index0 + 1].role != 'tool'", "true"),  # only when two calls were answered
        ("tojson", "tojson(indent=1)"),
        ("'<|im_end|>\\n' }}", "'<|im_end|>' }}"),
    ],
)
def test_any_difference_is_refused_and_shown(folder, old, new):
    assert old in QWEN3_CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text(QWEN3_CHAT_TEMPLATE.replace(old, new))
    with pytest.raises(UserError) as refused:
        check_template(folder, thinking=True)
    said = str(refused.value)
    assert said.startswith(f"{folder}: our renderer and the model's chat template differ from character ")
    assert "rollout.renderer" in said and "\n" not in said


@pytest.mark.parametrize("thinking", [False, True])
def test_marks_of_what_is_trained_on_change_nothing(folder, thinking):
    """TRL and others mark the policy's own text so."""
    opening = "{{- '<|im_start|>assistant\\n' }}\n        {%- if loop.index0"
    closing = "{{- calls(m, content) + '<|im_end|>\\n' }}"
    assert opening in QWEN3_CHAT_TEMPLATE and closing in QWEN3_CHAT_TEMPLATE
    marked = QWEN3_CHAT_TEMPLATE.replace(
        opening, opening.replace("{%- if", "{%- generation %}\n        {%- if")
    ).replace(closing, closing + "\n        {%- endgeneration %}")
    (folder / "chat_template.jinja").write_text(marked)
    check_template(folder, thinking)
    (folder / "chat_template.jinja").write_text(marked.replace("call one or more functions", "call functions"))
    with pytest.raises(UserError, match="differ from character"):
        check_template(folder, thinking)


def test_where_the_texts_part_is_shown_from_both_sides(folder):
    (folder / "chat_template.jinja").write_text(QWEN3_CHAT_TEMPLATE.replace("'<|im_end|>\\n' }}", "'<|im_END|>\\n' }}"))
    with pytest.raises(UserError) as refused:
        check_template(folder, thinking=False)
    ours, theirs = str(refused.value).split("; set ")[0].split(" on: ours ")[1].split(", the template ")
    assert "im_end" in ours and "im_END" in theirs and "im_END" not in ours


@pytest.mark.parametrize(
    "template", ["<tools> enable_thinking {% if %}", "<tools> enable_thinking {{ raise_exception('no') }}"]
)
def test_a_template_that_cannot_be_rendered_is_refused(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="its chat template cannot be rendered"):
        check_template(folder, thinking=False)


def test_a_template_is_text_and_reaches_no_python(folder):
    for leak in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ):
        (folder / "chat_template.jinja").write_text(f"<tools> enable_thinking {leak}")
        with pytest.raises(UserError, match="its chat template cannot be rendered"):
            check_template(folder, thinking=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{{ 'x' * 9999999999 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "writes more than"),
    ],
)
def test_a_template_has_limits_of_time_memory_and_text(folder, program, said):
    (folder / "chat_template.jinja").write_text(f"<tools> enable_thinking {program}")
    with pytest.raises(UserError, match=f"its chat template cannot be rendered.*{said}"):
        check_template(folder, thinking=False)
