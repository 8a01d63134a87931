"""The trained model: the Policy verbs, packing, layouts; ``megatron/`` implements them on Megatron-Core."""
