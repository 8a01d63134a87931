"""Random HF folders of one tiny model per family, and their logits by ``transformers``.

Weights are large enough (and norms and biases far enough from 1 and 0) that any two swapped tensors change the logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_configs import FAMILIES, Config, raw_config

__all__ = ["FAMILIES", "dequantise", "make", "raw_config", "reference_logits", "stored_tensors", "unstacked"]

TOKENIZER = Path(__file__).parents[2] / "assets" / "tiny"
FILES = 3
BLOCK, GROUP = 128, 32
Tensors = dict[str, torch.Tensor]


def make(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a random HF folder of a family (one of `FAMILIES`) and return it.

    The folder is what transformers 5.19 saves: config, safetensors files with an index, generation config, tokenizer.
    Kimi models (unknown to transformers, or renamed by it) have the configuration and the tensor names of their
    publisher. ``dtype`` is that of the weights that are not quantised; the routers' score correction is float32,
    Moonlight's bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = raw_config(family, "v4" if family.startswith("kimi") else "v5")
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.19.0"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    _save(folder, _Writer(family, raw_config(family, "v4"), dtype, seed).tensors(), family)
    return folder


def stored_tensors(folder: Path) -> Tensors:
    """Every tensor of a folder as it is in the files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dequantise(stored: Tensors) -> Tensors:
    """float32 tensors of a folder: FP8 blocks of 128 x 128 and INT4 groups of 32 decoded, the rest widened.

    A quantised weight is worth its bfloat16 value: code times scale, rounded once.
    """
    out: Tensors = {}
    for name, tensor in stored.items():
        if name.endswith((".weight_scale_inv", ".weight_scale", ".weight_shape")):
            continue
        if name.endswith(".weight_packed"):
            scale = stored[name.replace("_packed", "_scale")].float()
            codes = torch.stack([(tensor >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1) - 8
            wide = codes.float() * scale.repeat_interleave(GROUP, 1)
            out[name.removesuffix("_packed")] = wide.bfloat16().float()
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            rows, cols = tensor.shape
            out[name] = (tensor.float() * scale[:rows, :cols]).bfloat16().float()
        else:
            out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out


def unstacked(tensors: Tensors) -> Tensors:
    """Tensors with experts one by one where they are stacked."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        stack, _, kind = name.rpartition(".")
        if not stack.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            for part, values in zip(
                ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), parts, strict=True
            ):
                out[f"{stack}.{e}.{part}.weight"] = values
    return out


@torch.no_grad()
def reference_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, T, V]`` float32 of token ids ``[B, T]``, computed by ``transformers`` in float32."""
    return reference_model(folder)(ids).logits.float()


def reference_model(folder: Path) -> torch.nn.Module:
    """The model of a folder in ``transformers``, float32, for inference.

    Every stored tensor must be used, except those of multi-token prediction, of Kimi's vision parts and the stale
    rotary frequencies.
    """
    import transformers

    config = json.loads((folder / "config.json").read_text())
    prefix = "language_model." if config["model_type"] == "kimi_k25" else ""
    text = dict(config.get("text_config", config) if prefix else config)
    text.pop("quantization_config", None)
    if text["model_type"] == "kimi_k2":
        text["model_type"] = "deepseek_v3"
    extra = f"model.layers.{text.get('num_hidden_layers')}."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in dequantise(stored_tensors(folder)).items()
        if name.startswith(prefix) and not name.startswith(extra) and not name.endswith("rotary_emb.inv_freq")
    }
    model, report = getattr(transformers, text["architectures"][0]).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(**text),
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {what: names for what, names in report.items() if names}
    assert not wrong, wrong
    return model.eval()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _save(folder: Path, tensors: Tensors, family: str) -> None:
    """Spread over files in order, cut by bytes: a layer may straddle two files, as in published models."""
    name = "model-{}-of-{}.safetensors" if family.startswith("kimi_k2") else "model-{:05d}-of-{:05d}.safetensors"
    total, done = sum(t.nbytes for t in tensors.values()), 0
    weight_map: dict[str, str] = {}
    for tensor_name, tensor in tensors.items():
        weight_map[tensor_name] = name.format(min(FILES, done * FILES // total + 1), FILES)
        done += tensor.nbytes
    for file in sorted(set(weight_map.values())):
        part = {n: tensors[n].contiguous() for n, f in weight_map.items() if f == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    elements = sum(t.numel() for t in tensors.values())
    index = {"metadata": {"total_parameters": elements, "total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


class _Writer:
    """All tensors of one model, in checkpoint order."""

    def __init__(self, family: str, config: Config, dtype: torch.dtype, seed: int) -> None:
        self.family, self.config, self.dtype = family, config, dtype
        self.text: Config = config.get("text_config", config)
        self.random = torch.Generator().manual_seed(seed)
        self.hybrid = "linear_num_key_heads" in self.text
        quantised = self.text.get("quantization_config", {})
        self.fp8, self.int4 = (quantised.get("quant_method") == q for q in ("fp8", "compressed-tensors"))

    def tensors(self) -> Tensors:
        if "vision_config" in self.config and self.family != "kimi_k25":
            return dict([*self._language("model.language_model.", "lm_head"), *self._qwen3_vl_vision()])
        if self.family == "kimi_k25":
            language = self._language("language_model.model.", "language_model.lm_head")
            return dict([*language, *self._kimi_vision()])
        return dict(self._language("model.", "lm_head"))

    def _normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.random) * std + mean

    def _weight(self, name: str, *shape: int, std: float = 0.08) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", self._normal(*shape, std=std).to(self.dtype)

    def _norm(self, name: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        mean = 0.0 if self.hybrid else 1.0
        yield f"{name}.weight", self._normal(size, std=0.2, mean=mean).to(self.dtype)

    def _bias(self, name: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.bias", self._normal(size, std=0.1).to(self.dtype)

    def _linear(self, name: str, rows: int, cols: int, *, expert: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """A linear layer, quantised where the family's published models quantise it."""
        if not (self.fp8 or (self.int4 and expert)):
            yield from self._weight(name, rows, cols)
            return
        weight = self._normal(rows, cols, std=0.08)
        if self.fp8:
            codes, scale = _fp8(weight)
            yield f"{name}.weight", codes
            yield f"{name}.weight_scale_inv", scale
        else:
            packed, scale = _int4(weight)
            yield f"{name}.weight_packed", packed
            yield f"{name}.weight_scale", scale
            yield f"{name}.weight_shape", torch.tensor([rows, cols], dtype=torch.int32)

    def _language(self, prefix: str, head: str) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.text
        h, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
        # Logits half as large where rounding is larger, so that one bound serves all families.
        scale = 0.5 if self.hybrid else 1.0
        embedding = list(self._weight(f"{prefix}embed_tokens", vocab, h, std=0.1 * scale))
        yield from embedding
        for i in range(layers):
            linear = self.hybrid and c["layer_types"][i] == "linear_attention"
            yield from self._layer(f"{prefix}layers.{i}.", i >= c.get("first_k_dense_replace", 0), linear)
        yield from self._norm(f"{prefix}norm", h)
        output = list(self._weight(head, vocab, h, std=scale * h**-0.5))
        if not c.get("tie_word_embeddings"):
            yield from output
        for i in range(layers, layers + c.get("num_nextn_predict_layers", 0)):
            at = f"{prefix}layers.{i}."
            yield from self._layer(at, True)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield from self._norm(at + name, h)
            yield from self._weight(f"{at}eh_proj", h, 2 * h)
            # Published models repeat these two.
            yield f"{at}embed_tokens.weight", embedding[0][1].clone()
            yield f"{at}shared_head.head.weight", output[0][1].clone()
        if c.get("mtp_num_hidden_layers"):
            # Qwen3.5 stores the experts of this layer one by one, and stacks all others; Qwen3.6 stacks these too.
            yield from self._layer("mtp.layers.0.", True, stacked=self.family == "qwen3_5_moe_text")
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                yield from self._norm(f"mtp.{name}", h)
            yield from self._weight("mtp.fc", h, 2 * h)

    def _layer(
        self, at: str, sparse: bool, linear: bool = False, stacked: bool | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        h = self.text["hidden_size"]
        if linear:
            yield from self._linear_attention(f"{at}linear_attn.")
        else:
            latent = "kv_lora_rank" in self.text
            yield from self._latent(f"{at}self_attn.") if latent else self._grouped(f"{at}self_attn.")
        yield from self._norm(f"{at}input_layernorm", h)
        if sparse and "moe_intermediate_size" in self.text:
            yield from self._experts(f"{at}mlp.", self.hybrid if stacked is None else stacked)
        else:
            yield from self._mlp(f"{at}mlp.", self.text["intermediate_size"])
        yield from self._norm(f"{at}post_attention_layernorm", h)

    def _grouped(self, at: str) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.text
        h, heads, groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        d = c.get("head_dim", h // heads)
        biased = c["model_type"] == "qwen2" or c["attention_bias"]
        gated = 2 if self.hybrid else 1
        for name, n in (("q", gated * heads), ("k", groups), ("v", groups)):
            yield from self._linear(f"{at}{name}_proj", n * d, h)
            if biased:
                yield from self._bias(f"{at}{name}_proj", n * d)
        yield from self._linear(f"{at}o_proj", h, heads * d)
        if c["model_type"].startswith("qwen3") or c.get("use_qk_norm"):
            yield from self._norm(f"{at}q_norm", d)
            yield from self._norm(f"{at}k_norm", d)

    def _linear_attention(self, at: str) -> Iterator[tuple[str, torch.Tensor]]:
        """A Gated DeltaNet in which float32 is exact to 1e-5.

        The gated norm scales up rows that are almost zero, and with them their rounding. So decays are slow, and
        queries lie near keys, which makes no row almost zero.
        """
        c = self.text
        h, width = c["hidden_size"], c["linear_conv_kernel_dim"]
        keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"]
        heads, inner = values, values * c["linear_value_head_dim"]
        # Qwen3.5 stores these two in float32, Qwen3.6 in the dtype of the model.
        small = torch.float32 if "vision_config" in self.config else self.dtype
        yield f"{at}A_log", (torch.rand(heads, generator=self.random) * 3.9 + 0.1).log().to(small)
        taps = self._normal(2 * keys + inner, 1, width, std=0.5)
        taps[:keys] = taps[keys : 2 * keys] + 0.1 * taps[:keys]
        yield f"{at}conv1d.weight", taps.to(self.dtype)
        yield f"{at}dt_bias", self._normal(heads, std=0.5, mean=-3.0).to(self.dtype)
        for name in "ab":
            yield from self._weight(f"{at}in_proj_{name}", heads, h)
        mixed = self._normal(2 * keys + inner, h, std=0.08)
        mixed[:keys] = 0.9 * mixed[keys : 2 * keys] + 0.436 * mixed[:keys]
        yield f"{at}in_proj_qkv.weight", mixed.to(self.dtype)
        yield from self._weight(f"{at}in_proj_z", inner, h)
        norm = torch.rand(c["linear_value_head_dim"], generator=self.random) * 1.5 + 0.25
        yield f"{at}norm.weight", norm.to(small)
        yield from self._weight(f"{at}out_proj", h, inner)

    def _latent(self, at: str) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.text
        h, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        if q_rank is None:
            yield from self._linear(f"{at}q_proj", heads * (nope + rope), h)
        else:
            yield from self._linear(f"{at}q_a_proj", q_rank, h)
            yield from self._norm(f"{at}q_a_layernorm", q_rank)
            yield from self._linear(f"{at}q_b_proj", heads * (nope + rope), q_rank)
        yield from self._linear(f"{at}kv_a_proj_with_mqa", kv_rank + rope, h)
        yield from self._norm(f"{at}kv_a_layernorm", kv_rank)
        yield from self._linear(f"{at}kv_b_proj", heads * (nope + v), kv_rank)
        yield from self._linear(f"{at}o_proj", h, heads * v)
        if self.family in ("moonlight", "kimi_k2", "kimi_k2_fp8"):
            # Left over in the published files; of a width that belongs to no rotary embedding of the model.
            yield f"{at}rotary_emb.inv_freq", self._normal(h // heads // 2, std=1.0).to(torch.bfloat16)

    def _mlp(self, at: str, width: int, *, expert: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        h = self.text["hidden_size"]
        yield from self._linear(f"{at}gate_proj", width, h, expert=expert)
        yield from self._linear(f"{at}up_proj", width, h, expert=expert)
        yield from self._linear(f"{at}down_proj", h, width, expert=expert)

    def _experts(self, at: str, stacked: bool) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.text
        experts, width = c.get("num_experts", c.get("n_routed_experts")), c["moe_intermediate_size"]
        one_by_one = [dict(self._mlp(f"{at}experts.{e}.", width, expert=True)) for e in range(experts)]
        if stacked:
            gate, up, down = zip(*(expert.values() for expert in one_by_one), strict=True)
            yield f"{at}experts.gate_up_proj", torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
            yield f"{at}experts.down_proj", torch.stack(down)
        else:
            for expert in one_by_one:
                yield from expert.items()
        # Far apart, so that rounding does not change which experts a token goes to.
        yield from self._weight(f"{at}gate", experts, c["hidden_size"], std=0.3)
        if "n_group" in c:
            bias = self._normal(experts, std=0.1)
            moonlight = self.family == "moonlight"
            yield f"{at}gate.e_score_correction_bias", bias.to(torch.bfloat16 if moonlight else torch.float32)
            yield from self._mlp(f"{at}shared_experts.", width * c["n_shared_experts"])
        if "shared_expert_intermediate_size" in c:
            yield from self._mlp(f"{at}shared_expert.", c["shared_expert_intermediate_size"])
            yield from self._weight(f"{at}shared_expert_gate", 1, c["hidden_size"])

    def _biased(self, name: str, rows: int, *cols: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weight(name, rows, *cols)
        yield from self._bias(name, rows)

    def _layer_norm(self, name: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._norm(name, size)
        yield from self._bias(name, size)

    def _qwen3_vl_vision(self) -> Iterator[tuple[str, torch.Tensor]]:
        c, at = self.config["vision_config"], "model.visual."
        h, wide, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
        merged = h * c["spatial_merge_size"] ** 2
        yield from self._biased(f"{at}patch_embed.proj", h, c["in_channels"], c["temporal_patch_size"], patch, patch)
        yield from self._weight(f"{at}pos_embed", c["num_position_embeddings"], h)
        for i in range(c["depth"]):
            block = f"{at}blocks.{i}."
            yield from self._layer_norm(f"{block}norm1", h)
            yield from self._layer_norm(f"{block}norm2", h)
            yield from self._biased(f"{block}attn.qkv", 3 * h, h)
            yield from self._biased(f"{block}attn.proj", h, h)
            yield from self._biased(f"{block}mlp.linear_fc1", wide, h)
            yield from self._biased(f"{block}mlp.linear_fc2", h, wide)
        deep = [f"{at}deepstack_merger_list.{k}." for k in range(len(c["deepstack_visual_indexes"]))]
        for merger, normed in [(f"{at}merger.", h), *((d, merged) for d in deep)]:
            yield from self._layer_norm(f"{merger}norm", normed)
            yield from self._biased(f"{merger}linear_fc1", merged, merged)
            yield from self._biased(f"{merger}linear_fc2", c["out_hidden_size"], merged)

    def _kimi_vision(self) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config["vision_config"]
        h, wide, patch = c["vt_hidden_size"], c["vt_intermediate_size"], c["patch_size"]
        merged = h * c["merge_kernel_size"][0] * c["merge_kernel_size"][1]
        yield from self._biased("vision_tower.patch_embed.proj", h, 3, patch, patch)
        at = "vision_tower.patch_embed.pos_emb"
        yield from self._weight(at, c["init_pos_emb_height"], c["init_pos_emb_width"], h)
        for i in range(c["vt_num_hidden_layers"]):
            block = f"vision_tower.encoder.blocks.{i}."
            yield from self._layer_norm(f"{block}norm0", h)
            yield from self._layer_norm(f"{block}norm1", h)
            yield from self._biased(f"{block}wqkv", 3 * h, h)
            yield from self._biased(f"{block}wo", h, h)
            yield from self._biased(f"{block}mlp.fc0", wide, h)
            yield from self._biased(f"{block}mlp.fc1", h, wide)
        yield from self._layer_norm("vision_tower.encoder.final_layernorm", h)
        yield from self._layer_norm("mm_projector.pre_norm", c["mm_hidden_size"])
        yield from self._biased("mm_projector.proj.0", merged, merged)
        yield from self._biased("mm_projector.proj.2", c["text_hidden_size"], merged)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and float32 scales ``[⌈rows/128⌉, ⌈cols/128⌉]``; the largest value of a block is code 448."""
    rows, cols = weight.shape
    down, across = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = weight.new_zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :cols] = weight
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scale


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors' ``pack-quantized``: int32 ``[rows, cols/8]`` of codes + 8, low nibble first, and scales.

    Scales are bfloat16 ``[rows, cols/32]``, the largest value of a group over 7.5 (so that code -8 occurs).
    """
    rows, cols = weight.shape
    groups = weight.view(rows, cols // GROUP, GROUP)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    shifted = codes.view(rows, cols // 8, 8) << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.int32), scale
