"""The page of the battery's results is the one that its files give, and shows them beside the limits."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest


@pytest.fixture
def page():
    import page

    return page


ROWS = {
    "layers": [
        {"variant": variant, "tokens": tokens, "longest": longest, "tflops": speed, "share": None}
        for variant, speed in (("bf16", 400.0), ("fp8_blockwise", 600.0))
        for tokens, longest in ((4096, 4096), (32768, 8192), (65536, 65536))
    ],
    "logprobs": [{"dtype": "bfloat16", "chunk": chunk, "tflops": 500.0} for chunk in (1024, 4096)],
    "engine": [
        {"graphs": graphs, "sequences": count, "tokens_per_s": 1000.0}
        for graphs, counts in (("yes", (16, 64)), ("no", (16,)))
        for count in counts
    ],
}
FIGURES = {
    "device": {"matrix_tflops": 780.0, "copy_tb_s": 4.1},
    "layers": {"matrix_tflops": 770.0, "bf16_share": 0.52, "fp8_speedup": 1.25},
    "logprobs": {"matrix_tflops": 760.0},
    "engine": {"left_gib": 1.5},
    "offload": {"offload_gb_s": 40.0, "plain_out_gb_s": 50.0},
}


@pytest.fixture
def results(tmp_path):
    """A folder with the results of one H200, and of a CPU."""
    from battery.hardware import Machine
    from battery.registry import PARTS
    from battery.supervise import new_result

    machine = Machine("NVIDIA H200", gpus=1, cuda="13.0", cpu="a CPU", cores=16, packages={"torch": "2.13.0"})
    for part in PARTS:
        result = new_result(part.name, "code", "full", machine)
        result.status, result.figures = "done", FIGURES.get(part.name, {})
        if rows := ROWS.get(part.name):
            result.tables = {next(iter(part.tables)): rows}
        if part.name == "device":
            result.left_out = {"FP8 matrix product": "needs compute capability 8.9 or above"}
        if part.name == "ranks":
            result.status, result.reason = "skipped", "needs 2 GPUs, and torch finds 1 here"
        result.write(tmp_path / "results" / machine.slug / f"{part.name}.json")
        result.size = "tiny"
        result.write(tmp_path / "results" / "cpu" / f"{part.name}.json")
    return tmp_path / "results"


def test_the_page_is_that_of_the_results(page):
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.RESULTS, page.PAGE), (
        "run: python benchmarks/gpu/page.py"
    )


def test_without_results_the_page_says_so(page, tmp_path):
    text = page.page(tmp_path / "nothing", tmp_path / "gpu.md")
    assert "**Nothing has been measured on a GPU yet.**" in text and "python benchmarks/gpu/run.py" in text
    assert list(tmp_path.iterdir()) == []


def test_figures_stand_beside_goals_and_limits(page, results, tmp_path):
    text = page.page(results, tmp_path / "gpu.md")
    assert "Nothing has been measured" not in text and "## NVIDIA H200" in text and "## cpu" not in text
    lines = text.splitlines()
    assert "| BF16 matrix product, TFLOP/s | 780 | 790 (one H200) | 0.99 |" in lines
    assert "| copy, TB/s | 4.1 | 4.3 (one H200) | 0.95 |" in lines
    assert "| offload, GB/s | 40 | 50 (plain copy) | 0.80 |" in lines
    assert "| BF16 layers |  | matrix product | 0.52 |" in lines
    assert "| BF16 layers reach half of the matrix product's speed | 0.52 | ≥ 0.5 | met |" in lines
    assert "| FP8 layers are 1.3 times as fast as BF16 | 1.25 | ≥ 1.3 | NOT MET |" in lines
    assert "| a sync moves 50 GB/s |  | ≥ 50 | not measured |" in lines
    assert "skipped, 0 s: needs 2 GPUs, and torch finds 1 here" in lines
    assert "| copy within the device's memory, TB/s read and written | 4.1 |" in lines
    assert "* FP8 matrix product: needs compute capability 8.9 or above" in lines
    assert sum(line.startswith("| bf16 | ") for line in lines) == 3


def test_the_picture_has_the_lines_of_the_limits(page, results, tmp_path):
    text = page.page(results, tmp_path / "gpu.md")
    picture = tmp_path / "gpu-nvidia-h200.svg"
    assert f"]({picture.name})" in text
    labels = [e.text for e in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    for label in ("bf16", "fp8_blockwise", "bfloat16", "graphs: yes", "graphs: no"):
        assert label in labels
    assert labels.count("BF16 matrix product here") == labels.count("BF16 matrix product, one H200") == 2
    layers, *_ = page.charts(page.results_of(results / "nvidia-h200"))
    assert {series.label: series.points for series in layers.series} == {
        "bf16": ((4.0, 400.0), (32.0, 400.0)),
        "fp8_blockwise": ((4.0, 600.0), (32.0, 600.0)),
        "BF16 matrix product here": ((4.0, 770.0), (32.0, 770.0)),
        "BF16 matrix product, one H200": ((4.0, 790.0), (32.0, 790.0)),
    }
