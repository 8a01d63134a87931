"""Conversations as token ids, in any family's chat format.

A `format.ChatFormat` defines the text of a conversation and which parts are control tokens; it knows no ids.
`renderer.ChatRenderer` encodes it with the model's own tokenizer, `parser` reads the policy's output, and
`detection` determines the format of a model folder.
"""
