"""The controller: one asyncio process without torch that owns the loop, the batches, evaluations and records."""
