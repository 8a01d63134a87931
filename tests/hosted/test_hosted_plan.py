"""Plan of a run at the service: its tokens by hand, its passes, its cost."""

from __future__ import annotations

import json

import pytest

from megatron_fleet import cli
from megatron_fleet.config.load import load
from megatron_fleet.hosted import prices
from megatron_fleet.hosted.prices import Tokens
from megatron_fleet.loop.dry_run import describe
from megatron_fleet.planning.hosted_run import evaluations_of, make_hosted_plan, tokens_of_episodes
from megatron_fleet.planning.workload import Workload

RUN = ("experiment=tinker_quickstart", "run.steps=10", "eval.tasks=5", "eval.samples=2", "eval.greedy=false")
PRICES = tuple(f"hosted.prices.{name}=0.5" for name in ("prefill", "cached_prefill", "sample", "train"))


@pytest.fixture(autouse=True)
def no_list(monkeypatch):
    monkeypatch.setattr(prices, "PRICE_LIST", "http://127.0.0.1:9")


def plan(*overrides: str):
    config = load([*RUN, *overrides])
    return make_hosted_plan(config, Workload.of(config.rollout, config.env, 1000.0, 0.25, 5.0))


def test_tokens_of_an_episode_by_hand():
    """Turn k of 3 has a prompt of 100 · k tokens: 50 new ones, the rest was sent or sampled before."""
    load = Workload(episodes=1, mean=300, longest=300, sampled=0.5, turns=3)
    assert tokens_of_episodes(load, 2) == Tokens(sampled=300, prefill_cached=600, prefill_uncached=300)


TRAINED = {
    (): (1, 1, 0),
    ("algorithm=importance_weighted",): (2, 2, 0),
    ("algorithm=importance_weighted", "hosted.losses=service"): (1, 1, 0),
    ("algorithm.kl.coef=0.1",): (2, 2, 1),
    ("policy.updates_per_batch=4",): (3, 9, 0),  # log-probs of π_old, then two passes over each quarter
    ("policy.updates_per_batch=4", "algorithm=reinforce"): (1, 4, 0),
}


@pytest.mark.parametrize(("overrides", "passes"), TRAINED.items())
def test_passes_and_cycles_of_an_update(overrides, passes):
    trained, cycles, scored = passes
    found = plan(*overrides)
    tokens = found.load.tokens
    assert found.step.trained == trained * tokens and found.cycles == cycles
    assert found.step.prefill_uncached == 0.75 * tokens + scored * tokens


@pytest.mark.parametrize(
    ("overrides", "count"),
    [((), 2), (("eval.interval=4",), 4), (("eval.interval=5",), 3), (("eval=none",), 0)],
)
def test_evaluations_of_a_run(overrides, count):
    assert evaluations_of(load([*RUN, *overrides])) == count


def test_the_command_prints_tokens_cost_and_seconds(capsys):
    command = ["plan", *RUN, *PRICES, "hosted.budget_usd=0.01", "--tokens", "1000"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "model: Qwen/Qwen3-8B, adapters of rank 16" in text and "10 steps, 2 evaluations" in text
    assert "% of what the run costs" in text
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run, step, evaluation = (found["tokens"][name] for name in ("run", "step", "evaluation"))
    assert run == {kind: 10 * step[kind] + 2 * evaluation[kind] for kind in step}
    assert found["usd"]["run"] == pytest.approx(0.5e-6 * sum(run.values()))
    assert cli.main([*command, "hosted.budget_usd=1000"]) == 0
    assert "hosted.budget_usd=1000 is enough" in capsys.readouterr().out


def test_what_is_not_known_is_said(capsys):
    assert cli.main(["plan", *RUN, "run.steps=null", "run.epochs=2", "eval.tasks=null"]) == 0
    text = capsys.readouterr().out
    assert "not known (http://127.0.0.1:9 cannot be read: " in text and "set hosted.prices" in text
    assert "run: " not in text.partition("tokens")[2] and "eval.tasks=null) are left out" in text


def test_episodes_that_wait_for_others_take_longer():
    seconds = {number: plan(f"rollout.episodes_in_flight={number}").play_s for number in (16, 64, 256)}
    assert seconds[16] == 4 * seconds[64] and seconds[64] == seconds[256]
    assert seconds[256] == plan("rollout.episodes_in_flight=auto").play_s


@pytest.mark.parametrize("flag", ["--gpu=H100", "--search=8", "--simulate", "--price=2", "--gpu-memory=80"])
def test_flags_about_gpus_are_refused(capsys, flag):
    assert cli.main(["plan", *RUN, flag]) == 2
    assert f"{flag.partition('=')[0]} is about GPUs" in capsys.readouterr().err


def test_a_dry_run_tells_the_cost(tmp_path):
    text = describe(load([*RUN, *PRICES, f"run.out={tmp_path}"]))
    assert "# cost (computed, as by mfleet plan)\n#   step $" in text
