"""Model families: a folder each, and what families share.

A family's ``weights.py`` lists its ``ARCHITECTURES``: which fields its ``config.json`` has, and what differs from the
layers that all share. Its ``chat.py`` lists its ``FORMATS``: how it writes conversations and tool calls. `registry`
finds both; nothing else has to name a family.

Shared: ``model.py`` says what a model computes, ``fields.py`` and ``hf_config.py`` read it from ``config.json``,
``megatron_config.py`` translates it to Megatron, ``rules.py`` and ``layers.py`` are the weight table, ``flops.py``
counts operations, ``images.py`` the tokens of images; ``chat/`` turns conversations into token ids and back. Nothing
here imports torch.
"""
