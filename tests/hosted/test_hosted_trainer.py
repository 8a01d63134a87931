"""The hosted trainer through the unmodified package, against a service in another process."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from policy_fixtures import make_batch
from tinker_service import Bigrams

from megatron_fleet.algorithms.explicit_losses import TrainedTokens, explicit_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.hosted.prices import Tokens
from megatron_fleet.hosted.states import SAVED, STATE
from megatron_fleet.hosted.trainer import HostedTrainer
from megatron_fleet.loop.update import with_logprobs
from megatron_fleet.trainer.base import AdamParams, LossSpec, TrainerLost

VOCAB = 1024
ADAM = AdamParams(1e-2, betas=(0.9, 0.95), clip_grad=0.5, weight_decay=0.1)


@asynccontextmanager
async def opened(config):
    trainer = HostedTrainer(config)
    try:
        await trainer.start(None)
        yield trainer
    finally:
        await trainer.close()


def batch(seed=0, count=6):
    """Sequences with a loss scale, whose sampler is near the base model."""
    return make_batch(count=count, longest=40, vocab_size=VOCAB, seed=seed)


class Expected:
    """The same policy in this process, trained by our formulas."""

    def __init__(self):
        self.policy = Bigrams(VOCAB)
        self.adapters = self.policy.make(32, 0)

    def logprobs(self, data):
        rows = self.policy.forward(self.adapters, [(d.token_ids[:-1], d.token_ids[1:]) for d in data])
        return [np.where(d.loss_mask, [0, *row], 0) for d, row in zip(data, rows, strict=True)]

    def backward(self, algo, data):
        found = explicit_loss(algo, TrainedTokens.of(data, self.logprobs(data)))
        parts = np.split(found.gradient, np.cumsum([d.loss_mask.sum() for d in data])[:-1])
        slopes = []
        for datum, part in zip(data, parts, strict=True):
            slope = np.zeros(len(datum))
            slope[datum.loss_mask] = part
            slopes.append(slope[1:])
        pairs = [(d.token_ids[:-1], d.token_ids[1:]) for d in data]
        self.policy.backward(self.adapters, pairs, slopes)
        return found

    def step(self, adam):
        return self.policy.step(
            self.adapters,
            {
                "learning_rate": adam.lr, "beta1": adam.betas[0], "beta2": adam.betas[1], "eps": adam.eps,
                "weight_decay": adam.weight_decay, "grad_clip_norm": adam.clip_grad,
            },
        )  # fmt: skip


LOSSES = [
    {"loss": "ppo_clip"},
    {"loss": "ppo_clip", "dual_clip": 1.5},
    *({"loss": name} for name in ("gspo", "gmpo", "sapo", "cispo", "reinforce", "importance_weighted")),
    {"loss": "ppo_clip", "kl": {"coef": 0.1}},
    {"loss": "ppo_clip", "correction": {"kind": "token_tis"}},
]


@pytest.mark.parametrize("several", [False, True], ids=["one update", "several"])
@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: "-".join(map(str, s.values())))
async def test_updates_equal_those_of_our_formulas(make_config, settings, several):
    algo = AlgorithmConfig.model_validate(settings)
    expected, data = Expected(), batch()
    async with opened(make_config()) as trainer:
        await trainer.keep_reference()
        reference = await trainer.forward(data, "reference")
        data = with_logprobs(data, "reference", reference)
        if several:
            data = with_logprobs(data, "proximal", [x + 0.05 * np.sin(7 * x) for x in await trainer.forward(data)])
        for _ in range(2):
            report, step = await asyncio.gather(
                trainer.forward_backward(data, LossSpec.of(algo)), trainer.optim_step(ADAM)
            )
            found = expected.backward(algo, data)
            assert report.loss == pytest.approx(found.value, rel=1e-6)
            assert report.metrics == pytest.approx(found.sums, rel=1e-4, abs=1e-5)
            assert step.grad_norm == pytest.approx(expected.step(ADAM), rel=1e-6)
        for one, two in zip(await trainer.forward(data), expected.logprobs(data), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


OWN = """
from megatron_fleet.algorithms.policy_terms import ppo_clip

def clipped(inputs, algorithm):
    return ppo_clip(inputs, algorithm.model_copy(update={"loss": "ppo_clip"}))
"""


@pytest.mark.parametrize("several", [False, True], ids=["one update", "several"])
async def test_a_loss_of_the_users_own_is_differentiated_here(make_config, tmp_path, monkeypatch, several):
    (tmp_path / "own_terms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    data = batch()
    if several:
        data = with_logprobs(data, "proximal", [d.behaviour_logprobs for d in data])
    found = []
    for name in ("ppo_clip", "own_terms:clipped"):
        algo = AlgorithmConfig(loss=name, correction={"kind": "icepop"}, clip_low=0.2, clip_high=0.2)
        async with opened(make_config()) as trainer:
            reported, _ = await update(trainer, data, algo)
            found.append((reported.loss, np.concatenate(await trainer.forward(data))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


async def test_a_mistake_in_a_loss_is_not_a_lost_session(make_config, tmp_path, monkeypatch):
    (tmp_path / "broken_terms.py").write_text("def clipped(inputs, algorithm):\n    raise KeyError('of their own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with opened(make_config()) as trainer:
        with pytest.raises(KeyError, match="of their own"):
            await trainer.forward_backward(batch(), LossSpec.of(AlgorithmConfig(loss="broken_terms:clipped")))


SERVED = [
    {"loss": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3},
    {"loss": "cispo", "clip_low": 0.1, "clip_high": 0.3},
    {"loss": "importance_weighted", "clip_low": 1.0, "clip_high": 1e9},
]


@pytest.mark.parametrize("settings", SERVED, ids=lambda s: s["loss"])
async def test_formulas_of_the_service_take_the_ratio_to_the_sampler(make_config, service, settings):
    """Ours with the sampler's policy as the old one; ours masks by the ratio what the service does not."""
    algo, data, expected = AlgorithmConfig.model_validate(settings), batch(), Expected()
    async with opened(make_config("hosted.losses=service")) as trainer:
        for _ in range(2):
            report, _ = await update(trainer, data, algo)
            found = expected.backward(algo, with_logprobs(data, "proximal", [d.behaviour_logprobs for d in data]))
            expected.step(ADAM)
            assert report.loss == pytest.approx(found.value, rel=1e-6)
        for one, two in zip(await trainer.forward(data), expected.logprobs(data), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
    kinds = [r["type"] for r in service.ask("requests")["requests"] if r["path"] == "retrieve_future"]
    assert kinds.count("ForwardBackward") == 2 and kinds.count("Forward") == 1, "one pass for each update"


CYCLE_S = 0.4
CLOCKED = ("--cycle-s", str(CYCLE_S), "--config", json.dumps({"fwdbwd_max_chunk_len": 2}))


@pytest.mark.parametrize("service", [CLOCKED], indirect=True)
@pytest.mark.parametrize(("settings", "cycles"), [({}, 1), ({"kl": {"coef": 0.1}}, 2)])
@pytest.mark.parametrize("requests", [1, 4, 16])
async def test_an_update_and_its_weights_take_no_more_cycles_than_needed(
    make_config, service, settings, cycles, requests
):
    """Gradients, however many requests their data are, step and weights for the sampler are one cycle of the service;
    a loss that needs log-probs first takes two."""
    data, algo = batch(count=2 * requests), AlgorithmConfig.model_validate(settings)
    async with opened(make_config()) as trainer:
        await trainer.keep_reference()
        data = with_logprobs(data, "reference", await trainer.forward(data, "reference"))
        await trainer.forward(data[:1])  # the adapters exist
        before = service.ask("requests")

        async def ignore(message):
            pass

        await asyncio.gather(trainer.forward_backward(data, LossSpec.of(algo)), trainer.optim_step(ADAM))
        await trainer.send_weights(1, {}, ignore)
        after = service.ask("requests")
    assert after["cycles"] - before["cycles"] == cycles
    made = [request["path"] for request in after["requests"][len(before["requests"]) :]]
    assert made.count("forward_backward") == requests * cycles and made.count("save_weights_for_sampler") == 1


async def test_adapters_are_exported_and_nothing_of_it_stays_at_the_service(make_config, service, tmp_path):
    path = tmp_path / "out" / "hf"
    async with opened(make_config()) as trainer:
        await trainer.forward_backward(batch(), LossSpec.of(AlgorithmConfig()))
        await trainer.optim_step(ADAM)
        await trainer.export_hf(path)
        assert service.ask("requests")["saved"] == []
    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} == {
        "adapter_config.json", "adapter_model.safetensors", "more/README.md"
    }  # fmt: skip
    assert np.frombuffer((path / "adapter_model.safetensors").read_bytes()).any()
    assert json.loads((path / "adapter_config.json").read_text()) == {
        "r": 32, "base_model_name_or_path": "test/tiny"
    }  # fmt: skip


async def test_a_service_without_exports_is_no_lost_session(make_config, service, tmp_path):
    service.fail("save_weights_external", 404)
    async with opened(make_config()) as trainer:
        with pytest.raises(UserError, match=r"the service exports no adapters .*; set it to false\. The run is saved"):
            await trainer.export_hf(tmp_path / "out" / "hf")


EXPORTED = {
    "no adapters": ({"adapter_model.safetensors": ""}, UserError, "has no adapter_model.safetensors"),
    "a file outside": ({"../../outside": "x"}, TrainerLost, "names a file outside its folder"),
}


@pytest.mark.parametrize(
    ("service", "error", "said"),
    [(("--config", json.dumps({"exported": files})), error, said) for files, error, said in EXPORTED.values()],
    ids=EXPORTED,
    indirect=["service"],
)
async def test_an_export_that_is_none_leaves_nothing(make_config, service, error, said, tmp_path):
    async with opened(make_config()) as trainer:
        with pytest.raises(error, match=said):
            await trainer.export_hf(tmp_path / "out" / "hf")
        assert service.ask("requests")["saved"] == []
    assert not (tmp_path / "out" / "hf").exists() and not (tmp_path / "outside").exists()


async def test_a_sampler_that_starts_again_finds_a_session_that_is_gone(make_config, service):
    handles = []

    async def keep(message):
        handles.append(message["sampler"])

    async with opened(make_config()) as trainer:
        await update(trainer, batch())
        await trainer.send_weights(1, {}, keep)
        assert len(service.paths("save_weights_for_sampler")) == 1, "with the step"
        await trainer.send_weights(1, {}, keep)
        assert handles[0] != handles[1] and len(service.paths("save_weights_for_sampler")) == 2
        service.fail("save_weights_for_sampler", 404)
        with pytest.raises(TrainerLost):
            await trainer.send_weights(1, {}, keep)


async def update(trainer, data, algo=None):
    loss = LossSpec.of(algo or AlgorithmConfig())
    return await asyncio.gather(trainer.forward_backward(data, loss), trainer.optim_step(ADAM))


# Life


async def test_a_new_session_goes_on_from_a_saved_state(make_config, tmp_path, service):
    data, out = batch(), tmp_path / "out" / "checkpoints"
    async with opened(make_config()) as trainer:
        await update(trainer, data)
        (out / "step_1").mkdir(parents=True)
        assert list(await trainer.save_state(out / "step_1")) == [STATE]
        await update(trainer, data)
        whole = await trainer.forward(data)
    service.restart()
    async with opened(make_config()) as trainer:
        await trainer.load_state(out / "step_1")
        await update(trainer, data)
        for one, two in zip(await trainer.forward(data), whole, strict=True):
            assert np.array_equal(one, two)


async def test_states_that_no_checkpoint_needs_are_deleted(make_config, tmp_path, service):
    out = tmp_path / "out" / "checkpoints"
    async with opened(make_config()) as trainer:
        for step in range(3):
            (out / f"step_{step}").mkdir(parents=True)
            await trainer.save_state(out / f"step_{step}")
        assert len(service.ask("requests")["saved"]) == 3
        (out / "step_0" / STATE).unlink()
        service.fail("save_weights", "lost")  # executed, and asked for again
        (out / "step_3").mkdir()
        await trainer.save_state(out / "step_3")
        kept = sorted(json.loads(file.read_text())["path"] for file in out.glob(f"*/{STATE}"))
        assert service.ask("requests")["saved"] == kept and len(kept) == 3
        assert sorted((tmp_path / "out" / SAVED).read_text().split()) == kept
    with_store = make_config(f"checkpoint.store.url={tmp_path / 'store'}")
    async with opened(with_store) as trainer:
        (out / "step_1" / STATE).unlink()
        await trainer.load_state(out / "step_3")
    assert service.ask("requests")["saved"] == kept, "the store may have it"


async def test_states_of_a_stores_newest_checkpoints_stay(make_config, tmp_path, service):
    """One step more than the store keeps, whose newest may not be uploaded yet; attempts at a step are one."""
    out = tmp_path / "out" / "checkpoints"
    async with opened(make_config(f"checkpoint.store.url={tmp_path / 'store'}", "checkpoint.store.keep=1")) as trainer:
        for step in (1, 2, 2, 3, 10, 10):
            (out / f"step_{step}").mkdir(parents=True, exist_ok=True)
            await trainer.save_state(out / f"step_{step}")
            (out / f"step_{step}" / STATE).unlink()  # nothing here needs it
        names = [path.rpartition("/")[2].rpartition("-")[0] for path in service.ask("requests")["saved"]]
        assert sorted(names) == ["run-step_10", "run-step_10", "run-step_3"]


async def test_a_machine_that_has_the_checkpoint_alone_knows_all_states_and_costs(make_config, tmp_path, service):
    """Those of earlier sessions from the checkpoint, others from the service; not what a person saved there."""
    checkpoints = tmp_path / "out" / "checkpoints"

    async def save(trainer, step):
        (checkpoints / f"step_{step}").mkdir(parents=True, exist_ok=True)
        await trainer.save_state(checkpoints / f"step_{step}")

    async with opened(make_config()) as trainer:
        await trainer.forward(batch())
        await save(trainer, 0)
    async with opened(make_config()) as trainer:
        await trainer.load_state(checkpoints / "step_0")
        for step in (1, 2):
            await save(trainer, step)
        by_hand = (await trainer._client.save_state("by-hand")).path
        spent = trainer.spending.tokens
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere" / "checkpoints" / "step_1", checkpoints / "step_1")
    service.restart()
    async with opened(make_config()) as trainer:
        await trainer.load_state(checkpoints / "step_1")
        known = (tmp_path / "out" / SAVED).read_text().split()
        assert len(known) == 3 and sorted([*known, by_hand]) == service.ask("requests")["saved"]
        assert trainer.spending.tokens == spent != Tokens()
        await save(trainer, 2)
    # Those of step 0 and of the lost checkpoint of step 2 are deleted.
    assert by_hand in (saved := service.ask("requests")["saved"]) and len(saved) == 3


async def test_a_state_of_another_model_is_refused(make_config, tmp_path, service):
    folder = tmp_path / "step_1"
    folder.mkdir()
    async with opened(make_config()) as trainer:
        await trainer.save_state(folder)
    async with opened(make_config("policy.lora.rank=8")) as trainer:
        with pytest.raises(UserError, match=r"policy\.lora\.rank=32, not 8"):
            await trainer.load_state(folder)
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(state | {"path": "tinker://gone/weights/x"}))
    async with opened(make_config()) as trainer:
        with pytest.raises(UserError, match="has no state tinker://gone/weights/x any more; resume from another"):
            await trainer.load_state(folder)


SILENT = {"type": "try_again", "request_id": "?", "queue_state": "paused_capacity"}
WAITED = {
    "statuses that pass": ("forward_backward", 503, 409, 429),
    "a lost answer": ("forward_backward", "lost"),
    "a step's lost answer": ("optim_step", "lost", "lost"),
    "an answer that takes longer": ("retrieve_future ForwardBackward", SILENT, 408, 1.0),
    "a busy server": ("retrieve_future OptimStep", 500, 502, 504),
    "weights whose answer is lost": ("save_weights_for_sampler", "lost"),
}


@pytest.mark.parametrize("fault", WAITED.values(), ids=WAITED)
async def test_what_may_pass_is_waited_for_and_nothing_is_done_twice(make_config, service, fault):
    expected, data, algo = Expected(), batch(), AlgorithmConfig()
    async with opened(make_config()) as trainer:
        service.fail(*fault)
        for _ in range(2):
            await update(trainer, data)
            expected.backward(algo, data)
            expected.step(ADAM)
        for one, two in zip(await trainer.forward(data), expected.logprobs(data), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)


LOST = {
    "forgotten": ("retrieve_future ForwardBackward", 410),
    "unknown": ("retrieve_future ForwardBackward", 404),
    "cut short": ("retrieve_future ForwardBackward", "half"),
    "an older server": ("retrieve_future ForwardBackward", {"loss_fn_output_type": "ArrayRecord", "metrics": {}}),
    "failed": ("retrieve_future OptimStep", {"error": "a node died", "category": "server"}),
    "no such model": ("forward_backward", 404),
}


@pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
async def test_a_session_that_is_lost_is_replaced(make_config, tmp_path, service, fault):
    """Whether the step was taken is not known, so the run goes back to its checkpoint."""
    data, folder = batch(), tmp_path / "step_1"
    folder.mkdir()
    async with opened(make_config()) as trainer:
        await update(trainer, data)
        await trainer.save_state(folder)
        saved = await trainer.forward(data)
        service.fail(*fault)
        with pytest.raises(TrainerLost) as lost:
            await update(trainer, data)
        with pytest.raises(TrainerLost):
            await trainer.forward(data)
        assert str(await trainer.lost()) == str(lost.value)
        await trainer.start(lost.value)
        await trainer.load_state(folder)
        for one, two in zip(await trainer.forward(data), saved, strict=True):
            assert np.array_equal(one, two)


REFUSED = {
    "key": ("forward_backward", 401, "refuses the key .* set TINKER_API_KEY"),
    "permission": ("forward_backward", 403, "use another TINKER_API_KEY"),
    "request": ("forward_backward", 400, "refuses the request"),
    "too long": ("retrieve_future ForwardBackward", {"error": "too long", "category": "user"}, "too long"),
}


@pytest.mark.parametrize(("path", "fault", "said"), REFUSED.values(), ids=REFUSED)
async def test_what_would_be_refused_again_ends_the_run(make_config, service, path, fault, said):
    async with opened(make_config()) as trainer:
        service.fail(path, fault)
        with pytest.raises(UserError, match=said):
            await trainer.forward_backward(batch(), LossSpec.of(AlgorithmConfig()))


async def test_an_update_that_is_not_finite_reaches_no_optimizer(make_config, service):
    """Its loss is known here before the gradients are asked for."""
    algo, data = AlgorithmConfig(loss="importance_weighted"), batch()
    data[1] = replace(data[1], scaled_advantages=np.full(len(data[1]), np.nan, np.float32))
    async with opened(make_config()) as trainer:
        before = await trainer.forward(batch())
        report, step = await update(trainer, data, algo)
        assert math.isnan(report.loss) and step.skipped and service.paths("optim_step") == []
        assert all(np.array_equal(a, b) for a, b in zip(before, await trainer.forward(batch()), strict=True))
        assert not (await update(trainer, batch(), algo))[1].skipped


@pytest.mark.parametrize("service", [("--cycle-s", "3600")], indirect=True)
async def test_an_answer_that_never_comes_is_a_lost_session(make_config, service):
    async with opened(make_config("hosted.answer_timeout_s=1")) as trainer:
        with pytest.raises(TrainerLost, match=r"A forward pass: no answer in 1 s \(hosted\.answer_timeout_s\)"):
            await trainer.forward(batch())
        assert "no answer" in str(await trainer.lost())


async def test_a_service_that_is_down_does_not_keep_a_run_from_ending(make_config, service, monkeypatch):
    monkeypatch.setattr("megatron_fleet.hosted.trainer.CLOSE_S", 0.2)
    async with opened(make_config()) as trainer:
        await update(trainer, batch())
        service.kill()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hosted.base_model=other/model", "does not train this model; it trains test/tiny"),
        ("rollout.max_context=8192 policy.micro_batch_tokens=8192", "on at most 4096 tokens"),
    ],
)
async def test_models_and_limits_are_checked_at_the_start(make_config, override, said):
    with pytest.raises(UserError, match=said):
        async with opened(make_config(*override.split())):
            pass
