"""The rollout benchmark plays what it promises (its numbers are for quiet machines)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_the_loop_plays_and_its_requests_are_replayed(tmp_path, episode_python, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from rollout import TINY, Bench, write_model

    model = write_model(tmp_path / "tiny", TINY, "float32")
    bench = Bench(model, tmp_path, episode_python, "float32", {"engine": {"kv_cache_bytes": 1 << 28}})
    try:
        loop = bench.play(2)
        raw = bench.replay(2)
    finally:
        bench.close()
    assert loop["tokens"] == raw["tokens"] > 0
    assert loop["turns"] >= 2 and all(seconds >= 0 for seconds in loop["cpu"].values())
