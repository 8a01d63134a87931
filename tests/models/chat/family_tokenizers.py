"""A small tokenizer folder for each model family, with the family's added tokens and kind of file."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import tokenizers

from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.tokenizer import train_tokenizer
from megatron_fleet.models.kimi.chat import TOKENS as KIMI_TOKENS
from megatron_fleet.models.kimi.codec import SPLIT

CORPUS = ["open tickets of the system, search for them with the tool and tell the user"] * 3
MERGES = (b"th", b"the", b" t", b" the", b"to", b"ool", b"oo", b"ss", b"\n\n", b"im", b"_e", b"|>")


def make_folder(family: str, folder: Path) -> Path:
    """Writes the folder, without a chat template; the model's type is in config.json."""
    if family.startswith("kimi"):
        write_tiktoken(folder)
    else:
        train_tokenizer(CORPUS, 320, folder, FORMATS[family].tokens)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_tiktoken(folder: Path) -> None:
    """Kimi's two files: byte ranks with a few merges, and the added tokens at every other id behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [bytes([i]) for i in range(256)] + sorted(MERGES, key=len)
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = KIMI_TOKENS.control + KIMI_TOKENS.tags
    added = {
        str(len(ranks) + 2 * i): {"content": name, "special": name in KIMI_TOKENS.control}
        for i, name in enumerate(names)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def reference(folder: Path) -> Callable[[str], list[int]]:
    """Text to ids as the model's own tokenizer code does it: every added token that the text spells is that token."""
    if (folder / "tokenizer.json").exists():
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: inner.encode(text, add_special_tokens=False).ids
    import tiktoken

    ranks = {}
    for line in (folder / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special = {token["content"]: int(i) for i, token in added.items()}
    encoding = tiktoken.Encoding("reference", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)
    return lambda text: encoding.encode(text, allowed_special="all")
