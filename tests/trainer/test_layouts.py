"""Properties of every parallel layout, and checkpoints that move between them. Equality of training: tests/parity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from policy_fixtures import make_batch, write_config
from tiny_configs import raw_config
from turns import in_turn

from megatron_fleet.config.schema import ParallelConfig

LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual": 2},
    "cp2": {"context": 2},
    "dp2": {"data": 2},
    "ep2": {"data": 2, "expert": 2},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "tp2ep2": {"tensor": 2, "data": 2, "expert": 2},
}
TRAINED = {
    "dense": ("single", "tp2", "vpp2", "cp2", "dp2", "tp2pp2"),
    "tied": ("single", "vpp2"),
    "sparse": ("single", "vpp2", "ep2", "tp2ep2"),
    "hybrid": ("single", "ep2"),
}
RESHARDED = {
    ("dense", "tp2"): ("single", "pp2", "vpp2", "dp2", "tp2pp2"),
    ("dense", "dp2"): ("tp2", "tp2pp2", "cp2"),
    ("tied", "vpp2"): ("single",),
    ("sparse", "ep2"): ("single", "vpp2", "tp2ep2"),
    ("sparse", "vpp2"): ("ep2", "tp2ep2"),
    ("hybrid", "ep2"): ("single", "tp2ep2", "cp2"),
}
SPARSE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
SPARSE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "intermediate_size": 96}


def write_hybrid(folder: Path) -> None:
    """A tiny Qwen3.5-MoE, with the vocabulary of the others."""
    folder.mkdir()
    config = raw_config("qwen3_5_moe_text", "v5") | {"vocab_size": 511, "mtp_num_hidden_layers": 0}
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": 0.06}))


def world_of(layout: str) -> int:
    return ParallelConfig(**LAYOUTS[layout]).world_size


def jobs(trained: set[str], resharded: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Two steps in each layout, and the second step again from checkpoints of the first.

    Args:
        trained: names of `RUNS`, to which the sources of checkpoints are added.
        resharded: keys of `RESHARDED`.
    """
    out: list[dict[str, Any]] = []
    trained = trained | {f"{model}-{source}" for model, source in resharded}
    for model, layouts in TRAINED.items():
        for layout in layouts:
            name = f"{model}-{layout}"
            job = {"name": name, "model": model, "layout": layout, "first": 0, "last": 2}
            if name in trained:
                out.append(job | {"save_at": 1, "save": f"{name}.saved"})
    for model, source in resharded:
        for target in (source, *RESHARDED[model, source]):
            name, saved = f"{model}-{source}-to-{target}", f"{model}-{source}.saved"
            out.append({"name": name, "model": model, "layout": target, "first": 1, "last": 2, "load": saved})
    return [job | {"parallel": LAYOUTS[job["layout"]], "world": world_of(job["layout"])} for job in out]


def launch(folder: Path, world: int) -> None:
    run_ranks(Path(__file__).with_name("policy_ranks.py"), world, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory, played) -> dict[str, list[dict[str, Any]]]:
    """Job → what each of its ranks measured. One launch per world size; imports dominate."""
    folder = tmp_path_factory.mktemp("layouts")
    write_config(folder / "dense")
    write_config(folder / "tied", tie_word_embeddings=True)
    write_config(folder / "sparse", **SPARSE)
    write_hybrid(folder / "hybrid")
    singles = {f"{model}-single" for model in TRAINED}  # for what is said of all models
    todo = jobs({*played("run"), *singles}, played("model", "source"))
    # Every checkpoint's source runs on two ranks: those first, and the loading jobs come last in `todo`.
    for world in [world for world in (2, 4, 1) if any(job["world"] == world for job in todo)]:
        torch.save([job for job in todo if job["world"] == world], folder / f"jobs.{world}.pt")
        launch(folder, world)
    return {
        job["name"]: [torch.load(folder / f"{job['name']}.{r}.pt", weights_only=False) for r in range(job["world"])]
        for job in todo
    }


def whole(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """Global parameters from shards; replicas must agree to the bit. Vocabulary padding is cut off."""
    full: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for key, shape, offset, prepended, data in rank[what]:
            into = full.setdefault(key, torch.full(shape, float("nan")))
            sizes = [1] * prepended + list(data.shape)
            place = into[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]
            new = data.reshape(place.shape)
            assert torch.isnan(place).all() or torch.equal(place, new), f"replicas of {key} differ"
            place.copy_(new)
    assert not any(torch.isnan(v).any() for v in full.values())
    return {k: v[:511] if "word_embeddings" in k or "output_layer" in k else v for k, v in full.items()}


def by_sequence(ranks: list[dict[str, Any]], what: str) -> list[np.ndarray]:
    """Log-probs in the order of the batch; ranks that share data must agree to the bit."""
    found: dict[int, np.ndarray] = {}
    for rank in ranks:
        for indices, values in zip(rank["rank_micro_batches"], rank[what], strict=True):
            for index, value in zip(indices, values, strict=True):
                assert index not in found or np.array_equal(found[index], value)
                found[index] = value
    return [found[i] for i in range(len(found))]


RUNS = [f"{model}-{layout}" for model, layouts in TRAINED.items() for layout in layouts]
ALWAYS = {*(f"{model}-single" for model in TRAINED), "dense-tp2", "dense-tp2pp2", "sparse-tp2ep2", "hybrid-ep2"}


@pytest.mark.slow
@pytest.mark.parametrize("run", in_turn(RUNS, ALWAYS))
class TestEveryLayout:
    def test_training_changes_the_policy(self, results, run):
        ranks = results[run]
        before, after = by_sequence(ranks, "initial_logprobs"), by_sequence(ranks, "final_logprobs")
        assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 0.01

    def test_ratio_is_one_on_policy(self, results, run):
        for report, _ in results[run][0]["reports"]:
            assert report.metrics["ratio"] == report.metrics["tokens"] > 0

    def test_old_policy_computed_apart_is_the_policy(self, results, run):
        for rank in results[run]:
            metrics = rank["old_policy"].metrics
            assert metrics["ratio"] == metrics["tokens"] > 0

    def test_reference_is_the_first_policy_and_leaves_no_trace(self, results, run):
        ranks = results[run]
        first, reference = by_sequence(ranks, "initial_logprobs"), by_sequence(ranks, "reference_logprobs")
        assert all(np.array_equal(a, b) for a, b in zip(first, reference, strict=True))
        before, after = whole(ranks, "parameters"), whole(ranks, "after_reference")
        assert all(torch.equal(before[k], after[k]) for k in before)

    def test_a_rank_with_nan_stops_the_update_everywhere(self, results, run):
        ranks = results[run]
        assert all(rank["poisoned"].skipped and not math.isfinite(rank["poisoned"].grad_norm) for rank in ranks)
        before, after = whole(ranks, "parameters"), whole(ranks, "after_poison")
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert all(not r["after_poison_step"].skipped and r["after_poison_step"].grad_norm > 0 for r in ranks)


@pytest.mark.slow
def test_training_does_not_import_the_compiler(results):
    """It takes 0.8 s of CPU, and nothing is compiled on CPU. Only masks of context parallelism import it."""
    assert [model for model in TRAINED if results[f"{model}-single"][0]["imported_compiler"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("run", in_turn(RUNS, ALWAYS))
def test_metrics_are_those_of_one_process(results, run):
    single = results[f"{run.split('-')[0]}-single"][0]["reports"]
    for rank in results[run]:
        for (loss, _), (loss1, _) in zip(rank["reports"], single, strict=True):
            assert loss.tokens == loss1.tokens == sum(len(d) for d in make_batch())
            for name, value in loss1.metrics.items():
                assert loss.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source"), in_turn(RESHARDED, [("dense", "tp2"), ("hybrid", "ep2")]))
class TestCheckpoints:
    def test_same_layout_goes_on_bit_for_bit(self, results, model, source):
        run = f"{model}-{source}"
        for straight, resumed in zip(results[run], results[f"{run}-to-{source}"], strict=True):
            assert resumed["reports"] == straight["reports"][1:]
            for a, b in zip(straight["parameters"], resumed["parameters"], strict=True):
                assert torch.equal(a[-1], b[-1]), a[0]

    def test_other_layouts_go_on_alike(self, results, model, source):
        run = f"{model}-{source}"
        loss, optim = results[run][0]["reports"][1]
        final = whole(results[run], "parameters")
        for target in RESHARDED[model, source]:
            ranks = results[f"{run}-to-{target}"]
            for what in ("", "_optimizer"):
                saved, loaded = whole(results[run], f"saved{what}"), whole(ranks, f"loaded{what}")
                assert saved.keys() == loaded.keys(), target
                assert all(torch.equal(loaded[k], saved[k]) for k in saved), target
            assert ranks[0]["reports"][0][0].loss == pytest.approx(loss.loss, rel=1e-5)
            assert ranks[0]["reports"][0][1].grad_norm == pytest.approx(optim.grad_norm, rel=1e-5)
            # Adam's moments came along too: the next parameters agree.
            parameters = whole(ranks, "parameters")
            assert max((parameters[k] - final[k]).abs().max().item() for k in final) < 1e-5, target
