"""Qwen3: dense, mixture of experts, and the language model of Qwen3-VL."""
