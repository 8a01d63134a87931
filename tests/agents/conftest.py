"""One small trained tokenizer for all tests of this folder."""

from pathlib import Path

import pytest
from agent_doubles import CORPUS

from megatron_fleet.agents.renderers.chat import ChatRenderer
from megatron_fleet.agents.renderers.qwen import Qwen
from megatron_fleet.agents.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 512, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, Qwen(hybrid=True, thinking=True))
