"""Two folders are equal or the first difference is named, in every part of them."""

from __future__ import annotations

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from convert_helpers import change  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_models import stored_tensors  # noqa: E402

DOWN = "model.layers.2.mlp.down_proj.weight"


def once(name, edit):
    """An edit of one tensor for `change`."""

    def apply(found, tensor):
        if found != name:
            return None
        tensor = tensor.clone()
        edit(tensor)
        return tensor

    return apply


def put(value, *at):
    def edit(tensor):
        tensor[at] = value

    return edit


def test_the_first_difference_and_both_values(made, copied, convert):
    other = copied("qwen3")
    old = next(load_file(f)[DOWN] for f in other.glob("*.safetensors") if DOWN in load_file(f))[5, 7].item()
    change(other, once(DOWN, put(2.0, 5, 7)))
    change(other, once(DOWN, put(3.0, 6, 1)))
    code, out, _ = convert("verify", made("qwen3"), other)
    assert code == 1
    first, last = out.splitlines()
    assert first.startswith(
        f"{DOWN}: 2 of {96 * 112} values differ, first at [5, 7]: {old:.8g} and 2, largest difference"
    )
    assert last.startswith("1 of ") and str(other) in last


def test_tolerance_is_of_weights(made, copied, convert):
    other = copied("qwen3")
    change(other, lambda name, tensor: tensor + 0.01 if name == "model.norm.weight" else None)
    assert convert("verify", made("qwen3"), other, "--tolerance", "0.05")[0] == 0
    assert convert("verify", made("qwen3"), other, "--tolerance", "0.001")[0] == 1
    assert convert("verify", made("qwen3"), other)[0] == 1
    assert convert("verify", made("qwen3"), other, "--tolerance", "-1")[0] == 2
    assert convert("verify", made("qwen3"), other, "--tolerance", "nan")[0] == 2


def of_type(dtype):
    """An edit that stores one tensor in a type."""
    return lambda name, tensor: tensor.to(dtype) if name == DOWN else None


TYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tolerance", [0, 0.5])
def test_nan_equals_itself_and_nothing_else(tolerance, dtype, made, copied, convert, tmp_path):
    one, two = copied("qwen3"), made("qwen3")
    change(one, of_type(dtype))
    change(one, once(DOWN, put(float("nan"), 5, 7)))
    same = convert("verify", one, shutil.copytree(one, tmp_path / "same"), "--tolerance", tolerance)
    assert same[0] == 0
    for sides in ((one, two), (two, one)):
        code, out, _ = convert("verify", *sides, "--tolerance", tolerance)
        assert code == 1 and "first at [5, 7]: " in out and "nan" in out


@pytest.mark.parametrize("dtype", TYPES)
def test_signs_of_zero_differ(dtype, copied, convert, tmp_path):
    plus = copied("qwen3")
    change(plus, of_type(dtype))
    change(plus, once(DOWN, put(0.0, 5, 7)))
    minus = shutil.copytree(plus, tmp_path / "minus")
    change(minus, once(DOWN, put(-0.0, 5, 7)))
    assert convert("verify", plus, minus)[0] == 1
    assert convert("verify", plus, minus, "--tolerance", "1e-30")[0] == 0


VISION = "vision_tower.encoder.blocks.1.wo.weight"
COPIES = ["model.layers.4.shared_head.head.weight", "model.layers.4.embed_tokens.weight"]
ELSEWHERE = [
    ("kimi_k25", VISION),
    ("moonlight", "model.layers.1.self_attn.rotary_emb.inv_freq"),
    *(("deepseek_v3_mtp", c) for c in COPIES),
]


@pytest.mark.parametrize("side", ["folders", "checkpoint"])
@pytest.mark.parametrize(("family", "name"), ELSEWHERE)
def test_what_megatron_does_not_hold_is_compared_too(family, name, side, made, copied, convert, tmp_path):
    other = copied(family)
    change(other, once(name, put(9.0, -1)))
    a = made(family)
    if side == "checkpoint":
        convert("to-megatron", a, tmp_path / "mg")
        a = tmp_path / "mg"
    code, out, _ = convert("verify", a, other)
    assert code == 1
    assert out.splitlines()[0].startswith(f"{name}: ") and "first at" in out.splitlines()[0]
    assert out.splitlines()[1].startswith("1 of ")


def without(folder, name):
    """Remove a tensor from a folder's files and index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("family", "name"), [ELSEWHERE[0], ELSEWHERE[2]])
@pytest.mark.parametrize("turned", [False, True])
def test_what_one_side_lacks_is_reported(family, name, turned, copied, made, convert, tmp_path):
    other = copied(family)
    without(other, name)
    convert("to-megatron", made(family), tmp_path / "mg")
    sides = (tmp_path / "mg", other)
    code, out, _ = convert("verify", *(reversed(sides) if turned else sides))
    assert code == 1
    assert out.splitlines()[0] == f"{name}: missing in {other}"


def test_another_type_of_a_carried_tensor(made, copied, convert):
    other = copied("kimi_k25")
    change(other, lambda name, tensor: tensor.float() if name == VISION else None)
    code, out, _ = convert("verify", made("kimi_k25"), other)
    assert code == 1
    assert out.startswith(f"{VISION}: BF16 [32, 32] in {made('kimi_k25')} and F32 [32, 32] in {other}")


def test_another_model(made, convert):
    code, out, _ = convert("verify", made("qwen3"), made("qwen3_tied"))
    assert code == 1
    assert "lm_head.weight: missing in" in out


@pytest.mark.parametrize("family", ["kimi_k25", "deepseek_v3_mtp"])
def test_hashes_stand_for_a_folder(family, made, copied, convert, refused, tmp_path):
    convert("to-megatron", made(family), tmp_path / "mg")
    for place, name in ((made(family), "hf"), (tmp_path / "mg", "mg")):
        assert convert("inspect", place, "--hashes", tmp_path / f"{name}.json")[0] == 0
    found = [json.loads((tmp_path / f"{name}.json").read_text())["blake3"] for name in ("hf", "mg")]
    assert found[0] == found[1]
    assert convert("verify", made(family), tmp_path / "mg.json")[0] == 0
    changed = VISION if family == "kimi_k25" else COPIES[0]
    other = copied(family)
    change(other, once(changed, put(9.0, -1)))
    code, out, _ = convert("verify", other, tmp_path / "hf.json")
    assert (code, out.splitlines()[0]) == (1, f"{changed}: different hashes")
    without(other, changed)
    assert f"{changed}: missing in one of the two" in convert("verify", other, tmp_path / "hf.json")[1]
    assert "already exists" in refused("inspect", other, "--hashes", tmp_path / "hf.json")
    (tmp_path / "bad.json").write_text('{"blake3": {"x": 1}}')
    assert "is not a file of hashes" in refused("verify", other, tmp_path / "bad.json")
    assert "cannot be read" in refused("verify", other, tmp_path / "none.json")
    assert "cannot be written" in refused("inspect", other, "--hashes", tmp_path / "no" / "folder.json")


def test_equal_bits_of_another_type_have_another_hash(made, copied, convert, tmp_path):
    other = copied("qwen3")
    change(other, lambda name, tensor: tensor.view(torch.float16) if name == DOWN else None)
    convert("inspect", made("qwen3"), "--hashes", tmp_path / "hashes.json")
    code, out, _ = convert("verify", other, tmp_path / "hashes.json")
    assert (code, out.splitlines()[0]) == (1, f"{DOWN}: different hashes")


def test_a_changed_byte_of_a_checkpoint_is_found(made, convert, tmp_path):
    convert("to-megatron", made("qwen3"), tmp_path / "mg")
    data = tmp_path / "mg" / "release" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    row = stored_tensors(made("qwen3"))[DOWN][3].view(torch.uint8).numpy().tobytes()
    content[content.index(row) + 9] ^= 0x40
    data.write_bytes(content)
    code, out, _ = convert("verify", made("qwen3"), tmp_path / "mg")
    assert code == 1
    assert out.splitlines()[0].startswith(f"{DOWN}: 1 of {96 * 112} values differ, first at [3, 4]: ")


def test_small_blocks_give_the_same_answer(made, copied, convert, monkeypatch):
    from megatron_fleet.convert import verify

    other = copied("kimi_k25")
    for name in (VISION, "language_model.model.norm.weight"):
        change(other, once(name, put(9.0, -1)))
    whole = convert("verify", made("kimi_k25"), other)
    monkeypatch.setattr(verify, "STEP_BYTES", 100)
    assert convert("verify", made("kimi_k25"), other)[:2] == whole[:2]
    assert whole[0] == 1 and len(whole[1].splitlines()) == 3
