"""The inert unpickler: the same values as the standard one, and no harm from what is made to harm."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import signal
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.weights.torch_dist import pickle_writer as emit
from megatron_fleet.weights.torch_dist.pickle_reader import BadPickle, Opaque, unpickle

keys = st.one_of(st.text(max_size=300), st.integers(-(2**59), 2**59), st.booleans(), st.none())
leaves = st.one_of(keys, st.floats(), st.integers(-(2**200), 2**200))


def nested(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner), st.tuples(inner, inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner)
        ),
        max_leaves=30,
    )


@settings(max_examples=100, deadline=None)
@given(value=nested(leaves), protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back(value, protocol):
    found = unpickle(pickle.dumps([value, value], protocol), ())
    assert repr(found) == repr([value, value])
    assert found[0] is found[1] or not isinstance(value, list | dict)


@settings(max_examples=50, deadline=None)
@given(value=nested(st.one_of(st.binary(max_size=300), st.sets(keys), st.frozensets(keys))))
def test_bytes_and_sets_come_back(value):
    """Older protocols know neither."""
    assert unpickle(pickle.dumps(value, 4), ()) == value


def test_objects_become_names_and_state():
    value = argparse.Namespace(lr=0.5, how=signal.SIGTERM, order=collections.OrderedDict(a=1))
    found = unpickle(pickle.dumps(value), ("argparse", "signal", "collections"))
    assert isinstance(found, Opaque)
    assert found.name == "argparse.Namespace"
    assert found.state["lr"] == 0.5
    assert found.state["order"] == {"a": 1}
    assert isinstance(found.state["how"], Opaque)
    assert found.state["how"].name == "signal.Signals"
    with pytest.raises(BadPickle, match=r"'signal\.Signals'"):
        unpickle(pickle.dumps(value), ("argparse", "collections"))


class Harmful:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def test_calls_are_refused_and_never_made(tmp_path):
    victim = tmp_path / "made"
    for harm in (Harmful(os.mkdir, str(victim)), Harmful(eval, f"__import__('os').mkdir({str(victim)!r})")):
        for protocol in (2, 4):
            with pytest.raises(BadPickle, match="do not trust"):
                unpickle(pickle.dumps({"a": harm}, protocol), ("torch", "collections"))
            unpickle(pickle.dumps(harm, protocol), ("posix", "builtins"))  # named as harmless: it is
    assert not victim.exists()
    # A name that merely starts like a permitted one.
    with pytest.raises(BadPickle, match=r"torch_evil\.run"):
        unpickle(emit.PROTO + emit.named("torch_evil", "run") + emit.STOP, ("torch",))


@pytest.mark.parametrize(
    "bomb",
    [
        b"N" + b"r" + struct.pack("<I", 2**31) + b".",  # a memo of 2**31 entries
        b"K\1" + b"q\xff" + b".",
        b"\x8d" + struct.pack("<Q", 2**62) + b"x.",  # a string of 2**62 bytes
        b"\x96" + struct.pack("<Q", 2**40) + b"x.",
        b"\x8b" + struct.pack("<I", 2**30) + b"\0" * 100 + b".",  # an integer of 2**30 bytes
        b"(" * 1000 + b"t" * 1000 + b"ss.",
        b".",
        b"",
        b"e.",
        b"(e.",
        b"]K\1N\x93.",
        b"h\7.",
        b"}]Ns.",
        b"R.",
        b")R.",
        b")b.",
        b"\x82\x01.",
        b"cos\nsystem",
    ],
)
def test_bombs_are_refused_at_once(bomb):
    with pytest.raises(BadPickle):
        unpickle(bomb, ("torch",))


def test_keys_that_would_take_long_to_hash():
    shared = b"})q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(26))
    for key in (b"h\x1a", b"h\x1ah\x1a\x86"):  # 2**26 leaves: seconds, so that a failure ends
        with pytest.raises(BadPickle, match="keys that no checkpoint has"):
            unpickle(shared + key + b"Ns.", ())


@pytest.mark.parametrize("key", [1 << 60, -(1 << 61), 1.5, (1, 1 << 60)])
def test_keys_that_can_be_made_to_collide(key):
    with pytest.raises(BadPickle, match="keys that no checkpoint has"):
        unpickle(pickle.dumps({key: None}), ())


def test_deep_nesting_is_no_crash():
    depth = 100_000
    tuples = unpickle(b")" + b"\x85" * depth + b".", ())
    assert len(tuples) == 1
    objects = unpickle(
        emit.named("torch", "A") + b"q\0" + b"h\0" * depth + b")" + b"\x81\x85" * depth + b".", ("torch",)
    )
    assert isinstance(objects[0], Opaque)
    del tuples, objects


@settings(max_examples=400, deadline=None)
@given(content=st.binary(max_size=200), protocol=st.sampled_from([b"", b"\x80\x02", b"\x80\x04"]))
def test_noise_is_refused_or_read(content, protocol):
    try:
        unpickle(protocol + content, ("torch",))
    except BadPickle as e:
        assert len(str(e)) < 300


@given(value=st.integers(-(2**300), 2**300), text=st.text(), dims=st.lists(st.integers(-(2**70), 2**70)).map(tuple))
def test_what_we_write_the_standard_library_reads(value, text, dims):
    for content, expected in (
        (emit.integer(value), value),
        (emit.text(text), text),
        (emit.integers(dims), dims),
    ):
        assert pickle.loads(emit.PROTO + content + emit.STOP) == expected
