"""A small trained tokenizer, shared by the tests of a session."""

from pathlib import Path

import pytest

from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.qwen3.chat import QWEN3_CHAT_TEMPLATE, QWEN3_TOKENS, Qwen

CORPUS = [
    QWEN3_CHAT_TEMPLATE,
    'user assistant system {"name": "search", "arguments": {"query": "open tickets"}} the answer is 42, done.\n\n',
] * 3


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 512, folder, QWEN3_TOKENS)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, Qwen(hybrid=True, thinking=True))
