"""Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464), which most layers of Qwen3.5 have instead of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.fields import Fields
from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import ATTENTION, HF, Leaf, Rows, Rule

if TYPE_CHECKING:
    from megatron_fleet.models.stored_arguments import StoredArguments
    from megatron_fleet.platform.megatron.spec import MixerLayer

CHUNK = 64
"""Tokens to a chunk of the rule, in all implementations."""

_MEGATRON = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_head": "linear_key_head_dim",
    "value_head": "linear_value_head_dim",
    "convolution": "linear_conv_kernel_dim",
}
"""Attribute of ``GatedDeltaNet`` → field of ``config.json`` and argument of Megatron's ``TransformerConfig``."""
_MOST = {"key_heads": 1 << 16, "value_heads": 1 << 16, "convolution": 1 << 10}
_MOST_OTHERWISE = (1 << 31) - 1
"""Upper bounds of the sizes, beyond any model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """A ``model.Mixer``.

    Attributes:
        pattern: whether each layer of the model is one.
        key_heads, value_heads: number of query and key heads, and of value heads.
        key_head, value_head: sizes of a head.
        convolution: width of the causal convolution in tokens.
    """

    name: ClassVar[str] = "Gated DeltaNet"
    variant: ClassVar[str] = "gated_delta_net"
    engine: ClassVar[str] = "megatron_fleet.models.qwen3_5.modules.vllm"
    # vLLM 0.32 caches prefixes of models with these layers only with chunked prefill.
    cpu_engine: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}

    pattern: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_head: int
    value_head: int
    convolution: int

    @classmethod
    def read(cls, fields: Fields, layers: int) -> GatedDeltaNet:
        """See ``model.Mixer``."""
        sizes = {name: fields.integer(to, 1, most=_MOST.get(name, _MOST_OTHERWISE)) for name, to in _MEGATRON.items()}
        if sizes["value_heads"] % sizes["key_heads"]:
            raise UserError(
                f"config.json: linear_num_key_heads={sizes['key_heads']} does not divide linear_num_value_heads="
                f"{sizes['value_heads']}; correct the file."
            )
        return cls(pattern=_pattern(fields, layers), **sizes)

    def write(self) -> dict[str, Any]:
        """See ``model.Mixer``."""
        kinds = ["linear_attention" if here else "full_attention" for here in self.pattern]
        return {"layer_types": kinds, **{to: getattr(self, name) for name, to in _MEGATRON.items()}}

    @classmethod
    def from_megatron(cls, given: StoredArguments) -> GatedDeltaNet:
        """See ``model.Mixer``."""
        sizes = {name: given.need(to) for name, to in _MEGATRON.items()}
        stride = given.need("linear_attention_freq")
        return cls(pattern=given.pattern("linear_attention_freq", stride, lambda i, n: (i + 1) % n != 0), **sizes)

    def megatron(self) -> dict[str, Any]:
        """See ``model.Mixer``."""
        frequency = {"linear_attention_freq": [int(here) for here in self.pattern]}
        return {to: getattr(self, name) for name, to in _MEGATRON.items()} | frequency

    def rules(self, model: Model) -> tuple[Rule, ...]:
        """See ``model.Mixer``. Megatron stores the parts of the input projection and of the convolution as tensors of
        their own.
        """
        at, keys, values = HF + "linear_attn.", self._keys, self._values
        qkv = {"query": Rows(0, keys), "key": Rows(keys, keys), "value": Rows(2 * keys, values)}
        others = (
            ("z", "z", "linear_values"),
            ("beta", "b", "linear_value_heads"),
            ("alpha", "a", "linear_value_heads"),
        )
        mixed, taps = ("linear_qkv", "hidden"), ("linear_qkv", "one", "linear_convolution")
        return (
            Rule(ATTENTION + "in_proj.layer_norm_weight", (Leaf(HF + "input_layernorm.weight", ("hidden",)),)),
            *(
                Rule(f"{ATTENTION}in_proj.weight.{name}", (Leaf(at + "in_proj_qkv.weight", mixed, rows=rows),))
                for name, rows in qkv.items()
            ),
            *(
                Rule(f"{ATTENTION}in_proj.weight.{name}", (Leaf(f"{at}in_proj_{x}.weight", (size, "hidden")),))
                for name, x, size in others
            ),
            *(
                Rule(f"{ATTENTION}conv1d.weight.{name}", (Leaf(at + "conv1d.weight", taps, rows=rows),))
                for name, rows in qkv.items()
            ),
            Rule(ATTENTION + "dt_bias", (Leaf(at + "dt_bias", ("linear_value_heads",)),)),
            # In bfloat16 rates of decay would be off by up to 0.8 %.
            Rule(ATTENTION + "A_log", (Leaf(at + "A_log", ("linear_value_heads",)),), float32=True),
            # The one norm that HF does not centre at zero; the difference would be lost in bfloat16.
            Rule(
                ATTENTION + "out_norm.weight",
                (Leaf(at + "norm.weight", ("linear_value_head",)),),
                float32=True,
                offset=-1.0 if model.zero_centered_norms else 0.0,
            ),
            Rule(ATTENTION + "out_proj.weight", (Leaf(at + "out_proj.weight", ("hidden", "linear_values")),)),
        )

    def sizes(self) -> dict[str, int]:
        """See ``model.Mixer``."""
        return {
            "linear_values": self._values,
            "linear_qkv": 2 * self._keys + self._values,
            "linear_value_heads": self.value_heads,
            "linear_value_head": self.value_head,
            "linear_convolution": self.convolution,
        }

    def flops(self, hidden: int) -> int:
        """See ``model.Mixer``: projections, convolution and the rule in its chunked form.

        A chunk of C tokens costs each of them, per value head, products with the state (write, correct, read: K·V each)
        and with half of the chunk's other tokens (k·k and q·k: K each; solved and attended: K + V and V each).
        """
        keys, values = self._keys, self._values
        projections = hidden * (2 * keys + 2 * values + 2 * self.value_heads + values)
        convolution = self.convolution * (2 * keys + values)
        products = 3 * self.key_head * self.value_head + CHUNK // 2 * (3 * self.key_head + 2 * self.value_head)
        return 2 * (projections + convolution + self.value_heads * products)

    @property
    def heads(self) -> tuple[str, int]:
        """See ``model.Mixer``."""
        return "linear_num_key_heads", self.key_heads

    def widths(self) -> tuple[tuple[str, int], ...]:
        """See ``model.Mixer``."""
        return (
            ("the input of a Gated DeltaNet", 2 * self._keys + 2 * self._values + 2 * self.value_heads),
            ("the output of a Gated DeltaNet", self._values),
        )

    @property
    def state_bytes(self) -> int:
        """See ``model.Mixer``: a matrix per head, in float32."""
        return 4 * self.value_heads * self.key_head * self.value_head

    def layer(self) -> MixerLayer:
        """See ``model.Mixer``."""
        from megatron_fleet.models.qwen3_5.modules.megatron import LAYER

        return LAYER

    def advice(self) -> str | None:
        """See ``model.Mixer``."""
        from megatron_fleet.models.qwen3_5.modules import delta_rule

        if not delta_rule.is_slow():
            return None
        return (
            f"its Gated DeltaNet layers are trained with PyTorch's operators, which are slow; {delta_rule.fla_fault()}."
        )

    @property
    def _keys(self) -> int:
        return self.key_heads * self.key_head

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_head


def _pattern(fields: Fields, layers: int) -> tuple[bool, ...]:
    kinds = fields.optional("layer_types")
    if fields.optional("full_attention_interval") is not None:
        every = fields.integer("full_attention_interval", 1)
        counted = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        if kinds not in (None, counted):
            raise UserError(
                f"config.json: full_attention_interval={every} and layer_types={kinds!r:.200} name different "
                f"layers; correct the file."
            )
        kinds = counted
    if kinds is None:
        raise UserError("config.json: layer_types is missing; use the config.json that belongs to the weights.")
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise UserError(
            f"config.json: layer_types={kinds!r:.200} is not {' or '.join(known)} for each of the {layers} layers; "
            f"correct the file."
        )
    return tuple(kind == "linear_attention" for kind in kinds)
