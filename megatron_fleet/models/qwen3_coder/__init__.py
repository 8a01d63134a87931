"""Qwen3-Coder: the chat format. Its weights are those of Qwen3 with experts."""
