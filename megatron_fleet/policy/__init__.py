"""The trained model: the Policy verbs, packing, layouts; ``megatron/`` implements them on Megatron-Core.

``base.py`` is the protocol: forward, forward and backward, optimizer step, publish, save, load, export. ``pack.py``
puts sequences into rows of one fixed number of tokens, the same number of rows on every rank. ``megatron/step.py``
sends the rows through Megatron's pipeline schedule; log-probs come from hidden states, in chunks, at trained positions
only.
"""
