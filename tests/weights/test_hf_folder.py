"""Headers of HF folders: what is wrong with a file is said in one sentence that names it, whatever its bytes are."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights import hf_folder
from megatron_fleet.weights.hf_folder import INDEX, SINGLE, StoredTensor, read_config, read_headers

GOOD = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [10, 34]},
    "a": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
    "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [34, 34]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [34, 42]},
}
NBYTES = 42


def encode(header, data=NBYTES):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def write(folder, files, weight_map=None):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if weight_map is not None:
        index = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
        (folder / INDEX).write_bytes(index)
    return folder


def refusal(folder):
    with pytest.raises(UserError) as e:
        read_headers(folder)
    message = str(e.value)
    assert "\n" not in message and str(folder) in message and len(message) < 400 + len(str(folder))
    return message.replace(str(folder), "")


def test_headers_are_read_as_they_are(tmp_path):
    start = len(encode(GOOD, 0))
    stored = read_headers(write(tmp_path, {SINGLE: encode(GOOD)}))
    assert stored == {
        "a": StoredTensor(SINGLE, "BF16", (5,), start),
        "b": StoredTensor(SINGLE, "F32", (2, 3), start + 10),
        "none": StoredTensor(SINGLE, "F32", (0, 7), start + 34),
        "scalar": StoredTensor(SINGLE, "I64", (), start + 34),
    }
    assert list(stored) == ["a", "b", "none", "scalar"]
    assert [tensor.nbytes for tensor in stored.values()] == [10, 24, 0, 8]


def test_an_empty_header_is_a_file_without_tensors(tmp_path):
    assert read_headers(write(tmp_path, {SINGLE: encode({}, 0)})) == {}


def test_safetensors_writes_what_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    names = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    names |= {"I16": "int16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "F32": "float32"}
    names |= {"I64": "int64", "F64": "float64", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
    tensors = {name: torch.zeros(3, 5).to(getattr(torch, name)) for name in names.values()}
    save_file(tensors | {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 2)}, tmp_path / SINGLE)
    stored = read_headers(tmp_path)
    assert {name: stored[name].dtype for name in tensors} == {ours: st for st, ours in names.items()}
    assert {name: stored[name].nbytes for name in tensors} == {name: t.nbytes for name, t in tensors.items()}
    assert (stored["scalar"].shape, stored["empty"].shape) == ((), (0, 2))


def changed(name, **fields):
    return GOOD | {name: GOOD[name] | fields}


def without(name, field):
    return GOOD | {name: {key: value for key, value in GOOD[name].items() if key != field}}


TWICE = json.dumps(GOOD)[:-1].encode() + b', "a": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]}}'
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has only 0 bytes"),
        (b"\x08\0\0", "it has only 3 bytes"),
        (encode(GOOD)[:40], "its header claims .* bytes, but the file has 40"),
        (encode(GOOD)[:-1], "its header describes .* bytes and the file has"),
        (encode(GOOD) + b"\0", "its header describes .* bytes and the file has"),
        (struct.pack("<Q", 1 << 63) + bytes(100), "its header claims 9223372036854775808 bytes, but the file has 108"),
        (b"<html>\n404 not found</html>", "its header claims"),
        (encode(b"{" + b"x" * 50), "Expecting property name"),
        (encode(b"\xff\xfe" * 8), "codec can't decode"),
        (encode(b"[1, 2]"), "its header is not a JSON object"),
        (encode(b"null"), "its header is not a JSON object"),
        (encode(TWICE), "a is there twice"),
        (encode(DEEP, 0), "nested more than 200 levels"),
        (encode(b'{"a": ' + b"9" * 5000 + b"}"), "digits"),
        (encode(GOOD | {"a": None}), "tensor a lacks"),
        (encode(GOOD | {"a": [1]}), "tensor a lacks"),
        *((encode(without("b", field)), "tensor b lacks") for field in ("dtype", "shape", "data_offsets")),
        (encode(changed("a", dtype="BF17")), "tensor a has the unknown type 'BF17'"),
        (encode(changed("a", dtype=["BF16"])), "tensor a has the unknown type"),
        (encode(changed("a", dtype="F32")), "tensor a has 10 bytes and its shape asks for 20"),
        (encode(changed("b", shape=[2, 4])), "tensor b has 24 bytes and its shape asks for 32"),
        *(
            (encode(changed("b", shape=shape)), "tensor b has shape")
            for shape in ([-2, -3], [2.0, 3], ["2", 3], "23", 6, None, {"2": 3}, [True, 6], [1 << 63, 0], [1] * 65)
        ),
        *(
            (encode(changed("b", data_offsets=at)), "tensor b ")
            for at in ([-1, 23], [10], [10, 34, 35], "ab", None, [10.0, 34], [True, 34], [10, 1 << 64], [34, 10])
        ),
        (encode(changed("b", data_offsets=[9, 33])), r"tensor b begins at byte \d+ and what precedes it ends at"),
        (encode(changed("b", data_offsets=[11, 35])), r"tensor b begins at byte \d+ and what precedes it ends at"),
        (encode(changed("b", data_offsets=[1 << 62, (1 << 62) + 24])), "tensor (scalar|none|b) begins at byte"),
        (encode(changed("a", data_offsets=[2, 12])), "tensor a begins at byte"),
    ],
)
def test_broken_files(tmp_path, content, message):
    said = refusal(write(tmp_path, {SINGLE: content}))
    assert said.startswith(f"/{SINGLE}: not a whole safetensors file (") and said.endswith("; download it again.")
    assert re.search(message, said), said
    # As one of several files, the same.
    folder = write(tmp_path / "many", {"model-1-of-1.safetensors": content}, {"a": "model-1-of-1.safetensors"})
    assert re.search(message, refusal(folder))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def part(**tensors):
    return encode(
        {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(tensors)}, len(tensors)
    )


def test_several_files_and_one_that_is_not_listed(tmp_path):
    files = {ONE: part(a=1, b=1), TWO: part(c=1), "consolidated.safetensors": b"broken"}
    stored = read_headers(write(tmp_path, files, {"a": ONE, "b": ONE, "c": TWO}))
    assert {name: tensor.file for name, tensor in stored.items()} == {"a": ONE, "b": ONE, "c": TWO}


@pytest.mark.parametrize(
    ("files", "weight_map", "message"),
    [
        ({}, None, r": neither model\.safetensors nor .*index\.json is there"),
        ({"pytorch_model.bin": b""}, None, ": neither"),
        ({ONE: part(a=1)}, {"a": ONE, "c": TWO}, f"/{TWO}: missing although {INDEX} lists it"),
        ({ONE: part(a=1), TWO: part(c=1)}, {"a": TWO, "c": TWO}, f"/{TWO}: tensor a is missing although {INDEX}"),
        ({ONE: part(a=1), TWO: part(c=1)}, {"a": ONE, "c": ONE, "x": TWO}, f"/{ONE}: tensor c is missing although"),
        ({ONE: part(a=1), TWO: part(c=1)}, {"a": ONE, "d": TWO}, f"/{TWO}: tensor d is missing although"),
        ({ONE: part(a=1), TWO: part(a=1)}, {"a": ONE, "c": TWO}, f"/{TWO}: tensor a is in {ONE} too"),
        ({ONE: part(a=1)}, {"a": "../x.safetensors"}, r"a lies in '\.\./x\.safetensors', which is no"),
        ({ONE: part(a=1)}, {"a": "/etc/x.safetensors"}, "a lies in '/etc/x.safetensors', which is no"),
        ({ONE: part(a=1)}, {"a": "model.bin"}, "a lies in 'model.bin', which is no"),
        ({ONE: part(a=1)}, {"a": None}, "a lies in None, which is no"),
        ({ONE: part(a=1)}, {"a": [ONE]}, "a lies in .*, which is no"),
        ({ONE: part(a=1)}, {}, "weight_map is missing"),
        ({ONE: part(a=1)}, [ONE], "weight_map is missing"),
        ({ONE: part(a=1)}, b"[]", f"/{INDEX}: weight_map is missing"),
        ({ONE: part(a=1)}, b"", f"/{INDEX}: not valid JSON"),
        ({ONE: part(a=1)}, b'{"weight_map": {"a": "x.safetensors"', f"/{INDEX}: not valid JSON"),
        ({ONE: part(a=1)}, b'{"weight_map": {"a": "x", "a": "y"}}', f"/{INDEX}: not valid JSON .a is there twice"),
        ({ONE: part(a=1)}, b"[" * 100_000, f"/{INDEX}: not valid JSON"),
        ({ONE: part(a=1)}, b"\xff\xfe", f"/{INDEX}: not valid JSON"),
    ],
)
def test_broken_folders(tmp_path, files, weight_map, message):
    said = refusal(write(tmp_path, files, weight_map))
    assert re.search(message, said), said


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b'{"a": 1, "a": 2}', b"\x80", b"[" * 100_000])
def test_broken_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_config(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


def test_many_repeated_names_are_found_at_once(tmp_path):
    """Not by comparing each with each."""
    names = b", ".join(b'"t%d": 0' % (i // 2) for i in range(200_000))
    assert "t0 is there twice" in refusal(write(tmp_path, {SINGLE: encode(b"{" + names + b"}", 0)}))


def mutated(draw, good):
    """Bytes near a good file: cut, changed, with a piece repeated or inserted."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["cut", "set", "insert", "repeat"]))
        if kind == "cut":
            del content[at : at + draw(st.integers(1, 20))]
        elif kind == "set":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "insert":
            content[at:at] = draw(st.sampled_from([b"-", b"9" * 30, b"[", b"]", b"null", b'"', b"{}", b",", b"1e99"]))
        else:
            content[at:at] = content[max(0, at - 30) : at]
    return bytes(content)


@st.composite
def broken_safetensors(draw):
    """Half of them with a length that fits, so that the JSON is looked at."""
    text = json.dumps(GOOD).encode()
    if draw(st.booleans()):
        return encode(mutated(draw, text))
    return mutated(draw, encode(GOOD)) if draw(st.booleans()) else draw(st.binary(max_size=64))


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(content=broken_safetensors())
@example(struct.pack("<Q", 99_999_999) + bytes(100))
def test_any_bytes_give_tensors_or_a_refusal(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    tracemalloc.start()
    try:
        for tensor in read_headers(tmp_path).values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
    except UserError as e:
        assert SINGLE in str(e) and "\n" not in str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_index_gives_tensors_or_a_refusal(tmp_path, data):
    good = json.dumps({"metadata": {"total_size": 3}, "weight_map": {"a": ONE, "b": ONE, "c": TWO}}).encode()
    write(tmp_path, {ONE: part(a=1, b=1), TWO: part(c=1)}, mutated(data.draw, good))
    try:
        assert set(read_headers(tmp_path)) <= {"a", "b", "c"}
    except UserError as e:
        assert str(tmp_path) in str(e) and "\n" not in str(e)


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_folder, "_MAX_HEADER", 100)
    assert "its header claims" in refusal(write(tmp_path, {SINGLE: encode(GOOD)}))


def test_companions_are_the_small_files_beside_the_weights(tmp_path):
    kept = ("config.json", "generation_config.json", "merges.txt", "chat_template.jinja", "tiktoken.model", "code.py")
    others = ("README.md", "other.safetensors.index.json", "pytorch_model.bin", "conversion.json", "export.json")
    for name in (*kept, INDEX, SINGLE, *others):
        (tmp_path / name).write_text(name)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    assert hf_folder.companions(open_folder(tmp_path)) == {name: name.encode() for name in sorted(kept)}
