"""Model folders as people have them: dry run, doctor and ``convert --plan`` accept the same ones, in the same words."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("hydra")

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import model_folders_page
from model_folders import CASES, EMBEDDING, HEAD, TINY, UP, changed, declared, edit, extra, write
from published_configs import published
from sparse_models import stored_as, write_weights

from megatron_fleet import cli
from megatron_fleet.cluster.inventory import Host
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.doctor.model import model_files
from megatron_fleet.doctor.probe import ProbeContext
from megatron_fleet.preflight import checks
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.weights import model_check
from megatron_fleet.weights.hf_folder import INDEX, SINGLE
from megatron_fleet.weights.hf_model import HfModel, open_model


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launch, and a processor on which engines can compute in FP8."""
    monkeypatch.setattr(checks, "_has_amx", lambda: True)
    for name in ("WORLD_SIZE", "RANK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


class Silence:
    """A progress that nobody watches."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...


def config_of(folder: Path, *overrides: str) -> Config:
    out = folder.parent / "out"
    return load(["experiment=quickstart", "model.dtype=bfloat16", f"model.path={folder}", f"run.out={out}", *overrides])


def check_model(config: Config) -> HfModel | None:
    return model_check.check_model(config.model, config.rollout.engine.speculative)


def outcome(check: Callable[[], object]) -> str | None:
    try:
        check()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_dry_run_doctor_and_conversion_say_the_same(name, tmp_path, capsys):
    case = CASES[name]
    folder = write(tmp_path / "model", **(case.made or {}))
    case.damage(folder)
    config = config_of(folder)
    dry_run = outcome(lambda: checks.check_training(config))
    doctor = outcome(lambda: model_files(ProbeContext(config, os.environ, Host("here"), quick=True)))
    assert dry_run == doctor
    assert dry_run is None if case.said is None else dry_run is not None and case.said in dry_run
    status = cli.main(["convert", "to-megatron", str(folder), str(tmp_path / "megatron"), "--plan"])
    said = capsys.readouterr().err.removeprefix("error: ").rstrip()
    if case.said is None or case.weights_alone:
        assert (status, said) == (0, "")
    else:
        assert (status, said) == (2, dry_run)


@pytest.mark.slow
def test_the_table_in_the_docs_is_current():
    text = model_folders_page.PAGE.read_text(encoding="utf-8")
    assert model_folders_page.page(text) == text, "run: python tools/model_folders_page.py"


def test_engines_compute_with_fp8_weights_in_half_precision_only(tmp_path):
    case = CASES["fp8"]
    config = config_of(write(tmp_path / "model", **(case.made or {})), "model.dtype=float32")
    said = outcome(lambda: checks.check_training(config))
    assert said is not None and "are stored in FP8" in said and "set it to bfloat16" in said


def test_engines_on_cpus_without_amx_take_no_fp8_weights(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(checks, "_has_amx", lambda: False)
    monkeypatch.setattr(checks.metadata, "distributions", lambda name: [name])
    said = outcome(lambda: checks.check_training(config_of(write(tmp_path / "model", **(CASES["fp8"].made or {})))))
    assert said is not None and "is stored in FP8: on CPUs" in said and "use the release in BF16" in said


def test_a_launch_to_other_machines_reads_a_folder_that_is_here(tmp_path, capsys):
    folder = write(tmp_path / "model", **declared("awq"))
    job = ["cluster=slurm", "launch.gpus=0", f"model.path={folder}", f"run.out={tmp_path / 'out'}", "--dry-run"]
    assert cli.main(["launch", "experiment=quickstart", *job]) == 2
    assert "quant_method='awq' (AWQ, " in capsys.readouterr().err


@pytest.mark.slow
def test_no_data_is_read_but_that_of_copies(tmp_path, monkeypatch):
    """Folders of a trillion parameters are checked too: their files are as large as they should be, and empty."""
    read: list[tuple[str, int, int]] = []
    inner = LocalFolder.read_into

    def read_into(self, name, offset, buffer):
        read.append((name, offset, len(buffer)))
        return inner(self, name, offset, buffer)

    monkeypatch.setattr(LocalFolder, "read_into", read_into)
    big = published()["Qwen3-30B-A3B"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(big))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    write_weights(folder, files=16)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 60e9
    model = check_model(config_of(folder))
    assert model is not None and len(model.stored) == 18867
    assert read == []


def test_a_head_beside_a_tied_embedding_is_compared(tmp_path):
    folder = write(tmp_path / "model", "qwen3_tied", changed(lm_head__weight=("F32", (1000, 96))))
    config = config_of(folder)
    model = check_model(config)
    assert model is not None
    head = model.stored[HEAD]
    for row in (0, 617, 999):
        with (folder / head.file).open("r+b") as file:
            file.seek(head.offset + row * 96 * 4 + 92)
            file.write(b"\x00\x00\x80\x3f")
        said = outcome(lambda: check_model(config))
        assert said is not None and f"{HEAD} differs from {EMBEDDING} (first in row {row})" in said
        assert "set it to false if the head was trained by itself" in said
        with (folder / head.file).open("r+b") as file:
            file.seek(head.offset + row * 96 * 4 + 92)
            file.write(bytes(4))
    assert outcome(lambda: check_model(config)) is None


def test_of_a_large_copy_parts_are_compared_of_which_the_ends_are_two():
    rows = 151_936
    parts = list(model_check._spans(rows, 2 * 1024, whole=False))
    assert len(parts) == model_check.SPANS and parts[0][0] == 0 and parts[-1][1] == rows
    assert all(last - first == 512 for first, last in parts[:-1])
    everything = list(model_check._spans(rows, 2 * 1024, whole=True))
    assert [first for first, _ in everything[1:]] == [last for _, last in everything[:-1]]
    assert (everything[0][0], everything[-1][1]) == (0, rows)


def test_a_drafter_whose_layers_are_in_no_file_is_refused(tmp_path):
    folder = write(tmp_path / "model", "glm4_moe_mtp")
    drafts = "rollout.engine.speculative.method=mtp"
    assert check_model(config_of(folder, drafts)) is not None
    names = stored_as(json.loads((folder / "config.json").read_text()))
    write_weights(folder, {name: value for name, value in names.items() if not name.startswith("model.layers.4.")})
    assert check_model(config_of(folder)) is not None
    said = outcome(lambda: check_model(config_of(folder, drafts)))
    assert said is not None and "has the multi-token prediction layers that config.json announces" in said


@pytest.fixture
def earlier(tmp_path) -> Path:
    """The model of a run that has checkpoints in ``run.out``."""
    folder = write(tmp_path / "earlier")
    plan = plan_to_megatron(open_model(folder))
    execute(plan, str(tmp_path / "converted"), 1, Share(), Silence())
    shutil.copytree(tmp_path / "converted" / "release", tmp_path / "out" / "checkpoints" / "step_000012")
    return folder


def resumed(config: Config) -> str | None:
    model = check_model(config)
    assert model is not None
    return outcome(lambda: model_check.check_resumed(config.run, config.policy.lora, model))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_in_the_dry_run(earlier, tmp_path):
    assert resumed(config_of(earlier)) is None
    other = write(tmp_path / "other", intermediate_size=128)
    said = resumed(config_of(other))
    assert said is not None and said.startswith(f"run.out={tmp_path / 'out'} has a checkpoint of another run (")
    assert "mlp.linear_fc1.weight has shape [4, 224, 96]; config.json asks for [4, 256, 96]" in said
    assert outcome(lambda: checks.check_training(config_of(other))) == said
    assert resumed(config_of(other, "run.resume=never")) is None
    assert resumed(config_of(other, "run.resume=11")) is None, "which is not there"
    (tmp_path / "out" / "checkpoints" / "step_000012").rename(tmp_path / "out" / "checkpoints" / ".step_000012")
    assert resumed(config_of(other)) is None


@pytest.mark.slow
def test_full_training_and_adapters_do_not_resume_each_other(earlier, tmp_path):
    said = resumed(config_of(earlier, "policy.lora.rank=4"))
    assert said is not None and "step_000012 holds all parameters, and policy.lora.rank=4" in said
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    newer, key = tmp_path / "out" / "checkpoints" / "step_000013", "adapters.decoder.layers.0.mlp.linear_fc2"
    dcp.save({f"{key}.a": torch.zeros(4, 112), f"{key}.b": torch.zeros(96, 4)}, checkpoint_id=newer, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(newer.with_name("step_000012") / name, newer)
    assert resumed(config_of(earlier, "policy.lora.rank=4")) is None
    said = resumed(config_of(earlier))
    assert said is not None and "step_000013 holds adapters, and policy.lora.rank=0" in said
    said = resumed(config_of(earlier, "policy.lora.rank=8"))
    assert said is not None and f"{key}.a has shape [4, 112]; this run has [8, 112]" in said


def test_sources_that_contradict_each_other_are_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    folder = write(tmp_path / "model", files=3)
    check_model(config_of(folder))
    assert caplog.messages == []
    edit(folder, "generation_config.json", eos_token_id=7)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "chat_template.jinja").write_text(template + "{# mine #}")
    extra(SINGLE, UP)(folder)
    check_model(config_of(folder))
    assert len(caplog.messages) == 3
    assert f"has {SINGLE} and {INDEX}; the files that the index lists are taken" in caplog.text
    assert "eos_token_id is [2] in config.json and [7] in generation_config.json; neither is used" in caplog.text
    assert "using the chat template in chat_template.jinja" in caplog.text


def test_of_a_model_that_is_not_here_and_cannot_be_asked_for_index_and_config_are_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "hub" / "models--fleet--tiny" / "snapshots" / ("0" * 40), files=3)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    config = load(["experiment=quickstart", f"model.path=fleet/tiny@{'0' * 40}"])
    assert check_model(config) is None
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][HEAD]
    (folder / INDEX).write_text(json.dumps(index))
    assert outcome(lambda: check_model(config)) == (
        f"{folder}/{INDEX}: tensor {HEAD} is not listed; use the files of config.json."
    )
    edit(folder, "config.json", **declared("awq"))
    assert "(AWQ, " in str(outcome(lambda: check_model(config)))
