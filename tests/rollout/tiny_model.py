"""A random Qwen3 HF folder, small enough to serve in a test."""

from __future__ import annotations

from pathlib import Path


def write_tiny_model(folder: Path, seed: int, tied: bool = True, vocab: int = 512) -> Path:
    """float32 weights scaled up, so that greedy continuations of two seeds differ at once."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=tied,
        eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.3 if "embed" in name else 0.1)
    model.to(torch.float32).save_pretrained(folder)
    return folder
