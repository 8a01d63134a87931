"""Model families, one folder each, and the code they share.

A family's ``weights.py`` lists its ``ARCHITECTURES``: the fields of its ``config.json`` and its differences from the
shared layers. Its ``chat.py`` lists its ``FORMATS``: the syntax of conversations and tool calls. `registry` finds both;
no other code has to name a family.

Shared code: ``model.py`` describes a model's architecture, ``fields.py`` and ``hf_config.py`` read it from
``config.json``, ``megatron_config.py`` translates it to Megatron, ``rules.py`` and ``layers.py`` form the weight table,
``flops.py`` counts operations, ``images.py`` counts image tokens; ``chat/`` converts conversations to token ids and
back. Nothing here imports torch.
"""
