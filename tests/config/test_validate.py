"""Combinations that cannot work are refused, each with the keys to change."""

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load

FP8_WEIGHTS = ["model.dtype=bfloat16", "precision.recipe=fp8_tensorwise", "precision.fp8_param_gather=true"]

OWN_PAIR = ["policy.trainer=my:Own", "rollout.sampler=my:Own"]


def check(*overrides: str) -> None:
    validate.check(load(["experiment=quickstart", *overrides]))


def test_quickstart_is_accepted():
    check()


def test_a_trainer_and_a_sampler_of_the_users_own_are_accepted():
    check(*OWN_PAIR)
    check(*OWN_PAIR, "rollout.engine.transport=message")
    check("policy.trainer=my:Own", "rollout.engine.transport=my:transport")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.micro_batch_tokens=1023"], ["policy.micro_batch_tokens=1023", "rollout.max_context=1024"]),
        (
            ["rollout.sampling.max_tokens_per_turn=1024"],
            ["rollout.sampling.max_tokens_per_turn", "rollout.max_context"],
        ),
        (["rollout.sampling.temperature=0"], ["rollout.sampling.temperature"]),
        (["env.kind=openenv", "data.tasks=x"], ["env.url"]),
        (["policy.trainer=my:Own"], ["policy.trainer=my:Own with rollout.sampler=vllm: no built-in transport"]),
        (["rollout.sampler=my:Own"], ["policy.trainer=megatron with rollout.sampler=my:Own: no built-in transport"]),
        (["rollout.engine.transport=message"], ["transport=message with policy.trainer=megatron", "too large"]),
        ([*OWN_PAIR, "rollout.engine.transport=shm"], ["transport=shm with policy.trainer=my:Own", "set it to auto"]),
        ([*OWN_PAIR, "cluster.ranks=external"], ["cluster.ranks=external with policy.trainer=my:Own", "to local"]),
        ([*OWN_PAIR, "rollout.engine.colocated=true"], ["colocated=true with policy.trainer=my:Own", "to null"]),
        (["env.kind=openenv", "env.url=host:80", "data.tasks=x"], ["env.url=host:80", "http://"]),
        (["env.url=http://h"], ["env.url", "env.kind=openenv"]),
        *(
            (["env=openenv", f"env.url='{url}'", "data.tasks=x"], ["env.url=", "not the address of a server"])
            for url in ("http://[::1", "http://h:99999", "http://h:0", "http://", "ftp://h", "http://a b")
        ),
        (["env=openenv", "env.url='http://u:hidden@[::1'", "data.tasks=x"], ["holds a user or a password"]),
        (
            ["logging.mlflow.uri='http://[::1'"],
            ["logging.mlflow.uri=http://[::1", "sqlite:///FILE", "http://host:port"],
        ),
        *(
            ([f"logging.wandb.project='{name}'", "logging.wandb.mode=offline"], ["logging.wandb.project=", words])
            for name, words in (
                ("team/mine", "W&B refuses / in the name of a project; choose another; the team goes to"),
                ("50%?", "W&B refuses % ? in"),
                ("x" * 129, "1 to 128 characters"),
                (" ", "1 to 128 characters"),
            )
        ),
        (
            ["logging.mlflow.uri=http://h", f"logging.mlflow.experiment={'x' * 501}"],
            ["logging.mlflow.experiment=", "1 to 500 characters"],
        ),
        (["env=openenv", "env.url=http://h"], ["data.tasks", "mfleet data export"]),
        (["rollout.episode_timeout_s=60"], ["rollout.engine.request_timeout_s", "rollout.episode_timeout_s"]),
        (
            ["rollout.max_context=8192", "policy.micro_batch_tokens=8192", "rollout.sampling.max_tokens_per_turn=2000"],
            ["rollout.sampling.max_tokens_per_turn / rollout.engine.min_tokens_per_s=320", "rollout.episode_timeout_s"],
        ),
        (
            ["rollout.engine.expert_parallel=true"],
            ["rollout.engine.expert_parallel=true", "rollout.engine.tensor_parallel=1"],
        ),
        (["policy.overlap=true"], ["policy.overlap=true has no effect", "parallel.data × parallel.context = 1"]),
        (["policy.router.dispatcher=deepep"], ["policy.router.dispatcher=deepep needs model.dtype=bfloat16"]),
        (
            ["policy.router.dispatcher=deepep", "model.dtype=bfloat16", "policy.router.dtype=float64"],
            ["policy.router.dispatcher=deepep needs policy.router.dtype=float32"],
        ),
        (
            ["policy.router.dispatcher=deepep", "model.dtype=bfloat16", "parallel.data=3", "parallel.expert=3"],
            ["policy.router.dispatcher=deepep", "= 3 ranks: it supports 2, 4, 8", "policy.router.dispatcher=auto"],
        ),
        (["rollout.engine.quantization=fp8"], ["rollout.engine.quantization=fp8", "model.dtype=float32"]),
        (
            ["rollout.engine.quantization=fp8", "policy.fake_quant=int4_experts", "model.dtype=bfloat16"],
            ["rollout.engine.quantization=fp8", "policy.fake_quant=int4_experts"],
        ),
        (
            ["rollout.engine.max_num_batched_tokens=100"],
            ["rollout.engine.max_num_batched_tokens=100", "128 sequences", "rollout.engine.max_num_seqs"],
        ),
        (
            ["rollout.engine.routing_replay=true", "rollout.engine.speculative.method=ngram"],
            ["rollout.engine.routing_replay=true", "rollout.engine.speculative.method=ngram"],
        ),
        (["env.verify_timeout_s=300"], ["env.verify_timeout_s", "rollout.episode_timeout_s"]),
        (["policy.updates_per_batch=17"], ["policy.updates_per_batch", "rollout.prompts_per_step"]),
        (["parallel.data=129"], ["128 trajectories", "parallel.data=129"]),
        (["rollout.workers=2", "rollout.episodes_in_flight=1"], ["rollout.workers=2"]),
        (
            ["rollout.workers=200", "rollout.episodes_in_flight=auto"],
            ["rollout.episodes_in_flight=auto plays at most 128 episodes", "rollout.workers=200"],
        ),
        (["rollout.episodes_in_flight=0"], ["rollout.episodes_in_flight=0: it must be auto or integer ≥ 1"]),
        (["rollout.episodes_in_flight=all"], ['rollout.episodes_in_flight="all": it must be auto or integer']),
        (["policy.optimizer.betas=[0.9,1.0]"], ["policy.optimizer.betas"]),
        (["policy.optimizer.min_lr=1"], ["policy.optimizer.min_lr", "policy.optimizer.lr"]),
        (
            ["policy.optimizer.schedule=constant", "policy.optimizer.min_lr=1e-6"],
            ["policy.optimizer.min_lr", "schedule=constant"],
        ),
        (["algorithm.loss=reinforce", "algorithm.clip_low=0.1"], ["clip_low=0.1 has no effect", "loss=reinforce"]),
        (["algorithm=sapo", "algorithm.clip_high=0.3"], ["clip_high=0.3 has no effect", "loss=sapo"]),
        (["algorithm=dapo_clip", "algorithm.loss=gspo"], ["dual_clip=3 has no effect", "loss=gspo"]),
        (["algorithm.correction.high=2"], ["correction.high=2 has no effect", "kind=off"]),
        (
            ["algorithm.correction.kind=token_tis", "algorithm.correction.low=0.5"],
            ["correction.low=0.5 has no effect", "kind=token_tis"],
        ),
        (
            ["algorithm=importance_weighted", "algorithm.correction.kind=icepop"],
            ["kind=icepop", "loss=importance_weighted", "outlier_mask"],
        ),
        (
            ["rollout.max_staleness=2"],
            ["rollout.max_staleness=2", "algorithm.loss=ppo_clip", "algorithm=importance_weighted"],
        ),
        (
            [*FP8_WEIGHTS, "rollout.engine.colocated=true"],
            ["rollout.engine.colocated=true with precision.fp8_param_gather=true"],
        ),
        (["parallel.tensor=1000000007"], ["parallel.tensor=1000000007", "131072"]),
        (["rollout.engine.replicas=131073"], ["rollout.engine.replicas=131073", "131072"]),
        (["env.step_timeout_s=1e300"], ["env.step_timeout_s=1e+300"]),
        (["run.name=" + "x" * 101], ["run.name", "101 characters"]),
        (["policy.micro_batch_tokens=1000000000000000"], ["policy.micro_batch_tokens=1000000000000000", "≤ 67108864"]),
        (["rollout.prompts_per_step=1000000000000"], ["rollout.prompts_per_step=1000000000000", "≤ 100000"]),
        (["rollout.samples_per_prompt=1000000000"], ["rollout.samples_per_prompt=1000000000", "≤ 10000"]),
        (["rollout.max_context=1000000000000"], ["rollout.max_context=1000000000000", "≤ 67108864"]),
        (["policy.lora.rank=10000000"], ["policy.lora.rank=10000000", "≤ 65536"]),
        (["eval.engines=1", "eval.at_start=false"], ["eval.engines=1", "eval.at_start=false", "set eval.interval"]),
        (["eval.engines=1", "eval.overlap=true"], ["eval.engines=1 with eval.overlap=true", "set only one of them"]),
        (
            ["eval.engines=2", "rollout.engine.colocated=true"],
            ["eval.engines=2 needs rollout.engine.colocated=false", "eval.overlap=true"],
        ),
        (
            ["trainer=hosted", "hosted.base_model=some/model", "eval.engines=1"],
            ["eval.engines=1 with policy.trainer=hosted", "set eval.engines=0"],
        ),
        (["eval.engines=131073"], ["eval.engines=131073", "131072"]),
        (["eval.endpoint.extra_body=[1]"], ["eval.endpoint.extra_body must be a JSON object"]),
        (["eval.endpoint.extra_body={"], ["eval.endpoint.extra_body: line 1, column 2: not JSON"]),
        (
            ["eval.endpoint.extra_body=" + '{"a":' * 600 + "1" + "}" * 600],
            ["eval.endpoint.extra_body: its JSON is nested more than 200 levels deep"],
        ),
        (["eval.endpoint.api_key_env="], ["eval.endpoint.api_key_env=''", "OPENAI_API_KEY"]),
        (["eval.endpoint.api_key_env=A-B"], ["eval.endpoint.api_key_env='A-B'", "cannot name a variable"]),
        (["eval.endpoint.url=host/v1"], ["eval.endpoint.url=host/v1", "https://host:port"]),
        (["env.sandbox=full", "eval.upload=s3://key:hidden@bucket"], ["eval.upload holds an @"]),
        (["run.name=a\x07b"], ["run.name='a\\x07b'", "control characters"]),
        (["env.openenv.finish_tool=" + "x" * 4001], ["env.openenv.finish_tool", "4001 characters"]),
        (["logging.mlflow.uri=mlruns"], ["logging.mlflow.uri=mlruns", "http://"]),
    ],
)
def test_impossible_combinations_are_explained(overrides, keys):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert all(key in str(caught.value) for key in keys), str(caught.value)


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("eval.endpoint.url", "http://u:hidden@h/v1"),
        *(
            ("eval.endpoint.url", f"http://h/v1?a=1&{name}=hidden")
            for name in ("api_key", "token", "sig", "X-Amz-Signature")
        ),
        ("eval.endpoint.url", "ftp://h/v1?client_secret=hidden"),
        ("logging.mlflow.uri", "http://h?password=hidden#part"),
        ("env.url", "ws://h:99999/?access-token=hidden"),
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(key, url):
    own = ["env=openenv", "data.tasks=x"] if key == "env.url" else []
    with pytest.raises(UserError, match=f"^{key} holds .*written to files") as caught:
        check(*own, f"{key}='{url}'")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("query", ["?api-version=2024-10-21", "?design=1&signal=2&author=x", ""])
def test_other_parameters_of_an_address_are_taken(query):
    check(f"eval.endpoint.url='http://h/v1{query}'")


@pytest.mark.parametrize(
    "overrides",
    [
        FP8_WEIGHTS,
        ["policy.micro_batch_tokens=1024"],
        ["rollout.sampling.max_tokens_per_turn=1023"],
        ["parallel.data=128"],
        ["policy.updates_per_batch=16"],
        ["env=openenv", "env.url=http://h", "data=file", "data.tasks=x"],
        ["algorithm=importance_weighted", "algorithm.correction.kind=geometric_mask", "algorithm.correction.low=0.9"],
        ["algorithm=gspo", "algorithm.clip_low=1", "algorithm.correction.kind=icepop", "algorithm.correction.high=3"],
        ["algorithm=reinforce", "algorithm.correction.kind=token_tis", "algorithm.correction.high=1"],
        ["logging.mlflow.uri=https://host:5000"],
    ],
)
def test_the_edge_is_accepted(overrides):
    check(*overrides)


def test_a_password_is_refused_and_not_shown():
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        check("logging.mlflow.uri=https://me:secret@host")
    assert "secret" not in str(caught.value)
