"""Checks of configuration and service before a hosted run starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tinker_service import BASE_MODEL, running

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.hosted.address import address
from megatron_fleet.hosted.service import ServedModel, check_service
from megatron_fleet.preflight import checks

HOSTED = ("experiment=quickstart", "trainer=hosted", f"hosted.base_model={BASE_MODEL}")
REFUSED = {
    "policy.lora.rank=0": "trains adapters only; set policy.lora.rank",
    "policy.lora.export=merged": "gives the adapters alone; set it to adapters",
    "checkpoint.export.every=5": "checkpoints hold no weights; set it to 0",
    "checkpoint.export.best=true": "checkpoints hold no weights; set it to false",
    "policy.lora.alpha=16": r"policy\.lora\.alpha=16 .* set it to 32\.",
    "rollout.sampling.temperature=0.8": r"temperature=0\.8 .* the service trains at temperature 1; set it to 1\.",
    "algorithm.entropy_coef=0.01": "the service returns no entropy; set it to 0",
    "rollout.engine.routing_replay=true": "the service tells no experts; set it to false",
    "policy.gradient_metrics.every=5": "the service shows no gradients; set it to 0",
    "rollout.sampler=vllm": "set both to hosted .*, or none",
    "policy.trainer=megatron": "set both to hosted .*, or none",
    "hosted.base_model=null": r"the service knows models by name, not by folder; set hosted\.base_model",
    "rollout.engine.colocated=true": "uses no devices of the run",
}


def test_the_preset_is_accepted():
    validate.check(load([*HOSTED]))


@pytest.mark.parametrize(("override", "said"), REFUSED.items())
def test_what_the_service_does_not_do_is_refused(override, said):
    with pytest.raises(UserError, match=said):
        validate.check(load([*HOSTED, override]))


@pytest.mark.parametrize(
    ("path", "name"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("Qwen/Qwen3-8B@0123abc", "Qwen/Qwen3-8B"), ("s3://bucket/model", None)],
)
def test_the_service_has_the_hubs_name_of_a_model(path, name):
    assert load(HOSTED[:2]).hosted.model(path) == name
    assert load(HOSTED).hosted.model(path) == BASE_MODEL


def test_the_address_is_the_keys_or_a_variables():
    hosted = load(HOSTED).hosted
    both = {"TINKER_BASE_URL": "http://one", "TINKER_API_URL": "http://two"}
    assert address(hosted, both) == "http://one" and address(hosted, {"TINKER_API_URL": "http://two"}) == "http://two"
    assert address(hosted, {}) is None
    assert address(load([*HOSTED, "hosted.url=http://three"]).hosted, both) == "http://three"


def test_a_model_and_a_length_are_checked_at_the_service(service):
    check_service(ServedModel(BASE_MODEL, 4096), service.url, 60)
    with pytest.raises(UserError, match="does not train this model; it trains test/tiny"):
        check_service(ServedModel("other/model", 4096), service.url, 60)
    with pytest.raises(UserError, match=r"rollout\.max_context=4097: .* at most 4096 tokens"):
        check_service(ServedModel(BASE_MODEL, 4097), service.url, 60)


KEYS = {
    "tml-wrong": r"refuses the key .* set TINKER_API_KEY",
    "sk-other": r"no usable key was found .* begins with tml-",
}


@pytest.mark.parametrize(("key", "said"), KEYS.items())
def test_a_key_that_the_service_does_not_take_is_refused(tmp_path, monkeypatch, key, said):
    """At an address of its own: the package keeps the connections, and so the key, of one that it has asked."""
    monkeypatch.setenv("TINKER_API_KEY", key)
    with running(tmp_path / "service") as service, pytest.raises(UserError, match=said):
        check_service(ServedModel(BASE_MODEL, 4096), service.url, 60)


def test_a_service_that_does_not_answer_is_named_in_time(service):
    """In a process of its own: the package keeps trying for five minutes, and its other clients would wait for that."""
    service.kill()
    program = (
        "import sys\nfrom megatron_fleet.config.errors import UserError\n"
        "from megatron_fleet.hosted.service import ServedModel, check_service\n"
        "try:\n    check_service(ServedModel('test/tiny', 4096), sys.argv[1], 0.5)\n"
        "except UserError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, service.url], capture_output=True, text=True, check=True)
    assert f"the service at {service.url} cannot be reached (no answer in 0.5 s)" in done.stdout


def test_an_evaluation_of_a_folder_is_not_the_services():
    with pytest.raises(UserError, match=r"mfleet eval with policy\.trainer=hosted: .* leave out trainer=hosted"):
        checks.check_evaluation(load(HOSTED))


def test_without_the_package_setup_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    monkeypatch.delitem(sys.modules, "megatron_fleet.hosted.service")
    with pytest.raises(UserError, match=r"needs the package tinker, .*\./setup\.sh --hosted"):
        checks._hosted(load(HOSTED))
