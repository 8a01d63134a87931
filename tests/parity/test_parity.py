"""Every layout trains as one process does, and one process as ``transformers``; see docs/understand/parity.md."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

from parity_layouts import CELLS, HYBRID, HYBRID_SPARSE, MODELS, SINGLE
from parity_page import table
from parity_runs import Row, run_all
from turns import in_turn

STEPS = 2
"""Fewer than the page has, which takes longer."""
EQUAL, AFTER_STEPS = 1e-5, 2e-5
OF_GATED_NORMS = {HYBRID: (1e-3, 1e-3, 1e-3), HYBRID_SPARSE: (1e-2, 1e-1, 3e-3)}
"""Bounds of loss, norm and parameters after the steps of Qwen3.5: the norm of a Gated DeltaNet scales rounding up with
values that are small, and that may move a token to another expert in later steps."""
ALWAYS = {
    *((model, SINGLE.name) for model in MODELS),
    *(("qwen3", layout) for layout in ("TP2+SP", "DP2", "TP2×PP2")),
    *((HYBRID_SPARSE, layout) for layout in ("TP2+SP", "EP2")),
}
"""Models and layouts in every run of CI: what is trained most."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory, played) -> dict[tuple[str, str], Row]:
    cells = {*played("model", "layout"), *((model, SINGLE.name) for model in played("moved_model"))}
    found = run_all(tmp_path_factory.mktemp("parity"), STEPS, cells)
    print(table(found))
    return {(row.model, row.layout): row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("other", ["single", "transformers"])
@pytest.mark.parametrize(("model", "layout"), in_turn(CELLS, ALWAYS))
def test_equal(rows, model, layout, other):
    found = getattr(rows[model, layout], other)
    assert max(found.logprob, found.loss, found.norm) <= EQUAL, found
    later = found.later_loss, found.later_norm, found.parameters
    bounds = OF_GATED_NORMS.get(model, (AFTER_STEPS,) * 3)
    assert all(value <= bound for value, bound in zip(later, bounds, strict=True)), found


@pytest.mark.slow
@pytest.mark.parametrize("moved_model", MODELS)
def test_there_was_something_to_tell_apart(rows, moved_model):
    """The parameters moved a hundred times further than they may differ, most of them."""
    greatest, mean = rows[moved_model, SINGLE.name].transformers.moved
    assert greatest > 50 * AFTER_STEPS and mean > 20 * AFTER_STEPS
