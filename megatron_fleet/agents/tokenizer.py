"""Text to ids and back with the model's own ``tokenizer.json``; no transformers, so episode workers start fast."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_fleet.agents.chat_template import QWEN3_CHAT_TEMPLATE
from megatron_fleet.config.errors import UserError

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Qwen3 marks only the first three as special; the others are added tokens that ordinary text may contain.
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Words, numbers, and what stands between them. Unlike Qwen2's pattern, a number is whole and a word never takes the
# blank or quote before it along: each is the same token in a table, a sentence and a JSON string, so a small model can
# copy it.
_SPLIT = r"\p{L}+|\p{N}+|[^\p{L}\p{N}]+"


class Tokenizer:
    """A ``tokenizer.json`` of the Qwen3 family.

    Attributes:
        special: text of each control and tag token to its id.
        vocab_size: ids are in ``[0, vocab_size)``.
    """

    def __init__(self, folder: str | Path) -> None:
        """Load ``folder/tokenizer.json``. Raises UserError when it is missing, broken or lacks a Qwen3 token."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; model.path must be an HF folder that holds tokenizer.json")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise UserError(f"{path}: not a readable tokenizer ({e}); copy the model's own file again") from e
        # Text that merely spells a control token must not end a turn or open another one.
        self._inner.encode_special_tokens = True
        found = {t: self._inner.token_to_id(t) for t in CONTROL_TOKENS + TAG_TOKENS}
        self.special: dict[str, int] = {t: i for t, i in found.items() if i is not None}
        missing = [t for t in found if t not in self.special]
        if missing:
            raise UserError(f"{path}: lacks the tokens {', '.join(missing)}; only Qwen3 tokenizers are supported")
        split = [t for t in TAG_TOKENS if self.encode(t) != [self.special[t]]]
        if split:
            raise UserError(f'{path}: {", ".join(split)} must be added tokens with "special": false, as in Qwen3')
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone: no bos, control tokens spelled out in the text stay ordinary text."""
        try:
            return self._inner.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):  # lone surrogates, which JSON from a tool can carry
            clean = text.encode("utf-8", "replace").decode("utf-8")
            return self._inner.encode(clean, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        return self._inner.decode(ids, skip_special_tokens=False)


def train_tokenizer(corpus: Iterable[str], vocab_size: int, out_dir: str | Path) -> Tokenizer:
    """Train a small byte-level BPE with Qwen3's special tokens, and write it as an HF folder.

    Args:
        corpus: texts to learn merges from.
        vocab_size: ids in all, added tokens included; a small corpus may give fewer.
        out_dir: gets tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Raises:
        UserError: ``vocab_size`` has no room for the 256 bytes and the added tokens.
    """
    added = len(CONTROL_TOKENS) + len(TAG_TOKENS)
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
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    inner.save(str(out / "tokenizer.json"))
    _write_companions(inner, out)
    return Tokenizer(out)


def _write_companions(inner: tokenizers.Tokenizer, out: Path) -> None:
    """The small JSON files that let transformers and vLLM use the folder without arguments."""
    ids = {t: inner.token_to_id(t) for t in CONTROL_TOKENS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": QWEN3_CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": [ids[IM_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
