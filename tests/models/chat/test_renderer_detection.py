"""Detection of a model folder's format from its tokenizer and template; refused in one sentence otherwise."""

import json

import pytest
from family_tokenizers import make_folder

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.chat.detection import FORMATS, detect, make_renderer, read_template
from megatron_fleet.models.chat.tokenizer import AddedTokens, Tokenizer, train_tokenizer

# Text that each family's published template holds and its relatives' do not.
TRAITS = {
    "qwen2.5": "You are Qwen <tools>",
    "qwen3": "<tools> enable_thinking <think>",
    "qwen3-thinking": "<tools> <think> add_generation_prompt <think>",
    "qwen3.5": "<tools> <function=example_function_name> enable_thinking <think>",
    "qwen3-coder": "<tools> <parameters> <function=example_function_name>",
    "glm-4.5": "<tools> <tool_call>{function-name}\n<arg_key> <think>",
    "glm-4.7": "<tools> <tool_call>{function-name}<arg_key> <think>",
    "kimi-k2": "tool_declare",
    "kimi-k2-thinking": "tool_declare <think></think>",
    "kimi-k2.5": "tool_declare tools_ts_str <think>",
}
MODEL_TYPES = {
    "qwen3.5": "qwen3_5_moe",
    "glm-4.5": "glm4_moe",
    "glm-4.7": "glm4_moe_lite",
    "kimi-k2": "kimi_k2",
    "kimi-k2.5": "kimi_k25",
}


@pytest.fixture(scope="module")
def qwen25_folder(tmp_path_factory):
    """Qwen 2.5 has the control tokens of Qwen 3 but no token for thinking."""
    folder = tmp_path_factory.mktemp("qwen2.5")
    qwen = FORMATS["qwen2.5"].tokens
    train_tokenizer(
        ["a"], 300, folder, AddedTokens(qwen.control, ("<tool_call>", "</tool_call>"), qwen.stops, qwen.pad)
    )
    return folder


def folder_of(family, tmp_path, qwen25_folder):
    return qwen25_folder if family == "qwen2.5" else make_folder(family, tmp_path)


@pytest.mark.parametrize("family", TRAITS)
def test_the_template_tells_relatives_apart(family, tmp_path, qwen25_folder):
    folder = folder_of(family, tmp_path, qwen25_folder)
    assert detect(folder, Tokenizer(folder), TRAITS[family]) == family


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", *MODEL_TYPES])
def test_without_a_template_the_models_type_decides(family, tmp_path, qwen25_folder):
    folder = folder_of(family, tmp_path, qwen25_folder)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES.get(family, "any")}))
    assert detect(folder, Tokenizer(folder), None) == family


def test_a_line_end_may_be_spelled_in_a_string(tmp_path):
    folder = make_folder("glm-4.5", tmp_path)
    assert detect(folder, Tokenizer(folder), r"{{ '<tool_call>{function-name}\n<arg_key>' }}") == "glm-4.5"


def test_qwen_3_instruct_thinks_in_no_template_but_has_the_tokens(tmp_path):
    folder = make_folder("qwen3", tmp_path)
    assert detect(folder, Tokenizer(folder), "<tools> no thoughts") == "qwen3-instruct"


@pytest.mark.parametrize(
    ("family", "template", "said"),
    [
        (
            "glm-4.5",
            "another GLM with tools",
            "writes tools or calls in a form .*=glm-4.5 or glm-4.7 would leave it unread",
        ),
        ("glm-4.5", None, "no chat template, and model_type=None does not decide .* tokenizer, glm-4.5, glm-4.7; set"),
        ("qwen3-coder", "tools <function=example_function_name>", "writes tools or calls in a form .* would leave it"),
        ("qwen3.5", "You are a bot", "writes no tools.*=qwen2.5 or .* or qwen3-coder would leave it unread"),
    ],
)
def test_what_nobody_fits_is_refused_with_the_formats_of_its_tokenizer(family, template, said, tmp_path):
    folder = make_folder(family, tmp_path)
    with pytest.raises(UserError, match=f"{folder}: its chat template {said}|{folder}: it has {said}"):
        detect(folder, Tokenizer(folder), template)


def test_a_foreign_tokenizer_is_refused(tmp_path):
    train_tokenizer(["a"], 300, tmp_path, AddedTokens(("<s>",), (), ("<s>",), "<s>"))
    with pytest.raises(UserError, match=r"lacks control tokens of each of the formats glm-4\.5, .*; choose another"):
        make_renderer(tmp_path, thinking=False)
    with pytest.raises(UserError, match=r"rollout\.renderer=glm-4\.5: .* lacks the tokens <\|endoftext\|>, \[gMASK\]"):
        make_renderer(tmp_path, thinking=False, name="glm-4.5")


def test_a_format_given_by_hand_goes_before_what_the_folder_says(tmp_path):
    folder = make_folder("qwen3", tmp_path)
    tokenizer = Tokenizer(folder)
    auto, given = make_renderer(folder, False), make_renderer(folder, False, "qwen2.5")
    empty = tokenizer.encode("<think>\n\n</think>\n\n")
    assert auto.initial("S", [], "U") == given.initial("S", [], "U") + empty


@pytest.mark.parametrize(("family", "thinking"), [("qwen2.5", True), ("kimi-k2", True), ("kimi-k2-thinking", False)])
def test_thinking_that_the_models_do_not_have_is_refused(family, thinking, tmp_path):
    folder = make_folder(family, tmp_path)
    with pytest.raises(UserError, match=rf"rollout\.thinking={str(thinking).lower()}: .* {family} .* set it to"):
        make_renderer(folder, thinking, family)


SEVERAL = [{"name": "default", "template": "config default"}, {"name": "tool_use", "template": "config tools"}]
WHERE = {
    "nowhere": ({}, None),
    "tokenizer_config.json": ({"tokenizer_config.json": "config"}, "config"),
    "several, named": ({"tokenizer_config.json": SEVERAL}, "config tools"),
    "several, the default alone": ({"tokenizer_config.json": SEVERAL[:1]}, "config default"),
    "a file before tokenizer_config.json": (
        {"chat_template.jinja": "file", "tokenizer_config.json": SEVERAL},
        "file",
    ),
    "another file, for tools": (
        {"additional_chat_templates/tool_use.jinja": "tools", "chat_template.jinja": "file"},
        "tools",
    ),
    "another file, for something else": (
        {"additional_chat_templates/rag.jinja": "rag", "chat_template.jinja": "file"},
        "file",
    ),
    "another file alone": (
        {"additional_chat_templates/tool_use.jinja": "tools", "tokenizer_config.json": "config"},
        "tools",
    ),
    "chat_template.json": ({"chat_template.json": "processor"}, "processor"),
    "tokenizer_config.json before chat_template.json": (
        {"chat_template.json": "processor", "tokenizer_config.json": "config"},
        "config",
    ),
}
"""Files of a folder, with the templates in them → the one that counts."""


def lay_out(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            content = json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"chat_template": content})
        path.write_text(content)


@pytest.mark.parametrize("where", WHERE)
def test_the_template_is_found_where_model_folders_keep_it(where, tmp_path):
    files, taken = WHERE[where]
    lay_out(tmp_path, files)
    assert read_template(tmp_path) == taken


@pytest.mark.slow
@pytest.mark.parametrize("where", [where for where, (files, _) in WHERE.items() if "chat_template.json" not in files])
def test_transformers_takes_the_same_template(where, tmp_path):
    PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

    lay_out(make_folder("qwen3", tmp_path), WHERE[where][0])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (tokenizer.chat_template and tokenizer.get_chat_template(tools=[{}])) == read_template(tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config.json": [*SEVERAL[1:], {"name": "rag"}]}, "not a list of names and templates"),
        (
            {"tokenizer_config.json": [{"name": "rag", "template": ""}]},
            "none of its chat templates rag is named tool_use",
        ),
        ({"additional_chat_templates/rag.jinja": ""}, "none of its chat templates rag is named tool_use or default"),
    ],
)
def test_templates_of_which_none_can_be_chosen_are_refused(files, said, tmp_path):
    lay_out(tmp_path, files)
    with pytest.raises(UserError, match=said):
        read_template(tmp_path)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .*not JSON"):
        read_template(tmp_path)
