"""The record is made of wheels and source archives of exactly the locked releases."""

from __future__ import annotations

import io
import tarfile
import zipfile

import pytest

pytest.importorskip("torch")

import record

PLATFORMS = "import os\nlevel = os.environ['VLLM_LOGGING_LEVEL']\nclass Platform: ...\ncurrent_platform: Platform\n"


@pytest.fixture
def archives(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "locked", lambda: {"vllm": "1.0", "transformer-engine-torch": "2.0.post1"})
    wheel, source = (
        tmp_path / "vllm-1.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        tmp_path / "transformer_engine_torch-2.0.post1.tar.gz",
    )
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "")
        file.writestr("vllm/platforms.py", PLATFORMS)
        file.writestr("vllm/kernels.so", b"\xff")
    text = b"class DelayedScaling:\n    def __init__(self, margin=0): ...\nweight.allreduce = True\n"
    with tarfile.open(source, "w:gz") as file:
        for name in (
            "transformer_engine_torch-2.0.post1/transformer_engine/common/recipe.py",
            "transformer_engine_torch-2.0.post1/README",
        ):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text))
    return [wheel, source]


def test_a_record_holds_what_is_in_use(archives, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "made.json")
    record.main(archives)
    made = record.Record.read()
    assert made.versions == {"vllm": "1.0", "transformer-engine-torch": "2.0.post1"}
    assert made.environment == {"vllm": ["VLLM_LOGGING_LEVEL"], "transformer-engine-torch": []}
    assert (made.attributes["allreduce"], made.attributes["quant_method"]) == (["transformer-engine-torch"], [])
    assert made.lookup("vllm.platforms:current_platform").holds == "vllm.platforms:Platform()"
    recipe = made.lookup("transformer_engine.common.recipe:DelayedScaling")
    assert (recipe.kind, recipe.parameters) == ("class", "margin=...")
    assert "vllm.platforms:Platform" not in made.symbols  # nobody names the class


def test_other_releases_are_refused(archives):
    with pytest.raises(SystemExit, match=r"transformer-engine-torch==2\.0\.post1"):
        record.record(archives[:1])
    with pytest.raises(SystemExit, match="is neither a wheel nor a source archive"):
        record.record([archives[0].parent / "vllm.zip"])
