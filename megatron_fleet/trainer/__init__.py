"""The trained model: the Policy verbs, packing, layouts; ``megatron/`` implements them on Megatron-Core.

``base.py`` is the protocol: forward, forward and backward, optimizer step, publish, save, load, export.
``pack_plan.py`` puts sequences into rows, the same number of rows on every rank and about the same work: ``flops.py``
says what a sequence costs, ``balance.py`` shares costs out. ``pack.py`` makes the tensors of a row.
``megatron/step.py`` sends the rows through Megatron's pipeline schedule; log-probs come from hidden states, in chunks,
at trained positions only.
"""
