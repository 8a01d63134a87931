"""Weight tables: the HF tensors behind each Megatron tensor, their arrangement, and the layers that families share.

The families name their tensors alike, so one table serves all; the model's architecture determines which parts apply,
and a family's own layer brings its rules (`model.Mixer`). Keys are the ones Megatron-Core 0.16 to 0.19 writes with
Transformer Engine layers; where its local layers use a different key for the same content, that key is an alias.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import ATTENTION, HF, LAYER, MTP, Leaf, Prediction, Rows, Rule, Stack

EMBEDDING = "{body}embed_tokens.weight"

BEFORE = (Rule("embedding.word_embeddings.weight", (Leaf(EMBEDDING, ("vocab", "hidden")),), vocabulary=True),)
"""Rules for the tensors before the layers."""


def after(head: str) -> tuple[Rule, ...]:
    """Rules for the tensors after the layers; ``head``: name of the output layer."""
    return (
        Rule("decoder.final_layernorm.weight", (Leaf("{body}norm.weight", ("hidden",)),)),
        Rule("output_layer.weight", (Leaf(head, ("vocab", "hidden"), tied=EMBEDDING),), vocabulary=True),
    )


def layer(model: Model, mixer: bool, experts: bool) -> tuple[Rule, ...]:
    """Rules for one transformer layer.

    Args:
        mixer: whether the family's mixer takes the place of attention.
        experts: whether its feed-forward part has experts.
    """
    if mixer and model.mixer is not None:
        mixing = model.mixer.rules(model)
    else:
        mixing = _latent(model) if model.latent else _grouped_query(model)
    return (*mixing, *(_experts(model) if experts else _dense(model)))


def _grouped_query(model: Model) -> tuple[Rule, ...]:
    def qkv(kind: str, *more: str) -> tuple[Leaf, ...]:
        q, k, v = (f"{HF}self_attn.{x}_proj.{kind}" for x in "qkv")
        head = model.head or 0
        # Each head's rows of a gated q_proj are those of its query, then those of its gate.
        parts = (Rows(0, head, 2 * head), Rows(head, head, 2 * head)) if model.output_gate else (None,)
        queries = (Leaf(q, ("q_proj", *more), rows=rows) for rows in parts)
        return (*queries, Leaf(k, ("kv", *more)), Leaf(v, ("kv", *more)))

    rules = [
        Rule(ATTENTION + "linear_qkv.layer_norm_weight", (Leaf(HF + "input_layernorm.weight", ("hidden",)),)),
        Rule(ATTENTION + "linear_qkv.weight", qkv("weight", "hidden"), layout="qkv"),
    ]
    if model.qkv_bias:
        rules.append(Rule(ATTENTION + "linear_qkv.bias", qkv("bias"), layout="qkv"))
    if model.qk_norm:
        rules += [
            Rule(ATTENTION + f"{x}_layernorm.weight", (Leaf(HF + f"self_attn.{x}_norm.weight", ("head",)),))
            for x in "qk"
        ]
    return (*rules, Rule(ATTENTION + "linear_proj.weight", (Leaf(HF + "self_attn.o_proj.weight", ("hidden", "q")),)))


def _latent(model: Model) -> tuple[Rule, ...]:
    def norm(x: str, leaf: Leaf) -> Rule:
        alias = ATTENTION + f"{x}_layernorm.weight"
        return Rule(ATTENTION + f"linear_{x}_up_proj.layer_norm_weight", (leaf,), aliases=(alias,))

    query: tuple[Rule, ...]
    if model.q_lora is None:
        query = (Rule(ATTENTION + "linear_q_proj.weight", (Leaf(HF + "self_attn.q_proj.weight", ("q", "hidden")),)),)
    else:
        query = (
            Rule(
                ATTENTION + "linear_q_down_proj.weight", (Leaf(HF + "self_attn.q_a_proj.weight", ("q_lora", "hidden")),)
            ),
            norm("q", Leaf(HF + "self_attn.q_a_layernorm.weight", ("q_lora",))),
            Rule(ATTENTION + "linear_q_up_proj.weight", (Leaf(HF + "self_attn.q_b_proj.weight", ("q", "q_lora")),)),
        )
    kv_down = Leaf(HF + "self_attn.kv_a_proj_with_mqa.weight", ("kv_a", "hidden"))
    kv_up = Leaf(HF + "self_attn.kv_b_proj.weight", ("kv_b", "kv_lora"))
    return (
        Rule(LAYER + "input_layernorm.weight", (Leaf(HF + "input_layernorm.weight", ("hidden",)),)),
        *query,
        Rule(ATTENTION + "linear_kv_down_proj.weight", (kv_down,)),
        norm("kv", Leaf(HF + "self_attn.kv_a_layernorm.weight", ("kv_lora",))),
        Rule(ATTENTION + "linear_kv_up_proj.weight", (kv_up,)),
        Rule(ATTENTION + "linear_proj.weight", (Leaf(HF + "self_attn.o_proj.weight", ("hidden", "attended")),)),
    )


def _swiglu(megatron: str, hf: str, width: str, stack: str | None = None) -> tuple[Rule, ...]:
    """Rules of a feed-forward layer; ``stack``: prefix of the tensors in which some releases stack all experts."""
    gate, up = (
        Leaf(
            f"{hf}{x}_proj.weight",
            (width, "hidden"),
            stack=None if stack is None else Stack(stack + "gate_up_proj", part, 2),
        )
        for part, x in enumerate(("gate", "up"))
    )
    down = Leaf(
        hf + "down_proj.weight",
        ("hidden", width),
        stack=None if stack is None else Stack(stack + "down_proj"),
    )
    return (
        Rule(megatron + "linear_fc1.weight", (gate, up), layout="concat"),
        Rule(megatron + "linear_fc2.weight", (down,)),
    )


def _dense(model: Model) -> tuple[Rule, ...]:
    norm = Leaf(HF + "post_attention_layernorm.weight", ("hidden",))
    alias = LAYER + "pre_mlp_layernorm.weight"
    return (
        Rule(LAYER + "mlp.linear_fc1.layer_norm_weight", (norm,), aliases=(alias,)),
        *_swiglu(LAYER + "mlp.", HF + "mlp.", "ffn"),
    )


def _experts(model: Model) -> tuple[Rule, ...]:
    norm = Leaf(HF + "post_attention_layernorm.weight", ("hidden",))
    alias = LAYER + "mlp.linear_fc1.layer_norm_weight"
    rules = [
        Rule(LAYER + "pre_mlp_layernorm.weight", (norm,), aliases=(alias,)),
        Rule(LAYER + "mlp.router.weight", (Leaf(HF + "mlp.gate.weight", ("experts", "hidden")),)),
    ]
    if model.router_bias:
        bias = Leaf(HF + "mlp.gate.e_score_correction_bias", ("experts",))
        rules.append(Rule(LAYER + "mlp.router.expert_bias", (bias,), float32=True))
    experts = HF + "mlp.experts."
    rules += _swiglu(LAYER + "mlp.experts.experts.", experts + "{e}.", "expert_ffn", stack=experts)
    if model.shared_ffn:
        # Families with a gate name the one shared expert in the singular.
        shared = HF + ("mlp.shared_expert." if model.shared_gate else "mlp.shared_experts.")
        rules += _swiglu(LAYER + "mlp.shared_experts.", shared, "shared_ffn")
    if model.shared_gate:
        gate = Leaf(HF + "mlp.shared_expert_gate.weight", ("one", "hidden"))
        rules.append(Rule(LAYER + "mlp.shared_experts.gate_weight", (gate,)))
    return tuple(rules)


def prediction(model: Model, names: Prediction) -> tuple[Rule, ...]:
    """Rules for a multi-token prediction layer, Megatron's ``mtp.layers.{k}``."""
    inner = layer(model, mixer=False, experts=model.has_experts(model.layers))
    norms = {"enorm": names.embedding_norm, "hnorm": names.hidden_norm}
    return (
        *(Rule(f"{MTP}{x}.weight", (Leaf(name, ("hidden",)),)) for x, name in norms.items()),
        Rule(MTP + "eh_proj.weight", (Leaf(names.projection, ("hidden", "twice_hidden")),)),
        *(_moved(rule, names.layer) for rule in inner),
        Rule(MTP + "final_layernorm.weight", (Leaf(names.norm, ("hidden",)),)),
    )


def _moved(rule: Rule, prefix: str) -> Rule:
    def key(text: str) -> str:
        return text.replace(LAYER, MTP + "transformer_layer.")

    def leaf(of: Leaf) -> Leaf:
        stack = None if of.stack is None else replace(of.stack, name=of.stack.name.replace(HF, prefix))
        return replace(of, name=of.name.replace(HF, prefix), stack=stack)

    aliases, leaves = tuple(map(key, rule.aliases)), tuple(map(leaf, rule.leaves))
    return replace(rule, key=key(rule.key), leaves=leaves, aliases=aliases)
