"""Gated DeltaNet layers in PyTorch, for Megatron's ranks and vLLM's engines; imported where a model is built."""
