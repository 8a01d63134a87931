"""megatron_fleet: reinforcement learning of tool-using agents on Megatron-Core and vLLM."""

__version__ = "0.1.0"
