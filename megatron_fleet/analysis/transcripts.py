"""Episodes serialised for the page's script: messages, tokens with mask and log-probs, token texts, thumbnails."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image

from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.failures import failures
from megatron_fleet.analysis.run import Run
from megatron_fleet.models.images import FORMATS, MAX_PIXELS
from megatron_fleet.telemetry.trajectories import IMAGES, image_file

if TYPE_CHECKING:
    import tokenizers

MAX_MESSAGE_CHARS = 20_000
MAX_TOKENS = 30_000
THUMBNAIL_SIDE = 640
"""Maximum side in pixels."""
THUMBNAIL_QUALITY = 60
MAX_THUMBNAIL_BYTES = 16_000_000
REPLACEMENT = "\ufffd"


class Transcripts:
    """Serialised episodes within a byte budget, which includes the text of their tokens.

    Attributes:
        blobs: episode id → its record, packed, in the order they were added.
        episodes: the same episodes, in the same order.
        pieces: token id → its text; empty without a tokenizer.
        left_out: number of episodes that did not fit.
    """

    def __init__(self, run: Run, budget: int, with_images: int = 0) -> None:
        """
        Args:
            budget: bytes of trajectories without images.
            with_images: bytes of both.
        """
        self.blobs: dict[str, str] = {}
        self.episodes: list[Episode] = []
        self.pieces: dict[int, str] = {}
        self.left_out = 0
        self._run, self._budget, self._room = run, budget, max(with_images, budget) - budget
        self._smallest = 0
        self._tokenizer = load_tokenizer(run)
        self._arrays: dict[tuple[str, int], dict[str, np.ndarray] | None] = {}

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add episodes in order; those that no longer fit are only counted. Adding one twice has no effect."""
        for episode in episodes:
            if episode.id in self.blobs:
                continue
            if self._budget < self._smallest:
                self.left_out += 1
                continue
            tokens = self._tokens(episode)
            pieces = self._new_pieces(tokens.get("ids", []))
            blob = pack(record_of(episode) | tokens)
            # The element around a record takes about 60.
            cost = len(blob) + 160 + sum(len(json.dumps(piece)) + 40 for piece in pieces.values())
            self._smallest = min(self._smallest or cost, cost)
            if cost > self._budget:
                self.left_out += 1
                continue
            self._budget -= cost
            self.blobs[episode.id] = blob
            self.pieces |= pieces
            self.episodes.append(episode)

    def images(self) -> dict[str, str]:
        """Map digest → ``data:`` URL of a thumbnail, for as many images as the remaining budget allows."""
        shown = [name for episode in self.episodes for names in episode.images for name in names]
        self._run.fetch_images(shown)
        return thumbnails(self._run.folder, shown, self._budget + self._room)

    def index(self) -> list[list[Any]]:
        """Return one row per episode for the page's list, in order of file and line."""
        return [index_row(e) for e in sorted(self.episodes, key=lambda e: (e.kind, e.step, e.line))]

    def _tokens(self, episode: Episode) -> dict[str, Any]:
        """Return the fields of `token_fields`; none where the arrays are missing."""
        key = (episode.kind, episode.step)
        if key not in self._arrays:
            self._arrays[key] = self._run.arrays(*key)
        arrays = self._arrays[key]
        if arrays is None or episode.line + 1 >= len(arrays["offsets"]):
            return {}
        return token_fields(arrays, episode.line)

    def _new_pieces(self, ids: list[int]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        return {i: piece_text(self._tokenizer, i) for i in set(ids) if i not in self.pieces}


def token_fields(arrays: Mapping[str, np.ndarray], line: int) -> dict[str, Any]:
    """Return ``ids``, ``runs`` (of the mask, see ``run_lengths``) and ``logprobs`` of the sampled tokens of an episode.

    Args:
        arrays: of all episodes of a file, as in `telemetry.trajectories`.
        line: index of the episode.
    """
    start, end = (int(arrays["offsets"][line + i]) for i in (0, 1))
    shown = slice(start, min(end, start + MAX_TOKENS))
    ids, mask, logprobs = (arrays[name][shown] for name in ("token_ids", "action_mask", "behaviour_logprobs"))
    return {
        "ids": ids.tolist(),
        "runs": run_lengths(mask),
        "logprobs": rounded(logprobs[mask]),
        **({"cut": end - start} if end - start > MAX_TOKENS else {}),
    }


def pack(record: Mapping[str, Any]) -> str:
    """Return a record as base64 of its JSON compressed with gzip: what the page's script unpacks when it is looked at.

    A page of 20 MB holds three times as many trajectories as it would otherwise, and opens as fast as ASCII is skipped.
    """
    content = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def unpack(blob: str) -> dict[str, Any]:
    """Return the record of `pack`."""
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(blob)))
    return found


def rounded(logprobs: np.ndarray) -> list[float | None]:
    """Return float ``[T]`` log-probabilities with three decimals; ``None`` for those that are not finite."""
    values: list[float | None] = np.round(logprobs.astype(np.float64), 3).tolist()
    for index in np.flatnonzero(~np.isfinite(logprobs)):
        values[index] = None
    return values


def run_lengths(mask: np.ndarray) -> list[int]:
    """Return the run lengths of a bool ``[T]`` mask; the first run is of false values and may have length 0."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [not mask[-1] if len(mask) else True]]))).tolist()
    return np.diff([0, *edges]).tolist()


def piece_text(tokenizer: tokenizers.Tokenizer, token: int) -> str:
    """Return the text of one id; a partial character as its vocabulary entry, an unknown id as a number."""
    try:
        text = tokenizer.decode([token], skip_special_tokens=False)
    except OverflowError:
        return f"‹{token}›"
    if text and REPLACEMENT not in text:
        return text
    return f"‹{tokenizer.id_to_token(token) or token}›"


def load_tokenizer(run: Run) -> tokenizers.Tokenizer | None:
    """Load the tokenizer of the run's export or of its model; ``None``, with a note, when neither has one."""
    import tokenizers

    run.fetch(["hf/tokenizer.json"])
    for folder in (run.folder / "hf", *([Path(run.model)] if run.model else [])):
        path = folder / "tokenizer.json"
        try:
            if path.is_file():
                return tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises bare Exception; is_file, OSError for an overlong path
            run.notes.append(f"{path}: not a readable tokenizer ({e}).")
    run.notes.append("No tokenizer.json was found in the run's hf folder or its model's, so tokens are shown as ids.")
    return None


def record_of(episode: Episode) -> dict[str, Any]:
    """Return what the page shows of an episode, without its tokens."""
    return {
        "id": episode.id,
        "task": episode.task,
        "env": episode.env,
        "sample": episode.sample,
        "outcome": episode.outcome,
        "reward": episode.reward,
        "reason": episode.reason,
        "answer": episode.final_answer,
        "tokens": episode.tokens,
        "sampled": episode.action_tokens,
        "metrics": {name: round(value, 4) for name, value in episode.metrics.items()},
        "failures": failures(episode),
        "versions": [[s[1], s[4]] for s in episode.spans if s[0] == "action"],
        "segments": [start for start in episode.segment_starts if start],
        "messages": _messages(episode),
    }


def _messages(episode: Episode) -> list[list[Any]]:
    """Return role, text and, if any, image digests of each message."""
    found: list[list[Any]] = [[role, shorten(text, MAX_MESSAGE_CHARS)] for role, text in episode.messages]
    for message, names in zip(found, episode.images, strict=False):
        if names:
            message.append(list(names))
    return found


def index_row(episode: Episode) -> list[Any]:
    return [
        episode.id,
        f"{episode.kind} {episode.step}",
        episode.env,
        episode.task,
        episode.sample,
        episode.outcome,
        episode.reward,
        episode.result,
        sorted(failures(episode)),
        int(episode.metrics.get("turns", 0)),
        episode.tokens,
    ]


def shorten(text: str, limit: int) -> str:
    """Return the text; beyond ``limit`` characters its middle is replaced by a note of how many are missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out of this page …]\n{text[-half:]}"


def thumbnails(run: Path, names: Iterable[str], budget: int) -> dict[str, str]:
    """Map digest → ``data:`` URL, in order, as many as fit into ``budget`` and ``MAX_THUMBNAIL_BYTES``.

    Unreadable images are skipped; the others are encoded again, so that no bytes of an untrusted file reach the page.
    """
    left, found = min(budget, MAX_THUMBNAIL_BYTES), dict[str, str]()
    for name in dict.fromkeys(names):
        path = image_file(run / IMAGES, name)
        content = None if path is None else thumbnail(path)
        if content is None:
            continue
        address = "data:image/jpeg;base64," + base64.b64encode(content).decode()
        left -= len(address) + 80
        if left < 0:
            break
        found[name] = address
    return found


def thumbnail(path: Path) -> bytes | None:
    """Return a small JPEG of an image, or ``None`` if the file is no image."""
    try:
        with PIL.Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                return None
            small = opened.convert("RGB")
    except Exception:  # on broken files the decoders may raise anything
        return None
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=THUMBNAIL_QUALITY)
    return out.getvalue()
