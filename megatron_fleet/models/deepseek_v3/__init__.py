"""DeepSeek-V3 and R1, Moonlight: weights alone; no chat format yet."""
