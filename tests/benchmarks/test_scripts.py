"""Every script in ``benchmarks/`` starts, runs at a tiny size, and says which sources it measured."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from turns import in_turn
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")
from megatron_fleet.config.load import load
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.parser import ToolResult

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8"))
EPISODE = {"env_concurrency_roles.py"}
"""Scripts for the episode environment."""
TINY = {
    "controller.py": "--steps 1 --sequences 2 --large 2 --run-steps 0",
    "long_engines.py": "--experiments qwen3_5_35b_a3b_fleet --seeds 1",
    "mixture.py": "--seeds 1 --steps 2 --prompts 4 --samples 2",
    "offload.py": "--layers 1 --hidden 64 --vocab 512 --repeats 1",
    "quant_kernels.py": "--rows 128 --cols 128 --repeats 1",
    "report.py": "--steps 2 --episodes 16 --distinct 2 --opens 1",
    "storage.py": "{folder} --gb 0.04 --rounds 1",
    "transfers.py": "--mb 4 --rounds 1",
    "two_runs.py": "--sequences 2 --steps 1",
    "verdicts.py": "--rounds 1",
    "weight_sync.py": "--layers 1 --hidden 256 --vocab 1024 --repeats 1",
}
LONG = ("two_runs.py", "weight_sync.py")
ELSEWHERE = {
    "checkpoint.py": "trainer/test_checkpoint_benchmark.py",
    "convert.py": "benchmarks/test_scripts.py",
    "counts.py": "trainer/test_counts.py",
    "emulated_ranks.py": "trainer/test_group.py",
    "env_concurrency.py": "envs/test_env_concurrency_benchmark.py",
    "env_concurrency_roles.py": "envs/test_env_concurrency_benchmark.py",
    "logprob_memory.py": "trainer/test_logprob_benchmark.py",
    "measured_points.py": "planning/test_measured_points.py",
    "memory_points.py": "planning/test_memory_points.py",
    "modes.py": "benchmarks/test_scripts.py",
    "mutations.py": "test_mutations_benchmark.py",
    "packing.py": "trainer/test_pack_benchmark.py",
    "peers.py": "benchmarks/test_scripts.py",
    "peers_trl.py": "benchmarks/test_scripts.py",
    "rollout.py": "rollout/test_rollout_benchmark.py",
    "rollout_roles.py": "rollout/test_rollout_benchmark.py",
    "simulator.py": "planning/test_planning_simulation.py",
    "step_points.py": "planning/test_planning_points.py",
    "train_step.py": "trainer/test_train_step_benchmark.py",
}
"""Script → the test that runs it, or the script whose process it is."""
HELP = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv, said = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        status = "goes on"
    except SystemExit as ended:
        status = ended.code
    except BaseException as error:
        status = repr(error)
    if status != 0 or not said.getvalue().startswith("usage:"):
        print(script, status, said.getvalue()[:200])
"""


def test_every_script_has_a_tiny_run():
    assert {path.name for path in SCRIPTS} == TINY.keys() | ELSEWHERE.keys()
    assert not TINY.keys() & ELSEWHERE.keys()
    for name, test in ELSEWHERE.items():
        stem = Path(name).stem.removesuffix("_roles")
        assert stem in (ROOT / "tests" / test).read_text("utf-8"), f"{test} does not run {name}"


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=2)
def test_help(episode_python):
    for python, scripts in (
        (sys.executable, [path for path in SCRIPTS if path.name not in EPISODE]),
        (episode_python, [path for path in SCRIPTS if path.name in EPISODE]),
    ):
        command = [str(python), "-c", HELP, *map(str, scripts)]
        env = os.environ | {"PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANG_S, env=env)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *in_turn(name for name in TINY if name not in LONG),
        *(pytest.param(name, marks=pytest.mark.nightly(minutes=0.5)) for name in LONG),
    ],
)
def test_tiny_run(name, tmp_path):
    if name == "weight_sync.py":
        pytest.importorskip("vllm")
    arguments = TINY[name].format(folder=tmp_path).split()
    report = run(name, *arguments)
    assert report["sources"] and report["machine"]["cores"] == os.cpu_count()
    assert min(numbers(report)) >= -1  # no figure is missing or not a number


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_conversions_of_small_models(tmp_path, monkeypatch, capsys):
    import convert

    small = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 512}
    monkeypatch.setattr(convert, "DENSE", convert.DENSE | small)
    monkeypatch.setattr(convert, "EXPERTS", convert.EXPERTS | small | {"num_experts": 8, "moe_intermediate_size": 64})
    text = convert.KIMI["text_config"] | small | {"num_hidden_layers": 2, "n_routed_experts": 8}
    monkeypatch.setattr(convert, "KIMI", convert.KIMI | {"text_config": text | {"moe_intermediate_size": 64}})
    monkeypatch.setattr(convert, "KIMI_FILES", 2)
    monkeypatch.setattr(convert, "kernels", dict)
    sizes = "--dense-gb 0.001 --moe-gb 0.001 --repeats 1 --workers 1 --kimi-shards 2"
    monkeypatch.setattr(sys, "argv", ["convert.py", "--dir", str(tmp_path), *sizes.split()])
    convert.main()
    report = json.loads(capsys.readouterr().out)
    assert report["sources"] and report["ratio_to_hf"] > 0 and report["kimi"]["shard_gb"] >= 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_modes_are_measured_and_drawn(tmp_path):
    pytest.importorskip("vllm")
    small = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "eval.tasks=2", "eval.greedy=false")
    places = ("rollout.episodes_in_flight=4", "env.faults.latency_median_s=0.01")
    picture = ("--picture", str(tmp_path / "modes.svg"))
    modes = ("--modes", "wait", "continue", "--seeds", "0", "--steps", "4")
    report = run("modes.py", "--out", str(tmp_path), *modes, *picture, "--", *small, *places)
    for part in ("speed", "learning"):
        assert [one["mode"] for one in report[part]] == ["wait", "continue"] and report["sources"]
    assert all(one["of_bound"] > 0.5 for one in report["speed"])
    assert all(0 <= one["pass_at_1_after"] <= 1 for one in report["learning"])
    assert "<svg" in (tmp_path / "modes.svg").read_text()


@pytest.mark.slow
@pytest.mark.nightly(minutes=2)
@pytest.mark.skipif("MFLEET_TRL_PYTHON" not in os.environ, reason="names the interpreter of an environment with TRL")
def test_both_sides_of_a_comparison_do_the_same(tmp_path):
    pytest.importorskip("vllm")
    small = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4")
    sizes = ("--rounds", "1", "--steps", "2", "--batch", "8", "--python", os.environ["MFLEET_TRL_PYTHON"])
    report = run("peers.py", "--out", str(tmp_path), *sizes, "--", *small)
    ours, trl = (report["sides"][name] for name in ("ours", "trl"))
    assert report["sources"] and report["ratio"] > 0 and report["episodes_per_step"] == 16
    for name in ("tokens", "turns"):
        assert 0.6 < trl["untrained"][name] / ours["untrained"][name] < 1.6, name


def test_a_comparison_gives_trl_our_prompts_and_tools(tmp_path):
    import peers
    import peers_trl
    from transformers import AutoTokenizer

    config = load(["experiment=quickstart", *peers.COMMON, "run.steps=3", f"run.out={tmp_path}"])
    plan = json.loads(json.dumps(peers.plan(config, batch=16, more={})))
    assert len(plan["rows"]) == 48 and plan["tools"].keys() == {"tickets", "booking", "ledger"}
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    tokenizer.chat_template = plan["template"]
    renderer = make_renderer(plan["model"], thinking=True)
    for row in plan["rows"]:
        kind = peers_trl.environment(plan["tools"][row["environment"]])
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        assert {*names} == {"reset", *(tool["function"]["name"] for tool in plan["tools"][row["environment"]])}
        said = tokenizer.apply_chat_template(
            row["prompt"], tools=[getattr(kind("", None), name) for name in names if name != "reset"],
            add_generation_prompt=True, return_dict=False,
        )  # fmt: skip
        system, user = (message["content"] for message in row["prompt"])
        tools = plan["tools"][row["environment"]]
        assert said == renderer.initial(system.partition("\n\n# Tools")[0], tools, user)
    call = {"type": "function", "function": {"name": "list_accounts", "arguments": {}}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = tokenizer.apply_chat_template(talk, return_dict=False)
    results = [ToolResult("list_accounts", text, number) for number, text in enumerate(("kind\ncash", "none"))]
    talk += [{"role": "tool", "name": result.name, "content": result.text} for result in results]
    after = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    end = tokenizer.eos_token_id
    assert after[: len(before)] == before
    assert after[len(before) - 1 :] == renderer.observation(results, end)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"content": " Ana <done>"}, "Ana"),
        ({"content": "Ana"}, None),
        ({"content": "Ana <done>", "tool_calls": [{}]}, None),
        ({"role": "tool", "content": "<done>"}, None),
    ],
)
def test_the_final_answer_of_trl_is_that_before_the_tag(message, answer):
    import peers_trl

    assert peers_trl.final_answer([{"role": "assistant", **message}]) == answer


def run(name: str, *arguments: str):
    """The report of a script, the last line of its output."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8 * HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def numbers(value):
    """All numbers of a report."""
    if isinstance(value, dict | list):
        return [n for each in (value.values() if isinstance(value, dict) else value) for n in numbers(each)]
    return [value] if isinstance(value, int | float) else []
