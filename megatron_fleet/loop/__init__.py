"""Controller: one asyncio process without torch that owns the training loop, the batches, evaluations and records."""
