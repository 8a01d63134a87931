"""Adapters train alike in every layout; exports and checkpoints hold what was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import numpy as np
import torch
from lora_ranks import LORA, WITH_EXPERTS, LoraConfig
from policy_fixtures import make_batch
from safetensors.torch import load_file
from tiny_models import make, reference_model, stored_tensors
from turns import in_turn

from megatron_fleet.trainer.megatron.fake_quant import int4_values

pytestmark = pytest.mark.slow

SPARSE = "deepseek_v3"
LAYOUTS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    # model: (name, parallel, recompute)
    "qwen3": [
        ("single", {}, "none"),
        ("tp2pp2", {"tensor": 2, "pipeline": 2}, "full"),
        ("tp2dp2 without sp", {"tensor": 2, "sequence": False, "data": 2}, "none"),
    ],
    "qwen3_tied": [("single", {}, "none"), ("pp2cp2", {"pipeline": 2, "context": 2}, "none")],
    SPARSE: [
        ("single", {}, "none"),
        ("tp2ep2", {"tensor": 2, "data": 2, "expert": 2}, "none"),
        ("tp2ep2etp2", {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, "none"),
        ("pp2vpp2dp2", {"pipeline": 2, "virtual": 2, "data": 2}, "full"),
    ],
}
EXPORTED_IN = {"qwen3": "tp2pp2", SPARSE: "tp2ep2"}
RESHARDED = [  # model, saved in, loaded in; experts with an optimizer of their own (expert 2) and without
    ("qwen3", "tp2pp2", "tp2dp2 without sp"),
    (SPARSE, "pp2vpp2dp2", "tp2ep2"),
    (SPARSE, "tp2ep2etp2", "single"),
]
INT4 = "kimi_k2_thinking"
QUANTISED: list[tuple[str, dict[str, Any], str]] = [
    ("single", {}, "none"),
    ("tp2ep2etp2", {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, "full"),
]
CASES = [(model, name) for model, layouts in LAYOUTS.items() for name, _, _ in layouts]
SEVERAL = [case for case in CASES if case[1] != "single"]
ALWAYS = {*((model, "single") for model in LAYOUTS), *EXPORTED_IN.items()}
"""In every run of CI: what tests without variants compare, and what others are compared with."""


def jobs(cases: Collection[tuple[str, str]], moved: Collection[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Three steps in each layout, and the third again from checkpoints of the second.

    Args:
        cases: of `CASES`, to which sources of checkpoints are added.
        moved: of `RESHARDED`.
    """
    cases = {*cases, *((model, source) for model, source, _ in moved)}
    out: list[dict[str, Any]] = []
    loading: list[dict[str, Any]] = []
    for model, layouts in LAYOUTS.items():
        lora = WITH_EXPERTS if model == SPARSE else LORA
        for name, parallel, recompute in layouts:
            job = {"model": model, "lora": lora, "parallel": parallel, "recompute": recompute}
            whole = job | {"name": f"{model}-{name}"}
            if EXPORTED_IN.get(model) == name:
                whole |= {"export": f"{model}.export"}
            for resharded, source, target in moved:
                if (resharded, source) == (model, name):
                    whole |= {"save_at": 2, "save": f"{model}-{source}.saved"}
                if (resharded, target) == (model, name):
                    load = {"name": f"{model}-{name}-loaded", "load": f"{model}-{source}.saved", "first_step": 2}
                    loading.append(job | load)
            if (model, name) in cases:
                out.append(whole)
    for name, parallel, recompute in QUANTISED:
        job = {"model": INT4, "lora": LoraConfig(), "parallel": parallel, "recompute": recompute}
        out.append(job | {"name": f"{INT4}-{name}", "fake_quant": "int4_experts"})
    return out + loading


def launch(folder: Path, world: int) -> None:
    run_ranks(Path(__file__).with_name("lora_ranks.py"), world, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def results(folder, played) -> dict[str, list[dict[str, Any]]]:
    """Job → what each of its ranks measured."""
    for model in (*LAYOUTS, INT4):
        make(model, folder / model, torch.float32)
    todo = jobs({*played("model", "name"), *ALWAYS}, played("model", "source", "target"))
    for job in todo:
        sizes = {k: v for k, v in job["parallel"].items() if k in ("tensor", "pipeline", "context", "data")}
        job["world"] = math.prod(sizes.values())
    for world in (4, 1):
        torch.save([job for job in todo if job["world"] == world], folder / f"jobs.{world}.pt")
        launch(folder, world)
    return {
        job["name"]: [torch.load(folder / f"{job['name']}.{r}.pt", weights_only=False) for r in range(job["world"])]
        for job in todo
    }


def by_sequence(ranks: list[dict[str, Any]], what: str) -> np.ndarray:
    found: dict[int, np.ndarray] = {}
    for rank in ranks:
        for indices, values in zip(rank["rank_micro_batches"], rank[what], strict=True):
            found |= dict(zip(indices, values, strict=True))
    return np.concatenate([found[i] for i in sorted(found)])


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(("model", "name"), in_turn(SEVERAL, ALWAYS))
def test_a_layout_trains_as_one_process_does(results, model, name):
    single, several = results[f"{model}-single"][0], results[f"{model}-{name}"]
    for rank in several:
        assert distance(rank["initial"], single["initial"]) == 0
        assert np.allclose(rank["losses"], single["losses"], rtol=0, atol=2e-5)
        assert np.allclose(rank["norms"], single["norms"], rtol=2e-5, atol=0)
        assert distance(rank["adapters"], single["adapters"]) < 2e-5
        assert distance(rank["merged"], single["merged"]) < 2e-5
    assert np.abs(by_sequence(several, "last") - by_sequence([single], "last")).max() < 2e-4


@pytest.mark.parametrize(("model", "name"), in_turn(CASES, ALWAYS))
def test_only_adapters_move_and_only_they_have_gradient_buffers(results, model, name):
    single = results[f"{model}-single"][0]
    for rank in results[f"{model}-{name}"]:
        assert rank["base_untouched"]
        assert rank["buffered"] == rank["trained"] > 0
        moved = {key for key, value in rank["adapters"].items() if not torch.equal(value, rank["initial"][key])}
        assert moved == set(rank["adapters"])
        assert rank["losses"][0] != rank["losses"][1]
    assert all(not value.any() for key, value in single["initial"].items() if ".lora_B." in key)
    lengths = {key: value.abs().max() * math.sqrt(value.shape[1]) for key, value in single["initial"].items()}
    assert all(0.8 < value <= 1 for key, value in lengths.items() if ".lora_A." in key)


@pytest.mark.parametrize(("model", "name"), in_turn(CASES, ALWAYS))
def test_the_reference_is_the_base_model(results, model, name):
    ranks = results[f"{model}-{name}"]
    assert np.array_equal(by_sequence(ranks, "reference"), by_sequence(ranks, "first"))
    assert np.array_equal(by_sequence(ranks, "after_reference"), by_sequence(ranks, "last"))
    assert np.abs(by_sequence(ranks, "last") - by_sequence(ranks, "first")).max() > 1e-2


@pytest.mark.parametrize(("model", "source", "target"), in_turn(RESHARDED))
def test_a_checkpoint_of_adapters_goes_on_in_another_layout(results, folder, model, source, target):
    saved, loaded = results[f"{model}-{source}"], results[f"{model}-{target}-loaded"]
    for rank in loaded:
        assert distance(rank["loaded"], saved[0]["saved"]) == 0
        assert abs(rank["losses"][0] - saved[0]["losses"][2]) < 2e-5
        assert distance(rank["adapters"], saved[0]["adapters"]) < 2e-5
    size = sum(path.stat().st_size for path in (folder / f"{model}-{source}.saved").rglob("*.distcp"))
    assert size < sum(path.stat().st_size for path in (folder / model).glob("*.safetensors"))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(("model", "name"), in_turn(CASES, ALWAYS))
def test_merged_weights_are_the_base_plus_the_product(results, folder, model, name):
    rank = results[f"{model}-{name}"][0]
    for key, value in stored_tensors(folder / model).items():
        module = "base_model.model." + key.removesuffix(".weight")
        if f"{module}.lora_A.weight" in rank["adapters"]:
            a, b = (rank["adapters"][f"{module}.lora_{x}.weight"] for x in "AB")
            assert (rank["merged"][key] - (value + 2.0 * b @ a)).abs().max() < 1e-6, key
        else:
            assert torch.equal(rank["merged"][key], value), key


@pytest.mark.parametrize(("model", "name"), EXPORTED_IN.items())
def test_exports_hold_what_was_trained(results, folder, model, name):
    rank = results[f"{model}-{name}"][0]
    adapters, merged = stored(folder / f"{model}.export"), stored_tensors(folder / f"{model}.export-merged")
    assert distance(dict(sorted(adapters.items())), dict(sorted(rank["adapters"].items()))) == 0
    assert distance(dict(sorted(merged.items())), dict(sorted(rank["merged"].items()))) == 0
    config = json.loads((folder / f"{model}.export" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6, str(folder / model))


def test_every_target_is_adapted_and_nothing_else(results, folder):
    def modules(model: str) -> set[str]:
        names = {key.split(".lora_")[0] for key in results[f"{model}-single"][0]["adapters"]}
        return {name.removeprefix("base_model.model.model.layers.").split(".", 1)[1] for name in names}

    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    mlp = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert modules("qwen3") == attention | mlp
    latent = {f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    inner = {x.removeprefix("mlp.") for x in mlp}
    experts = {f"mlp.experts.{e}.{x}" for e in range(8) for x in inner}
    assert modules(SPARSE) == latent | mlp | experts | {f"mlp.shared_experts.{x}" for x in inner}
    config = json.loads((folder / "qwen3.export" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def logprobs(model: torch.nn.Module) -> np.ndarray:
    """Log-probs of the trained positions of the ranks' batch at their temperature, by ``transformers``."""
    out = []
    for datum in make_batch(count=8, vocab_size=500, longest=30):
        ids = torch.from_numpy(datum.token_ids).long()[None]
        with torch.no_grad():
            logp = (model(ids).logits[0].float() / 0.8).log_softmax(-1)
        chosen = torch.cat([torch.zeros(1), logp[:-1].gather(1, ids[0, 1:, None])[:, 0]])
        out.append(np.where(datum.loss_mask, chosen.numpy(), 0.0))
    return np.concatenate(out)


def test_transformers_computes_the_same_with_merged_weights_and_with_adapters(results, folder):
    expected = by_sequence(results["qwen3-single"], "last")
    trained = np.concatenate([d.loss_mask for d in make_batch(count=8, vocab_size=500, longest=30)])
    merged = reference_model(folder / "qwen3.export-merged")
    assert np.abs(logprobs(merged) - expected)[trained].max() < 1e-4
    adapters, base = stored(folder / "qwen3.export"), reference_model(folder / "qwen3")
    assert np.abs(logprobs(base) - expected)[trained].max() > 1e-2
    for name, module in base.named_modules():
        if f"base_model.model.{name}.lora_A.weight" in adapters:
            a, b = (adapters.pop(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
            module.register_forward_hook(lambda _, args, out, a=a, b=b: out + 2.0 * (args[0] @ a.T) @ b.T)
    assert not adapters
    assert np.abs(logprobs(base) - expected)[trained].max() < 1e-4


def test_a_merged_mixture_of_experts_computes_the_same_in_transformers(results, folder):
    expected = by_sequence(results[f"{SPARSE}-single"], "last")
    trained = np.concatenate([d.loss_mask for d in make_batch(count=8, vocab_size=500, longest=30)])
    merged = reference_model(folder / f"{SPARSE}.export-merged")
    assert np.abs(logprobs(merged) - expected)[trained].max() < 2e-4


def test_int4_experts_train_alike_in_several_ranks(results):
    single, several = results[f"{INT4}-single"][0], results[f"{INT4}-tp2ep2etp2"]
    assert np.abs(by_sequence(several, "first") - by_sequence([single], "first")).max() < 1e-5
    for rank in several:
        assert abs(rank["losses"][0] - single["losses"][0]) < 2e-5
        assert abs(rank["norms"][0] / single["norms"][0] - 1) < 2e-5
        # Afterwards a weight next to a boundary may round to the other side.
        assert np.allclose(rank["losses"], single["losses"], rtol=0, atol=2e-3)
        for name, tensor in rank["merged"].items():
            if ".mlp.experts." in name:
                assert torch.equal(int4_values(tensor), tensor)
                assert ((tensor - single["merged"][name]).abs() > 1e-5).float().mean() < 0.01
            else:
                assert (tensor - single["merged"][name]).abs().max() < 3e-4
