"""DeepSeek-V3 and R1, Moonlight: weights only; no chat format yet."""
