"""Checkpoints that are damaged or belong to another model: one sentence each, and no output."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from convert_helpers import megatron_tensors, write_foreign  # noqa: E402

QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def converted(made, tmp_path_factory):
    from convert_helpers import Silence

    from megatron_fleet.convert.execute import Share, execute
    from megatron_fleet.convert.to_megatron import plan_to_megatron
    from megatron_fleet.weights.hf_model import open_model

    root = tmp_path_factory.mktemp("converted")

    def get(family):
        out = root / family
        execute(plan_to_megatron(open_model(made(family))), str(out), 1, Share(), Silence())
        return out

    return get


@pytest.fixture
def checkpoint(converted, tmp_path):
    return lambda family="qwen3": shutil.copytree(converted(family), tmp_path / "mg")


def edit_metadata(root, edit):
    path = root / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_dtype(key, dtype):
    def edit(metadata):
        entry = metadata.state_dict_metadata[key]
        entry.properties = replace(entry.properties, dtype=dtype)  # they share one

    return edit


def drop(key):
    def edit(metadata):
        del metadata.state_dict_metadata[key]
        for index in [i for i in metadata.storage_data if i.fqn == key]:
            del metadata.storage_data[index]

    return edit


def add(key):
    def edit(metadata):
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[QKV]
        for index in [i for i in metadata.storage_data if i.fqn == QKV]:
            metadata.storage_data[type(index)(key, index.offset, index.index)] = metadata.storage_data[index]

    return edit


def another_place(metadata):
    """A chunk that the index looks for where one of another shape is."""
    places = metadata.storage_data
    (here, *_), (there, *_) = (
        [index for index in places if index.fqn.endswith(name)] for name in ("linear_fc2.weight", "linear_qkv.weight")
    )
    places[here].offset, places[here].length = places[there].offset, places[there].length


DAMAGE = {
    "a cut data file": (
        lambda r: cut(r / "release" / "__0_0.distcp"),
        r"/release/\.metadata needs .* of __0_0\.distcp, which has \d+",
    ),
    "a missing data file": (
        lambda r: (r / "release" / "__0_0.distcp").unlink(),
        r"/release/\.metadata needs .* from __0_0\.distcp, which is missing",
    ),
    "a cut index": (lambda r: cut(r / "release" / ".metadata"), r"/release/\.metadata is not a whole pickle"),
    "a damaged index": (
        lambda r: (r / "release" / ".metadata").write_bytes(b"\x80\x04\xff" * 50),
        r"/release/\.metadata ",
    ),
    "no index": (lambda r: (r / "release" / ".metadata").unlink(), r"names release, which holds no \.metadata"),
    "no format": (lambda r: (r / "release" / "metadata.json").unlink(), r"/release: metadata\.json is missing"),
    "another format": (
        lambda r: (r / "release" / "metadata.json").write_text(
            '{"sharded_backend": "zarr", "sharded_backend_version": 1}'
        ),
        r"the format is 'zarr'",
    ),
    "no common state": (lambda r: (r / "release" / "common.pt").unlink(), r"common\.pt is missing"),
    "a damaged common state": (
        lambda r: (r / "release" / "common.pt").write_bytes(b"PK\x03\x04" + bytes(100)),
        r"common\.pt: the common state",
    ),
    "a tracker that lies": (
        lambda r: (r / "latest_checkpointed_iteration.txt").write_text("7"),
        r"names iter_0000007, which holds no \.metadata",
    ),
    "a lost tensor": (
        lambda r: edit_metadata(r, drop(QKV)),
        r"tensor decoder\.layers\.0\.self_attention\.linear_qkv\.weight is missing",
    ),
    "a tensor of another model": (
        lambda r: edit_metadata(r, add("decoder.layers.cross_attention.weight")),
        r"tensor decoder\.layers\.cross_attention\.weight is not part of the model",
    ),
    "a type that is not a float": (
        lambda r: edit_metadata(r, set_dtype(QKV, torch.int16)),
        rf"tensor {QKV} is stored as I16; only F32, BF16, F16 can be read",
    ),
    "a type that is not that of the data": (
        lambda r: edit_metadata(r, set_dtype(QKV, torch.float16)),
        r"__0_0\.distcp holds BF16 \[1, 192, 96\] at byte \d+, where \.metadata promises F16 \[1, 192, 96\]",
    ),
    "a place that is another's": (
        lambda r: edit_metadata(r, another_place),
        r"__0_0\.distcp holds BF16 \[1, 192, 96\] at byte \d+, where \.metadata promises BF16 \[1, 96, 112\]",
    ),
    "data that begins with something else": (
        lambda r: overwrite_start(r / "release" / "__0_0.distcp"),
        r"__0_0\.distcp .*; save the checkpoint again with Megatron's torch_dist format",
    ),
    "no layout": (lambda r: (r / "hf" / "safetensors_layout.json").unlink(), r"does not say which model it is"),
    "a malformed layout": (
        lambda r: (r / "hf" / "safetensors_layout.json").write_text('{"headers": {"a": "!"}}'),
        r"/hf/safetensors_layout\.json: malformed",
    ),
    "a layout of nothing": (
        lambda r: (r / "hf" / "safetensors_layout.json").write_text('{"headers": {"m": "AAAA"}, "passthrough": []}'),
        r"/hf/safetensors_layout\.json: malformed",
    ),
    "a config that names a key twice": (
        lambda r: (r / "hf" / "config.json").write_text('{"a": 1, "a": 2}'),
        r"/hf/config\.json: not valid JSON \(a is there twice\)",
    ),
    "a config of another model": (
        lambda r: change_config(r, intermediate_size=128),
        r"/hf/model-00001-of-00003\.safetensors: tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape "
        r"\[112, 96\]; config\.json asks for \[128, 96\]",
    ),
}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite_start(path):
    data = path.read_bytes()
    path.write_bytes(bytes(4096) + data[4096:])


def change_config(root, **fields):
    path = root / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_sentence_and_no_output(damage, checkpoint, refused, tmp_path):
    import re

    root = checkpoint()
    edit, message = DAMAGE[damage]
    edit(root)
    said = refused("to-hf", root, tmp_path / "out")
    assert re.search(message, said), said
    assert said.startswith(str(root))
    assert not (tmp_path / "out").exists()


CARRIED = {
    "missing": (lambda f: f.unlink(), r"missing although safetensors_layout\.json lists it"),
    "cut": (cut, r"not a whole safetensors file"),
}


@pytest.mark.parametrize("damage", CARRIED)
def test_damage_of_what_is_carried(damage, checkpoint, refused, tmp_path):
    import re

    root = checkpoint("kimi_k25")
    edit, message = CARRIED[damage]
    file = root / "hf" / "passthrough-00001.safetensors"
    edit(file)
    said = refused("to-hf", root, tmp_path / "out")
    assert said.startswith(str(file)) and re.search(message, said)
    assert not (tmp_path / "out").exists()


def test_carried_tensors_that_are_lost(checkpoint, refused, tmp_path):
    root = checkpoint("moonlight")
    layout = root / "hf" / "safetensors_layout.json"
    layout.write_text(json.dumps(json.loads(layout.read_text()) | {"passthrough": []}))
    said = refused("to-hf", root, tmp_path / "out")
    assert "the bytes of tensor model.layers.0.self_attn.rotary_emb.inv_freq are missing" in said


WRONG_TEMPLATES = {
    "qwen3_tied": "tensor output_layer.weight is not part of the model",
    "qwen2": "config.json asks for",
    "qwen3_moe": "is missing; config.json asks for it",
    "llama3": "config.json asks for",
}


@pytest.mark.parametrize("family", WRONG_TEMPLATES)
def test_a_template_of_another_model(family, made, refused, tmp_path):
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False))
    said = refused("to-hf", root, tmp_path / "out", "--template", made(family))
    assert said.startswith(f"{root}/iter_0000100: ") and WRONG_TEMPLATES[family] in said


@pytest.mark.parametrize("layers", [3, 5])
def test_a_template_with_other_layers(layers, made, copied, refused, tmp_path):
    from safetensors.torch import load_file, save_file

    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), True))
    template = copied("qwen3")
    tensors = {k: v for f in template.glob("*.safetensors") for k, v in load_file(f).items()}
    for file in (*template.glob("*.safetensors"), template / "model.safetensors.index.json"):
        file.unlink()
    last = {k.replace("layers.3.", "layers.4."): v.clone() for k, v in tensors.items() if ".layers.3." in k}
    tensors = tensors | last if layers == 5 else {k: v for k, v in tensors.items() if ".layers.3." not in k}
    save_file(tensors, template / "model.safetensors")
    config = json.loads((template / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (template / "config.json").write_text(json.dumps(config))
    said = refused("to-hf", root, tmp_path / "out", "--template", template)
    assert ("decoder.layers.4." if layers == 5 else "decoder.layers.3.") in said
    assert ("is missing" if layers == 5 else "is not part of the model") in said


def test_a_vocabulary_that_is_too_small(made, refused, tmp_path):
    tensors = megatron_tensors(made("qwen3"), False)
    tensors["output_layer.weight"] = tensors["output_layer.weight"][:500]
    root = write_foreign(tmp_path / "run", tensors)
    said = refused("to-hf", root, tmp_path / "out", "--template", made("qwen3"))
    assert (
        said == f"{root}/iter_0000100: tensor output_layer.weight has shape [500, 96]; config.json asks for [515, 96]."
    )


def test_each_command_says_which_folder_it_wants(made, refused, tmp_path):
    assert refused("to-hf", made("qwen3"), tmp_path / "o") == (
        f"{made('qwen3')} is an HF folder; give the folder of a Megatron checkpoint."
    )
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False))
    assert "config.json: there is no such file" in refused("to-megatron", root, tmp_path / "o")
    for command in ("to-hf", "to-megatron"):
        assert refused(command, tmp_path / "none", tmp_path / "o").startswith(str(tmp_path / "none"))
    assert refused("verify", tmp_path / "none", made("qwen3")).startswith(str(tmp_path / "none"))


def test_a_damaged_folder_is_not_converted(copied, refused, tmp_path):
    """Damaged HF folders; the reader's own tests have more."""
    source = copied("qwen3")
    cut(sorted(source.glob("*.safetensors"))[1])
    said = refused("to-megatron", source, tmp_path / "out")
    assert said.startswith(f"{source}/model-00002-of-00003.safetensors: not a whole safetensors file")
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
