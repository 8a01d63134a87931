"""Tokens that a hosted run is billed for, their prices, and its budget."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from policy_fixtures import make_batch
from tinker_service import BASE_MODEL

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.config.sections.hosted import HostedConfig
from megatron_fleet.config.validate import check
from megatron_fleet.hosted import prices
from megatron_fleet.hosted.prices import Prices, Tokens, find_prices, prices_of_run
from megatron_fleet.hosted.spending import SPENT, Spending
from megatron_fleet.hosted.trainer import HostedTrainer
from megatron_fleet.rollout.engine_statistics import EngineStatistics, engine_metrics
from megatron_fleet.telemetry.registry import find
from megatron_fleet.trainer.base import AdamParams, BudgetSpent, LossSpec

PRICES = Prices(prefill=0.2, cached_prefill=0.04, sample=0.6, train=0.4)
COUNTED = EngineStatistics(prompt_tokens=1000, cache_queries=5000, cache_hits=4000, generated_tokens=300)
ENGINES = engine_metrics([COUNTED])
LISTED = [
    {"tinker_id": "other/model", "prefill": "$9", "cached_prefill": "$9", "sample": "$9", "train": "$9"},
    {"tinker_id": BASE_MODEL, "prefill": "$1,000.50", "cached_prefill": " $0.04", "sample": "0.6", "train": "$0.40"},
    {"tinker_id": "new/model", "prefill": "$1", "cached_prefill": "n/a", "sample": "$1", "train": "$1"},
]


def test_tokens_of_a_step_and_of_the_whole_run_are_priced(tmp_path):
    spent = Spending(tmp_path / SPENT, PRICES, None)
    spent.add(Tokens(trained=2000))
    spent.record(ENGINES)
    spent.add(Tokens(trained=50, prefill_uncached=7))
    found = spent.record(engine_metrics([]))
    assert {k: v for k, v in found.items() if k.startswith("tokens/")} == {
        "tokens/sampled": 0, "tokens/prefill_cached": 0, "tokens/prefill_uncached": 7, "tokens/trained": 50,
        "tokens/cumulative/sampled": 300, "tokens/cumulative/prefill_cached": 4000,
        "tokens/cumulative/prefill_uncached": 1007, "tokens/cumulative/trained": 2050,
    }  # fmt: skip
    assert found["cost/step_usd"] == pytest.approx((7 * 0.2 + 50 * 0.4) / 1e6)
    total = (1007 * 0.2 + 4000 * 0.04 + 300 * 0.6 + 2050 * 0.4) / 1e6
    assert found["cost/cumulative_usd"] == spent.usd == pytest.approx(total)
    assert all(find(name) for name in found)
    assert Spending(tmp_path / SPENT, PRICES, None).usd == pytest.approx(total)  # of another process


def test_without_prices_tokens_are_counted_alone(tmp_path):
    spent = Spending(tmp_path / SPENT, None, None)
    assert spent.record(ENGINES)["tokens/sampled"] == 300 and spent.usd is None
    assert not any(name.startswith("cost/") for name in spent.record(ENGINES))


def test_a_spent_budget_is_told(tmp_path):
    spent = Spending(tmp_path / SPENT, PRICES, 1.0)
    spent.add(Tokens(trained=2_499_999))
    spent.check()
    spent.add(Tokens(trained=1))
    with pytest.raises(BudgetSpent, match=r"hosted\.budget_usd=1: this run has spent 1\.00 US dollars"):
        spent.check()


async def test_every_pass_is_counted(make_config, tmp_path):
    data = make_batch(count=6, longest=40, vocab_size=1024)
    length = sum(len(datum) for datum in data)
    trainer = HostedTrainer(make_config("algorithm.kl.coef=0.1"))
    await trainer.start(None)
    try:
        await trainer.keep_reference()
        reference = await trainer.forward(data, "reference")
        for datum, values in zip(data, reference, strict=True):
            datum.arrays["reference"] = values
        await trainer.forward(data)
        for kl in (0.1, 0.0):  # in two passes, and in one
            await trainer.forward_backward(data, LossSpec.of(AlgorithmConfig.model_validate({"kl": {"coef": kl}})))
            await trainer.optim_step(AdamParams(1e-3))
    finally:
        await trainer.close()
    assert json.loads((tmp_path / "out" / SPENT).read_text()) == {
        "sampled": 0, "prefill_cached": 0, "prefill_uncached": length, "trained": 4 * length,
    }  # fmt: skip


@pytest.fixture
def price_list(monkeypatch):
    """The list at an address of this machine; its answer can be replaced."""
    answer = {"body": json.dumps(LISTED).encode(), "status": 200}

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answer["status"])
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(prices, "PRICE_LIST", f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()
    server.server_close()


GIVEN = {"prices": {"prefill": 0.2, "cached_prefill": 0.04, "sample": 0.6, "train": 0.4}}


def test_prices_are_those_of_the_configuration_or_of_the_list(price_list, monkeypatch):
    assert find_prices(HostedConfig(url="http://other", **GIVEN), BASE_MODEL) == PRICES
    assert find_prices(HostedConfig(), BASE_MODEL) == Prices(1000.5, 0.04, 0.6, 0.4)
    monkeypatch.setenv("TINKER_BASE_URL", "http://other")
    with pytest.raises(LookupError, match="no list of the prices at http://other"):
        find_prices(HostedConfig(), BASE_MODEL)


UNREADABLE = {
    "the status": {"status": 500},
    "no JSON": {"body": b"<html>"},
    "another form": {"body": b'{"models": []}'},
    "a row without a name": {"body": b'[{"prefill": "$1"}]'},
}


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_a_list_that_cannot_be_read_matters_to_a_budget_alone(price_list, change, caplog):
    price_list.update(change)
    assert prices_of_run(HostedConfig(), BASE_MODEL) is None
    assert f"the prices of {BASE_MODEL} are not known" in caplog.text
    with pytest.raises(UserError, match=r"hosted\.budget_usd=5: .* cannot be read: .*; set hosted\.prices"):
        prices_of_run(HostedConfig(budget_usd=5), BASE_MODEL)


@pytest.mark.parametrize(("model", "said"), [("no/model", "does not list it"), ("new/model", "could not convert")])
def test_a_model_without_all_prices_has_none(price_list, model, said):
    with pytest.raises(LookupError, match=said):
        find_prices(HostedConfig(), model)


def test_some_prices_alone_are_refused():
    hosted = ("experiment=quickstart", "trainer=hosted", f"hosted.base_model={BASE_MODEL}")
    with pytest.raises(UserError, match=r"hosted\.prices\.cached_prefill is null, .* set all four, or none"):
        check(load([*hosted, "hosted.prices.prefill=0.2"]))
