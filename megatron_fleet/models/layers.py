"""Weight tables: the HF tensors behind each Megatron tensor, layer by layer.

All supported families use the same naming scheme, so one table serves all; the model's architecture determines which
parts apply. Keys are the ones Megatron-Core 0.16 to 0.19 writes with Transformer Engine layers; where its local layers
use a different key for the same content, that key is an alias.
"""

from __future__ import annotations

from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import Leaf, Rule

HF = "{body}layers.{i}."
LAYER = "decoder.layers.{i}."
ATTENTION = LAYER + "self_attention."
MTP = "mtp.layers.{k}."

EMBEDDING = "{body}embed_tokens.weight"


BEFORE = (Rule("embedding.word_embeddings.weight", (Leaf(EMBEDDING, ("vocab", "hidden")),), vocabulary=True),)
"""Rules for the tensors before the layers."""


def after(head: str) -> tuple[Rule, ...]:
    """Rules for the tensors after the layers; ``head``: name of the output layer."""
    return (
        Rule("decoder.final_layernorm.weight", (Leaf("{body}norm.weight", ("hidden",)),)),
        Rule("output_layer.weight", (Leaf(head, ("vocab", "hidden"), tied=EMBEDDING),), vocabulary=True),
    )


def layer(model: Model, experts: bool) -> tuple[Rule, ...]:
    """Rules for one transformer layer; ``experts``: whether its feed-forward part has experts."""
    attention = _latent(model) if model.latent else _grouped_query(model)
    return (*attention, *(_experts(model) if experts else _dense(model)))


def _grouped_query(model: Model) -> tuple[Rule, ...]:
    def qkv(kind: str, *more: str) -> tuple[Leaf, ...]:
        sizes = (("q", "q"), ("k", "kv"), ("v", "kv"))
        return tuple(Leaf(f"{HF}self_attn.{x}_proj.{kind}", (size, *more)) for x, size in sizes)

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


def _swiglu(megatron: str, hf: str, width: str) -> tuple[Rule, ...]:
    gate, up = (Leaf(f"{hf}{x}_proj.weight", (width, "hidden")) for x in ("gate", "up"))
    down = Leaf(hf + "down_proj.weight", ("hidden", width))
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
    rules += _swiglu(LAYER + "mlp.experts.experts.", HF + "mlp.experts.{e}.", "expert_ffn")
    if model.shared_ffn:
        rules += _swiglu(LAYER + "mlp.shared_experts.", HF + "mlp.shared_experts.", "shared_ffn")
    return tuple(rules)


def prediction(model: Model) -> tuple[Rule, ...]:
    """Rules for a multi-token prediction layer: HF layer ``{i}`` after the last one, Megatron's ``mtp.layers.{k}``."""
    eh = Leaf(HF + "eh_proj.weight", ("hidden", "twice_hidden"))
    inner = layer(model, experts=model.has_experts(model.layers))
    return (
        *(Rule(f"{MTP}{x}.weight", (Leaf(f"{HF}{x}.weight", ("hidden",)),)) for x in ("enorm", "hnorm")),
        Rule(MTP + "eh_proj.weight", (eh,)),
        *(_moved(rule) for rule in inner),
        Rule(MTP + "final_layernorm.weight", (Leaf(HF + "shared_head.norm.weight", ("hidden",)),)),
    )


def _moved(rule: Rule) -> Rule:
    def key(text: str) -> str:
        return text.replace(LAYER, MTP + "transformer_layer.")

    return Rule(
        key(rule.key), rule.leaves, rule.layout, tuple(key(a) for a in rule.aliases), rule.vocabulary, rule.float32
    )


def repeated(head: str) -> dict[str, str]:
    """Tensors of an MTP layer that duplicate another tensor, mapped to that tensor."""
    return {HF + "embed_tokens.weight": EMBEDDING, HF + "shared_head.head.weight": head}
