"""Seconds of a rollout: engines that decode many sequences at once, each step as slow as what it must read.

A step of b sequences reads the weights (of a mixture of experts: those that are chosen by one of the b tokens) and the
KV cache of all, or takes its products where these are longer; with several devices there are two all-reduces a layer.
Prompts and tool results are computed between the steps. Sequences of one engine advance together, those that wait for a
tool aside; when one ends, the others become faster: the longest episode of a step is alone at its end.

With a drafter a step computes its tokens too, of which a share is accepted (`Workload.accepted`); the drafter's own
time is not counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.memory.engine_memory import EngineMemory, engine_memory
from megatron_fleet.planning.memory.phases import cache_tokens
from megatron_fleet.planning.training import FP8_SPEED, NVLINK
from megatron_fleet.planning.workload import Workload
from megatron_fleet.rollout.concurrency import SOFT

STEP_S, SEQUENCE_S = 5e-3, 30e-6
"""Seconds of the host's work for a decoding step (scheduling, inputs, outputs), and for each sequence. With vLLM 0.32's
asynchronous scheduling it is done while the device computes the step before. ``VllmConfig.__post_init__`` in
vllm/config/vllm.py switches that on for the executors of our engines (uni and mp, ``supports_async_scheduling``),
without a drafter and with those that ours have on GPUs (``ngram_gpu``, ``mtp``)."""
LAYER_KERNELS_S, LATENT_S = 40e-6, 200e-6
"""Shortest time of a layer in a step, however little it computes: its kernels, launched from a graph. What latent
attention with its experts takes besides, in more and smaller kernels."""
EAGER = 4.0
"""That time without CUDA graphs, as a multiple."""
PREFILL = 0.5
"""Share of the peak that prompts reach."""
MESSAGE_S, NETWORK_MESSAGE_S = 15e-6, 60e-6
"""Seconds of a small all-reduce within a host, and for each doubling of hosts."""
DECODE, EXPERT_READS = 0.65, 0.58
"""Shares of the memory's bandwidth that a decoding step reaches, and that its experts reach."""
CONTEXT_SHARE = 0.6
"""Mean context of a sampled token, as a share of its episode's mean length."""


@dataclass(slots=True)
class Engine:
    """Speed of an engine.

    Attributes:
        slots: sequences that it decodes together at most: configured, in flight, or as the KV cache has room.
        kv_tokens: tokens that its KV cache holds.
        bound: why there are no more slots.
        overlapped: the host's work for a step overlaps with the device's for the step before.
    """

    config: Config
    model: Model
    gpu: Gpu
    load: Workload
    memory: EngineMemory
    slots: int
    kv_tokens: int
    bound: str
    overlapped: bool = True
    _step: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Config,
        hf_config: Mapping[str, Any],
        model: Model,
        gpu: Gpu,
        load: Workload,
        overlapped: bool = True,
    ) -> Engine:
        """Return an engine of the configuration. It has no slot if its KV cache has no room for a mean episode."""
        engine = config.rollout.engine
        memory = engine_memory(config, model, hf_config)
        kv_tokens = cache_tokens(config, memory, gpu.memory)
        limits = {
            "rollout.engine.max_num_seqs": engine.sequences(config.rollout.episodes_in_flight),
            "rollout.episodes_in_flight": math.ceil(config.rollout.most_in_flight() / engine.count),
            "episodes that may play": math.ceil(in_play(config) * load.episodes / engine.count),
            "KV cache": int((SOFT if config.rollout.adapts else 1) * kv_tokens / (CONTEXT_SHARE * load.mean)),
        }
        bound = min(limits, key=lambda name: limits[name])
        return cls(config, model, gpu, load, memory, limits[bound], kv_tokens, bound, overlapped)

    def step_s(self, sequences: float) -> float:
        """Return the seconds in which each sequence gets one token, prompts that are computed beside it included.

        It is a decoding step; with a drafter, which makes it give several tokens, a part of one.
        """
        b = max(1, round(sequences))
        if b not in self._step:
            drafted = self.config.rollout.engine.speculative.drafted(b)
            self._step[b] = self._decode_s(b) / (1 + drafted * self.load.accepted) + b * self._prefill_s()
        return self._step[b]

    def _decode_s(self, b: int) -> float:
        size, model, gpu = self.config.rollout.engine.tensor_parallel, self.model, self.gpu
        cost, eager = SequenceCost.of(model), self.config.rollout.engine.enforce_eager
        tokens = b * (1 + self.config.rollout.engine.speculative.drafted(b))
        context = CONTEXT_SHARE * self.load.mean
        bandwidth = gpu.hbm * DECODE
        read = self._weights_read(tokens) / bandwidth
        products = tokens * (cost.token + cost.prediction) / size / (gpu.flops * PREFILL * self._fp8())
        cache = b * (self.memory.token * context + 2 * self.memory.state) / bandwidth
        launched = model.layers * LAYER_KERNELS_S * (EAGER if eager else 1)
        device = max(launched, max(read, products) + cache) + (model.layers * LATENT_S if model.latent else 0)
        device += self._all_reduces_s(tokens)
        host = STEP_S + SEQUENCE_S * b
        # Without graphs the host launches every kernel itself, and has no time for the next step meanwhile.
        return max(device, host) if self.overlapped and not eager else device + host

    def _fp8(self) -> float:
        return FP8_SPEED if self.config.rollout.engine.fp8(self.config.precision.recipe) else 1.0

    def _weights_read(self, tokens: int) -> float:
        """Bytes of weights that a step reads on a device, as many as other reads would take as long."""
        model = self.model
        embedding = 2 * model.vocab * model.hidden / self.config.rollout.engine.tensor_parallel
        weights = self.memory.weights - (0 if model.tied else embedding)
        if not model.experts:
            return weights
        counts = sum(map(model.has_experts, range(model.layers))) * 3 * model.hidden * model.expert_ffn
        routed = counts * model.experts
        others = sum(SequenceCost.of_layer(model, layer).token for layer in range(model.layers)) / 2
        others -= counts * model.experts_per_token
        share = self._expert_share(routed, others)
        chosen = 1 - (1 - model.experts_per_token / model.experts) ** tokens
        return weights * (1 - share + share * chosen * DECODE / EXPERT_READS)

    def _expert_share(self, routed: float, others: float) -> float:
        """Share of an engine's weights that are routed experts; ``others``: elements of the rest, in bfloat16."""
        size = self.config.rollout.engine.tensor_parallel
        rest = 2 * (others + 2 * self.model.vocab * self.model.hidden) / size
        return max(0.0, 1 - rest / self.memory.weights) if routed else 0.0

    def _all_reduces_s(self, tokens: int) -> float:
        size = self.config.rollout.engine.tensor_parallel
        if size == 1:
            return 0.0
        hosts = size / self.gpu.per_host
        message = MESSAGE_S if hosts <= 1 else NETWORK_MESSAGE_S * math.log2(2 * hosts) / 2 + MESSAGE_S
        link = self.gpu.nvlink * NVLINK if hosts <= 1 else self.gpu.network
        return 2 * self.model.layers * (message + 2 * 2 * self.model.hidden * tokens / link)

    def _prefill_s(self) -> float:
        """Seconds of the tokens that are not sampled, for each sampled one."""
        return (1 - self.load.sampled) / self.load.sampled * self._prompt_s()

    def _prompt_s(self) -> float:
        """Seconds of a token of a prompt."""
        cost = SequenceCost.of(self.model)
        flops = cost.token + cost.pair * self.load.mean / 2
        return flops / self.config.rollout.engine.tensor_parallel / (self.gpu.flops * PREFILL * self._fp8())

    def again_s(self) -> float:
        """Return the seconds in which the prefixes of all episodes in play are computed again after an update."""
        return self.slots * CONTEXT_SHARE * self.load.mean * self._prompt_s()

    def token_s(self, episodes: int) -> float:
        """Return the seconds in which each of ``episodes`` advances by a token, its share of waiting included."""
        waiting = self.load.waiting / (self.load.mean * self.load.sampled)
        decoding = float(episodes)
        for _ in range(6):
            step = self.step_s(decoding)
            decoding = (decoding + episodes * step / (step + waiting)) / 2
        return self.step_s(decoding) + waiting

    def tokens_per_s(self) -> float:
        """Return the tokens that are sampled in a second while all slots are taken."""
        return self.slots / self.token_s(self.slots)

    def ends(self, sampled: np.ndarray) -> np.ndarray:
        """Return the seconds after which each of these episodes has ended, ``[N]``.

        Args:
            sampled: tokens of each episode that are sampled, ``[N]``, in the order in which they begin.
        """
        waiting = list(enumerate(sampled.tolist()))[::-1]
        playing: list[tuple[float, int]] = []
        ends = np.zeros(len(sampled))
        now = passed = 0.0
        while waiting or playing:
            while waiting and len(playing) < self.slots:
                place, tokens = waiting.pop()
                heapq.heappush(playing, (passed + tokens, place))
            until, place = heapq.heappop(playing)
            now += (until - passed) * self.token_s(len(playing) + 1)
            passed, ends[place] = until, now
        return ends


def in_play(config: Config) -> float:
    """Return how many batches play at once: of colocated engines the one that is waited for is among them."""
    rollout = config.rollout
    ahead = rollout.max_staleness if rollout.batch.ahead is None else rollout.batch.ahead
    return 1 + ahead if rollout.engine.colocated is not False or rollout.batch.ahead else max(1, ahead)


def assumptions(config: Config, engine: Engine | None) -> list[str]:
    """Return what ``rollout.episodes_in_flight=auto`` is taken for. ``engine``: ``None`` if none is known."""
    if config.rollout.episodes_in_flight != "auto":
        return []
    most = config.rollout.most_in_flight()
    if engine is None or not config.rollout.adapts:
        return [f"rollout.episodes_in_flight=auto: {most} episodes at once"]
    return [
        f"rollout.episodes_in_flight=auto: {engine.slots * config.rollout.engine.count} episodes at once, at most "
        f"{most}, and no more than fill the KV caches to {SOFT:.0%}"
    ]


def rollout_time(engine: Engine) -> Mapping[str, float]:
    """Return the seconds of a step's rollout by part.

    Engines are full but for the last episodes: a batch of which every group is waited for takes as long as its longest
    episode. Where groups play in advance, that episode has as many steps' time as its group may be old
    (``rollout.max_staleness``); every update then costs the computation of the prefixes of what plays. Where groups
    are stopped when the batch is full (``rollout.unfinished=again``), the step ends with the last group that it needs.
    """
    config, load = engine.config, engine.load
    rollout, replicas = config.rollout, config.rollout.engine.count
    batches = in_play(config)
    steady = load.tokens * load.sampled / replicas / engine.tokens_per_s()
    count = math.ceil(load.episodes / replicas)
    lengths = load.lengths(load.episodes) * load.sampled
    # One engine with every length of the distribution; the longest episode of all is on one of them.
    chosen = np.quantile(lengths, (np.arange(count) + 0.5) / count)
    chosen[-1] = lengths[-1]
    order = np.random.default_rng(0).permutation(count)
    if batches > 1 and rollout.unfinished == "again":
        return {"full engines": steady, "last episodes": max(0.0, _until_full(engine, lengths, batches) - steady)}
    steps, parts = 1, {}
    if rollout.unfinished == "continue" and (batches > 1 or rollout.max_staleness):
        steps = 1 + rollout.max_staleness if rollout.engine.colocated is not False else max(1, rollout.max_staleness)
        parts["prefixes again"] = engine.again_s()
    total = float(engine.ends(chosen[order]).max()) / steps
    return {"full engines": steady, "last episodes": max(0.0, total - steady), **parts}


def _until_full(engine: Engine, lengths: np.ndarray, batches: float) -> float:
    """Seconds until as many groups have ended as a batch needs, of ``batches`` batches that begin together."""
    rollout = engine.config.rollout
    replicas, samples = rollout.engine.count, rollout.samples_per_prompt
    needed = max(1, round(rollout.prompts_per_step / replicas))
    groups = max(needed, math.ceil(batches * rollout.prompts_per_step / replicas))
    drawn = np.random.default_rng(0).choice(lengths, (8, groups * samples))
    ends = [np.sort(engine.ends(row).reshape(groups, samples).max(axis=1))[needed - 1] for row in drawn]
    return float(np.mean(ends))
