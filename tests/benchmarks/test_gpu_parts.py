"""Each part of the battery measures on a CPU at tiny sizes with the code that a GPU runs, and says what it means."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from waiting import HANG_S

from megatron_fleet.trainer.precision import Machine, machine_problem

pytest.importorskip("megatron_fleet.trainer.megatron")

ON_GPUS = {
    "layers": {"fp8_speedup", "fp8_recipe", "torch_slowdown"},
    "sync": {f"fp8_{name}" for name in ("bytes", "sync_gb_s", "send_gb_s", "bit_equal", "agreement", "agreement_max")}
    | {"fp8_engine_start_s", "fp8_cycle_s"},
    "engine": {"start_eager_s", "graph_speedup", "freed_gib", "left_gib", "growth_gib"},
    "offload": {"freed_share", "left_gib", "growth_gib"},
    "checkpoint": {"device_extra_gib"},
    "loop": {"mismatch"},
    "traces": {"layers_fp8_busy", "layers_fp8_launches"},
}
"""Figures that a CPU does not have."""


@pytest.fixture
def report(tmp_path):
    """Table of a part that has measured nothing yet."""
    from battery.results import Report, Request, Result

    places = {"result": str(tmp_path / "part.json"), "scratch": str(tmp_path), "keep": str(tmp_path)}
    return Report(Request("part", "", "cpu", "tiny", 3600.0, **places), Result("part", size="tiny"))


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measure a part in this process, its variants as well; returns the result."""
    from battery import shapes, variants
    from battery.registry import BY_NAME
    from battery.results import Report, Request, Result, Unavailable

    from megatron_fleet.config.errors import UserError

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # restored afterwards: parts do the same

    def variant(report, module, name, settings, launch=()):
        try:
            importlib.import_module(module).variant(report, settings)
        except (Unavailable, UserError) as error:
            report.leave_out(name, str(error))

    def run(name, *, processes=False):
        if not processes:
            monkeypatch.setattr(variants, "run", variant)
        places = {"result": str(tmp_path / f"{name}.json"), "scratch": str(tmp_path), "keep": str(tmp_path / "files")}
        (tmp_path / "files").mkdir()
        request = Request(name, BY_NAME[name].module, "cpu", "tiny", 3600.0, **places)
        report = Report(request, Result(name, size="tiny"))
        importlib.import_module(request.module).measure(report, request)
        report.close()
        lacking = set() if shapes.cuda() else ON_GPUS.get(name, set())
        check(BY_NAME[name], json.loads((tmp_path / f"{name}.json").read_text()), lacking)
        return report.result

    return run


@pytest.fixture
def gpu(monkeypatch):
    """What a part asks a GPU is answered, while it computes on the CPU: 80 GB, of which each question finds 1 MB less.

    Returns:
        Names of the questions that were asked.
    """
    from battery import shapes

    asked = set()

    def answering(name, answer):
        def ask(*_):
            asked.add(name)
            return answer()

        monkeypatch.setattr(torch.cuda, name, ask)

    used = itertools.count(1)
    monkeypatch.setattr(shapes, "cuda", lambda: True)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        answering(name, lambda: None)
    answering("memory_allocated", lambda: 5 << 20)
    answering("max_memory_allocated", lambda: 7 << 20)
    answering("mem_get_info", lambda: ((80 << 30) - (next(used) << 20), 80 << 30))
    answering("get_device_capability", lambda: (9, 0))
    return asked


def check(part, result, lacking=frozenset()):
    """What was measured is what the registry describes, and sensible."""
    assert (result["problems"], result["status"]) == ({}, "done")
    assert result["figures"].keys() == part.figures.keys() - lacking
    numbers = {name: value for name, value in result["figures"].items() if not isinstance(value, str)}
    assert {name for name, value in numbers.items() if not math.isfinite(value)} == set()
    assert result["tables"].keys() == part.tables.keys()
    for name, rows in result["tables"].items():
        assert rows and {frozenset(row) for row in rows} == {frozenset(part.tables[name].columns)}
    assert {goal.figure for goal in part.goals} <= part.figures.keys()


@pytest.mark.slow
def test_no_part_imports_megatron_before_it_has_prepared_its_process():
    """Else Transformer Engine is already there where it shall not be, or has read its variables before they are set."""
    modules = [part.module for part in importlib.import_module("battery.registry").PARTS]
    program = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'megatron', 'transformer_engine'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.strip() == ""


def test_memory_of_a_gpu_is_what_it_says(measure, gpu):
    """`mem_get_info` for what other processes see, the allocator's peak for what a step takes."""
    offload = measure("offload")
    assert offload.figures["left_gib"] == pytest.approx(6 / 1024, abs=1e-3) and "mem_get_info" in gpu
    assert offload.figures["growth_gib"] == pytest.approx(2 / 1024, abs=1e-3) and offload.left_out == {}


def test_peaks_of_a_gpu_are_the_allocators(measure, gpu):
    checkpoint = measure("checkpoint")
    assert checkpoint.figures["device_extra_gib"] == round(2 / 1024, 3)
    assert {row["device_gib"] for row in checkpoint.tables["memory"]} == {round(2 / 1024, 3)}


def test_extra_memory_of_logprobs_is_beyond_what_was_there(measure, gpu):
    assert {row["extra_mb"] for row in measure("logprobs").tables["chunks"]} == {2}
    assert {"max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"} <= gpu


class FakeEngine:
    """Half as fast without graphs; takes a second for each prefill and a tenth for each token."""

    made = ()

    def __init__(self, config, transport, log, more):
        self.eager, self.seconds = config.rollout.engine.enforce_eager, {"start": 10.0}
        assert (transport, more["load_format"]) == ("cuda_ipc", "dummy")
        FakeEngine.made += (self,)
        self.asleep, self.closed, self.prompts = [], False, []

    async def call(self, verb, *arguments):
        if verb == "sample":
            prompts, tokens = arguments
            self.prompts += map(tuple, prompts)
            self.seconds[verb] = (1 + 0.1 * (tokens - 1)) * (2 if self.eager else 1)
            return len(prompts) * tokens
        self.seconds[verb] = 0.5
        return None

    def close(self):
        self.closed = True


def test_an_engine_is_measured_with_and_without_graphs(measure, gpu, monkeypatch):
    from battery.parts import engine_speed

    monkeypatch.setattr(FakeEngine, "made", ())
    monkeypatch.setattr(engine_speed, "Engine", FakeEngine)
    result = measure("engine")
    assert [(row["graphs"], row["sequences"]) for row in result.tables["throughput"]] == [
        ("yes", 1),
        ("yes", 3),
        ("no", 1),
    ]
    three = result.tables["throughput"][1]
    assert three["ms_per_token"] == 100 and three["prefill_tokens_per_s"] == 48
    assert three["tokens_per_s"] == pytest.approx(12 / 1.3, abs=0.1)
    assert result.figures["graph_speedup"] == pytest.approx(2, rel=0.1) and result.figures["wake_s"] == 1
    assert result.figures["growth_gib"] == pytest.approx(0, abs=0.01)
    graphs, eager = FakeEngine.made
    assert graphs.closed and eager.closed and eager.eager and not graphs.eager
    assert len(set(graphs.prompts)) == len(graphs.prompts)  # no prompt was cached


class FakeServer(FakeEngine):
    """Holds always the same weights, and log-probs of -1."""

    def __init__(self, config, transport, log, more):
        self.seconds, self.closed = {"start": 10.0}, False
        assert transport == "cuda_ipc"
        FakeEngine.made += (self,)

    async def call(self, verb, *arguments):
        if verb == "fingerprints":
            return {"weight": 1}
        return [np.full(len(ids), -1.0, np.float32) for ids in arguments[0]] if verb == "score" else None


class FakeSync:
    def __init__(self, verbs, engine, transport):
        self.engine, self.version, self.trainer = engine, 0, SimpleNamespace(seconds=0.5)

    async def next(self):
        self.version += 1
        return 1.0

    def close(self):
        pass


def test_an_engine_in_fp8_takes_half_the_bytes(measure, gpu, monkeypatch):
    from battery import shapes
    from battery.parts import weight_transfer

    def nothing(*_):
        return None

    verbs = SimpleNamespace(offload=nothing, onload=nothing, close=nothing)
    monkeypatch.setattr(FakeEngine, "made", ())
    monkeypatch.setattr(weight_transfer, "Engine", FakeServer)
    monkeypatch.setattr(weight_transfer, "Sync", FakeSync)
    monkeypatch.setattr(shapes, "make_verbs", lambda config, init: verbs)
    monkeypatch.setattr(shapes, "logprobs", lambda verbs, data: np.full(3 * 39, -1.25, np.float32))
    figures = measure("sync").figures
    embedding_and_head = 2 * 2 * 512 * 128
    layers = 2 * 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert 0 <= figures["bytes"] - layers - embedding_and_head < 2000  # the norms
    assert 0 <= figures["fp8_bytes"] - layers / 2 - embedding_and_head < 2500
    assert figures["agreement"] == figures["fp8_agreement_max"] == 0.25 and figures["fp8_bit_equal"] == 1
    assert figures["fp8_sync_gb_s"] == pytest.approx(figures["fp8_bytes"] / 1e9, rel=1e-3)
    assert figures["send_gb_s"] == pytest.approx(2 * figures["bytes"] / 1e9, rel=1e-3)
    assert len(FakeEngine.made) == 2 and all(engine.closed for engine in FakeEngine.made)


def test_device(measure):
    result = measure("device")
    assert result.figures["matrix_tflops"] > 0 and result.figures["copy_tb_s"] > 0


def test_layers(measure):
    from battery.parts import layer_stack

    result = measure("layers")
    rows = [(row["variant"], row["tokens"], row["longest"]) for row in result.tables["speed"]]
    assert rows == [("bf16, no TE", 256, 128), ("bf16, no TE", 512, 128), ("bf16, no TE", 512, 512)]
    assert result.left_out.keys() == layer_stack.VARIANTS.keys() - {"bf16, no TE"}
    assert set(result.left_out.values()) == {"there is no GPU"}
    row = result.tables["speed"][0]
    assert row["share"] == pytest.approx(row["tflops"] / result.figures["matrix_tflops"], abs=1e-4)
    assert result.figures["bf16_share"] == row["share"]


def test_speed_of_layers_counts_every_product_once(monkeypatch):
    """By hand: projections, two attention products of half the square, gate, up, down, and a head."""
    from battery import shapes
    from battery.parts import layer_stack

    class Policy:
        vocab_size = shapes.SMALL_VOCABULARY
        hf_config = shapes.model_config("full", 4, shapes.SMALL_VOCABULARY)

        def forward_backward(self, micro_batches, loss):
            assert [len(datum) for datum in micro_batches[0]] == [64, 64]

        def discard_gradients(self):
            pass

    monkeypatch.setattr(shapes, "median_seconds", lambda step, repeats: 1.0)
    row = layer_stack.step_row(Policy(), 128, 64, 1)
    projections = 2 * 4096 * (4096 + 2 * 1024 + 4096) + 3 * 2 * 4096 * 12288
    attention = 2 * 2 * 4096 * 64 * 65 / 2
    forward = 4 * (128 * projections + 2 * attention) + 126 * 2 * 4096 * 1024
    assert row["tflops"] == pytest.approx(3 * forward / 1e12, rel=1e-3)
    assert (row["ms"], row["tokens_per_s"]) == (1000, 128)


def test_variants_are_compared_at_the_goals_size(report):
    from battery.parts import layer_stack

    speeds = {"bf16": 100, "bf16, no TE": 50, "fp8_blockwise": 150, "fp8_tensorwise": 140}
    rows = [
        {"variant": name, "tokens": tokens, "longest": 8192, "tokens_per_s": speed * factor, "share": speed / 200}
        for name, speed in speeds.items()
        for tokens, factor in ((32768, 1), (65536, 7))
    ]
    report.result.tables["speed"] = rows
    layer_stack.summarise(report, "full")
    wanted = {"bf16_share": 0.5, "torch_slowdown": 2.0, "fp8_speedup": 1.5, "fp8_recipe": "fp8_blockwise"}
    assert report.result.figures == wanted


def test_layers_that_do_not_fit_are_left_out(report, tmp_path, monkeypatch):
    from battery import shapes
    from battery.parts import layer_stack

    def step(policy, tokens, longest, repeats):
        if tokens > 256:
            raise torch.OutOfMemoryError
        return {"tflops": 1.0}

    policy = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(shapes, "make_policy", lambda config: policy)
    monkeypatch.setattr(layer_stack, "step_row", step)
    layer_stack.variant(report, {"size": "tiny", "name": "bf16, no TE", "kernels": "torch", "scratch": str(tmp_path)})
    assert len(report.rows("speed")) == 1
    assert report.result.left_out == {
        "bf16, no TE, 512 tokens in sequences of 128": "does not fit into the device's memory"
    }


@pytest.mark.parametrize(
    ("engine", "fault", "kernels"), [((2, 11), "", "auto"), (None, "it is not installed", "torch")]
)
def test_layers_are_pytorchs_where_transformer_engine_is_missing(engine, fault, kernels, tmp_path, monkeypatch):
    from battery import shapes
    from battery.parts import layer_stack

    machine = Machine((9, 0), (13, 0), engine, fault)
    monkeypatch.setattr(shapes, "cuda", lambda: True)
    monkeypatch.setenv("BATTERY_NO_TRANSFORMER_ENGINE", fault)
    config = shapes.run_config(tmp_path, 256)
    assert config.policy.kernels == kernels and machine_problem(config.policy, config.precision, machine) is None
    for settings in layer_stack.VARIANTS.values():
        precision = {"recipe": settings["recipe"]} if "recipe" in settings else {}
        policy = {"kernels": settings.get("kernels", "auto")}
        asked = shapes.run_config(tmp_path, 65536, precision=precision, policy=policy)
        works = machine_problem(asked.policy, asked.precision, machine) is None
        assert works == (engine is not None or policy["kernels"] == "torch")


def test_logprobs(measure):
    figures = measure("logprobs").figures
    assert 0 < figures["logprob_error"] <= figures["logprob_error_max"] < 0.1 and 0 < figures["gradient_error"] < 0.1


def test_offload(measure):
    result = measure("offload")
    assert result.figures["bit_equal"] == 1 and len(result.tables["cycles"]) == 3


@pytest.mark.slow
def test_optimizer(measure):
    result = measure("optimizer")
    names = ["moments in float32", "moments in bfloat16", "in host memory"]
    assert [row["variant"] for row in result.tables["steps"]] == names


def test_checkpoint(measure):
    result = measure("checkpoint")
    assert result.figures["bit_equal"] == 1
    assert result.figures["bytes"] >= result.figures["share_bytes"]
    copies = ["first copy", "writing the first", "second copy", "writing the second"]
    assert [row["verb"] for row in result.tables["memory"]] == ["save", "load", *copies]


def test_traces(measure):
    result = measure("traces")
    assert {row["of"] for row in result.tables["kernels"]} == {"layers", "head"}
    assert result.files == ["trace-layers.json.gz", "trace-head.json.gz"]


def test_gpu_tests_are_counted_and_those_that_did_not_pass_are_named(report, tmp_path, monkeypatch):
    from battery.parts import gpu_tests
    from battery.results import Request

    (tmp_path / "test_marked.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='later')\ndef test_late(): pass\n"
    )
    (tmp_path / "test_lacking.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "test_broken.py").write_text("1 / 0\n")
    (tmp_path / "test_unmarked.py").write_text("def test_other(): assert False\n")
    assert "tests/trainer/test_logprob_kernels.py" in gpu_tests.marked_files()
    files = [str(path) for path in sorted(tmp_path.glob("test_*.py"))]
    monkeypatch.setattr(gpu_tests, "marked_files", lambda: files)
    gpu_tests.measure(report, Request("tests", "", "cpu", "tiny", 3600.0, "", str(tmp_path), str(tmp_path)))
    assert report.result.figures == {"passed": 1, "failed": 2, "skipped": 2}
    outcomes = {row["test"]: (row["outcome"], row["message"]) for row in report.rows("tests")}
    # Which folders precede a name depends on where this checkout lies.
    rows = {test.rpartition("::")[2].rpartition(".")[2]: outcome for test, outcome in outcomes.items()}
    broken, lacking = (next(name for name in rows if word in name) for word in ("test_broken", "test_lacking"))
    assert rows == {
        "test_bad": ("failed", "assert 1 == 2"),
        broken: ("failed", "E   ZeroDivisionError: division by zero"),
        lacking: ("skipped", "a_package_that_is_not_here is not installed"),
        "test_marked (1)": ("skipped", "later"),
    }
    assert report.result.problems == {"tests": "2 of 5 failed"}


METRICS = [
    {"step": 1, "timing/step": 9.0, "reward/avg_raw_reward": 0.1, "generate/tokens_per_second": 10.0},
    {"step": 2, "eval/all/pass_at_1": 0.5},
    {"step": 2, "timing/step": 3.0, "generate/tokens_per_second": 30.0, "policy/mismatch_kl": 0.02},
    {"step": 3, "timing/step": 5.0, "generate/tokens_per_second": 50.0, "policy/mismatch_kl": 0.01},
]


def test_steps_of_the_loop_are_read_while_it_runs(report):
    from battery.parts import whole_loop
    from battery.registry import BY_NAME

    from megatron_fleet.telemetry.registry import find

    whole_loop.add_rows(report, METRICS[:1])
    whole_loop.add_rows(report, METRICS)
    assert [row["step"] for row in report.rows("steps")] == [1, 2, 3]
    assert report.rows("steps")[0].keys() == BY_NAME["loop"].tables["steps"].columns.keys()
    whole_loop.summarise(report, METRICS)
    assert report.result.figures == {"steps": 3, "step_s": 4.0, "tokens_per_s": 40.0, "mismatch": 0.01}
    assert [name for name in [*whole_loop.COLUMNS.values(), whole_loop.MISMATCH] if find(name) is None] == []


MFLEET = """
import json, pathlib, sys
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
print(*sys.argv[1:], file=open({calls!r}, "a"))
if sys.argv[1] == "train":
    out = pathlib.Path(given["run.out"])
    out.mkdir()
    with open(out / "metrics.jsonl", "w") as log:
        for row in {rows!r}:
            print(json.dumps(row), file=log, flush=True)
    sys.exit({status})
"""


@pytest.mark.slow
def test_the_loop_makes_its_model_and_trains_it(report, tmp_path, monkeypatch):
    from battery.parts import whole_loop
    from battery.results import Request

    script, calls = tmp_path / "mfleet.py", tmp_path / "calls"
    monkeypatch.setattr(whole_loop, "MFLEET", [sys.executable, str(script)])
    request = Request("loop", "", "cuda", "full", 3600.0, "", str(tmp_path), str(tmp_path))
    script.write_text(MFLEET.format(calls=str(calls), rows=METRICS, status=0))
    whole_loop.measure(report, request)
    assert calls.read_text().splitlines() == [
        f"model make-random {tmp_path}/model",
        f"train experiment=gpu_smoke run.out={tmp_path}/run model.path={tmp_path}/model",
    ]
    assert report.result.figures["step_s"] == 4.0 and len(report.rows("steps")) == 3
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run").rmdir()
    script.write_text(MFLEET.format(calls=str(calls), rows=METRICS, status=3))
    with pytest.raises(RuntimeError, match="mfleet train ended with status 3"):
        whole_loop.measure(report, request)


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_the_loops_run_is_a_valid_configuration(size):
    pytest.importorskip("hydra")
    from battery.parts import whole_loop

    from megatron_fleet.cli import main
    from megatron_fleet.config import validate
    from megatron_fleet.config.load import load

    validate.check(load([f"experiment={whole_loop.EXPERIMENT[size]}", *whole_loop.OVERRIDES[size]]))
    with pytest.raises(SystemExit) as ended:
        main(["model", "make-random", "--help"])
    assert ended.value.code == 0


NOT_NEEDED = (
    *("accelerate", "boto3", "datasets", "hydra", "mlflow", "omegaconf", "openai", "openenv", "ray", "tensorboard"),
    *("transformer_engine", "transformers", "vllm", "wandb"),
)


@pytest.mark.slow
def test_parts_of_the_trainer_need_few_packages(tmp_path):
    """A machine that is lent for half an hour has PyTorch, and what was brought along."""
    places = {"result": str(tmp_path / "part.json"), "scratch": str(tmp_path), "keep": str(tmp_path)}
    request = {"part": "checkpoint", "module": "battery.parts.checkpointing", "device": "cpu", "size": "tiny"}
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED}))\n"
        f"from battery import child\nfrom battery.results import Request\n"
        f"sys.exit(child.main(Request(**{request | places}, seconds=3600.0)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=4 * HANG_S)
    assert json.loads((tmp_path / "part.json").read_text())["figures"]["bit_equal"] == 1


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_weights_reach_an_engine_and_both_agree(measure):
    result = measure("sync")
    assert result.figures["bit_equal"] == 1 and 0 <= result.figures["agreement"] < 0.02
    assert [row["version"] for row in result.tables["syncs"]] == [1, 2]
    assert result.left_out == {"fp8": "measured on GPUs only"}


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_an_engine_is_measured(measure):
    result = measure("engine")
    assert [row["sequences"] for row in result.tables["throughput"]] == [1, 3]
    assert result.left_out["memory freed by sleep"].startswith("vLLM frees no memory")


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_layers_over_two_ranks(measure):
    result = measure("ranks", processes=True)
    assert [(row["tensor"], row["data"]) for row in result.tables["speed"]] == [(1, 1), (2, 1), (1, 2)]


@pytest.mark.slow
def test_a_part_is_measured_by_the_command(tmp_path, importable):
    import run

    assert run.main(["--device", "cpu", "--parts", "device", "--out", str(tmp_path)]) == 0
    check(run.BY_NAME["device"], json.loads((tmp_path / "cpu" / "device.json").read_text()))
