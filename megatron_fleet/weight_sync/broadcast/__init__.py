"""``gloo`` and ``nccl``: rank 0 broadcasts whole buckets to engines on other devices or hosts.

Every update has a group of its own. Rank 0 opens a store, whose address goes to the engines through the controller;
every engine worker registers there and gets the next number; when all have, rank 0 closes the list and all connect.
So nobody counts engines, and one that died or was started since the last update is no special case. ``gloo`` (CPU)
and ``nccl`` (CUDA) differ in the group only.

When a member dies during an update, the group breaks for all. The others keep what they have ready for another
attempt, which the controller makes with those that are left.
"""
