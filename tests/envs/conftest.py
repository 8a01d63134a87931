"""A small tokenizer for all tests of this folder."""

from tokenizer_fixtures import renderer, tokenizer, tokenizer_folder  # noqa: F401
