"""The trained model: the Policy verbs, packing, layouts; ``megatron/`` implements them on Megatron-Core.

``base.py`` is the protocol: forward, forward and backward, optimizer step, send weights, save, load, export.
``pack_plan.py`` packs sequences into micro-batches, the same number on every rank and of about equal cost: ``flops.py``
computes the cost of a sequence, ``balance.py`` distributes costs. ``pack.py`` makes the tensors of a micro-batch.
``megatron/step.py`` runs micro-batches through Megatron's pipeline schedule; log-probs come from hidden states, in
chunks, at trained positions only.
"""
