"""Every family through Megatron: its logits are those of transformers in every layout, and the way back is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import torch
from tiny_models import FAMILIES, make, reference_logits
from turns import in_turn
from weight_fixtures import Silence

from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_hf import plan_to_hf
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.weights.hf_model import open_model

WORLDS = (2, 4)
LENGTHS = (24, 17)
LAYOUTS_OF_DENSE, LAYOUTS_OF_EXPERTS = 5, 8
DENSE = {"qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "qwen3_yarn", "llama3", "qwen3_vl", "qwen3_5_text", "qwen3_5"}
VARIANTS = in_turn(FAMILIES, ("qwen3", "qwen3_5_moe"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, played) -> Path:
    """Families converted, loaded and saved by Megatron ranks; the folder of what they leave."""
    folder = tmp_path_factory.mktemp("families")
    families = played("family")
    for family in families:
        hf = make(family, folder / family / "hf")
        convert(plan_to_megatron(open_model(hf)), folder / family / "megatron")
        ids = torch.randint(0, 515, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
        logits = torch.cat([reference_logits(hf, part[None])[0] for part in ids.split(LENGTHS)])
        torch.save({"ids": ids, "logits": logits}, folder / family / "reference.pt")
    for world in WORLDS:
        run_ranks(Path(__file__).with_name("family_ranks.py"), world, folder, ",".join(families), timeout_s=840)
    return folder


def convert(plan, out: Path) -> None:
    assert execute(plan, str(out), 2, Share(), Silence())


@pytest.mark.slow
@pytest.mark.parametrize("family", VARIANTS)
def test_logits_are_those_of_transformers_in_every_layout(run, family):
    said = [line for world in WORLDS for line in (run / f"family_ranks.{world}.0.log").read_text().splitlines()]
    passed = [line for line in said if line.startswith(f"passed {family} ")]
    assert len(passed) == (LAYOUTS_OF_DENSE if family in DENSE else LAYOUTS_OF_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", VARIANTS)
def test_what_megatron_saves_becomes_the_source_again(run, tmp_path, family):
    source = run / family / "hf"
    convert(plan_to_hf(run / family / "saved", source), tmp_path / "back")
    # The model that was trained had no prediction layers: theirs are the source's, byte for byte.
    for file in source.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
