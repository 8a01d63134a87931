"""Text to ids and back with the model's own tokenizer files; avoids transformers, so episode workers start fast."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_file
from megatron_fleet.models.families import family_modules

_JSON = "tokenizer.json"


def tokenizer_files() -> tuple[str, ...]:
    """Return the names of supported tokenizer files: the usual one and those of families (``FAMILY/codec.py``)."""
    return (_JSON, *(module.FILE for module in family_modules("codec")))


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens that a model family adds to its byte-level vocabulary.

    Attributes:
        control: tokens that are never encoded from text that merely spells them.
        tags: tokens that ordinary text may contain.
        stops: subset of ``control`` that ends an assistant turn, the usual one first.
        chat_template: Jinja template for the folders that we create ourselves.
    """

    control: tuple[str, ...]
    tags: tuple[str, ...]
    stops: tuple[str, ...]
    pad: str
    chat_template: str | None = None


LONG_CHARS = 100_000
"""Texts longer than this are encoded without the interpreter's lock."""

# Words, numbers, and everything between them. Unlike Qwen2's pattern, it never splits a number and never attaches the
# preceding space or quote to a word: each is the same token in a table, a sentence and a JSON string, so a small model
# can copy it.
_SPLIT = r"\p{L}+|\p{N}+|[^\p{L}\p{N}]+"


class Codec(Protocol):
    """One kind of tokenizer file.

    Attributes:
        special: text of each added token to its id.
        vocab_size: ids are in ``[0, vocab_size)``.
    """

    special: Mapping[str, int]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Encode valid UTF-8 ``text`` on its own."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids`` to text."""
        ...


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        special: text of each added token (control tokens and tags) to its id.
        vocab_size: ids are in ``[0, vocab_size)``.
    """

    def __init__(self, folder: str | Path) -> None:
        """Load ``folder/tokenizer.json`` or, if absent, the file of a family that has its own.

        Raises:
            UserError: all are missing, or the file is broken.
        """
        self._codec = _open(Path(folder))
        self.special: Mapping[str, int] = self._codec.special
        self.vocab_size = self._codec.vocab_size

    def encode(self, text: str) -> list[int]:
        """Encode ``text`` on its own: no bos; control tokens spelled out in the text stay ordinary text."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, which JSON from a tool can carry
            text = text.encode("utf-8", "replace").decode("utf-8")
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``, including control tokens; incomplete UTF-8 becomes U+FFFD."""
        return self._codec.decode(ids)


def _open(folder: Path) -> Codec:
    path = folder / _JSON
    if path.is_file():
        return JsonCodec(path)
    for module in family_modules("codec"):
        if (folder / module.FILE).is_file():
            own: Codec = module.open_codec(folder / module.FILE)
            return own
    raise UserError(f"{path}: no such file; model.path must be an HF folder that holds {_JSON}.")


class JsonCodec:
    """A ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when ``path`` cannot be read."""
        remedy = "copy the model's own file again"
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(read_file(path, remedy))
        except UserError:
            raise
        except BaseException as e:  # the library raises bare Exception, and Rust panics, which are not
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise UserError(f"{path}: not a readable tokenizer ({e}); {remedy}.") from e
        # Text that merely spells a control token must not end a turn or open another one.
        self._inner.encode_special_tokens = True
        self.special: Mapping[str, int] = {
            token.content: i for i, token in self._inner.get_added_tokens_decoder().items()
        }
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{path} holds no token; {remedy}.")
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        """Encode ``text``."""
        if len(text) > LONG_CHARS:  # encode_batch, unlike encode, lets other threads run
            return self._inner.encode_batch([text], add_special_tokens=False)[0].ids
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``."""
        return self._inner.decode(ids, skip_special_tokens=False)


def train_tokenizer(corpus: Iterable[str], vocab_size: int, out_dir: str | Path, tokens: AddedTokens) -> Tokenizer:
    """Train a small byte-level BPE with a family's added tokens, and write it as an HF folder.

    Args:
        corpus: texts to learn merges from.
        vocab_size: total number of ids, added tokens included; a small corpus may give fewer.
        out_dir: receives tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Raises:
        UserError: ``vocab_size`` is too small for the 256 bytes and the added tokens.
    """
    added = len(tokens.control) + len(tokens.tags)
    if vocab_size < 256 + added:
        raise UserError(f"vocab_size: {vocab_size} is too small; 256 bytes and {added} added tokens need {256 + added}")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    inner.train_from_iterator(corpus, trainer)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens.control])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens.tags])
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    inner.save(str(out / "tokenizer.json"))
    _write_companions(inner, out, tokens)
    return Tokenizer(out)


def _write_companions(inner: tokenizers.Tokenizer, out: Path, tokens: AddedTokens) -> None:
    """Write the small JSON files that let transformers and vLLM use the folder without arguments."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": tokens.stops[0],
        "pad_token": tokens.pad,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    if tokens.chat_template is not None:
        config["chat_template"] = tokens.chat_template
    generation = {
        "eos_token_id": [inner.token_to_id(t) for t in tokens.stops],
        "pad_token_id": inner.token_to_id(tokens.pad),
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
