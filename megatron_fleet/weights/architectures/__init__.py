"""The families at hand, by the ``model_type`` of their ``config.json``. One file of data each."""

from megatron_fleet.weights.architectures import (
    deepseek_v3,
    glm4_moe,
    kimi_k25,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_vl,
)
from megatron_fleet.weights.rules import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    model_type: module.ARCHITECTURE
    for module in (qwen2, qwen3, qwen3_moe, llama, deepseek_v3, kimi_k25, glm4_moe, qwen3_vl)
    for model_type in module.ARCHITECTURE.model_types
}
