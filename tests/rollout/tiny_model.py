"""A random Qwen3 HF folder with a tokenizer, small enough to serve in a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

VOCABULARY = 512


def write_tiny_model(folder: Path, seed: int, tied: bool = True, context: int = 2048) -> Path:
    """float32 weights scaled up, so that greedy continuations of two seeds differ at once."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_fleet.models.chat.tokenizer import train_tokenizer
    from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=context, tie_word_embeddings=tied,
        eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.3 if "embed" in name else 0.1)
    model.to(torch.float32).save_pretrained(folder)
    train_tokenizer(["a small corpus for a small model; the bytes are enough"] * 4, VOCABULARY, folder, QWEN3_TOKENS)
    return folder


def greedy_continuation(folder: Path, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens by transformers, with the weights in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        said.append(ids[0, len(prompt) :].tolist())
    return said


def logprobs(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """Log-probs float32 ``[T, V]`` of the token after each, by transformers, with the weights in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        said: np.ndarray = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1).numpy()
    return said
