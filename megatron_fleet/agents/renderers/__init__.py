"""The chat formats of the model families, as text (``qwen``, ``glm``, ``kimi``) and as token ids (``chat``).

A format says which text stands where and which of it is a control token; it knows no ids. ``chat.ChatRenderer`` turns
that into ids of a model's own tokenizer, ``families`` finds out which format a model folder speaks.
"""
