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
    "qwen3.5": "<tools> <function=example_function_name> enable_thinking <think>",
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


def test_qwen_3_instruct_thinks_in_no_template_but_has_the_tokens(tmp_path):
    folder = make_folder("qwen3", tmp_path)
    assert detect(folder, Tokenizer(folder), "<tools> no thoughts") == "qwen3-instruct"


@pytest.mark.parametrize(
    ("family", "template"),
    [
        ("qwen3", "<tools> <function=name>"),
        ("qwen3", "<tools> <think> always"),
        ("qwen3", "a template without tools"),
        ("glm-4.5", "another GLM"),
        ("glm-4.5", None),
    ],
)
def test_what_nobody_fits_is_refused_with_the_formats_there_are(family, template, tmp_path):
    folder = make_folder(family, tmp_path)
    with pytest.raises(UserError) as refused:
        detect(folder, Tokenizer(folder), template)
    assert str(folder) in str(refused.value) and ", ".join(FORMATS) in str(refused.value)
    assert "rollout.renderer" in str(refused.value)


def test_a_foreign_tokenizer_is_refused(tmp_path):
    train_tokenizer(["a"], 300, tmp_path, AddedTokens(("<s>",), (), ("<s>",), "<s>"))
    with pytest.raises(UserError, match="are of none of the formats"):
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


def test_the_template_is_found_where_model_folders_keep_it(tmp_path):
    assert read_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert read_template(tmp_path) == "one"
    several = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert read_template(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert read_template(tmp_path) == "four"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .*not JSON"):
        read_template(tmp_path)
