"""Engine protocol over one persistent TCP connection, in frames of ``cluster.frames``.

Frames are lists whose first item is the kind. Client to engine, after the hello of ``cluster.handshake``::

    ["client", proof]
    ["image", media type, file]     later requests refer to it by its digest
    ["generate", id, session, prompt ids, temperature, max_tokens, stop ids, seed, routing_start,
     [[start, end, digest], ...]]   the last: the images in the prompt, each over its placeholders
    ["cancel", id]

Engine to client, in any order of ``id``::

    ["done", id, token ids, logprobs, finish_reason, [[version, start, end], ...], routing]
    ["missing", id]             the engine does not hold all images of the request: send images and request again
    ["refused", id, reason]     the request can never be served
    ["lost", id, reason]        the engine cannot serve any more

Token ids are sent as little-endian int32 bytes, log-probs as float32 bytes, routing (uint8 or int16 ``[R, layers, k]``)
as an array of a frame, or nil. Every later prompt of an episode contains its images, so each file is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ids_to_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(raw: bytes) -> np.ndarray:
    """int32 ``[N]``, writable."""
    return np.frombuffer(raw, dtype="<i4").astype(np.int32)


def floats_to_bytes(values: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def bytes_to_floats(raw: bytes) -> np.ndarray:
    """float32 ``[N]``, writable."""
    return np.frombuffer(raw, dtype="<f4").astype(np.float32)
