"""Checks of exports: vLLM's log-probs against those that a run's trainer left in the checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from convert_helpers import mfleet

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.check import Probe, Result, compare, read_probe

TINY = Path(__file__).parents[2] / "assets" / "tiny"


def write_checkpoint(folder: Path, probe: object, step: int = 7) -> str:
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"step": step, "guard": {}, "probe": probe}))
    return str(folder)


def test_the_first_token_of_each_sequence_does_not_count():
    probe = Probe(7, [[1, 2, 3], [4, 5]], [[9.0, -1.0, -2.0], [9.0, -3.0]])
    assert compare(probe, [[0.0, -1.0, -2.5], [0.0, -4.0]]) == Result(7, 3, 0.5, 1.0)


def test_what_is_not_a_number_is_no_agreement():
    probe = Probe(7, [[1, 2, 3]], [[0.0, -1.0, -2.0]])
    assert not compare(probe, [[0.0, -1.0, math.nan]]).mean <= 0.1


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        (None, "holds no log-probs to compare with; the run needs checkpoint.export.check=true"),
        ({"tokens": [[1, 2]]}, "probe is malformed"),
        ({"tokens": [[1, 2]], "logprobs": [[0.0]]}, "probe is malformed"),
        ({"tokens": [], "logprobs": []}, "probe is malformed"),
        ({"tokens": [["a", 2]], "logprobs": [[0.0, 1.0]]}, "probe is malformed"),
    ],
)
def test_checkpoints_without_a_probe_are_refused(tmp_path, probe, problem):
    checkpoint = write_checkpoint(tmp_path / "step_000007", probe)
    with pytest.raises(UserError, match=problem):
        read_probe(checkpoint)


def test_results_are_read_back_and_damaged_ones_refused(tmp_path):
    result = Result(7, 124, 1e-7, 2e-6)
    result.write(tmp_path / "step_000007.json")
    assert Result.read(tmp_path / "step_000007.json") == result
    (tmp_path / "step_000007.json").write_text('{"step": 7}')
    with pytest.raises(UserError, match=r"step_000007\.json is not the result of a check"):
        Result.read(tmp_path / "step_000007.json")


@pytest.mark.parametrize(("score", "status", "remark"), [(-1.0, 0, "by 0 at most"), (-1.5, 1, "it is not the model")])
def test_the_exit_status_tells_whether_they_agree(tmp_path, convert, monkeypatch, score, status, remark):
    checkpoint = write_checkpoint(tmp_path / "step_000007", {"tokens": [[1, 2]], "logprobs": [[0.0, -1.0]]})
    monkeypatch.setattr("megatron_fleet.convert.check.scores_in_vllm", lambda *_: [[0.0, score]])
    code, out, _ = convert("check", TINY, checkpoint, "--write", tmp_path / "result.json")
    assert code == status and remark in out
    assert Result.read(tmp_path / "result.json").mean == -1.0 - score


def test_a_folder_without_a_model_is_refused(tmp_path, refused):
    checkpoint = write_checkpoint(tmp_path / "step_000007", {"tokens": [[1, 2]], "logprobs": [[0.0, -1.0]]})
    assert "has no config.json" in refused("check", tmp_path, checkpoint)


@pytest.mark.slow
def test_vllm_agrees_with_transformers_about_a_good_export(tmp_path):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("vllm")
    from tiny_models import reference_logits

    tokens = torch.arange(4 * 32).reshape(4, 32) * 7 % 1024
    values = reference_logits(TINY, tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    logprobs = [[0.0, *row] for row in values.tolist()]
    checkpoint = write_checkpoint(tmp_path / "step_000007", {"tokens": tokens.tolist(), "logprobs": logprobs})
    done = mfleet("check", TINY, checkpoint, "--write", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    assert "from the trainer's at step 7" in done.stdout
    assert Result.read(tmp_path / "result.json").tokens == 124
    assert Result.read(tmp_path / "result.json").largest < 1e-3
