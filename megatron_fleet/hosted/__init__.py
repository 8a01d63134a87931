"""Trainer and sampler of a hosted service: Thinking Machines' Tinker, or a server that speaks its protocol.

``policy.trainer=hosted`` with ``rollout.sampler=hosted``. The loop, environments, agents and records are those of every
run; weights stay at the service, and no device of ours is used. Needs the package `tinker` and no torch.
"""
