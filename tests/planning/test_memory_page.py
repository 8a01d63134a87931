"""docs/understand/memory.md says what the code computes."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import memory_page

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.planning.memory.check import check_memory
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.memory.phases import H100_BYTES


def test_tables_and_picture_are_current(tmp_path):
    text = memory_page.PAGE.read_text(encoding="utf-8")
    assert memory_page.page(text) == text, "run: python tools/memory_page.py"
    assert all(f"<!-- table: {name} -->" in text for name in memory_page.TABLES)
    memory_page.draw(tmp_path / "memory.svg")
    assert memory_page.PICTURE.read_text() == (tmp_path / "memory.svg").read_text(), "run: python tools/memory_page.py"


def test_the_quoted_refusal_is_what_preflight_says():
    config = load([f"experiment={memory_page.LONG}", "model.path=/model", "policy.recompute=none"])
    with pytest.raises(UserError) as refusal:
        check_memory(config, memory_page.QWEN3_8B, H100_BYTES, 1000 * GIB)
    text = " ".join(memory_page.PAGE.read_text(encoding="utf-8").split())
    assert f"error: {refusal.value}" in text
