"""Policy on Megatron-Core."""

import megatron_fleet.platform.megatron  # noqa: F401  (before any import of megatron.core)
