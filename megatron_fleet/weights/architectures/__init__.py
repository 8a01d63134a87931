"""The families at hand, by the ``model_type`` of their ``config.json``."""

from megatron_fleet.weights.architectures import qwen3
from megatron_fleet.weights.rules import Architecture

ARCHITECTURES: dict[str, Architecture] = {"qwen3": qwen3.ARCHITECTURE}
