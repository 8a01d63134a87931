"""Gradients of a packed micro-batch are those of ``transformers`` in every layout, training that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import torch
from families_gradient_ranks import LAYOUTS, LR, TEMPERATURE, WORLDS, batch, objective, scales
from tiny_models import make, reference_model, stored_tensors, unstacked
from turns import in_turn

FAMILIES = {"qwen3_5_text": 0, "qwen3_5_moe_text": 2, "glm4_flash": 0}
"""Families, and the seeds of their weights."""
EQUAL = 2e-5
"""Bound of a difference, relative to the parameter's greatest gradient."""
TRAINED_EQUAL = 5e-5
"""Bound of a difference of parameters after the steps."""
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS if (family, layout) != ("qwen3_5_text", "EP2")]
ALWAYS = {("qwen3_5_text", "single"), *(("qwen3_5_moe_text", layout) for layout in ("single", "EP2", "TP2×PP2"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory, played) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    for family in played("family"):
        make(family, folder / family, dtype=torch.float32, seed=FAMILIES[family])
    cases = sorted({*played("family", "layout"), *((family, "single") for family in played("family"))})
    for world in sorted({WORLDS.get(layout, 2) for _, layout in cases}):
        script = Path(__file__).with_name("families_gradient_ranks.py")
        run_ranks(script, world, folder, json.dumps(cases), timeout_s=900)
    return folder


@pytest.fixture(scope="module")
def reference(run, played) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients by transformers, by the names in a model folder."""
    out = {}
    for family in played("family"):
        model = reference_model(run / family).train()
        for datum in batch():
            ids = torch.from_numpy(datum.token_ids).long()
            logp = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1]
            chosen, entropy = logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)
            mask, weights = (torch.from_numpy(x)[1:] for x in (scales(datum), datum.scaled_advantages))
            objective(chosen, entropy, mask, weights).backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
        model.save_pretrained(run / f"{family} gradients")
        out[family] = unstacked(stored_tensors(run / f"{family} gradients"))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), in_turn(CASES, ALWAYS))
def test_gradients_are_those_of_transformers(run, reference, family, layout):
    (found, _), expected = torch.load(run / f"{family} {layout}.pt"), reference[family]
    trained = expected.keys() - {name for name in expected if name.endswith("e_score_correction_bias")}
    assert trained <= found.keys()
    for name in sorted(trained):
        apart, greatest = (float(x.abs().max()) for x in (found[name] - expected[name], expected[name]))
        assert greatest > 0 and apart <= EQUAL * greatest, (name, apart, greatest)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), in_turn(CASES, ALWAYS))
def test_training_is_that_of_one_process(run, family, layout):
    (_, found), (_, single) = (torch.load(run / f"{family} {name}.pt") for name in (layout, "single"))
    before = unstacked(stored_tensors(run / family))
    moved = max(float((single[name] - before[name].float()).abs().max()) for name in single)
    apart = {name: float((found[name] - single[name]).abs().max()) for name in single}
    assert found.keys() == single.keys() and moved > 2 * LR
    print(max(apart.items(), key=lambda item: item[1]))
    assert max(apart.values()) <= TRAINED_EQUAL, max(apart.items(), key=lambda item: item[1])
