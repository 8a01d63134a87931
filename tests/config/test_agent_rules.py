"""The section ``agent``: its options, and what is refused."""

from pathlib import Path

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.preflight import checks


def test_step_wise_without_thinking_is_explained():
    with pytest.raises(UserError, match=r"agent\.step_wise=true .* rollout\.thinking=false .*; set "):
        validate.check(load(["experiment=quickstart", "rollout.thinking=false", "agent=step_wise"]))
    validate.check(load(["experiment=quickstart", "rollout.thinking=true", "agent=step_wise"]))


def test_groups_choose_what_is_offered():
    assert load(["experiment=quickstart"]).agent.finish == "done_tag"
    context = load(["experiment=quickstart", "agent=context", "agent.finish=tool"]).agent
    assert (context.paging, context.context_tools, context.context_status, context.finish) == (True, True, True, "tool")


def test_the_file_of_prompts_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(["experiment=quickstart", "agent.prompts=own.yaml"])
    assert config.agent.prompts == str(Path(tmp_path, "own.yaml"))


@pytest.mark.parametrize("override", ["agent.finish=text", "agent.repeat_feedback=1", "agent.max_tool_output_chars=9"])
def test_values_out_of_range_are_refused(override):
    with pytest.raises(UserError, match=override.split("=")[0].replace(".", r"\.")):
        load(["experiment=quickstart", override])


def test_a_missing_file_of_prompts_is_refused_before_anything_starts(tmp_path):
    config = load(["experiment=quickstart", f"run.out={tmp_path}", f"agent.prompts={tmp_path}/own.yaml"])
    with pytest.raises(UserError, match=r"own\.yaml cannot be read .*; correct agent\.prompts"):
        checks.check_training(config)
