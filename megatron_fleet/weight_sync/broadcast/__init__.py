"""``gloo`` and ``nccl`` transports: rank 0 broadcasts whole buckets to engines on other devices or hosts.

Every update has its own process group. Rank 0 opens a store, whose address reaches the engines through the controller;
every engine worker registers there and gets the next rank; once all have, rank 0 closes registration and all connect.
No engine count is needed, and an engine that died or started since the last update is not a special case. ``gloo``
(CPU) and ``nccl`` (CUDA) differ only in the group.

If a member dies during an update, the group breaks for all. The others keep their prepared state for another attempt,
which the controller makes with the remaining ones.
"""
