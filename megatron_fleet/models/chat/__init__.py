"""Conversations as token ids, in any family's chat format.

A `format.ChatFormat` says which text stands where and which of it is a control token; it knows no ids.
`chat_renderer.ChatRenderer` turns that into ids of a model's own tokenizer, `parser` reads what the policy wrote, and
`detection` finds out which format a model folder speaks.
"""
