"""Qwen3.5 and 3.6: the chat format. Weights are not supported yet."""
