"""``./test --changed`` runs what a change can affect, and not everything."""

import pytest
from changed import affected
from import_graph import ROOT

TESTS = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize(
    ("file", "found", "left_out"),
    [
        ("megatron_fleet/algorithms/kl.py", "tests/algorithms/test_kl.py", "tests/storage/test_s3_folder.py"),
        # Imported by other modules only, or by none: found in a folder.
        ("megatron_fleet/models/glm4/weights.py", "tests/weights/test_families.py", "tests/algorithms/test_kl.py"),
        # Read by it, as every module is.
        ("megatron_fleet/rollout/engine_logger.py", "tests/upstream/test_upstream.py", "tests/algorithms/test_kl.py"),
        # Started as a program.
        ("megatron_fleet/loop/train.py", "tests/e2e/test_whole_runs.py", "tests/algorithms/test_kl.py"),
        ("tests/weights/tiny_configs.py", "tests/models/test_hf_config.py", "tests/algorithms/test_kl.py"),
        ("tests/agents/conftest.py", "tests/agents/test_episode.py", "tests/algorithms/test_kl.py"),
        ("docs/reference/metrics.md", "tests/telemetry/test_metrics.py", "tests/storage/test_s3_folder.py"),
        ("examples/my_tasks.py", "tests/docs_site/test_tutorials.py", "tests/algorithms/test_kl.py"),
        # Named by a registry of the battery, or imported from its folder.
        ("benchmarks/gpu/battery/parts/device.py", "tests/benchmarks/test_gpu_parts.py", "tests/algorithms/test_kl.py"),
        ("benchmarks/gpu/battery/show.py", "tests/benchmarks/test_gpu_page.py", "tests/algorithms/test_kl.py"),
        ("benchmarks/gpu/run.py", "tests/benchmarks/test_gpu_battery.py", "tests/algorithms/test_kl.py"),
        ("tools/offline_bundle.py", "tests/test_offline_bundle.py", "tests/algorithms/test_kl.py"),
        ("docs/run/one-gpu.md", "tests/docs_site/test_site_in_browser.py", "tests/algorithms/test_kl.py"),
    ],
)
def test_what_a_change_affects(file, found, left_out):
    assert (ROOT / file).is_file() and {found, left_out} <= TESTS
    tests = affected([file])
    assert found in tests and left_out not in tests and set(tests) <= TESTS


def test_all_or_nothing():
    assert affected(["pyproject.toml"]) == affected(["requirements/dev.txt"]) == ["tests"]
    assert affected([]) == []
