"""Kimi's tokenizer files: byte-pair ranks in ``tiktoken.model``, the added tokens in ``tokenizer_config.json``."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megatron_fleet.config.errors import UserError

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How Kimi's tokenizer cuts text before it merges bytes; part of the model, like the ranks.
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
"""Ids behind the ranks that are kept for added tokens, named or not."""
MAX_RUN = 25_000
"""Kimi's tokenizer cuts a longer run of blanks or of non-blanks: the time of a merge grows with its square."""


class TiktokenCodec:
    """A ``tiktoken.model`` with its ``tokenizer_config.json``; same attributes and methods as ``JsonCodec``."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when a file is missing or cannot be read, or the package tiktoken is not installed."""
        try:
            import tiktoken
        except ModuleNotFoundError as e:
            raise UserError(f"{path} needs the package tiktoken; install requirements/episode.txt again") from e
        ranks = _read_ranks(path)
        added = _read_added(path.with_name("tokenizer_config.json"))
        ids = range(len(ranks), len(ranks) + RESERVED)
        names = {i: added.get(i, (f"<|reserved_token_{i}|>", True))[0] for i in ids}
        self.special: Mapping[str, int] = {name: i for i, name in names.items()}
        self.vocab_size = ids.stop
        # Tags may stand in ordinary text, as in a tokenizer.json; text that spells a control token stays text.
        self._tags = {name for i, name in names.items() if not added.get(i, ("", True))[1]}
        self._inner = tiktoken.Encoding(
            path.name, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=dict(self.special)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        return [
            i
            for part in split_runs(text, MAX_RUN)
            for i in self._inner.encode(part, allowed_special=self._tags, disallowed_special=())
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        return self._inner.decode(list(ids), errors="replace")


def split_runs(text: str, limit: int) -> Iterator[str]:
    """Parts of ``text`` with no run of blanks or of non-blanks longer than ``limit``."""
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
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        return {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as e:
        raise UserError(f"{path}: not a tiktoken file ({e}); copy the model's own file again") from e


def _read_added(path: Path) -> dict[int, tuple[str, bool]]:
    """Id of each added token → its text, and whether it is a control token."""
    try:
        tokens = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        return {int(i): (str(token["content"]), bool(token.get("special"))) for i, token in tokens.items()}
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such file; it names the tokens that tiktoken.model leaves out") from e
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise UserError(f"{path}: added_tokens_decoder cannot be read ({e}); copy the model's own file again") from e
