"""Kimi's tokenizer files: byte-pair ranks in ``tiktoken.model``, the added tokens in ``tokenizer_config.json``."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_file, read_object

FILE = "tiktoken.model"
CONFIG = "tokenizer_config.json"
REMEDY = "copy the model's own file again"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The pre-tokenizer pattern of Kimi's tokenizer; part of the model, like the ranks.
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
RESERVED = 256
"""Ids after the ranks that are reserved for added tokens, named or not."""
MAX_RUN = 25_000
"""Kimi's tokenizer splits longer runs of whitespace or non-whitespace: merge time is quadratic in their length."""


class TiktokenCodec:
    """A ``tiktoken.model`` with its ``tokenizer_config.json``; same attributes and methods as ``JsonCodec``."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when a file is missing or cannot be read, or the package tiktoken is not installed."""
        try:
            import tiktoken
        except ModuleNotFoundError as e:
            raise UserError(f"{path} needs the package tiktoken; install requirements/episode.txt again.") from e
        ranks = _read_ranks(path)
        added = _read_added(path.with_name(CONFIG))
        ids = range(len(ranks), len(ranks) + RESERVED)
        names = {i: added.get(i, (f"<|reserved_token_{i}|>", True))[0] for i in ids}
        self.special: Mapping[str, int] = {name: i for i, name in names.items()}
        self.vocab_size = ids.stop
        config = path.with_name(CONFIG)
        if len(self.special) < RESERVED or "" in self.special:
            raise UserError(f"{config}: added_tokens_decoder names a token twice or not at all; {REMEDY}.")
        # As in a tokenizer.json, ordinary text may contain tags; text that spells a control token stays text.
        self._tags = {name for i, name in names.items() if not added.get(i, ("", True))[1]}
        control = dict(self.special)
        try:
            self._inner = tiktoken.Encoding(path.name, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=control)
        except ValueError as e:  # its regular expression of all names has a size limit
            raise UserError(f"{config}: added_tokens_decoder: the names are too long ({e}); {REMEDY}.") from None

    def encode(self, text: str) -> list[int]:
        """Encode ``text``."""
        return [
            i
            for part in split_runs(text, MAX_RUN)
            for i in self._inner.encode(part, allowed_special=self._tags, disallowed_special=())
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``."""
        return self._inner.decode(list(ids), errors="replace")


def split_runs(text: str, limit: int) -> Iterator[str]:
    """Split ``text`` into parts without a run of whitespace or non-whitespace longer than ``limit``."""
    start = end = 0
    for _, run in groupby(text, str.isspace):
        length = len(list(run))
        for done in range(limit, length, limit):
            yield text[start : end + done]
            start = end + done
        end += length
    if start < end:
        yield text[start:end]


def _read_ranks(path: Path) -> dict[bytes, int]:
    data = read_file(path, REMEDY)
    try:
        lines = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as e:
        raise UserError(f"{path}: not a tiktoken file ({e}); {REMEDY}.") from e
    # The package checks neither, and panics later.
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([i]) in ranks for i in range(256)):
        raise UserError(f"{path}: its ranks are not 0 to {len(ranks) - 1}, or a byte is missing; {REMEDY}.")
    return ranks


def _read_added(path: Path) -> dict[int, tuple[str, bool]]:
    """Map the id of each added token to its text and whether it is a control token."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; it names the tokens that tiktoken.model leaves out.")
    tokens = read_object(path, REMEDY).get("added_tokens_decoder", {})
    try:
        return {int(i): (str(token["content"]), bool(token.get("special"))) for i, token in tokens.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise UserError(f"{path}: added_tokens_decoder cannot be read ({e}); {REMEDY}.") from e


open_codec = TiktokenCodec
"""Interface of a family's tokenizer: takes the path of ``FILE``, gives a ``Codec``."""
