"""Model families, one folder each, and the code they share.

A family's folder has everything that makes it a family. ``weights.py`` lists its ``ARCHITECTURES``: the fields of its
``config.json``, what they compute, and its differences from the shared layers; ``chat.py`` its ``FORMATS``: the syntax
of conversations and tool calls; ``vision.py``, where its models see images, how many tokens one has; ``codec.py``
the reader of a tokenizer file of its own. A layer of its own in the place of attention is a `model.Mixer`. `families`
finds the folders, and `registry` the architectures; no other code has to name a family.

Shared code: ``architecture.py`` is the interface of a family, ``model.py`` describes a model, ``hf_config.py`` reads it
from ``config.json`` (by ``fields.py``), ``megatron_config.py`` translates it to Megatron and back (by
``stored_arguments.py``), ``table.py`` forms the weight table of ``rules.py``, ``layout.py`` says in which layouts a
model can be trained, ``flops.py`` counts operations, ``images.py`` places images; ``chat/`` converts conversations to
token ids and back.
Nothing here imports torch, but for ``FAMILY/modules/``: layers for Megatron and vLLM, imported where a model is built.
"""
