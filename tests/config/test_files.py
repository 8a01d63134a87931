"""Whatever a file is or holds: a value, or one sentence that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.config import files
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json, parse_yaml, read_file, read_object, user_path

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values)
def test_json_is_read(value):
    assert parse_json(json.dumps(value).encode(), "f") == value


@given(st.one_of(st.binary(max_size=200), values.map(lambda v: json.dumps(v).encode()[:-1]), st.text().map(str.encode)))
def test_any_bytes_are_a_value_or_a_sentence(data):
    try:
        json.dumps(parse_json(data, "f"), ensure_ascii=False).encode()
    except UserError as error:
        assert str(error).startswith("f: ") and str(error).endswith("; correct the file.")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{\n"a": oops}', "line 2, column 6: not JSON"),
        (b'"\xff"', "byte 1: not UTF-8"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"a": ["\\uDFFF"]}', "half of a surrogate pair"),
        (b"[" * 201 + b"]" * 201, "more than 200 levels"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "more than 200 levels"),
        (b"[" * 1_000_000, "more than 200 levels"),
        (b"9" * 10_000, "not usable JSON"),
    ],
)
def test_json_that_is_refused(data, said):
    with pytest.raises(UserError, match=said):
        parse_json(data, "f")


@given(
    st.one_of(st.binary(max_size=200), st.text(alphabet="a:- \n[]{}&*!|>'\"0123456789_.", max_size=60).map(str.encode))
)
def test_any_bytes_are_a_yaml_value_or_a_sentence(data):
    try:
        parse_yaml(data, "f")
    except UserError as error:
        assert str(error).startswith("f: ") and str(error).endswith("; correct the file.")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a: &x [1]\nb: *x", "an alias"),
        (b"&x [*x]", "an alias"),
        (b"2024-99-99", "not usable YAML .month"),
        *((b"a: !!" + tag + b" x", "not usable YAML") for tag in (b"bool", b"timestamp", b"binary", b"map", b"float")),
        (b"a: !!int ''", "not usable YAML"),
        (b"a: \xff", "not UTF-8"),
        (b"[" * 5000, "nested too deep"),
        (b"a: b: c", "not usable YAML"),
        (b"!!python/object/apply:os.system [true]", "not usable YAML"),
    ],
)
def test_yaml_that_is_refused(data, said):
    with pytest.raises(UserError, match=said):
        parse_yaml(data, "f")


def test_a_home_that_is_not_there_is_refused():
    assert user_path("~/x") == Path.home() / "x"
    with pytest.raises(UserError, match="no home folder of ~nobody-of-that-name"):
        user_path("~nobody-of-that-name/x")


def test_a_pair_and_the_deepest_value_are_read():
    assert parse_json(b'"\\ud83d\\ude00"', "f") == "😀"
    assert parse_json(b"[" * 200 + b"]" * 200, "f")


def test_what_is_no_file_of_a_sensible_size_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(101))
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    for path, said in (
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "not a regular file|Is a directory"),
        (tmp_path / "long", "has 101 bytes, at most 100"),
        (tmp_path / "absent", "cannot be read .No such file or directory."),
        (Path("a\0b"), "cannot be the name of a file"),
        (Path("x" * 300), "cannot be read .File name too long."),
        (Path("\ud800"), "cannot be the name of a file"),
    ):
        with pytest.raises(UserError, match=said):
            read_file(path)


@pytest.mark.parametrize("content", ["null", "[]", "3", '"{}"'])
def test_an_object_is_an_object(tmp_path, content):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(UserError, match="expected a JSON object; fetch it again"):
        read_object(tmp_path / "f.json", "fetch it again")
