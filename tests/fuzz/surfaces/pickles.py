"""Pickles and archives of a checkpoint, read as data: the opcodes, ``.metadata``'s names, the container of a tensor."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from fuzz import pickles
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of
from fuzz.trees import bytes_of

from megatron_fleet.weights.torch_dist import archive, container, writer
from megatron_fleet.weights.torch_dist.pickle_reader import BadPickle, unpickle

NAMES = ("torch", "collections", "argparse", "builtins.set", "_codecs")
_STORAGE = ["storage", {"$name": "torch.FloatStorage"}, "0", "cpu", 6]
_TENSOR = [{"$call": ["persistent", {"$tuple": _STORAGE}, None]}, 0, {"$tuple": [2, 3]}, {"$tuple": [3, 1]}, False]


def seeds() -> list[Any]:
    plain = {"a": [1, -5, 2.5, None, True, b"x"], "b": {"$tuple": [1, "é"]}, "c": {"$set": ["x"]}, "d": 1 << 70}
    tensor = {"$call": ["torch._utils._rebuild_tensor_v2", {"$tuple": [*_TENSOR, {}]}, None]}
    whole = container.wrap("BF16", (3, 5))
    protocols = [pickle.dumps({"k": [1, "two", 3.0, (4, b"five")], 6: {7}}, p) for p in (2, 3, 4, 5)]
    return [
        *({"pickle": tree} for tree in (plain, {"$dict": [[1, 2]]}, tensor, *protocols)),
        *({"container": {"pickle": tensor, "bytes": 24}}, {"container": whole.prefix + bytes(30) + whole.suffix}),
        *({"archive": data} for data in (writer.common_bytes(), writer.extra_state_blob())),
    ]


def check(tree: Any, folder: Path) -> bool:
    tree = tree if isinstance(tree, dict) else {}
    taken = [_unpickled(tree.get("pickle", {}))]
    if "container" in tree:
        data = _archive(tree["container"])
        with refusal_of("FILE"):
            span = container.data_span(data[: container.HEAD_BYTES], len(data), "FILE")
            assert 0 <= span.offset <= span.offset + span.nbytes <= len(data)
            return True
        return False
    if "archive" in tree:
        try:
            found = list(archive.records(_archive(tree["archive"])))
        except ValueError:
            return False
        return bool(found)
    return all(taken)


def _unpickled(content: Any) -> bool:
    try:
        unpickle(content if isinstance(content, bytes) else pickles.pickled(content), NAMES)
    except BadPickle as error:
        assert str(error)
        return False
    return True


def _archive(content: Any) -> bytes:
    if not isinstance(content, dict):
        return bytes_of(content)
    count = content.get("bytes")
    return pickles.archived(content.get("pickle"), count if type(count) is int and 0 <= count < 1 << 16 else 0)


SURFACE = Surface(
    "pickles", 4000, seeds, check, words=("torch.Size", "torch.BFloat16Storage", "$tuple", "$call", "$name")
)
