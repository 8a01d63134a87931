"""Model folders as people have them: dry run, doctor and ``convert --plan`` accept the same ones, in the same words."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from published_configs import published
from sparse_models import Stored, stored_as, write_file, write_weights
from tiny_configs import FP8, INT4, raw_config

from megatron_fleet import cli
from megatron_fleet.cluster.doctor.model import model_files
from megatron_fleet.cluster.doctor.probe import Here
from megatron_fleet.cluster.inventory import Host
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.loop import preflight
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.weights import model_check
from megatron_fleet.weights.hf_folder import INDEX, SINGLE
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.mapping import WeightTable

TINY = Path(__file__).parents[2] / "assets" / "tiny"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
UP, HEAD, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
ONE, TWO, THREE = (f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "quantization_config": FP8}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


class Silence:
    """A progress that nobody watches."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...


def write(folder: Path, family: str = "qwen3", tensors: Callable[[dict], Stored] = stored_as, files: int = 1, **fields):
    """A folder of a tiny model with changed fields of config.json, its tokenizer and weights without data."""
    folder.mkdir(parents=True, exist_ok=True)
    config = raw_config(family, "v4") | {"vocab_size": 1000, "max_position_embeddings": 2048} | fields
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return write_weights(folder, tensors(config), files)


def changed(**changes: Any) -> Callable[[dict], Stored]:
    """Tensors of a config.json with others in place of some; ``None``: without it. Dots are written ``__``."""
    edits = {name.replace("__", "."): value for name, value in changes.items()}

    def make(config: dict) -> Stored:
        return {name: value for name, value in (stored_as(config) | edits).items() if value is not None}

    return make


def in_fp8(scales: str) -> Callable[[dict], Stored]:
    def make(config: dict) -> Stored:
        layers = [n for n in WeightTable(config).tensors if "_proj" in n]
        return stored_as(config, fp8=layers, scales=scales)

    return make


def edit(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@dataclass(frozen=True)
class Case:
    """A folder, by ``write`` and then ``damage``; ``said``: a part of the refusal, ``None``: it is accepted.

    ``weights_alone``: conversion, which needs no tokenizer and no engine, accepts it.
    """

    said: str | None = None
    damage: Callable[[Path], object] = lambda folder: None
    made: dict[str, Any] | None = None
    weights_alone: bool = False


def declared(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def of_format(name: str) -> dict[str, Any]:
    return declared("compressed-tensors", format=name, config_groups={"group_0": {"weights": {"num_bits": 8}}})


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def with_pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(POINTER)


def cut(folder: Path) -> None:
    path = folder / SINGLE
    os.truncate(path, path.stat().st_size - 1)


def extra(name: str, tensor: str = "other.weight") -> Callable[[Path], object]:
    return lambda folder: write_file(folder / name, {tensor: ("BF16", (4, 4))})


def misplaced(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][UP] = next(file for file in (ONE, TWO, THREE) if file != index["weight_map"][UP])
    (folder / INDEX).write_text(json.dumps(index))


SHARDED = {"files": 3}
CASES = {
    # Accepted: formats, dtypes, sources.
    "bfloat16": Case(),
    "float32": Case(made={"tensors": lambda config: stored_as(config, "F32")}),
    "float16": Case(made={"tensors": lambda config: stored_as(config, "F16")}),
    "several files": Case(made=SHARDED),
    "qwen2": Case(made={"family": "qwen2"}),
    "experts": Case(made={"family": "qwen3_moe"}),
    "yarn": Case(made={"family": "qwen3_yarn", "max_position_embeddings": 4096}),
    "tied": Case(made={"family": "qwen3_tied"}),
    "tied, and the head is stored": Case(
        made={"family": "qwen3_tied", "tensors": changed(lm_head__weight=("BF16", (1000, 96)))}
    ),
    "fp8": Case(made={"tensors": in_fp8("F32"), **BLOCKS}),
    "fp8 with scales in bfloat16": Case(made={"tensors": in_fp8("BF16"), **BLOCKS}),
    "fp8 with scales in float16": Case(made={"tensors": in_fp8("F16"), **BLOCKS}),
    "fields of other writers": Case(made={"unsloth_fixed": True, "unsloth_version": "2026.9.4", "new_field": None}),
    "no chat template": Case(damage=lambda folder: (folder / "tokenizer_config.json").unlink()),
    "consolidated weights beside the index": Case(damage=extra("consolidated.safetensors"), made=SHARDED),
    "no generation config": Case(damage=lambda folder: (folder / "generation_config.json").unlink()),
    # Quantised forms.
    "awq": Case("(AWQ, ", made=declared("awq", bits=4)),
    "gptq": Case("(GPTQ, ", made=declared("gptq", bits=4)),
    "bitsandbytes": Case("(bitsandbytes, ", made=declared("bitsandbytes", load_in_4bit=True)),
    "mxfp4": Case("(MXFP4, ", made=declared("mxfp4")),
    "modelopt": Case("or NVFP4)", made=declared("modelopt", quant_algo="NVFP4")),
    "nvfp4": Case("(NVFP4, ", made=of_format("nvfp4-pack-quantized")),
    "fp8 with one scale per row": Case("(FP8 with one scale per tensor or row)", made=of_format("float-quantized")),
    "fp8 with other blocks": Case("weight_block_size=[64, 64]", made=declared("fp8", weight_block_size=[64, 64])),
    "awq that config.json does not name": Case(
        "quantised as AWQ or GPTQ", made={"tensors": changed(model__layers__0__mlp__up_proj__qweight=("I32", (96, 14)))}
    ),
    "bitsandbytes that config.json does not name": Case(
        "quantised as bitsandbytes", made={"tensors": changed(**{f"{UP}.absmax".replace(".", "__"): ("F32", (8,))})}
    ),
    "fp8 that config.json does not name": Case(
        "has no quantization_config of fp8",
        made={"tensors": in_fp8("F32"), **BLOCKS, "quantization_config": None},
        weights_alone=True,
    ),
    "fp8 that is not there": Case("and no tensor is stored so", made=BLOCKS, weights_alone=True),
    "int4 that is not there": Case(
        "and no tensor is stored so", made={"quantization_config": INT4}, weights_alone=True
    ),
    # Damage.
    "pointer instead of weights": Case("is a pointer of Git LFS", with_pointer(TWO), SHARDED),
    "pointer instead of the tokenizer": Case("is a pointer of Git LFS", with_pointer("tokenizer.json")),
    "no index": Case(f"and {INDEX}, which lists them, is missing", without_index, SHARDED),
    "missing file": Case(f"missing although {INDEX} lists it", lambda folder: (folder / TWO).unlink(), SHARDED),
    "file of another version": Case(f"{INDEX} does not list it", extra("model-00004-of-00009.safetensors"), SHARDED),
    "index of other files": Case(f"is missing although {INDEX} lists it", misplaced, SHARDED),
    "truncated": Case("not a whole safetensors file", cut),
    "pickled weights": Case(
        "pytorch_model.bin cannot be read", lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin")
    ),
    "adapter beside the weights": Case(
        "engines would load both", extra("adapter_model.safetensors"), weights_alone=True
    ),
    # Contradictions between files.
    "resized embedding": Case(
        "with vocab_size=1008 if the embedding was resized",
        made={"tensors": changed(model__embed_tokens__weight=("BF16", (1008, 96)))},
    ),
    "another hidden size": Case(
        "config.json asks for [1000, 64]", lambda folder: edit(folder, "config.json", hidden_size=64)
    ),
    "fewer layers in config.json": Case(
        "is not part of the model", lambda folder: edit(folder, "config.json", num_hidden_layers=2)
    ),
    "no head": Case("tensor lm_head.weight is missing", made={"tensors": changed(lm_head__weight=None)}),
    "unknown field": Case("mystery=2 is an unknown field", lambda folder: edit(folder, "config.json", mystery=2)),
    "tokenizer beyond the embedding": Case(
        "the tokenizer has ids up to 973", made={"vocab_size": 515}, weights_alone=True
    ),
    "end of a turn beyond the embedding": Case(
        "eos_token_id=1000 is beyond the 1000 rows",
        lambda folder: edit(folder, "generation_config.json", eos_token_id=[2, 1000]),
        weights_alone=True,
    ),
}


def config_of(folder: Path, *overrides: str) -> Config:
    out = folder.parent / "out"
    return load(["experiment=quickstart", "model.dtype=bfloat16", f"model.path={folder}", f"run.out={out}", *overrides])


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
    dry_run = outcome(lambda: preflight.check(config))
    doctor = outcome(lambda: model_files(Here(config, os.environ, Host("here"), quick=True)))
    assert dry_run == doctor
    assert dry_run is None if case.said is None else dry_run is not None and case.said in dry_run
    status = cli.main(["convert", "to-megatron", str(folder), str(tmp_path / "megatron"), "--plan"])
    said = capsys.readouterr().err.removeprefix("error: ").rstrip()
    if case.said is None or case.weights_alone:
        assert (status, said) == (0, "")
    else:
        assert (status, said) == (2, dry_run)


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
    model = model_check.check_model(config_of(folder))
    assert model is not None and len(model.stored) == 18867
    assert read == []


def test_a_head_beside_a_tied_embedding_is_compared(tmp_path):
    folder = write(tmp_path / "model", "qwen3_tied", changed(lm_head__weight=("F32", (1000, 96))))
    config = config_of(folder)
    model = model_check.check_model(config)
    assert model is not None
    head = model.stored[HEAD]
    for row in (0, 617, 999):
        with (folder / head.file).open("r+b") as file:
            file.seek(head.offset + row * 96 * 4 + 92)
            file.write(b"\x00\x00\x80\x3f")
        said = outcome(lambda: model_check.check_model(config))
        assert said is not None and f"{HEAD} differs from {EMBEDDING} (first in row {row})" in said
        assert "set it to false if the head was trained by itself" in said
        with (folder / head.file).open("r+b") as file:
            file.seek(head.offset + row * 96 * 4 + 92)
            file.write(bytes(4))
    assert outcome(lambda: model_check.check_model(config)) is None


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
    assert model_check.check_model(config_of(folder, drafts)) is not None
    names = stored_as(json.loads((folder / "config.json").read_text()))
    write_weights(folder, {name: value for name, value in names.items() if not name.startswith("model.layers.4.")})
    assert model_check.check_model(config_of(folder)) is not None
    said = outcome(lambda: model_check.check_model(config_of(folder, drafts)))
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
    model = model_check.check_model(config)
    assert model is not None
    return outcome(lambda: model_check.check_resumed(config, model))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_in_the_dry_run(earlier, tmp_path):
    assert resumed(config_of(earlier)) is None
    other = write(tmp_path / "other", intermediate_size=128)
    said = resumed(config_of(other))
    assert said is not None and said.startswith(f"run.out={tmp_path / 'out'}: has a checkpoint of another run (")
    assert "mlp.linear_fc1.weight has shape [4, 224, 96]; config.json asks for [4, 256, 96]" in said
    assert outcome(lambda: preflight.check(config_of(other))) == said
    assert resumed(config_of(other, "run.resume=never")) is None
    assert resumed(config_of(other, "run.resume=11")) is None, "which is not there"
    (tmp_path / "out" / "checkpoints" / "step_000012").rename(tmp_path / "out" / "checkpoints" / ".step_000012")
    assert resumed(config_of(other)) is None


@pytest.mark.slow
def test_full_training_and_adapters_do_not_resume_each_other(earlier, tmp_path):
    said = resumed(config_of(earlier, "policy.lora.rank=4"))
    assert said is not None and "step_000012: holds all parameters, and policy.lora.rank=4" in said
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    newer, key = tmp_path / "out" / "checkpoints" / "step_000013", "adapters.decoder.layers.0.mlp.linear_fc2"
    dcp.save({f"{key}.a": torch.zeros(4, 112), f"{key}.b": torch.zeros(96, 4)}, checkpoint_id=newer, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(newer.with_name("step_000012") / name, newer)
    assert resumed(config_of(earlier, "policy.lora.rank=4")) is None
    said = resumed(config_of(earlier))
    assert said is not None and "step_000013: holds adapters, and policy.lora.rank=0" in said
    said = resumed(config_of(earlier, "policy.lora.rank=8"))
    assert said is not None and f"{key}.a has shape [4, 112]; this run has [8, 112]" in said


def test_sources_that_contradict_each_other_are_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    folder = write(tmp_path / "model", files=3)
    model_check.check_model(config_of(folder))
    assert caplog.messages == []
    edit(folder, "generation_config.json", eos_token_id=7)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "chat_template.jinja").write_text(template + "{# mine #}")
    extra(SINGLE, UP)(folder)
    model_check.check_model(config_of(folder))
    assert len(caplog.messages) == 3
    assert f"has {SINGLE} and {INDEX}; the files that the index lists are taken" in caplog.text
    assert "eos_token_id is [2] in config.json and [7] in generation_config.json; neither is used" in caplog.text
    assert "chat_template.jinja is taken" in caplog.text


def test_of_a_model_that_is_not_here_index_and_config_are_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "hub" / "models--fleet--tiny" / "snapshots" / ("0" * 40), files=3)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    config = load(["experiment=quickstart", f"model.path=fleet/tiny@{'0' * 40}"])
    assert model_check.check_model(config) is None
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][HEAD]
    (folder / INDEX).write_text(json.dumps(index))
    assert outcome(lambda: model_check.check_model(config)) == (
        f"{folder}/{INDEX}: tensor {HEAD} is not listed; use the files of config.json."
    )
    edit(folder, "config.json", **declared("awq"))
    assert "(AWQ, " in str(outcome(lambda: model_check.check_model(config)))
